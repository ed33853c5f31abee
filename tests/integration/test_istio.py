"""The filter inside an Istio sidecar: every case of the other tables that is the filter's own to keep there."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from control_plane.policy.model import Policy
from control_plane.render.placement import Placement

from . import test_body, test_meaning, test_transport
from .conftest import RENDER, SidecarFactory, run_sidecars
from .meshes import IstioSidecar
from .sidecars import RunningSidecar
from .test_run import FIVE, JSON, Held, free_address
from .test_transport import image as image  # a fixture of its cases
from .upstream import RecordingUpstream
from .wire import Header, Http1, call, priority

# What a mesh decides, not the filter: its clocks, its pool, who says 100 Continue, whether it decodes %72 in a path.
ISTIOS_OWN = {
    "test_a_path_with_a_control_character_is_rejected",  # Istio decodes the path first, and rejects %00 itself
    "test_nothing_of_a_held_body_leaves_when_its_client_leaves",  # read from a statistic of ours
    "test_a_client_that_holds_its_body_back_gets_one_100_then_the_response",
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
