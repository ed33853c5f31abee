"""Runs one request of the playground through the filter, in a process of its own.

A process can be stopped whatever the request makes of the Lua. It reads one JSON object from its standard input, and
writes one to its standard output; bodies are text in Latin-1, one character for each byte.
"""

import contextlib
import difflib
import json
import os
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from control_plane.explain import explain, in_chunks
from control_plane.policy.model import Policy
from control_plane.stream_handle import Client

CPU_SECONDS = 5
_MAX_MEMORY_BYTES = 2**30
_MAX_COMPARED = 4000
"""Longer changes are shown as one: comparing takes a time that grows with the square of the length."""

_PART = re.compile(rb"\s+|[\w.+-]+|.", re.DOTALL)


class Piece(NamedTuple):
    """A part of a body: in both, only in what the client sent (removed), or only in what vLLM gets (inserted)."""

    kind: Literal["same", "removed", "inserted"]
    data: bytes


def differences(before: bytes, after: bytes) -> Iterator[Piece]:
    """Yield the parts of two bodies in order. Those that are not inserted make `before`, not removed: `after`."""
    start = len(os.path.commonprefix([before, after]))
    end = len(os.path.commonprefix([before[start:][::-1], after[start:][::-1]]))
    old, new = before[start : len(before) - end], after[start : len(after) - end]
    if start:
        yield Piece("same", before[:start])
    if max(len(old), len(new)) > _MAX_COMPARED:
        parts = [(old, new, False)]
    else:
        parts = list(_compared(_PART.findall(old), _PART.findall(new)))
    for removed, inserted, same in parts:
        if same:
            yield Piece("same", removed)
        else:
            yield from (Piece("removed", removed),) if removed else ()
            yield from (Piece("inserted", inserted),) if inserted else ()
    if end:
        yield Piece("same", before[len(before) - end :])


def _compared(old: list[bytes], new: list[bytes]) -> Iterator[tuple[bytes, bytes, bool]]:
    for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        yield b"".join(old[i:j]), b"".join(new[k:m]), tag == "equal"


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Return what the filter does to a request, as JSON."""
    body = request["body"].encode("latin-1")
    policy = Policy.model_validate_json(request["policy"])
    found = explain(
        policy,
        request["role"],
        request["path"],
        request["headers"],
        in_chunks(body),
        method=request["method"],
        client=Client(request["client"], tuple(request["identities"])),
    )
    return {
        "report": found.report,
        "outcome": found.outcome,
        "source": found.source,
        "value": found.value,
        "trusted_by": found.trusted_by,
        "headers": found.headers,
        "bytes": len(found.body),
        "pieces": [(kind, data.decode("latin-1")) for kind, data in differences(body, found.body)],
        "rejection": found.rejection and (found.rejection[0], found.rejection[1].decode("latin-1")),
        "response": None if found.response is None else found.response.decode("latin-1"),
        "response_headers": found.response_headers,
    }


def _limit_this_process() -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit it
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    with contextlib.suppress(OSError):
        # If memory ends, this process ends, and not the control plane.
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    _limit_this_process()
    json.dump(run(json.load(sys.stdin)), sys.stdout)
