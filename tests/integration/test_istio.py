"""The filter inside an Istio sidecar: every case of the other tables that is the filter's own to keep there."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from . import test_body, test_meaning, test_transport
from .conftest import RENDER, SidecarFactory, run_sidecars
from .meshes import IstioSidecar
from .test_transport import image as image  # a fixture of its cases
from .upstream import RecordingUpstream
from .wire import call, priority

# What a mesh decides, not the filter: its clocks, its pool, and whether it decodes %72 in a path.
ISTIOS_OWN = {
    "test_t2_the_config_never_allows_a_chunked_body_with_a_length",
    "test_t8_the_pool_lets_go_before_uvicorn_does",
    "test_t8_a_connection_that_rested_for_five_to_six_seconds_is_no_trap",
    "test_t11_the_path_is_matched_decoded_and_without_its_query_and_sent_as_it_came",
    "test_t11_a_path_that_only_resembles_a_route_is_vllms_own_to_answer",
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
        assert names[-2:] == ["vllm_priority", "envoy.filters.http.router"]
        assert names.count("vllm_priority") == 1


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
