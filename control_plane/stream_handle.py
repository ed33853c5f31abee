"""A stand-in for Envoy's Lua stream handle, so that the scripts run in this process.

It has the methods that the scripts use, and they behave as Envoy's do:
https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_filters/lua_filter#stream-handle-api
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.render.filter import FILTER_NAME
from control_plane.render.tokens import TOKENS_NAMESPACE


class Metadata:
    """Dynamic metadata of one stream: the filter's own, and the payload of a verified token."""

    def __init__(self, to_table: Callable[[Any], Any]) -> None:
        self.values: dict[bytes, Any] = {}
        self.tokens: dict[bytes, Any] = {}
        self.to_table = to_table

    @property
    def report(self) -> bytes | None:
        """The text of the report; None where there is none."""
        return self.values[b"report"][b"text"] if b"report" in self.values else None

    def get(self, namespace: bytes) -> Any:
        if namespace == TOKENS_NAMESPACE.encode():
            return self.to_table(self.tokens) if self.tokens else None
        return self.to_table(self.values) if namespace == FILTER_NAME.encode() and self.values else None

    def set(self, namespace: bytes, key: bytes, value: Any) -> None:
        if namespace == FILTER_NAME.encode():
            self.values[key] = value


class Headers:
    """The headers of a request or a response."""

    def __init__(self, lines: list[tuple[bytes, bytes]]) -> None:
        self.lines = lines

    def get(self, name: bytes) -> Any:
        values = [value for key, value in self.lines if key == name]
        return b",".join(values) if values else None

    def getNumValues(self, name: bytes) -> int:
        return sum(key == name for key, _ in self.lines)

    def getAtIndex(self, name: bytes, index: float) -> bytes | None:
        values = [value for key, value in self.lines if key == name]
        return values[int(index)] if int(index) < len(values) else None

    def remove(self, name: bytes) -> None:
        self.lines[:] = [line for line in self.lines if line[0] != name]

    def replace(self, name: bytes, value: bytes) -> None:
        for index, (key, _) in enumerate(self.lines):
            if key == name:
                self.lines[index] = (name, value)
                return
        self.lines.append((name, value))


@dataclass
class Buffer:
    """Some of the body's chunks, as one. Set, it takes the headers' content-length along, as Envoy's does."""

    chunks: list[bytes]
    which: slice
    headers: Headers

    def length(self) -> int:
        return len(self._bytes())

    def getBytes(self, start: float, size: float) -> bytes:
        return self._bytes()[int(start) : int(start) + int(size)]

    def setBytes(self, data: bytes) -> None:
        self.chunks[self.which] = [data] + [b""] * (len(self.chunks[self.which]) - 1)
        self.headers.replace(b"content-length", str(len(data)).encode())

    def _bytes(self) -> bytes:
        return b"".join(self.chunks[self.which])


@dataclass
class Counter:
    """A counter of Envoy."""

    name: bytes

    def inc(self) -> None:
        """Counts nothing: there is one request."""


class Stats:
    """The counters of Envoy."""

    def counter(self, name: bytes) -> Counter:
        return Counter(name)


@dataclass
class RouteMetadata:
    """The metadata of the route, under the filter's name: whether the deferred filter is on."""

    deferred: bool

    def get(self, key: bytes) -> Any:
        """The value of a key, or None."""
        return self.deferred if key == b"deferred" else None


@dataclass(frozen=True)
class Client:
    """Who sends a request.

    address: the connection's address with its port.
    identities: the names in its verified certificate.
    claims: what its verified token says; empty: it has none. It needs the header of the token, too.
    """

    address: str = "127.0.0.1:1"
    identities: tuple[str, ...] = ()
    claims: Mapping[str, str | Sequence[str]] = field(default_factory=dict)


LOCAL_CLIENT = Client()


@dataclass
class Certificate:
    """The verified certificate of a client."""

    names: tuple[str, ...]
    to_table: Callable[[list[bytes]], Any]

    def peerCertificateValidated(self) -> bool:
        return True

    def uriSanPeerCertificate(self) -> Any:
        return self.to_table([name.encode() for name in self.names if ":" in name])

    def dnsSansPeerCertificate(self) -> Any:
        return self.to_table([name.encode() for name in self.names if ":" not in name])


@dataclass
class StreamInfo:
    """What Envoy knows about a stream."""

    metadata: Metadata
    client: Client

    def dynamicMetadata(self) -> Metadata:
        return self.metadata

    def downstreamDirectRemoteAddress(self) -> bytes:
        return self.client.address.encode()

    def downstreamSslConnection(self) -> Certificate | None:
        return Certificate(self.client.identities, self.metadata.to_table) if self.client.identities else None


@dataclass
class Stream:
    """One direction of one stream."""

    lines: list[tuple[bytes, bytes]]
    received: Sequence[bytes]
    dynamic: Metadata
    deferred: bool = False
    client: Client = LOCAL_CLIENT
    response: tuple[dict[bytes, bytes], bytes] | None = None
    chunks: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = list(self.received)

    def listed(self) -> tuple[tuple[str, str], ...]:
        return tuple((name.decode(), value.decode("latin-1")) for name, value in self.lines if name[:1] != b":")

    def headers(self) -> Headers:
        return Headers(self.lines)

    def streamInfo(self) -> StreamInfo:
        return StreamInfo(self.dynamic, self.client)

    def metadata(self) -> RouteMetadata:
        return RouteMetadata(self.deferred)

    def stats(self) -> Stats:
        return Stats()

    def body(self) -> Buffer | None:
        return Buffer(self.chunks, slice(None), self.headers()) if any(self.chunks) else None

    def bodyChunks(self) -> Any:
        # The headers wait in the deferred filter, or have left before the first chunk comes.
        waiting = Headers(self.lines if self.deferred else list(self.lines))
        steps = iter([Buffer(self.chunks, slice(index, index + 1), waiting) for index in range(len(self.chunks))])
        return lambda *_: next(steps, None)

    def respond(self, headers: Any, body: bytes) -> None:
        self.response = (dict(headers.items()), body)
