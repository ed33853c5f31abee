"""An upstream that records what reaches it to the byte, and answers as a test says."""

import contextlib
import hashlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from control_plane.address import Address

from .wire import Closed, Header, Reader, framing_of

WAIT = 10.0
"""Seconds after which something that must come counts as never coming."""


@dataclass
class Request:
    """One request as it came. `body` is empty where only the digest was kept."""

    method: str
    target: str
    version: str
    head: bytes
    headers: list[Header]
    framing: str
    declared: int
    connection: int
    body: bytes = b""
    length: int = 0
    tail: bytes = b""
    digest: str = ""
    surplus: bytes = b""
    trailers: list[Header] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    complete: threading.Event = field(default_factory=threading.Event)
    gone: threading.Event = field(default_factory=threading.Event)

    def all(self, name: str) -> list[str]:
        """Every value of a header, in order."""
        return [value.decode("latin-1") for key, value in self.headers if key.lower() == name.encode()]

    def json(self) -> object:
        """The body as vLLM reads it: json.loads of the bytes."""
        return json.loads(self.body)

    @property
    def priorities(self) -> list[object]:
        """Every top-level `priority` of the body, in order, under any spelling of the key."""
        return [value for key, value in pairs_of(self.body) if key == "priority"]


def pairs_of(body: bytes) -> list[tuple[str, object]]:
    """Top-level members of a JSON object in order, repeats and all; values as plain Python."""
    decoded = json.loads(body, object_pairs_hook=lambda pairs: pairs)
    assert isinstance(decoded, list)
    return decoded


def readable(sock: socket.socket, seconds: float) -> bool:
    """Whether there is something to read, or the end, within that time. select() fails from descriptor 1024 on."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Connection:
    """One connection from the sidecar (or from a client that goes straight to the upstream)."""

    def __init__(self, sock: socket.socket, number: int, keep_bodies: bool) -> None:
        self.sock, self.number, self.keep_bodies = sock, number, keep_bodies
        self.reader = Reader(sock)
        self.open = True

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def read_body(self, request: Request) -> None:
        """Reads the whole body into `request`; `began` is set at its first byte."""
        digest, pieces, left = hashlib.sha256(), [], request.declared
        while request.framing == "chunked" or left:
            piece = self.reader.chunk() if request.framing == "chunked" else self.reader.some(left)
            if not piece:
                request.trailers = self.reader.trailers()
                break
            left -= len(piece)
            request.length += len(piece)
            request.tail = (request.tail + piece)[-256:]
            if self.keep_bodies:
                pieces.append(piece)
            else:
                digest.update(piece)
            request.began.set()
        request.body = b"".join(pieces)
        request.digest = digest.hexdigest()
        # The sidecar sends no second request before the first is answered: more bytes mean a wrong length.
        if readable(self.sock, 0):
            with contextlib.suppress(Closed, OSError):
                self.reader.more()
        request.surplus = bytes(self.reader.buffer)
        request.complete.set()

    def wait_until_gone(self, request: Request, seconds: float = WAIT) -> None:
        """Returns when the peer has closed; `request.gone` is set then."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if readable(self.sock, 0.02):
                try:
                    if self.sock.recv(1 << 16):
                        continue
                except OSError:
                    pass
                request.gone.set()
                self.open = False
                return

    def reset(self) -> None:
        """Closes with a RST, as a process that was killed does."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self.open = False
        self.sock.close()


Handler = Callable[[Request, Connection], None]

DATE = b"Mon, 30 Nov 2026 10:00:00 GMT"


def response(
    body: bytes,
    status: bytes = b"200 OK",
    headers: Sequence[Header] = (),
    content_type: bytes = b"application/json",
    chunks: Sequence[bytes] | None = None,
) -> bytes:
    """A response in uvicorn's manner: lower-case names, date and server first. `chunks`: chunked instead of `body`."""
    lines = [(b"date", DATE), (b"server", b"uvicorn"), *headers, (b"content-type", content_type)]
    if chunks is None:
        lines.append((b"content-length", b"%d" % len(body)))
    else:
        lines.append((b"transfer-encoding", b"chunked"))
        body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    return b"HTTP/1.1 " + status + b"\r\n" + b"".join(n + b": " + v + b"\r\n" for n, v in lines) + b"\r\n" + body


def answering(data: bytes) -> Handler:
    """Reads the request, then sends `data` as it is."""

    def handler(request: Request, connection: Connection) -> None:
        connection.read_body(request)
        connection.send(data)

    return handler


OK = answering(response(b'{"ok":true}'))


class RecordingUpstream:
    """A server on a port of its own; set `handler`, then read `requests`."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, port), family=family, backlog=128)
        self.address = Address(host, self.listener.getsockname()[1])
        self.requests: list[Request] = []
        self.connections = 0
        self.handler: Handler = OK
        self.keep_bodies = True
        self.arrived = threading.Condition()
        threading.Thread(target=self._accept, daemon=True).start()

    def clear(self) -> None:
        """Forgets what was recorded and answers plainly again."""
        with self.arrived:
            self.requests = []
        self.handler = OK
        self.keep_bodies = True

    def wait(self, count: int = 1, seconds: float = WAIT) -> list[Request]:
        """The requests, once there are `count`; fails where they do not come, or more did."""
        with self.arrived:
            self.arrived.wait_for(lambda: len(self.requests) >= count, seconds)
            found = list(self.requests)
        assert len(found) == count, f"{len(found)} requests reached the upstream, {count} should"
        return found

    @property
    def only(self) -> Request:
        """The one request that came, whole."""
        request = self.wait(1)[0]
        assert request.complete.wait(WAIT), f"the body is shorter than its promised length of {request.declared}"
        assert not request.surplus, f"the body is longer than its promised length: {request.surplus!r}"
        return request

    def stop(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._serve, args=(sock, self.connections), daemon=True).start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(sock, number, self.keep_bodies)
        request = None
        try:
            while connection.open:
                request = None
                raw, first, headers = connection.reader.head()
                method, target, version = first.decode("latin-1").split(" ")
                framing, declared = framing_of(headers)
                request = Request(method, target, version, raw, headers, framing, declared, number)
                connection.keep_bodies = self.keep_bodies
                with self.arrived:
                    self.requests.append(request)
                    self.arrived.notify_all()
                self.handler(request, connection)
                if version == "HTTP/1.0" or b"close" in [v.lower() for n, v in headers if n.lower() == b"connection"]:
                    break
        except (Closed, OSError):
            if request is not None:
                request.gone.set()
        finally:
            sock.close()
