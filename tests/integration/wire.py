"""Clients with full control of the wire: raw HTTP/1.1, and HTTP/2 with prior knowledge (h2c).

An ordinary client library would mend, merge or reorder exactly what these tests are about.
"""

import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import h2.config
import h2.connection
import h2.events
import h2.settings

from control_plane.address import Address

TIMEOUT = 10.0
"""Seconds after which a client gives up: a hang, never a bound on speed."""

Header = tuple[bytes, bytes]
HOST = b"vllm.example"

# How a request body can be framed on its way to the sidecar.
TRANSPORTS = ("h1-length", "h1-chunked", "h2c-length", "h2c")


class Closed(Exception):
    """The peer closed the connection in the middle of a message, or before one."""


@dataclass
class Answer:
    """One response as it came. Header names keep their case on HTTP/1.1."""

    status: int
    headers: list[Header]
    body: bytes = b""
    interim: list[int] = field(default_factory=list)
    trailers: list[Header] = field(default_factory=list)
    head: bytes = b""
    framing: str = "none"

    def all(self, name: str) -> list[str]:
        """Every value of a header, in order."""
        return [value.decode() for key, value in self.headers if key.lower() == name.encode()]

    def header(self, name: str) -> str | None:
        """The one value of a header; None where it is missing."""
        values = self.all(name)
        assert len(values) <= 1, f"{name} is there {len(values)} times: {values}"
        return values[0] if values else None

    @property
    def applied(self) -> str | None:
        """What the sidecar says it did."""
        return self.header("x-vllm-priority-applied")


class Reader:
    """Reads lines and counted bytes from a socket, and HTTP/1.1 messages out of them."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = bytearray()

    def more(self) -> None:
        data = self.sock.recv(1 << 16)
        if not data:
            raise Closed
        self.buffer += data

    def until(self, mark: bytes) -> bytes:
        """Everything up to and including `mark`."""
        searched = 0
        while (at := self.buffer.find(mark, searched)) < 0:
            searched = max(0, len(self.buffer) - len(mark) + 1)
            self.more()
        return self.take(at + len(mark))

    def take(self, count: int) -> bytes:
        while len(self.buffer) < count:
            self.more()
        taken = bytes(memoryview(self.buffer)[:count])
        del self.buffer[:count]
        return taken

    def some(self, most: int) -> bytes:
        """At least one byte, at most `most`, as soon as there is any."""
        if not self.buffer:
            self.more()
        return self.take(min(most, len(self.buffer)))

    def head(self) -> tuple[bytes, bytes, list[Header]]:
        """The raw head, its first line, and its header lines in order, case kept."""
        raw = self.until(b"\r\n\r\n")
        first, *lines = raw[:-4].split(b"\r\n")
        return raw, first, [parse_line(line) for line in lines]

    def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at the last one (its trailers are not read yet)."""
        size = int(self.until(b"\r\n").split(b";")[0], 16)
        if size == 0:
            return b""
        data = self.take(size)
        assert self.take(2) == b"\r\n"
        return data

    def trailers(self) -> list[Header]:
        lines = []
        while (line := self.until(b"\r\n")) != b"\r\n":
            lines.append(parse_line(line[:-2]))
        return lines


def parse_line(line: bytes) -> Header:
    name, _, value = line.partition(b":")
    return name, value.strip(b" \t")


def framing_of(headers: Iterable[Header]) -> tuple[str, int]:
    """`chunked`, `length` or `none`, and the length."""
    lengths, chunked = set(), False
    for name, value in headers:
        if name.lower() == b"content-length":
            lengths.add(int(value))
        if name.lower() == b"transfer-encoding":
            chunked = value.lower() == b"chunked"
    assert not (lengths and chunked), "two framings at once"
    assert len(lengths) <= 1, "two lengths"
    return ("chunked", 0) if chunked else ("length", lengths.pop()) if lengths else ("none", 0)


