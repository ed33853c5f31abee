"""The access log and the spans of a sidecar: which requests they have, and what they say."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.address import Address
from control_plane.policy.model import Policy
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import LoggedRequests, Placement, Tracing

from .collector import collecting
from .conftest import GENERATE, RENDER
from .sidecars import RunningSidecar, load
from .upstream import RecordingUpstream
from .wire import call, priority

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"

Start = Callable[..., RunningSidecar]


@pytest.fixture
def start(envoy: Path, upstream: RecordingUpstream, tmp_path: Path) -> Iterator[Start]:
    """start(logged, tracing, upstream, policy): a sidecar with these settings, in front of the recording upstream."""
    running: list[RunningSidecar] = []

    def run(
        logged: LoggedRequests = "all",
        tracing: Tracing | None = None,
        to: Address | None = None,
        policy: str = "{range: {max: 50}}",
    ) -> RunningSidecar:
        class Configured(RunningSidecar):
            def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
                return bootstrap(policy, replace(placement, logged_requests=logged, tracing=tracing))

        folder = tmp_path / str(len(running))
        folder.mkdir()
        running.append(Configured(envoy, folder, "engine", load(policy), to or upstream.address))
        return running[-1]

    yield run
    try:
        assert not [value for front in running for value in front.lua_errors().values() if value]
    finally:
        for front in running:
            front.stop()


@pytest.fixture
def nowhere() -> Iterator[Address]:
    """An address that refuses connections: it is bound, and nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield Address("127.0.0.1", bound.getsockname()[1])


def logged_paths(front: RunningSidecar, last: str) -> list[str]:
    """The paths in the access log, once it has the last one."""
    until = time.monotonic() + 10
    paths: list[str] = []
    while last not in paths:
        assert time.monotonic() < until, paths
        time.sleep(0.02)
        lines = front.access_log.read_text().splitlines() if front.access_log.exists() else []
        paths = [json.loads(line)["path"] for line in lines]
    return paths


def test_the_log_of_problems_has_only_requests_whose_priority_was_not_applied(start: Start) -> None:
    front = start("problems")
    call(front.address, RENDER, b"{}", priority("5"))
    call(front.address, RENDER, b"{}")
    assert call(front.address, f"/%76{RENDER[2:]}", b"{}", priority("high")).status == 400
    call(front.address, f"/%69{GENERATE[2:]}", b"[]", priority("5"))
    assert logged_paths(front, f"/%69{GENERATE[2:]}") == [f"/%76{RENDER[2:]}", f"/%69{GENERATE[2:]}"]


def test_an_error_of_the_sidecar_itself_is_a_problem(start: Start, nowhere: Address) -> None:
    front = start("problems", to=nowhere)
    assert call(front.address, RENDER, b"{}", priority("5")).status == 503
    assert logged_paths(front, RENDER) == [RENDER]


def test_the_log_names_the_tenant_of_a_client(start: Start) -> None:
    front = start(policy="tenants: {header: x-team, rules: {batch: {default: 10}}}")
    for number, team in enumerate((b"batch", b"unknown", b"batch, batch")):
        call(front.address, RENDER, b"{}", (b"x-team", team), (b"x-request-id", b"%d" % number))
    assert [front.logged_of(str(number))["tenant"] for number in range(3)] == ["batch", None, None]


def test_without_a_log_the_metrics_go_on(start: Start) -> None:
    front = start("none")
    for _ in range(3):
        call(front.address, RENDER, b"{}", priority("high"))
    until = time.monotonic() + 10
    while front.counter("invalid") < 3:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert not front.access_log.exists()


def test_what_a_client_chooses_is_cut_in_the_log_and_cannot_break_a_line(start: Start) -> None:
    front = start("all")
    hostile = b'"}\\{' + b"x" * 5000
    headers = [(b"x-request-id", hostile), (b"traceparent", hostile), (b"authorization", b"Bearer secret")]
    call(front.address, RENDER + "?secret=1", b'{"prompt":"secret"}', *headers, priority("5"))
    call(front.address, GENERATE, b"{}", priority("5"))
    logged_paths(front, GENERATE)
    text = front.access_log.read_text()
    first = json.loads(text.splitlines()[0])
    assert first["request_id"] == first["traceparent"] == hostile[:128].decode()
    assert "secret" not in text
    assert all(len(line) < 2000 for line in text.splitlines())


def test_the_headers_of_traces_pass_untouched_without_tracing(start: Start, upstream: RecordingUpstream) -> None:
    front = start()
    sent = [(b"TraceParent", PARENT.encode()), (b"tracestate", b"a=b"), (b"x-request-id", b"mine"), (b"b3", b"0")]
    call(front.address, RENDER, b"{}", priority("5"), *sent)
    received = upstream.requests[-1].headers
    assert [header for header in sent if header not in received] == []


def test_a_span_says_what_became_of_the_priority(start: Start, upstream: RecordingUpstream) -> None:
    with collecting() as (collector, address):
        front = start(tracing=Tracing(address))
        call(front.address, RENDER, b"{}", priority("5"), (b"traceparent", PARENT.encode()), (b"x-request-id", b"mine"))
        received = dict(upstream.requests[-1].headers)
        call(front.address, RENDER, b"{}", priority("high"))
        call(front.address, "/health", b"", method="GET")
        applied, rejected, other = collector.wait_for(3)
    assert applied.service == "vllm-priority-engine"
    assert (applied.trace_id, applied.parent_id) == (TRACE, "b7ad6b7169203331")
    assert received[b"traceparent"].decode() == f"00-{TRACE}-{applied.span_id}-01", "vLLM's spans are children of ours"
    assert received[b"x-request-id"] == b"mine"
    assert {name: value for name, value in applied.attributes.items() if name.startswith("vllm_priority")} == {
        "vllm_priority.outcome": "inserted",
        "vllm_priority.value": "5",
        "vllm_priority.source": "header",
        "vllm_priority.route": RENDER,
    }
    assert rejected.attributes["vllm_priority.outcome"] == "invalid"
    assert rejected.attributes["http.status_code"] == "400"
    assert not [name for name in other.attributes if name.startswith("vllm_priority")]


def test_the_client_decides_whether_its_trace_is_recorded(start: Start, upstream: RecordingUpstream) -> None:
    with collecting() as (collector, address):
        front = start(tracing=Tracing(address))
        call(front.address, RENDER, b"{}", (b"traceparent", PARENT[:-1].encode() + b"0"))
        passed = dict(upstream.requests[-1].headers)[b"traceparent"]
        call(front.address, RENDER, b"{}")
        (span,) = collector.wait_for(1)
    assert passed.startswith(f"00-{TRACE}-".encode())
    assert passed.endswith(b"-00")
    assert span.trace_id != TRACE


def test_a_dead_collector_loses_no_request(start: Start, nowhere: Address) -> None:
    front = start(tracing=Tracing(nowhere))
    assert {call(front.address, RENDER, b"{}", priority("5")).status for _ in range(200)} == {200}
