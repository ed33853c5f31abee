"""An engine without --enable-scale-out: its 403 passes through unchanged, and the doctor says what to do."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from control_plane import simulator
from control_plane.doctor import DoctorSettings, examine
from control_plane.vllm import RENDER_ROUTES
from tests.e2e.conftest import VllmFactory, sidecar
from tests.e2e.queue_order import GENERATE, generate_request
from tests.e2e.render_requests import BODIES
from tests.e2e.vllm_server import MODEL_NAME, running

BODIES_THAT_ARE_REFUSED = {
    **{route: BODIES[route] for route in RENDER_ROUTES},
    GENERATE: generate_request(2),
    "/v1/chat/completions/derender": {},
    "/v1/completions/derender": {},
}
ROUTES = tuple(BODIES_THAT_ARE_REFUSED)

DISABLED = {
    "error": {
        "message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
        "type": "PermissionDeniedError",
        "param": None,
        "code": 403,
    }
}


@pytest.fixture(scope="module")
def off_url(start_vllm: VllmFactory) -> Iterator[str]:
    with running(start_vllm.engine(scale_out=False)) as (server,):
        yield server.url


@pytest.fixture(scope="module")
def off_sidecar_url(off_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from sidecar("engine", off_url, tmp_path_factory.mktemp("off-sidecar"))


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("headers", [{}, {"X-Vllm-Priority": "-10"}], ids=["no header", "-10"])
def test_vllms_403_passes_through_unchanged(
    headers: dict[str, str], route: str, off_url: str, off_sidecar_url: str, client: httpx.Client
) -> None:
    body = BODIES_THAT_ARE_REFUSED[route]
    straight, through = (client.post(url + route, json=body, headers=headers) for url in (off_url, off_sidecar_url))
    assert (straight.status_code, straight.json()) == (403, DISABLED)
    assert (through.status_code, through.content) == (403, straight.content)


def test_the_simulator_rejects_alike(off_url: str, client: httpx.Client) -> None:
    settings = simulator.SimulatorSettings(kind="engine", scale_out=False, model=MODEL_NAME)
    with simulator.run(settings) as simulated_url:
        for route, body in BODIES_THAT_ARE_REFUSED.items():
            simulated, expected = (client.post(url + route, json=body) for url in (simulated_url, off_url))
            assert (simulated.status_code, simulated.content) == (expected.status_code, expected.content)


def test_the_doctor_names_vllms_option(off_sidecar_url: str) -> None:
    report = asyncio.run(examine(DoctorSettings(engine=off_sidecar_url, timeout=60)))
    assert report.exit_status == 1
    assert any("--enable-scale-out" in row.next_step for row in report.rows if row.verdict == "fail"), report.rows