def head_bytes(method: str, target: str, headers: Sequence[Header], version: str = "1.1") -> bytes:
    lines = [f"{method} {target} HTTP/{version}".encode(), *(name + b": " + value for name, value in headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def chunks_of(body: bytes, cuts: Sequence[int] = ()) -> list[bytes]:
    """`body` cut at the given offsets, without empty pieces."""
    edges = [0, *sorted(set(cuts)), len(body)]
    return [body[a:b] for a, b in zip(edges, edges[1:], strict=False) if a < b]


def chunked(pieces: Iterable[bytes], trailers: bytes = b"") -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n" + trailers + b"\r\n"


class Http1:
    """One client connection that speaks HTTP/1.1."""

    def __init__(self, address: Address, timeout: float = TIMEOUT) -> None:
        self.sock = socket.create_connection((address.host, address.port), timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = Reader(self.sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def start(self) -> Answer:
        """The head of the next final response, with the interim ones counted."""
        interim: list[int] = []
        while True:
            raw, first, headers = self.reader.head()
            status = int(first.split()[1])
            if status >= 200 or status == 101:
                return Answer(status, headers, interim=interim, head=raw)
            interim.append(status)

    def answer(self, *, to_head: bool = False) -> Answer:
        """The next final response, whole."""
        answer = self.start()
        answer.framing, length = framing_of(answer.headers)
        if to_head or answer.status in (204, 304):
            return answer
        if answer.framing == "chunked":
            pieces = []
            while piece := self.reader.chunk():
                pieces.append(piece)
            answer.body = b"".join(pieces)
            answer.trailers = self.reader.trailers()
        elif answer.framing == "length":
            answer.body = self.reader.take(length)
        else:
            answer.body = self.rest()
        return answer

    def rest(self) -> bytes:
        """All bytes until the peer closes."""
        try:
            while True:
                self.reader.more()
        except (Closed, ConnectionResetError):
            return self.reader.take(len(self.reader.buffer))

    def post(
        self,
        target: str,
        headers: Sequence[Header],
        body: bytes,
        *,
        framing: str = "length",
        cuts: Sequence[int] = (),
        method: str = "POST",
    ) -> Answer:
        """Sends one request, a `Host` line first, and reads its answer."""
        lines = [(b"Host", HOST), *headers]
        if framing == "chunked":
            lines.append((b"Transfer-Encoding", b"chunked"))
            self.send(head_bytes(method, target, lines) + chunked(chunks_of(body, cuts)))
        else:
            lines.append((b"Content-Length", b"%d" % len(body)))
            self.send(head_bytes(method, target, lines))
            for piece in chunks_of(body, cuts):
                self.send(piece)
        return self.answer(to_head=method == "HEAD")


class Http2:
    """One client connection that speaks HTTP/2 without TLS."""

    def __init__(self, address: Address, timeout: float = TIMEOUT) -> None:
        self.sock = socket.create_connection((address.host, address.port), timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        config = h2.config.H2Configuration(
            header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.h2 = h2.connection.H2Connection(config)
        self.h2.initiate_connection()
        self.flush()
        self.pending: list[h2.events.Event] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def flush(self) -> None:
        if data := self.h2.data_to_send():
            self.sock.sendall(data)

    def event(self) -> h2.events.Event:
        """The next event; credit for received data is given back at once."""
        while not self.pending:
            data = self.sock.recv(1 << 16)
            if not data:
                raise Closed
            self.pending = self.h2.receive_data(data)
            for event in self.pending:
                if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self.flush()
        return self.pending.pop(0)

    def open(self, method: str, target: str, headers: Sequence[Header], *, end: bool = False) -> int:
        """Sends a request's head; the stream's id."""
        stream = self.h2.get_next_available_stream_id()
        pseudo = [
            (b":method", method.encode()),
            (b":scheme", b"http"),
            (b":authority", HOST),
            (b":path", target.encode()),
        ]
        self.h2.send_headers(stream, [*pseudo, *((name.lower(), value) for name, value in headers)], end_stream=end)
        self.flush()
        return stream

    def data(self, stream: int, piece: bytes, *, end: bool = False) -> None:
        """Sends one DATA frame or more, waiting for credit where there is none."""
        while piece:
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
            if room <= 0:
                event = self.event()
                if isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
                    raise Closed
                continue
            now, piece = piece[:room], piece[room:]
            self.h2.send_data(stream, now, end_stream=end and not piece)
            self.flush()
            if end and not piece:
                return
        if end:
            self.h2.end_stream(stream)
            self.flush()

    def answer(self, stream: int) -> Answer:
        """The response on a stream, whole."""
        answer = Answer(0, [], framing="h2")
        while True:
            event = self.event()
            if isinstance(event, h2.events.ConnectionTerminated):
                raise Closed
            if getattr(event, "stream_id", None) != stream:
                continue
            if isinstance(event, h2.events.InformationalResponseReceived):
                answer.interim.append(int(dict(event.headers)[b":status"]))
            elif isinstance(event, h2.events.ResponseReceived):
                answer.headers = [(n, v) for n, v in event.headers if not n.startswith(b":")]
                answer.status = int(dict(event.headers)[b":status"])
            elif isinstance(event, h2.events.DataReceived):
                answer.body += event.data
            elif isinstance(event, h2.events.TrailersReceived):
                answer.trailers = list(event.headers)
            elif isinstance(event, h2.events.StreamEnded):
                return answer
            elif isinstance(event, h2.events.StreamReset):
                raise Closed

    def post(
        self,
        target: str,
        headers: Sequence[Header],
        body: bytes,
        *,
        framing: str = "length",
        cuts: Sequence[int] = (),
        method: str = "POST",
    ) -> Answer:
        """Sends one request and reads its answer. `framing` length sends a content-length."""
        lines = [*headers, (b"content-length", b"%d" % len(body))] if framing == "length" else list(headers)
        pieces = chunks_of(body, cuts)
        stream = self.open(method, target, lines, end=framing == "length" and not pieces)
        if framing != "length" or pieces:
            for piece in pieces:
                self.data(stream, piece)
            self.data(stream, b"", end=True)
        return self.answer(stream)


def connect(address: Address, transport: str) -> Http1 | Http2:
    return Http1(address) if transport.startswith("h1") else Http2(address)


def call(
    address: Address,
    target: str,
    body: bytes,
    *headers: Header,
    transport: str = "h1-length",
    cuts: Sequence[int] = (),
    method: str = "POST",
    content_type: bytes | None = b"application/json",
) -> Answer:
    """One request on a connection of its own."""
    lines = list(headers) if content_type is None else [(b"Content-Type", content_type), *headers]
    framing = "length" if transport.endswith("length") else "chunked"
    with connect(address, transport) as client:
        return client.post(target, lines, body, framing=framing, cuts=cuts, method=method)


def priority(value: str | bytes) -> Header:
    """The header that this project is about."""
    return b"X-Vllm-Priority", value.encode() if isinstance(value, str) else value
