"""What an edit may do to a body, worked out with Python's json and not with the editor under test."""

import json
from dataclasses import dataclass
from json.decoder import JSONDecoder

from .upstream import Request

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
    number = str(value).encode()
    old = [member for member in found if member.name == "priority"]
    wanted, at = b"", 0
    for member in old:
        wanted += document[at : member.value] + number
        at = member.end
    wanted += document[at:]
    if not old:
        wanted = document[:close] + (b"," if found else b"") + b'"priority":' + number + document[close:]
    assert request.body == wanted, f"{document[:200]!r} became {request.body[:200]!r}"


def assert_untouched(request: Request, body: bytes) -> None:
    """The upstream got the body unchanged."""
    assert request.body == body, f"{body[:200]!r} became {request.body[:200]!r}"


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
