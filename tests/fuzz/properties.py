"""What must hold for any body, valid or not. Each violation is one line that starts with its kind."""

import json
import re

from .expected import expected, members
from .readers import READERS, Rejected, accepts, read

RESTORED = 1_048_576
"""Up to this size a body that was changed before its fault was found reaches the upstream unchanged."""

MOST_MEMBERS, LONGEST_VALUE, DEEPEST_VALUE = 256, 4096, 64
"""Above any, the request is rejected with 400: so it is where readers differ in whether the value is one."""

_KEY = re.compile(
    rb'"(?:p|\\u0070)(?:r|\\u0072)(?:i|\\u0069)(?:o|\\u006[fF])(?:r|\\u0072)(?:i|\\u0069)(?:t|\\u0074)(?:y|\\u0079)"'
)


def problems(
    body: bytes,
    value: str,
    status: int | None,
    out: bytes,
    *,
    applied: str | None,
    declared: int | None = None,
    is_default: bool = False,
) -> list[str]:
    """Return what is wrong with the way one request was handled; nothing if all is well.

    status: of a local response, or None if the request reached the upstream with the body `out`.
    """
    if status is not None:
        return [] if _may_reject(body, status, is_default) else [f"rejection: {status} for a body that must pass"]
    found = []
    if declared is not None and declared != len(out):
        found.append(f"length: content-length is {declared}, the body has {len(out)} bytes")
    accepting = [name for name in READERS if accepts(name, body)]
    if accepting:
        found += _of_valid(body, value, out, accepting, applied, is_default)
    else:
        found += _of_malformed(body, out, applied)
    return found


def _of_valid(
    body: bytes, value: str, out: bytes, accepting: list[str], applied: str | None, is_default: bool
) -> list[str]:
    if is_wide(body):
        # A default passes such a body through, and so does what is not an object. A header cannot be moved into it.
        passes = is_default or not isinstance(read("json.loads", body), dict)
        return [] if passes and out == body else ["wide: a UTF-16 or UTF-32 body was not rejected"]
    scanned = members(body)
    wanted = expected(body, value, is_default=is_default)
    found = [] if out == wanted else ["bytes: " + _difference(wanted, out)]
    is_kept = scanned is None or (is_default and any(member.name == "priority" for member in scanned[0]))
    if scanned is not None and not is_kept:
        for name in accepting:
            try:
                seen = read(name, out)["priority"]
            except Rejected as reason:
                found.append(f"unreadable: {name} accepted the body and rejects the edited one: {reason}")
            except (KeyError, TypeError):
                found.append(f"value: {name} reads no priority")
            else:
                if type(seen) is not int or seen != int(value):
                    found.append(f"value: {name} reads {_short(seen)} instead of {value}")
    if applied != (None if is_kept else value):
        found.append(f"report: {applied} is reported as the priority that was applied")
    return found


def _of_malformed(body: bytes, out: bytes, applied: str | None) -> list[str]:
    found = []
    for name in READERS:
        if out != body and accepts(name, out):
            found.append(f"mended: {name} rejects the body and accepts the edited one")
    if applied is None and out != body and len(body) <= RESTORED:
        found.append("changed: no priority is reported as applied, but the body differs: " + _difference(body, out))
    return found


def is_wide(body: bytes) -> bool:
    """Whether Python's json takes the body for UTF-16 or UTF-32."""
    return not json.detect_encoding(body).startswith("utf-8")


def _may_reject(body: bytes, status: int, is_default: bool) -> bool:
    if status == 415:
        # A zero byte or half a UTF-16 byte-order mark is close enough where no reader accepts the body anyway.
        start = body.removeprefix(b"\xef\xbb\xbf").lstrip(b" \t\r\n{")[:4]
        looks_wide = any(code in start for code in b"\x00\xfe\xff") and not any(accepts(n, body) for n in READERS)
        return (is_wide(body) or looks_wide) and not is_default
    if status != 400:
        return False
    if any(accepts(name, body) for name in READERS) and not is_wide(body):
        scanned = members(body)
        old = [member for member in scanned[0] if member.name == "priority"] if scanned else []
        return len(old) > MOST_MEMBERS or any(_is_unclear(body[member.start : member.end]) for member in old)
    # How far a value reaches is not defined in a malformed body.
    keys = len(_KEY.findall(body))
    return keys > MOST_MEMBERS or (
        keys > 0 and (len(body) > LONGEST_VALUE or _is_deep(body) or _UNCLEAR.search(body) is not None)
    )


# What a reader of JSON may or may not accept: NaN, Infinity, surrogates (also as bytes).
_UNCLEAR = re.compile(rb"NaN|Infinity|\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def names_an_unclear_priority(body: bytes) -> bool:
    """Whether an object's own priority is a value that not every reader accepts."""
    scanned = members(body)
    return any(m.name == "priority" and _is_unclear(body[m.start : m.end]) for m in (scanned[0] if scanned else []))


def _is_deep(text: bytes) -> bool:
    """Whether brackets, also those in strings, are nested deeper than a value of the member may be."""
    depth = 0
    for code in text:
        depth += (code in b"[{") - (code in b"]}")
        if depth > DEEPEST_VALUE:
            return True
    return False


def _is_unclear(value: bytes) -> bool:
    """Whether a value of the member may be rejected: too long, too deep, or not a value for the strict reader."""
    return len(value) > LONGEST_VALUE or _is_deep(value) or not accepts("strict", value)


def _difference(wanted: bytes, out: bytes) -> str:
    at = next((i for i, (a, b) in enumerate(zip(wanted, out, strict=False)) if a != b), min(len(wanted), len(out)))
    start = max(0, at - 20)
    return f"at byte {at}, {out[start : at + 40]!r} instead of {wanted[start : at + 40]!r}"


def _short(value: object) -> str:
    """Return a scalar as it is and the type of anything else, which may be nested too deeply to be shown."""
    return repr(value)[:60] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
