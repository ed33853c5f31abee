"""The filter inside an Istio sidecar: every case of the other tables that is the filter's own to keep there."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from control_plane.policy.model import Policy
from control_plane.render.filter import OUTCOMES
from control_plane.render.placement import Placement

from . import test_body, test_meaning, test_transport
from .conftest import GENERATE, MESSAGES, RENDER, SidecarFactory, run_sidecars
from .meshes import IstioSidecar, SharedIstioSidecar, WaypointProxy
from .oracle import assert_moved
from .sidecars import RunningSidecar
from .test_run import FIVE, JSON, Held, free_address
from .test_transport import image as image  # a fixture of its cases
from .upstream import RecordingUpstream, answering, response
from .wire import Header, Http1, call, priority

# What a mesh decides, not the filter: its clocks, its pool, who says 100 Continue, whether it decodes %72 in a path.
ISTIOS_OWN = {
    "test_a_path_with_a_control_character_is_rejected",  # Istio decodes the path first, and rejects %00 itself
    "test_nothing_of_a_held_body_leaves_when_its_client_leaves",  # read from a statistic of ours
    "test_a_client_that_holds_its_body_back_gets_one_100_then_the_response",
    "test_no_route_retries_a_request",  # Istio retries those that were not sent
    "test_the_config_never_allows_a_chunked_body_with_a_length",
    "test_the_pool_closes_idle_connections_before_uvicorn_does",
    "test_a_connection_that_was_idle_for_five_to_six_seconds_is_safe",
    "test_the_path_is_matched_decoded_and_without_its_query_and_sent_as_it_came",
    "test_a_path_that_only_resembles_a_route_is_left_to_vllm",
}


@pytest.fixture(scope="module")
def _sidecars(
    envoy: Path, _upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarFactory]:
    yield from run_sidecars(IstioSidecar, envoy, _upstream, tmp_path_factory)


def cases(module: ModuleType, but: set[str]) -> type:
    """A test class of a module's tests."""
    tests: dict[str, Callable[..., Any]] = {
        name: staticmethod(test) for name, test in vars(module).items() if name.startswith("test_") and name not in but
    }
    return type(module.__name__, (), {**tests, "pytestmark": getattr(module, "pytestmark", [])})


TestBody = cases(test_body, ISTIOS_OWN)
TestMeaning = cases(test_meaning, ISTIOS_OWN)
TestTransport = cases(test_transport, ISTIOS_OWN)


def test_the_filter_stands_right_before_the_router_and_once(sidecar: SidecarFactory) -> None:
    managers = sidecar().config("HttpConnectionManager")
    assert managers
    for manager in managers:
        names = [entry["name"] for entry in manager["http_filters"]]
        assert names[-3:] == ["vllm_priority", "vllm_priority_deferred", "envoy.filters.http.router"]
        assert names.count("vllm_priority") == names.count("vllm_priority_deferred") == 1


@pytest.mark.parametrize("target", [RENDER + "?x=1", "/v1/chat/completions%2Frender", "/v1/chat/completions/%72ender"])
def test_a_path_is_matched_whatever_the_mesh_made_of_it(
    sidecar: SidecarFactory, upstream: RecordingUpstream, target: str
) -> None:
    answer = call(sidecar().address, target, b"{}", priority("5"))
    assert answer.applied == "5; source=header; outcome=inserted"
    assert upstream.only.priorities == [5]


def test_no_counter_of_ours_is_a_cluster_of_the_mesh(sidecar: SidecarFactory) -> None:
    names = {cluster["name"] for cluster in sidecar().config("Cluster")}
    assert names == {"inbound|8000||", "BlackHoleCluster"}


MEBIBYTE = 1024**2


