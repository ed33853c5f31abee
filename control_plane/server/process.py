"""The control plane as a process: its listeners, their limits, and its shutdown.

uvicorn does not limit the time and the size of a request's head, so this module subclasses its protocol class. That
class is not a public API: pyproject.toml has an upper bound for uvicorn, and tests/unit/test_process.py fails when what
is used here has changed.
"""

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

from control_plane.address import Address
from control_plane.errors import InvalidField
from control_plane.server.app import create_app
from control_plane.server.settings import DEFAULT_TLS_LISTEN, ServeSettings

_log = logging.getLogger("vllm_priority.control_plane")

KEEP_ALIVE_SECONDS = 120
"""Longer than clients keep an idle connection, so that the server does not close it while a request is on its way. The
API server keeps one for 90 s (SetOldTransportDefaults in k8s.io/apimachinery takes Go's default), and sidecars poll at
least every 10 s."""

HEAD_SECONDS = 10.0
"""Time within which the whole head of a request must arrive."""
SEND_SECONDS = 30.0
"""Time after which the kernel gives up a client that does not read its response."""
MAX_HEAD_BYTES = 64 * 1024
DRAIN_ACCEPT_SECONDS = 5.0
"""Time for which the process continues to serve after SIGTERM. Kubernetes sends SIGTERM before all nodes know that the
pod has left the Service, so new connections arrive for some more seconds."""
DRAIN_SECONDS = 10
"""Time that requests in flight may take to end after that."""


def serve(settings: ServeSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    After SIGTERM the process serves for DRAIN_ACCEPT_SECONDS more, and each response asks the client to close its
    connection. The next request of that client then goes to another replica. Only connections that were idle for all
    that time are closed without a response. After SIGINT, or a second SIGTERM, the process stops at once, except that
    it waits for requests in flight.

    BadInput where the policy file, the certificate or an address cannot be used.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    app = create_app(settings)
    # Objects from the start live as long as the process, so the garbage collector need not look at them again.
    gc.collect()
    gc.freeze()
    # Requests create no reference cycles. With the default threshold of 700, the collector would often go through the
    # objects of thousands of connections, and polls would wait for it.
    gc.set_threshold(50_000, 20, 20)
    certificate = app.state.certificate
    listeners = [("listen", settings.listen, None)]
    if certificate:
        listeners.append(("tls_listen", settings.tls_listen or DEFAULT_TLS_LISTEN, certificate.context))
    _raise_open_files()
    with contextlib.ExitStack() as stack:
        bound = [(stack.enter_context(_bind(address, field)), context) for field, address, context in listeners]
        servers = []
        for index, (_, context) in enumerate(bound):
            config = uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                # The client is who connects. X-Forwarded-For could make anybody a client of this machine.
                proxy_headers=False,
                # The first listener starts and stops the app.
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
            _log.info("Serving %s on %s://%s.", settings.policy, "https" if context else "http", Address(host, port))
        loop_factory = servers[0].config.get_loop_factory()
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(_run(servers, [sock for sock, _ in bound]))


async def _run(servers: list["_Server"], sockets: list[socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    draining = False

    def stop() -> None:
        for server in servers:
            server.should_exit = True

    def drain(accept_seconds: float) -> None:
        nonlocal draining
        if draining:
            stop()
            return
        draining = True
        for server in servers:
            server.close_connections_with_their_next_response()
        _log.info("Stopping in %g seconds. Until then, each response closes its connection.", accept_seconds)
        loop.call_later(accept_seconds, stop)

    loop.add_signal_handler(signal.SIGTERM, drain, DRAIN_ACCEPT_SECONDS)
    loop.add_signal_handler(signal.SIGINT, drain, 0)
    await asyncio.gather(
        *(server.serve(sockets=[sock]) for server, sock in zip(servers, sockets, strict=True)),
    )


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # _run sets one handler for all listeners.
        yield

    def close_connections_with_their_next_response(self) -> None:
        """Add `connection: close` to all further responses, also to those of requests in flight."""
        # uvicorn adds the default headers to each response, and remakes them each second from the encoded headers.
        for headers in (self.config.encoded_headers, self.server_state.default_headers):
            headers.append((b"connection", b"close"))


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with a bound on the time and the size of a request's head."""

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
        # Trailers arrive here too, and uvicorn would store any number of them.
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()

    def shutdown(self) -> None:
        # uvicorn would close the connection under a request whose head is still arriving. Its response closes it.
        if not (self._in_head and self._head_bytes):
            super().shutdown()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.flow.read_paused:
            # Reading is paused until earlier pipelined requests have their responses, so the client is not late.
            self._start_head_timer()
        else:
            self.transport.abort()


def _bind(address: Address, field: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # The kernel gives up a client that does not read its response (tcp(7)). macOS has no such option.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(SEND_SECONDS * 1000))
        sock.bind((address.host, address.port))
    except OSError as error:
        sock.close()
        reason = error.strerror or error
        raise InvalidField(
            field, f"cannot listen on {address}: {reason}. Use a free address of this machine."
        ) from None
    return sock


def _raise_open_files() -> None:
    """Raise the limit of open files as far as the system allows, because each sidecar keeps a connection open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
