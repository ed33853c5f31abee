"""The control plane's process, and the internals of uvicorn that it subclasses: this fails when they have moved."""

import asyncio
import inspect
import tomllib
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from control_plane.server.process import KEEP_ALIVE_SECONDS, Protocol

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


def test_an_upper_bound_keeps_releases_of_uvicorn_out_that_were_not_tried() -> None:
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    (bounds,) = (entry.removeprefix("uvicorn") for entry in dependencies if entry.startswith("uvicorn"))
    major, minor = (int(part) for part in uvicorn.__version__.split(".")[:2])
    assert f"<{major}.{minor + 1}" in bounds.split(",")


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("connection_made", ["self", "transport"]),
        ("data_received", ["self", "data"]),
        ("connection_lost", ["self", "exc"]),
        ("on_message_begin", ["self"]),
        ("on_header", ["self", "name", "value"]),
        ("on_headers_complete", ["self"]),
        ("shutdown", ["self"]),
    ],
)
def test_uvicorn_has_the_methods_that_the_protocol_overrides(method: str, parameters: list[str]) -> None:
    assert method in vars(HttpToolsProtocol), "nobody would call an override of a method that is gone"
    for owner in (HttpToolsProtocol, Protocol):
        assert list(inspect.signature(getattr(owner, method)).parameters) == parameters


def test_the_parser_calls_the_methods_that_the_protocol_overrides() -> None:
    called: list[str] = []

    class Recording(Protocol):
        def on_message_begin(self) -> None:
            called.append("on_message_begin")
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            called.append(f"on_header {name.decode()}")
            super().on_header(name, value)

        def on_headers_complete(self) -> None:
            called.append("on_headers_complete")
            super().on_headers_complete()

    async def app(scope: object, receive: object, send: object) -> None:
        pass

    async def scenario() -> None:
        config = uvicorn.Config(app, http=Recording, lifespan="off", log_config=None)
        config.load()
        state = uvicorn.Server(config).server_state
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Recording(config, state, {}), "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n")
            while not state.connections:
                await asyncio.sleep(0.01)
            (connection,) = state.connections
            assert isinstance(connection, Protocol)
            assert isinstance(connection.flow, FlowControl)
            assert connection.flow.read_paused is False
            assert isinstance(connection.transport, asyncio.Transport)
            assert connection.loop is loop
            writer.write(b"\r\n")
            while "on_headers_complete" not in called:
                await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert called == ["on_message_begin", "on_header host", "on_headers_complete"]


def test_idle_connections_stay_open_for_longer_than_the_api_server_keeps_them() -> None:
    assert KEEP_ALIVE_SECONDS > 90


def test_uvicorn_server_has_what_the_process_overrides_and_sets() -> None:
    assert inspect.isgeneratorfunction(inspect.unwrap(uvicorn.Server.capture_signals))
    config = uvicorn.Config("app:app")
    assert uvicorn.Server(config).should_exit is False
    assert config.encoded_headers == uvicorn.Server(config).server_state.default_headers == []
    assert list(inspect.signature(uvicorn.Server.serve).parameters) == ["self", "sockets"]
    assert callable(config.get_loop_factory)
    assert hasattr(config, "ssl") or "self.ssl" in inspect.getsource(uvicorn.Config.load)
