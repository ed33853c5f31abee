"""What an edit may do to a body, worked out with Python's json and not with the editor under test."""

import json
import re
from dataclasses import dataclass
from json.decoder import JSONDecoder

from .upstream import Request, pairs_of

FILLER = 32
"""White space that may follow the object where a length was promised before the body was seen."""

_BLANK = rb"[ \t\r\n]*"
_BOM = b"\xef\xbb\xbf"
_DECODER = JSONDecoder(strict=False)


@dataclass(frozen=True)
class Member:
    """Offsets of one top-level member: its key, and its value, in bytes."""

    name: str
    key: int
    value: int
    end: int


def members(document: bytes) -> tuple[list[Member], int]:
    """Top-level members of a JSON object in order, and the offset of its closing brace."""
    text = document.decode("latin-1")  # one character a byte; structure is all that is looked at
    at = _skip(text, len(_BOM) if document.startswith(_BOM) else 0)
    assert text[at] == "{", "no object"
    at, found = _skip(text, at + 1), []
    while text[at] != "}":
        key = at
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(text, at)
        assert text[at] == ":"
        value = _skip(text, at + 1)
        _, end = _DECODER.raw_decode(text, value)
        found.append(Member(name, key, value, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return found, at


def _skip(text: str, at: int) -> int:
    while text[at] in " \t\r\n":
        at += 1
    return at


def assert_moved(request: Request, document: bytes, value: int) -> None:
    """The upstream got `document` with every top-level priority equal to `value`, and nothing else changed."""
    assert b"\x00" not in document[:2], "not for UTF-16"
    found, close = members(document)
    number, filler = str(value).encode(), FILLER if request.framing == "length" else 0
    old = [member for member in found if member.name == "priority"]
    assert request.priorities, f"no priority in {request.body!r}"
    assert set(map(repr, request.priorities)) == {str(value)}, request.priorities
    if len(old) > 1 and request.framing == "length" and len(request.priorities) < len(old):
        _assert_others_kept(request.body, document)
        return
    if old:
        pattern, at = b"", 0
        for member in old:
            # Where the old value was longer than any new one, white space takes the rest of its room.
            pattern += re.escape(document[at : member.value]) + number + _BLANK
            at = member.end
        pattern += re.escape(document[at:])
    else:
        comma = b"," if found else b""
        pattern = re.escape(document[:close] + comma + b'"priority":' + number + document[close:])
    pattern += rb"[ \t\r\n]{0,%d}" % filler
    assert re.fullmatch(pattern, request.body, re.DOTALL), f"{document!r} became {request.body!r}"


def _assert_others_kept(edited: bytes, document: bytes) -> None:
    """Members that are no priority keep their bytes and their order (later duplicates may be gone)."""

    def raw(text: bytes) -> list[bytes]:
        return [text[member.key : member.end] for member in members(text)[0] if member.name != "priority"]

    assert raw(edited) == raw(document)
    assert pairs_of(edited)[0][0] == pairs_of(document)[0][0]


def assert_untouched(request: Request, body: bytes) -> None:
    """The upstream got the body as it was; white space may follow where a length was promised."""
    filler = request.body[len(body) :]
    assert request.body[: len(body)] == body, f"{body!r} became {request.body!r}"
    assert len(filler) <= (FILLER if request.framing == "length" else 0), f"{len(filler)} bytes of filler"
    assert not filler.strip(b" \t\r\n"), filler


def assert_refused(answer_body: bytes, kind: str, code: int, *, param: str, value: str | None = None) -> None:
    """An error in vLLM's own shape that names the header, and its value where that is what is wrong."""
    document = json.loads(answer_body)
    assert set(document) == {"error"}
    error = document["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == (kind, code, param)
    if code == 400:
        assert param in error["message"]
    if value is not None:
        assert value in error["message"], error["message"]
