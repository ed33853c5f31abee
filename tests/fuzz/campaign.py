"""Runs generated requests through the filter, and reduces what fails to a small case."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace

from .documents import Generator
from .filter_driver import Sent, run
from .properties import problems


@dataclass(frozen=True)
class Failure:
    """One violated property: the number of the document, the reduced request, and what is wrong."""

    number: int
    sent: Sent
    problem: str

    @property
    def kind(self) -> str:
        return self.problem.split(":")[0]

    def as_case(self, seed: int) -> str:
        """Return the line that makes a fixed case of it, for tests/fuzz/cases.py."""
        return f"    # {self.problem[:160]} (seed {seed}, document {self.number})\n    {as_source(self.sent)},"


def as_source(sent: Sent) -> str:
    """Return the request as Python source."""
    options = [
        f"{name}={getattr(sent, name)!r}"
        for name in ("framing", "value", "is_default", "place")
        if getattr(sent, name) != getattr(Sent([]), name)
    ]
    chunks = ", ".join(_bytes_source(chunk) for chunk in sent.chunks)
    return f"Sent([{chunks}]{''.join(', ' + option for option in options)})"


def _bytes_source(chunk: bytes) -> str:
    """Return a bytes literal in which long runs of one byte are products."""
    parts, at = [], 0
    while at < len(chunk):
        end = at
        while end < len(chunk) and chunk[end] == chunk[at]:
            end += 1
        if end - at > 40:
            parts.append(f"{chunk[at : at + 1]!r} * {end - at}")
            at = end
            continue
        start = at
        while at < len(chunk) and chunk[at : at + 41] != chunk[at : at + 1] * 41:
            at += 1
        parts.append(repr(chunk[start:at]))
    return " + ".join(parts) or "b''"


LONGEST_AT_A_WAYPOINT = 1048576 - 64
"""Bytes of a body that a waypoint holds whatever is inserted: it has a limit that no configuration can raise."""


def check(sent: Sent) -> list[str]:
    """Return the properties that the filter violates for this request."""
    try:
        found = run(sent)
    except Exception as error:  # an error in the script lets the request through unedited
        return [f"script error: {error}"]
    if found.status == 413 and sent.place == "waypoint" and len(sent.body) > LONGEST_AT_A_WAYPOINT:
        return []
    return problems(
        sent.body,
        sent.value,
        found.status,
        found.body,
        applied=found.applied,
        declared=found.declared,
        is_default=sent.is_default,
    )


def search(seed: int, numbers: Iterable[int], *, until: float | None = None) -> tuple[int, list[Failure]]:
    """Check these documents, up to a time.monotonic(); return how many there were, and what failed."""
    generator, failures, count = Generator(seed), [], 0
    for number in numbers:
        if until is not None and time.monotonic() > until:
            break
        count += 1
        sent = generator.request(number).sent
        failures += [Failure(number, sent, problem) for problem in check(sent)]
    return count, failures


def reduce(failure: Failure, *, until: float, checking: Callable[[Sent], list[str]] = check) -> Failure:
    """Return the same kind of failure with as few bytes and cuts as a greedy search finds up to a time.monotonic()."""

    def still(sent: Sent) -> str | None:
        if time.monotonic() > until:
            return None
        return next((text for text in checking(sent) if text.split(":")[0] == failure.kind), None)

    best, problem = failure.sent, failure.problem
    for simpler in (
        replace(best, is_default=False),
        replace(best, place="managed"),
        replace(best, framing="length"),
        replace(best, value="5"),
        replace(best, chunks=(best.body,)),
    ):
        # Each is tried by itself, on top of those that worked.
        tried = replace(best, **{name: getattr(simpler, name) for name in _changed(failure.sent, simpler)})
        if text := still(tried):
            best, problem = tried, text
    size = max(len(best.body) // 2, 1)
    while size and time.monotonic() < until:
        at, before = 0, len(best.body)
        while at < len(best.body):
            shorter = replace(best, chunks=_without(best.chunks, at, at + size))
            if text := still(shorter):
                best, problem = shorter, text
            else:
                at += size
        size = size if size == 1 and len(best.body) < before else size // 2
    joined = 0
    while joined + 1 < len(best.chunks):
        chunks = best.chunks
        fewer = replace(best, chunks=(*chunks[:joined], chunks[joined] + chunks[joined + 1], *chunks[joined + 2 :]))
        if text := still(fewer):
            best, problem = fewer, text
        else:
            joined += 1
    return Failure(failure.number, best, problem)


def _changed(before: Sent, after: Sent) -> list[str]:
    return [field.name for field in fields(Sent) if getattr(before, field.name) != getattr(after, field.name)]


def _without(chunks: Iterable[bytes], start: int, end: int) -> tuple[bytes, ...]:
    kept, at = [], 0
    for chunk in chunks:
        first, last = min(max(start - at, 0), len(chunk)), min(max(end - at, 0), len(chunk))
        if piece := chunk[:first] + chunk[last:]:
            kept.append(piece)
        at += len(chunk)
    return tuple(kept)


def report(seed: int, failures: Iterable[Failure], *, most: int = 8, seconds: float = 20) -> str:
    """Return distinct failures, the shortest first, reduced as far as the time allows, as cases to paste."""
    lines: list[str] = []
    seen: set[str] = set()
    until = time.monotonic() + seconds
    for failure in sorted(failures, key=lambda failure: len(failure.sent.body)):
        small = reduce(failure, until=min(until, time.monotonic() + seconds / most))
        source = as_source(small.sent)
        if source not in seen:
            seen.add(source)
            lines.append(small.as_case(seed))
        if len(lines) == most or time.monotonic() > until:
            break
    return "\n".join(lines)