def _grown(front: RunningSidecar, upstream: RecordingUpstream, headers: list[Header], framing: str) -> int:
    """How many bytes Envoy grew by while the upstream had four requests of 20 MB and had not responded yet."""
    idle = front.peak_memory()
    upstream.keep_bodies = False
    upstream.handler = held = Held()
    body = b'{"a":"%b"}' % (b"x" * (20 * MEBIBYTE))

    def send() -> int:
        with Http1(front.address, 60) as client:
            return client.post(RENDER, [JSON, *headers], body, framing=framing).status

    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(send) for _ in range(4)]
        for request in upstream.wait(4, 60):
            assert request.complete.wait(60)
        grown = front.peak_memory() - idle
        held.go.set()
        assert [each.result() for each in sent] == [200] * 4
    return grown


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_body_that_is_not_edited_is_not_kept_for_a_retry(
    sidecar: SidecarFactory, upstream: RecordingUpstream, framing: str
) -> None:
    grown = _grown(sidecar(fresh=True), upstream, [], framing)
    assert grown < 20 * MEBIBYTE, f"{grown / MEBIBYTE:.0f} MB"


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_an_edited_body_is_kept_once(sidecar: SidecarFactory, upstream: RecordingUpstream, framing: str) -> None:
    grown = _grown(sidecar(fresh=True), upstream, [FIVE], framing)
    assert grown < 110 * MEBIBYTE, f"{grown / MEBIBYTE:.0f} MB for 80 MB"


@pytest.mark.parametrize(("size", "retries"), [(2, 2), (2 * MEBIBYTE, 0)])
def test_istio_retries_a_request_whose_body_envoy_would_keep_without_the_filter(
    envoy: Path, tmp_path: Path, size: int, retries: int
) -> None:
    front = IstioSidecar(envoy, tmp_path, "render", Policy(), free_address())
    try:
        assert call(front.address, RENDER, b"{}".ljust(size), priority("5")).status == 503
        assert front.stats()["cluster.inbound|8000||.upstream_rq_retry"] == retries
    finally:
        front.stop()


# ----- several instances of the filter in one proxy


@pytest.fixture(scope="module")
def _shared(
    envoy: Path, _upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarFactory]:
    yield from run_sidecars(SharedIstioSidecar, envoy, _upstream, tmp_path_factory)


@pytest.mark.parametrize("target", [RENDER, GENERATE])
@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("size", [10, 30000, 200000, 3000000])
def test_a_second_instance_leaves_the_firsts_work_alone(
    _shared: SidecarFactory, upstream: RecordingUpstream, target: str, framing: str, size: int
) -> None:
    front = _shared("render", fresh=True)
    body = b'{"a":"%b"}' % (b"x" * size)
    with Http1(front.address) as client:
        answer = client.post(target, [JSON, FIVE], body, framing=framing)
    assert (answer.status, answer.all("x-vllm-priority-applied")) == (200, ["5; source=header; outcome=inserted"])
    assert_moved(upstream.only, body, 5)
    if front.version >= (1, 38):  # before, Envoy has no counters for Lua
        assert front.counter("inserted") == 1
        assert front.counter("absent") == 0


def test_a_second_instance_leaves_a_patch_of_the_first_alone(
    _shared: SidecarFactory, upstream: RecordingUpstream
) -> None:
    """A value in front of a later error, or one that is replaced by a longer one, is patched into the held body."""
    body = b'{"priority":1,"a":"%b","priority":2}' % (b"x" * 100000)
    with Http1(_shared("render").address) as client:
        answer = client.post(RENDER, [JSON, (b"X-Vllm-Priority", b"-1234567")], body, framing="chunked")
    assert answer.applied == "-1234567; source=header; outcome=replaced"
    assert upstream.only.body == body.replace(b'"priority":1', b'"priority":-1234567').replace(b":2}", b":-1234567}")


