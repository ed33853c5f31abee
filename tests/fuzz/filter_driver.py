"""Runs the bundled Lua in this process. Everything that knows how the filter is loaded and called is in this file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from control_plane.explain import Filter
from control_plane.policy.load import parse_policies

Framing = Literal["length", "chunked", "h2"]
Place = Literal["managed", "mesh", "waypoint"]
"""An Envoy that this project configures, a proxy with the deferred filter after it, or one with the filter alone."""
FRAMINGS: tuple[Framing, ...] = ("length", "chunked", "h2")
RENDER = "/v1/chat/completions/render"


@dataclass(frozen=True)
class Sent:
    """One request: its body in chunks, its framing, and the priority that its header or the policy's default names."""

    chunks: Sequence[bytes]
    framing: Framing = "length"
    value: str = "5"
    is_default: bool = False
    place: Place = "managed"

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


@dataclass(frozen=True)
class Outcome:
    """What became of it: the status of a local response or None, and what the upstream received.

    declared: the content-length that the upstream received. applied: the priority that the report names.
    """

    status: int | None
    body: bytes
    declared: int | None
    applied: str | None


_filters: dict[tuple[str, Place], Filter] = {}


def run(sent: Sent) -> Outcome:
    """Send one request through the filter and the deferred filter."""
    policy = f"default: {sent.value}" if sent.is_default else "{}"
    loaded = (policy, sent.place)
    if loaded not in _filters:
        place = None if sent.place == "managed" else sent.place
        _filters[loaded] = Filter(parse_policies(policy).default, "render", place)
    headers = [("content-type", "application/json")]
    if not sent.is_default:
        headers.append(("x-vllm-priority", sent.value))
    if sent.framing == "length":
        headers.append(("content-length", str(len(sent.body))))
    elif sent.framing == "chunked":
        headers.append(("transfer-encoding", "chunked"))
    found = _filters[loaded].explain(RENDER, headers, sent.chunks)
    lengths = [value for name, value in found.headers if name == "content-length"]
    assert len(lengths) <= 1, "two lengths"
    return Outcome(
        status=found.rejection[0] if found.rejection else None,
        body=found.body,
        declared=int(lengths[0]) if lengths else None,
        applied=found.value,
    )
