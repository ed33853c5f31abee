"""What an edit must make of a valid document, computed without the editor under test.

The scan relies on the document being valid, which a reader has established before. It finds the members of the
top-level object and nothing else.
"""

import json
import re
from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_STOP = re.compile(rb'["{}\[\],]')


@dataclass(frozen=True)
class Member:
    """One top-level member: its name, and the offsets of its value in bytes."""

    name: str
    start: int
    end: int


def members(document: bytes) -> tuple[list[Member], int] | None:
    """Return a valid document's top-level members and its closing brace's offset; None if it is not an object."""
    at = _skip(document, len(_BOM) if document.startswith(_BOM) else 0)
    if document[at : at + 1] != b"{":
        return None
    found: list[Member] = []
    at = _skip(document, at + 1)
    while document[at : at + 1] != b"}":
        key = _STRING.match(document, at)
        assert key, "the document is not valid"
        name = json.loads(key[0].decode("utf-8", "surrogatepass"))
        colon = _skip(document, key.end())
        assert document[colon : colon + 1] == b":"
        start = _skip(document, colon + 1)
        end, at = _value_end(document, start)
        found.append(Member(name, start, end))
        if document[at : at + 1] == b",":
            at = _skip(document, at + 1)
    return found, at


def expected(document: bytes, number: str, *, is_default: bool = False) -> bytes:
    """Return the bytes that the upstream must receive for a valid document.

    number: the priority, as decimal digits. is_default: a default is inserted, but replaces nothing.
    """
    scanned = members(document)
    if scanned is None:
        return document
    found, close = scanned
    text = number.encode()
    old = [member for member in found if member.name == "priority"]
    if old and is_default:
        return document
    if not old:
        comma = b"," if found else b""
        return document[:close] + comma + b'"priority":' + text + document[close:]
    parts, at = [], 0
    for member in old:
        parts += [document[at : member.start], text]
        at = member.end
    return b"".join([*parts, document[at:]])


def _skip(document: bytes, at: int) -> int:
    while document[at : at + 1] and document[at] in _BLANK:
        at += 1
    return at


def _value_end(document: bytes, start: int) -> tuple[int, int]:
    """Return the end of the value that starts here, and the offset of the comma or brace after it."""
    depth, at = 0, start
    while True:
        stop = _STOP.search(document, at)
        assert stop, "the document is not valid"
        sign = stop[0]
        if sign == b'"':
            string = _STRING.match(document, stop.start())
            assert string, "the document is not valid"
            at = string.end()
            continue
        if depth == 0 and sign in b",}]":
            end = stop.start()
            while document[end - 1] in _BLANK:
                end -= 1
            return end, stop.start()
        if sign in b"{[":
            depth += 1
        elif sign in b"}]":
            depth -= 1
        at = stop.end()
