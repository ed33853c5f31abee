"""Real vLLM, and real Envoy in front of it. Nothing here is skipped: what is missing ends the run with the reason."""

import signal
import socket
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from control_plane.address import Address
from control_plane.policy.model import Policy
from control_plane.proxy import Sidecar, find_envoy
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import Placement
from control_plane.vllm import Role
from tests.e2e import setup_vllm
from tests.e2e.queue_order import GENERATE
from tests.e2e.vllm_server import VllmServer, engine_arguments, render_arguments, running

SERVERS = pytest.StashKey[list[VllmServer]]()


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


@dataclass(frozen=True)
class VllmFactory:
    """Makes vLLM servers whose logs are shown where a test fails."""

    _vllm: Path
    _model: Path
    _folders: pytest.TempPathFactory
    _config: pytest.Config

    def render(self) -> VllmServer:
        return self._made(render_arguments(self._model))

    def engine(self, *, scale_out: bool = True) -> VllmServer:
        return self._made(engine_arguments(self._model, scale_out=scale_out))

    def _made(self, arguments: Sequence[str]) -> VllmServer:
        server = VllmServer(self._vllm, arguments, self._folders.mktemp("vllm"))
        self._config.stash.setdefault(SERVERS, []).append(server)
        return server


@pytest.fixture(scope="session")
def start_vllm(
    vllm: Path, model: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> VllmFactory:
    return VllmFactory(vllm, model, tmp_path_factory, pytestconfig)


@pytest.fixture(scope="session")
def servers(start_vllm: VllmFactory) -> Iterator[dict[Role, str]]:
    """URLs of a render server and an engine, up for the whole run."""
    with running(start_vllm.render(), start_vllm.engine()) as (render, engine):
        # vLLM 0.32 asks the kernel for AMX only with a prompt of some length. On a processor that has it, a short
        # first prompt ends the engine with SIGILL.
        request = {"token_ids": [5] * 512, "sampling_params": {"max_tokens": 1}}
        httpx.post(engine.url + GENERATE, json=request, timeout=120, trust_env=False).raise_for_status()
        yield {"render": render.url, "engine": engine.url}


@pytest.fixture(scope="session")
def render_url(servers: dict[Role, str]) -> str:
    """The render server, with no sidecar."""
    return servers["render"]


@pytest.fixture(scope="session")
def engine_url(servers: dict[Role, str]) -> str:
    """The engine, with no sidecar."""
    return servers["engine"]


@pytest.fixture(scope="session")
def render_sidecar_url(render_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The render server, through a sidecar with the default policy."""
    yield from sidecar("render", render_url, tmp_path_factory.mktemp("render-sidecar"))


@pytest.fixture(scope="session")
def engine_sidecar_url(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The engine, through a sidecar with the default policy."""
    yield from sidecar("engine", engine_url, tmp_path_factory.mktemp("engine-sidecar"))


@pytest.fixture(scope="session")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=120, trust_env=False) as client:
        yield client


def sidecar(role: Role, upstream_url: str, folder: Path, policy: Policy | None = None) -> Iterator[str]:
    """The URL of a real Envoy with that policy, or the default one, in front of that server. Its Lua must not fail."""
    listen, admin = _free_address(), _free_address()
    upstream = Address.parse(upstream_url.removeprefix("http://"), "upstream")
    placement = Placement(role, listen, upstream, admin, access_log=str(folder / "access.log"))
    with Sidecar(bootstrap(policy or Policy(), placement), find_envoy()) as running_sidecar:
        yield f"http://{listen}"
        errors = httpx.get(f"{running_sidecar.admin}/stats?filter=lua.*errors", trust_env=False).text.splitlines()
        assert errors, "Envoy has no counter of Lua errors"
        assert all(line.endswith(": 0") for line in errors), errors


def _free_address() -> Address:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", int(probe.getsockname()[1]))


def pytest_configure() -> None:
    """A run that is told to end stops its servers first, as one that is interrupted does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        for server in item.config.stash.get(SERVERS, []):
            report.sections.append((f"end of {server.log}", server.log_tail()))
    return report
