"""The control plane as a process: its listeners, its limits, its end."""

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from control_plane.app import ServeSettings, create_app
from control_plane.errors import BadInput
from control_plane.render import Address

KEEP_ALIVE_SECONDS = 75
"""Above the poll interval of any sensible sidecar (5 s, and up to twice that with Envoy's jitter): polls keep their
connection, and none is closed just as the next poll is sent on it."""

HEAD_SECONDS = 10.0
SEND_SECONDS = 30.0
MAX_HEAD_BYTES = 64 * 1024
DRAIN_SECONDS = 10


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT. BadInput (PolicyError) where policy, certificate or an address cannot be used."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    app = create_app(settings)
    # What the start left lives as long as the process: looking at it again would only hold polls up.
    gc.collect()
    gc.freeze()
    # Requests leave no cycles behind, and at the default of 700 passes over thousands of connections hold polls up.
    gc.set_threshold(50_000, 20, 20)
    certificate = app.state.certificate
    listeners = [("--listen", settings.listen, None)]
    if certificate:
        listeners.append(("--tls-listen", settings.tls_listen, certificate.context))
    _raise_open_files()
    with contextlib.ExitStack() as stack:
        bound = [(stack.enter_context(_bind(address, what)), context) for what, address, context in listeners]
        servers = []
        for index, (_, context) in enumerate(bound):
            config = uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                # The app starts and stops with its first listener.
                lifespan="off" if index else "on",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=4096,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=DRAIN_SECONDS,
            )
            config.load()
            config.ssl = context
            servers.append(_Server(config))
        for sock, context in bound:
            host, port = sock.getsockname()[:2]
            logging.getLogger("vllm_priority.control_plane").info(
                "serving %s on %s://%s", settings.policy, "https" if context else "http", Address(host, port)
            )
        loop_factory = servers[0].config.get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_run(servers, [sock for sock, _ in bound]))


async def _run(servers: list["_Server"], sockets: list[socket.socket]) -> None:
    def stop() -> None:
        for server in servers:
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    await asyncio.gather(
        *(server.serve(sockets=[sock]) for server, sock in zip(servers, sockets, strict=True)),
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # One handler for all listeners, set in _run.
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with a bound on the time and the size of a request's head: it has none of its own."""

    _in_head = True
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()
            elif self._head_timer is None:
                self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers come here too, and would be kept without end.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.flow.read_paused:
            # Pipelined requests: the rest of this head waits for us, not we for it.
            self._start_head_timer()
        else:
            self.transport.abort()


def _bind(address: Address, what: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # A client that reads nothing of its answer is given up by the kernel (tcp(7)); macOS has no such option.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_SECONDS * 1000))
        sock.bind((address.host, address.port))
    except OSError as error:
        sock.close()
        raise BadInput(
            f"{what}: cannot listen on {address}: {error.strerror or error}; allowed: a free address of this machine"
        ) from None
    return sock


def _raise_open_files() -> None:
    """As many connections as the system lets us have: each sidecar keeps one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
