"""Real vLLM, and real Envoy in front of it. Nothing here is skipped: what is missing ends the run with the reason."""

import socket
from collections.abc import Generator, Iterator
from pathlib import Path

import httpx
import pytest
import setup_vllm
from vllm_server import VllmServer, engine_arguments, render_arguments, running

from control_plane.policy import Policy, Role
from control_plane.render import Address, Placement, bootstrap
from control_plane.sidecar import Sidecar, find_envoy

LOG_SECTIONS = pytest.StashKey[list[VllmServer]]()


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The virtual environment that vLLM is installed in."""
    missing = setup_vllm.what_is_missing()
    if missing:
        pytest.exit(missing, returncode=1)
    return setup_vllm.vllm_folder()


@pytest.fixture(scope="session")
def model() -> Path:
    return setup_vllm.model_folder()


@pytest.fixture(scope="session")
def servers(
    vllm: Path, model: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[dict[Role, VllmServer]]:
    """A render server and an engine, up for the whole run."""
    found: dict[Role, VllmServer] = {
        "render": VllmServer(vllm, render_arguments(model), tmp_path_factory.mktemp("render")),
        "engine": VllmServer(vllm, engine_arguments(model), tmp_path_factory.mktemp("engine")),
    }
    pytestconfig.stash.setdefault(LOG_SECTIONS, []).extend(found.values())
    with running(*found.values()):
        yield found


@pytest.fixture(scope="session")
def render_url(servers: dict[Role, VllmServer]) -> str:
    """The render server, with no sidecar."""
    return servers["render"].url


@pytest.fixture(scope="session")
def engine_url(servers: dict[Role, VllmServer]) -> str:
    """The engine, with no sidecar."""
    return servers["engine"].url


@pytest.fixture(scope="session")
def render_sidecar_url(servers: dict[Role, VllmServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The render server, through a sidecar with the default policy."""
    yield from _sidecar("render", servers["render"].port, tmp_path_factory.mktemp("render-sidecar"))


@pytest.fixture(scope="session")
def engine_sidecar_url(servers: dict[Role, VllmServer], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The engine, through a sidecar with the default policy."""
    yield from _sidecar("engine", servers["engine"].port, tmp_path_factory.mktemp("engine-sidecar"))


@pytest.fixture(scope="session")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=120, trust_env=False) as client:
        yield client


def _sidecar(role: Role, upstream_port: int, folder: Path) -> Iterator[str]:
    listen, admin = free_address(), free_address()
    placement = Placement(
        role, listen, Address("127.0.0.1", upstream_port), admin, access_log=str(folder / "access.log")
    )
    with Sidecar(bootstrap(Policy(), placement), find_envoy()) as sidecar:
        yield f"http://{listen}"
        errors = httpx.get(f"{sidecar.admin}/stats?filter=lua.errors", trust_env=False).text
        assert all(line.endswith(": 0") for line in errors.splitlines()), errors


def free_address() -> Address:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", int(probe.getsockname()[1]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for server in item.config.stash.get(LOG_SECTIONS, []):
            report.sections.append((f"end of {server.log}", server.log_tail()))
    return report
