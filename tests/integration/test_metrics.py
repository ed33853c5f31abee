"""The metrics of a sidecar: what they count, that clients cannot make them grow, and that they outlast a policy."""

import re
import time

import pytest

from control_plane.render.loggers import COUNTED_BY

from .conftest import GENERATE, MESSAGES, RENDER, SidecarFactory
from .sidecars import RunningSidecar
from .upstream import Connection, RecordingUpstream, Request
from .wire import Http1, call, connect, head_bytes, priority

CLASSES = "{classes: {batch: 50, urgent: -20}, default: 1, limits: {max_body_bytes: 100000}}"


def series(front: RunningSidecar, name: str) -> dict[str, float]:
    """The samples of a metric: labels to value."""
    found = {}
    for line in front.get("/stats/prometheus").splitlines():
        if match := re.fullmatch(rf"envoy_vllm_priority_{name}\{{(.*)\}} (\S+)", line):
            found[match[1]] = float(match[2])
    return found


def counted(front: RunningSidecar, at_least: int) -> dict[str, float]:
    """The counters, once there are as many requests: Envoy counts a request when it has ended."""
    until = time.monotonic() + 10
    while sum(series(front, "requests").values()) < at_least and time.monotonic() < until:
        time.sleep(0.01)
    return series(front, "requests")


def labels(route: str, outcome: str, source: str = "", name: str = "", bucket: str = "") -> str:
    values = (route, outcome, source, name, bucket)
    return ",".join(f'{label}="{value}"' for label, value in zip(COUNTED_BY, values, strict=True))


def test_requests_are_counted_by_route_outcome_source_class_and_priority(
    sidecar: SidecarFactory, upstream: RecordingUpstream
) -> None:
    front = sidecar("engine", CLASSES, fresh=True)
    for path, body, headers in (
        (RENDER, b"{}", [priority("batch")]),
        (RENDER, b"{}", [priority("urgent")]),
        ("/v1/chat/completions/%72ender?x=1", b'{"priority":1}', [priority("urgent")]),
        (GENERATE, b"{}", []),
        (GENERATE, b'{"priority":7}', []),
        (MESSAGES, b"{}", [priority("-3")]),
        (RENDER, b"{}", [priority("high")]),
        (RENDER, b"x" * 200_000, [priority("5")]),
    ):
        call(front.address, path, body, *headers)
    assert counted(front, 8) == {
        labels(RENDER, "inserted", "class", "batch", "11 to 100"): 1,
        labels(RENDER, "inserted", "class", "urgent", "-100 to -11"): 1,
        labels(RENDER, "replaced", "class", "urgent", "-100 to -11"): 1,
        labels(GENERATE, "inserted", "default", "", "1 to 10"): 1,
        labels(GENERATE, "kept"): 1,
        labels(MESSAGES, "response_edited", "header", "", "-10 to -1"): 1,
        labels(RENDER, "invalid"): 1,
        labels(RENDER, "too_large"): 1,
    }


@pytest.mark.parametrize(
    ("value", "bucket"),
    [
        ("-101", "below -100"), ("-100", "-100 to -11"), ("-11", "-100 to -11"), ("-10", "-10 to -1"),
        ("-1", "-10 to -1"), ("0", "0"), ("1", "1 to 10"), ("10", "1 to 10"), ("11", "11 to 100"),
        ("100", "11 to 100"), ("101", "above 100"), (str(2**63 - 1), "above 100"), (str(-(2**63)), "below -100"),
    ],
)  # fmt: skip
def test_a_priority_is_counted_in_its_bucket(
    sidecar: SidecarFactory, upstream: RecordingUpstream, value: str, bucket: str
) -> None:
    front = sidecar("render", "report_header: x-bucket-test")
    before = series(front, "requests")
    key = labels(RENDER, "inserted", "header", "", bucket)
    call(front.address, RENDER, b"{}", priority(value))
    assert counted(front, int(sum(before.values())) + 1).get(key, 0) == before.get(key, 0) + 1


def test_clients_cannot_make_the_metrics_grow(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    front = sidecar("engine", CLASSES, fresh=True)
    spellings = [RENDER.replace("r", "%72", 1), RENDER.replace("e", "%65", 1), RENDER + "?a=1", RENDER + "?b=2"]
    for number in range(150):
        call(front.address, spellings[number % 4], b"{}", priority(str(1000 + number)))
        call(front.address, RENDER + "%0" + str(number % 9 + 1), b"{}", priority("5"))
        call(front.address, RENDER, b"{}", priority(f"class{number}"), (b"X-Forwarded-For", str(number).encode()))
        call(front.address, f"/other/{number}", b"{}", priority("5"))
    found = counted(front, 450)
    assert sum(found.values()) == 450
    assert set(found) == {
        labels(RENDER, "inserted", "header", "", "above 100"), labels("", "invalid_path"), labels(RENDER, "invalid"),
    }  # fmt: skip


def test_times_and_sizes_are_measured(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    front = sidecar("engine", CLASSES, fresh=True)
    body = b'{"x":"' + b"y" * 50_000 + b'"}'
    for _ in range(3):
        call(front.address, GENERATE, body, priority("batch"))
    call(front.address, GENERATE, body, priority("high"))  # a rejection has no time to vLLM's first byte
    counted(front, 4)
    until = time.monotonic() + 15  # Envoy merges histograms every 5 seconds
    while not any(series(front, "request_bytes_count").values()) and time.monotonic() < until:
        time.sleep(0.1)
    key = 'class="batch",priority="11 to 100"'
    assert series(front, "time_to_first_byte_count")[key] == series(front, "duration_count")[key] == 3
    assert series(front, "filter_time_count")[f'route="{GENERATE}"'] == 3
    assert series(front, "request_bytes_sum")[f'route="{GENERATE}"'] == pytest.approx(4 * len(body), rel=0.1)
    assert not re.search(r"\[(error|critical)\]", front.messages()), front.messages()


def test_a_sidecar_has_no_series_for_what_did_not_happen(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    front = sidecar("engine", CLASSES, fresh=True)
    assert series(front, "requests") == {}
    clusters = set(re.findall(r'envoy_cluster_name="([^"]*)"', front.get("/stats/prometheus")))
    assert clusters == {"upstream"}


def _silent(request: Request, connection: Connection) -> None:
    """Takes the request and says nothing until the peer goes."""
    connection.read_body(request)
    connection.wait_until_gone(request)


@pytest.mark.parametrize(("route", "outcome"), [(RENDER, "inserted"), (MESSAGES, "pending")])
def test_a_request_whose_client_goes_away_is_counted(
    sidecar: SidecarFactory, upstream: RecordingUpstream, route: str, outcome: str
) -> None:
    front = sidecar("engine", CLASSES, fresh=True)
    upstream.handler = _silent
    headers = [(b"Host", b"a"), (b"Content-Type", b"application/json"), (b"Content-Length", b"2"), priority("-3")]
    with connect(front.address, "h1-length") as client:
        assert isinstance(client, Http1)
        client.send(head_bytes("POST", route, headers) + b"{}")
        upstream.wait(1)
        client.sock.close()
    assert counted(front, 1) == {labels(route, outcome, "header", "", "-10 to -1"): 1}
