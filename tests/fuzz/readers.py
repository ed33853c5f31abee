"""Three JSON readers that may stand behind the sidecar. Each rejects what the others may accept.

- json.loads: Starlette's `request.json()`, which vLLM's Python routes use. It detects UTF-16 and UTF-32, accepts NaN,
  lone surrogates and a byte-order mark, and takes the last of repeated members.
- pydantic_core.from_json (jiter): accepts NaN, rejects a byte-order mark, lone surrogates and invalid UTF-8.
- strict: RFC 8259 to the letter, as serde_json: it also rejects NaN, numbers beyond a double, and nesting beyond 128
  levels, and a member that is repeated in the top-level object (serde rejects a repeated field of a struct).
"""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pydantic_core

DEPTH = 128
"""Levels of nesting that serde_json accepts."""

Reader = Callable[[bytes], Any]


def _strict(body: bytes) -> Any:
    pairs = json.loads(
        body.decode("utf-8"), object_pairs_hook=_Pairs, parse_constant=_reject_constant, parse_float=_finite
    )
    _check_depth_and_strings(pairs)
    if isinstance(pairs, _Pairs):
        names = [name for name, _ in pairs]
        if len(names) != len(set(names)):
            raise ValueError("repeated member")
        return dict(pairs)
    return pairs


class _Pairs(list[tuple[str, Any]]):
    """The members of one object in order, repeats included."""


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is out of range")
    return number


def _check_depth_and_strings(document: Any) -> None:
    level: list[Any] = [document]
    depth = 0
    while level:
        deeper: list[Any] = []
        for node in level:
            if isinstance(node, str):
                node.encode("utf-8")  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
            elif isinstance(node, _Pairs):
                for name, value in node:
                    name.encode("utf-8")
                    deeper.append(value)
            elif isinstance(node, list):
                deeper.extend(node)
        level = deeper
        depth += 1
        if depth > DEPTH + 1:
            raise ValueError("nested too deeply")


def _loads(body: bytes) -> Any:
    """json.loads without its limit on nesting, which depends on the Python and on its stack, and not on the grammar."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20_000))
    try:
        return json.loads(body)
    finally:
        sys.setrecursionlimit(limit)


READERS: Mapping[str, Reader] = {
    "json.loads": _loads,
    "pydantic_core.from_json": pydantic_core.from_json,
    "strict": _strict,
}


class Rejected(Exception):
    """A reader does not accept the document."""


def read(name: str, body: bytes) -> Any:
    """Read `body` with the reader of this name; Rejected where it does not accept it."""
    try:
        return READERS[name](body)
    except (ValueError, RecursionError) as error:
        raise Rejected(str(error)) from None


def accepts(name: str, body: bytes) -> bool:
    """Whether this reader accepts the body."""
    try:
        READERS[name](body)
    except (ValueError, RecursionError):
        return False
    return True