def test_a_response_is_edited_and_counted_once_by_several_instances(
    _shared: SidecarFactory, upstream: RecordingUpstream
) -> None:
    upstream.handler = answering(response(b'{"token_ids":[1],"priority":0}'))
    front = _shared("render", fresh=True)
    answer = call(front.address, MESSAGES, b"{}", priority("7"))
    assert answer.body == b'{"token_ids":[1],"priority":7}'
    assert answer.all("x-vllm-priority-applied") == ["7; source=header; outcome=response_edited"]
    if front.version >= (1, 38):  # before, Envoy has no counters for Lua
        assert front.counter("response_edited") == 1


# ----- a waypoint


WAYPOINT = 1048576


@pytest.fixture(scope="module")
def _waypoints(
    envoy: Path, _upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarFactory]:
    yield from run_sidecars(WaypointProxy, envoy, _upstream, tmp_path_factory)


TOO_LARGE = "none; outcome=too_large"


def lua_counters(front: RunningSidecar) -> dict[str, int]:
    """What scripts without a stat_prefix have counted, by outcome. Empty before Envoy 1.38, where they cannot count."""
    named = {name.rpartition(".lua.")[2]: value for name, value in front.stats().items() if ".lua." in name}
    return {outcome: value for outcome, value in named.items() if outcome in OUTCOMES and value}


@pytest.mark.parametrize(
    ("size", "framing", "status", "report"),
    [
        (10, "length", 200, "5; source=header; outcome=inserted"),
        (WAYPOINT - 100, "length", 200, "5; source=header; outcome=inserted"),
        (WAYPOINT - 100, "chunked", 200, "5; source=header; outcome=inserted"),
        (WAYPOINT - 5, "length", 413, TOO_LARGE),
        (WAYPOINT - 5, "chunked", 413, TOO_LARGE),
        (WAYPOINT + 1, "length", 413, TOO_LARGE),
        (2 * WAYPOINT, "chunked", 413, TOO_LARGE),
    ],
)
def test_a_waypoint_says_what_became_of_a_body_near_its_limit(
    _waypoints: SidecarFactory, upstream: RecordingUpstream, size: int, framing: str, status: int, report: str
) -> None:
    front = _waypoints("render", fresh=True)
    body = b'{"a":"%b"}' % (b"x" * (size - 8))
    with Http1(front.address) as client:
        answer = client.post(RENDER, [JSON, FIVE], body, framing=framing)
    assert (answer.status, answer.applied) == (status, report)
    assert lua_counters(front) in ({"inserted" if status == 200 else "too_large": 1}, {})
    if status == 200:
        assert_moved(upstream.only, body, 5)
    else:
        assert not upstream.requests


def test_a_waypoints_own_rejection_names_its_limit(_waypoints: SidecarFactory) -> None:
    answer = call(_waypoints().address, RENDER, b"{}".ljust(WAYPOINT + 1), priority("5"))
    assert "1048576 bytes, the limit for a body whose priority is set (what a waypoint can hold)" in str(answer.body)


class _RoutedByPriority(IstioSidecar):
    """With a route of an operator's own that takes what has a priority."""

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        config = super().configuration(policy, placement)
        for chain in config["static_resources"]["listeners"][0]["filter_chains"]:
            host = chain["filters"][0]["typed_config"].get("route_config", {}).get("virtual_hosts", [None])[0]
            if host:
                urgent = json.loads(json.dumps(host["routes"][0]))
                urgent["match"]["headers"] = [{"name": "x-vllm-priority", "present_match": True}]
                urgent["response_headers_to_add"] = [{"header": {"key": "x-route", "value": "urgent"}}]
                host["routes"].insert(0, urgent)
        return config


def test_a_route_that_was_chosen_by_the_header_is_kept_when_the_header_goes(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    routed = _RoutedByPriority(envoy, tmp_path, "render", Policy(), upstream.address)
    try:
        answer = call(routed.address, RENDER, b"{}", priority("5"))
    finally:
        routed.stop()
    assert upstream.only.priorities == [5]
    assert answer.all("x-route") == ["urgent"]
