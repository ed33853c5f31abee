"""Writes a Lua script in about half its size, as a script that unpacks and runs it.

A pod carries its sidecar's script: in etcd, in watches, in the output of `kubectl get`. What occurs again is replaced
by a reference to its last occurrence: a mark, two characters for the distance, and one for the length.
"""

_MARK = "!"
_FIRST = 35  # "#": the digits are this character and the following ones, up to "~". The mark is not among them.
_BASE = 92
_SHORTEST = 5
_LONGEST = _SHORTEST + _BASE - 1
_FARTHEST = _BASE * _BASE - 1
_MOST_LOOKED_AT = 256

_UNPACK = f"""\
]==]
local text = ""
for plain, high, low, size in packed:gmatch("([^{_MARK}]*){_MARK}(.)(.)(.)") do
text = text .. plain
local from = #text + 1 - (high:byte() - {_FIRST}) * {_BASE} - (low:byte() - {_FIRST})
text = text .. text:sub(from, from + size:byte() - {_FIRST - _SHORTEST + 1})
end
text = text .. (packed:match("{_MARK}...([^{_MARK}]*)$") or packed)
return assert(loadstring(text, "=vllm_priority"))(...)
"""


def self_unpacking(text: str) -> str:
    """Return a Lua script that does what `text` does, with the same arguments. Errors have the line numbers of `text`.

    Raises:
        ValueError: `text` has characters that the packed form uses, or a carriage return, which Lua would replace.
    """
    if _MARK in text or "\r" in text or not text.isascii():
        raise ValueError(f"a script to pack has no {_MARK!r}, no carriage return, and ASCII only")
    packed = _references(text)
    if "]==]" in packed:
        raise ValueError("a script to pack has no ']==]' in its packed form")
    return f"local packed = [==[\n{packed}{_UNPACK}"


def _references(text: str) -> str:
    pieces: list[str] = []
    places: dict[str, list[int]] = {}
    at = 0
    while at < len(text):
        length, found = _longest_match(text, at, places.get(text[at : at + _SHORTEST], []))
        if length:
            distance = at - found
            digits = (distance // _BASE, distance % _BASE, length - _SHORTEST)
            pieces.append(_MARK + "".join(chr(_FIRST + digit) for digit in digits))
        else:
            length = 1
            pieces.append(text[at])
        for place in range(at, at + length):
            places.setdefault(text[place : place + _SHORTEST], []).append(place)
        at += length
    return "".join(pieces)


def _longest_match(text: str, at: int, places: list[int]) -> tuple[int, int]:
    """The length and the place of the longest match that ends before `at`; (0, 0) if there is none."""
    best = (0, 0)
    for place in places[: -_MOST_LOOKED_AT - 1 : -1]:
        distance = at - place
        if distance > _FARTHEST:
            break
        most = min(_LONGEST, distance, len(text) - at)
        length = 0
        while length < most and text[place + length] == text[at + length]:
            length += 1
        if length >= _SHORTEST and length > best[0]:
            best = (length, place)
    return best
