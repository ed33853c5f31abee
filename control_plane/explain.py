"""What the sidecar would do to one request: the same Lua, run by LuaJIT in this process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lupa import luajit21

from control_plane.lua_bundle import bundle
from control_plane.policy import Policy, Role
from control_plane.render import FILTER_NAME, OwnEnvoy, behind_settings, filter_settings

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Explanation:
    """What becomes of a request, and what the sidecar says of it.

    `report` is what the response header and the access log say; None on a route that is not edited.
    `headers` and `body` are what vLLM gets; `refusal` is the answer where nothing reaches vLLM (status, body).
    `answer` is what becomes of an answer `{"priority":0}` on a route whose answer is edited.
    """

    report: str | None
    headers: tuple[tuple[str, str], ...]
    body: bytes
    refusal: tuple[int, bytes] | None
    answer: bytes | None
    answer_headers: tuple[tuple[str, str], ...]

    @property
    def outcome(self) -> str | None:
        """Such as "inserted"."""
        return self._reported("outcome")

    @property
    def source(self) -> str | None:
        """Where the priority came from: "header", "class" or "default"."""
        return self._reported("source")

    @property
    def value(self) -> str | None:
        """The priority that was applied."""
        value = (self.report or "none").partition(";")[0]
        return None if value == "none" else value

    def _reported(self, name: str) -> str | None:
        parts = (part.strip().partition("=") for part in (self.report or "").split(";")[1:])
        return next((value for key, _, value in parts if key == name), None)


def explain(
    policy: Policy,
    role: Role,
    path: str,
    headers: Headers,
    chunks: Sequence[bytes],
    *,
    method: str = "POST",
    answer: bytes = b'{"priority":0}',
) -> Explanation:
    """Run one request, its body in these chunks, through the filter with this policy."""
    return Filter(policy, role).explain(path, headers, chunks, method=method, answer=answer)


class Filter:
    """The filter of one policy and role, loaded once, for any number of requests."""

    def __init__(self, policy: Policy, role: Role, *, own_envoy: bool = True) -> None:
        """`own_envoy`: as in a sidecar, where long bodies stream; else as in a proxy that is not ours."""
        lua = luajit21.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        lua.execute(bundle(filter_settings(policy, role, OwnEnvoy.of(policy) if own_envoy else None)).encode())
        functions = lua.globals()
        self._to_table = lua.table_from
        self._on_request = functions[b"envoy_on_request"]
        self._hold: Any = None
        self._added_header: str | None = None
        if own_envoy:
            lua.execute(bundle(behind_settings(policy), "behind").encode())
            self._hold = functions[b"envoy_on_request"]
            self._added_header = policy.report_header
        self._on_response = functions[b"envoy_on_response"]
        self._collect = functions[b"collectgarbage"]

    def explain(
        self,
        path: str,
        headers: Headers,
        chunks: Sequence[bytes],
        *,
        method: str = "POST",
        answer: bytes = b'{"priority":0}',
        answer_head: Headers = ((":status", "200"), ("content-type", "application/json")),
        answer_chunks: Sequence[bytes] | None = None,
    ) -> Explanation:
        """Run one request, its body in these chunks, and this answer to it (`answer_chunks`: the same, in pieces)."""
        metadata = _Metadata(self._to_table)
        pseudo = [(b":method", method.encode()), (b":path", path.encode())]
        lines = pseudo + [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
        held_behind = self._hold is not None and not any(name == b"content-length" for name, _ in lines)
        request = _Stream(lines, chunks, metadata, held_behind)
        # lupa mixes Python's objects up where Lua collects while they come and go: between requests there are none.
        self._collect(b"stop")
        self._on_request(request)
        if held_behind and request.response is None:
            self._hold(request)
        refusal = request.response
        if refusal is None:
            head = [(name.lower().encode(), value.encode("latin-1")) for name, value in answer_head]
            response = _Stream(head, answer_chunks or [answer], metadata)
        else:
            response = _Stream(list(refusal[0].items()), [refusal[1]], metadata)
        if self._added_header and b"report" in metadata.values:
            response.headers().replace(self._added_header.encode(), metadata.values[b"report"])
        self._on_response(response)
        self._collect(b"collect")
        late = metadata.values.get(b"refused_status")
        edited = b"".join(response.chunks)
        refused: tuple[int, bytes] | None = None
        if refusal is not None:
            refused = (int(refusal[0][b":status"]), refusal[1])
        elif late:
            refused = (int(late), edited)
        return Explanation(
            report=_text(metadata.values.get(b"report")),
            headers=request.listed(),
            body=b"".join(request.chunks),
            refusal=refused,
            answer=edited if b"answer_value" in metadata.values else None,
            answer_headers=response.listed(),
        )


# What follows has the methods of Envoy's stream handle that the filter uses, with Envoy's behaviour:
# https://www.envoyproxy.io/docs/envoy/latest/configuration/http/http_filters/lua_filter#stream-handle-api


class _Metadata:
    """Dynamic metadata of one stream, under the filter's namespace."""

    def __init__(self, to_table: Callable[[dict[bytes, Any]], Any]) -> None:
        self.values: dict[bytes, Any] = {}
        self._to_table = to_table

    def get(self, namespace: bytes) -> Any:
        return self._to_table(self.values) if namespace == FILTER_NAME.encode() and self.values else None

    def set(self, namespace: bytes, key: bytes, value: Any) -> None:
        if namespace == FILTER_NAME.encode():
            self.values[key] = value


class _Headers:
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
class _Buffer:
    """Some of the body's chunks, as one. Set, it takes the headers' content-length along, as Envoy's does."""

    chunks: list[bytes]
    which: slice
    headers: _Headers

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
class _Counter:
    name: bytes

    def inc(self) -> None:
        """Counts nothing: there is one request."""


class _Stats:
    def counter(self, name: bytes) -> _Counter:
        return _Counter(name)


@dataclass
class _RouteMetadata:
    held_behind: bool

    def get(self, key: bytes) -> Any:
        return self.held_behind if key == b"held_behind" else None


@dataclass
class _StreamInfo:
    metadata: _Metadata

    def dynamicMetadata(self) -> _Metadata:
        return self.metadata


@dataclass
class _Stream:
    """One direction of one stream."""

    lines: list[tuple[bytes, bytes]]
    received: Sequence[bytes]
    dynamic: _Metadata
    held_behind: bool = False
    response: tuple[dict[bytes, bytes], bytes] | None = None
    chunks: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = list(self.received)

    def listed(self) -> tuple[tuple[str, str], ...]:
        return tuple((name.decode(), value.decode("latin-1")) for name, value in self.lines if name[:1] != b":")

    def headers(self) -> _Headers:
        return _Headers(self.lines)

    def streamInfo(self) -> _StreamInfo:
        return _StreamInfo(self.dynamic)

    def metadata(self) -> _RouteMetadata:
        return _RouteMetadata(self.held_behind)

    def stats(self) -> _Stats:
        return _Stats()

    def body(self) -> _Buffer | None:
        return _Buffer(self.chunks, slice(None), self.headers()) if any(self.chunks) else None

    def bodyChunks(self) -> Any:
        # The headers have left before the first chunk comes, or wait in the next filter.
        sent = _Headers(self.lines if self.held_behind else list(self.lines))
        steps = iter([_Buffer(self.chunks, slice(index, index + 1), sent) for index in range(len(self.chunks))])
        return lambda *_: next(steps, None)

    def respond(self, headers: Any, body: bytes) -> None:
        self.response = (dict(headers.items()), body)


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
