"""An upstream whose connection is not up yet when the body arrives, in pieces: a cold pool, a full backlog.

Envoy's chunk:setBytes() sets Content-Length to the length of that one chunk, in the header map that the router
encodes only once the connection is up. Until then each edit of a piece overwrites the promised length.
"""

import fcntl
import json
import socket
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from control_plane.address import Address

from .conftest import RENDER
from .sidecars import RunningSidecar, load
from .upstream import WAIT, pairs_of

BODY = b'{"prompt":"' + b"x" * 3000 + b'"}'
EDITED = BODY[:-1] + b',"priority":5}'


class LateUpstream:
    """Listens with a full backlog, so that a connection to it hangs until accept() is told to begin."""

    def __init__(self, stack: ExitStack) -> None:
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._received: list[bytes] = []
        self._done = threading.Event()
        for _ in range(2):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(self._listener.getsockname())

    def accept(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(WAIT)
            data = b""
            while not _is_whole(data):
                piece = connection.recv(65536)
                if not piece:
                    return
                data += piece
            self._received.append(data)
            self._done.set()

    def request(self) -> tuple[dict[bytes, bytes], bytes]:
        """Header fields by lower-case name, and the bytes behind them."""
        assert self._done.wait(WAIT), "no request arrived"
        head, _, body = self._received[0].partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        return fields, body


def _is_whole(data: bytes) -> bool:
    """Whether a request's object has come, whatever its head promises."""
    return data.rstrip(b" ").endswith(b"}") or data.rstrip(b"\r\n").endswith(b"\r\n0")


@pytest.fixture
def late() -> Iterator[LateUpstream]:
    with ExitStack() as stack:
        yield LateUpstream(stack)


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_the_framing_is_right_when_the_whole_body_came_before_the_connection(
    envoy: Path, late: LateUpstream, tmp_path: Path, framing: str
) -> None:
    sidecar = RunningSidecar(envoy, tmp_path, "render", load("{}"), late.address)
    try:
        pieces = [BODY[:1500], BODY[1500:]]
        promise = b"Content-Length: %d" % len(BODY) if framing == "length" else b"Transfer-Encoding: chunked"
        with socket.create_connection((sidecar.address.host, sidecar.address.port), WAIT) as client:
            head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nX-Vllm-Priority: 5\r\n%s\r\n\r\n"
            client.sendall(head % (RENDER.encode(), promise))
            for piece in pieces:
                client.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if framing == "chunked" else piece)
                _until_read(client)
            if framing == "chunked":
                client.sendall(b"0\r\n\r\n")
            _until_read(client)
            late.accept()
            fields, body = late.request()
    finally:
        sidecar.stop()
    if framing == "length":
        assert fields.get(b"content-length") == b"%d" % len(body)
        assert body == EDITED
    else:
        assert fields.get(b"transfer-encoding") == b"chunked"
        assert b"content-length" not in fields


EARLY = b'"priority":1,'


@pytest.mark.parametrize("before", [None, 0, 50_000, 100_000, 200_000, 300_000, 400_000, 600_000, 790_000, 1_000_000])
def test_a_body_that_streams_is_changed_only_once_the_connection_is_up(
    envoy: Path, late: LateUpstream, tmp_path: Path, before: int | None
) -> None:
    """Wherever a member of the body's own stands, and however much Envoy takes before it pauses."""
    start = b"{" if before is None else b'{"prompt":"' + b"y" * before + b'",' + EARLY
    body = start + b'"x":"' + b"x" * 2_000_000 + b'"}'
    sidecar = RunningSidecar(envoy, tmp_path, "render", load("{}"), late.address)
    try:
        with socket.create_connection((sidecar.address.host, sidecar.address.port), WAIT) as client:
            head = b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nX-Vllm-Priority: 5\r\n%s\r\n\r\n"
            client.sendall(head % (RENDER.encode(), b"Content-Length: %d" % len(body)))

            def send() -> None:
                for piece in (start, body[len(start) :]):
                    client.sendall(piece)
                    time.sleep(0.1)

            sender = threading.Thread(target=send, daemon=True)
            sender.start()
            time.sleep(0.5)  # as much as Envoy takes without an upstream
            late.accept()
            fields, received = late.request()
            sender.join(WAIT)
    finally:
        sidecar.stop()
    assert fields.get(b"content-length") == b"%d" % len(received)
    assert ("priority", 5) in pairs_of(received)
    assert json.loads(received)["priority"] == 5
    assert [pair for pair in pairs_of(received) if pair[0] != "priority"] == [
        pair for pair in pairs_of(body) if pair[0] != "priority"
    ]


def _until_read(client: socket.socket) -> None:
    """Until the peer has read what was sent, so that each piece reaches the filter as a chunk of its own."""
    until = time.monotonic() + WAIT
    while int.from_bytes(fcntl.ioctl(client, termios.TIOCOUTQ, b"\0" * 4), "little"):
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.1)
