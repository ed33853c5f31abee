"""What the sidecar would do to one request: the same Lua, run by LuaJIT in this process."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lupa import luajit21

from control_plane.policy.model import Policy
from control_plane.render.filter import ManagedEnvoy, Place, deferred_script, filter_script
from control_plane.report_header import SidecarReport, parse_report
from control_plane.stream_handle import LOCAL_CLIENT, Client, Metadata, Stream
from control_plane.vllm import Role

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Explanation:
    """What becomes of a request, and what the sidecar reports about it.

    `report` is what the response header and the access log say; None on a route that is not edited.
    `headers` and `body` are what vLLM receives. `rejection` is the sidecar's own response (status, body) if nothing
    reaches vLLM.
    `trusted_by` is the rule of the policy's `trust` that lets the client set a priority: "nothing" if no rule does,
    None if the policy has no `trust`.
    `response` is the body that the client receives on a route whose response is edited, by default of `{"priority":0}`.
    """

    report: str | None
    headers: tuple[tuple[str, str], ...]
    body: bytes
    rejection: tuple[int, bytes] | None
    response: bytes | None
    response_headers: tuple[tuple[str, str], ...]
    trusted_by: str | None

    @property
    def outcome(self) -> str | None:
        """What became of the priority, for example "inserted"; None on a route that is not edited."""
        return self._parsed.outcome if self._parsed else None

    @property
    def source(self) -> str | None:
        """Where the priority came from: "header", "class" or "default"; None if none was applied."""
        return self._parsed.source if self._parsed else None

    @property
    def value(self) -> str | None:
        """The priority that was applied, as text, because JSON readers may round large integers."""
        return None if self._parsed is None or self._parsed.priority is None else str(self._parsed.priority)

    @property
    def _parsed(self) -> SidecarReport | None:
        return parse_report(self.report)


def explain(
    policy: Policy,
    role: Role,
    path: str,
    headers: Headers,
    chunks: Sequence[bytes],
    *,
    method: str = "POST",
    client: Client = LOCAL_CLIENT,
    response: bytes = b'{"priority":0}',
) -> Explanation:
    """Run one request, its body in these chunks, through the filter with this policy."""
    return Filter(policy, role).explain(path, headers, chunks, method=method, client=client, response=response)


class Filter:
    """The filters of one policy and role, loaded once, for any number of requests."""

    def __init__(self, policy: Policy, role: Role, place: Place | None = None) -> None:
        """Load the scripts for a `place`, by default for an Envoy that started with this policy."""
        place = ManagedEnvoy.of(policy) if place is None else place
        lua = luajit21.LuaRuntime(encoding=None, unpack_returned_tuples=True)
        functions = lua.globals()
        self._to_table = lua.table_from
        self._collect = functions[b"collectgarbage"]
        self._routes_report = place.report_header if isinstance(place, ManagedEnvoy) else ""
        self._on_response: list[Any] = []

        def load(script: str) -> Any:
            functions[b"envoy_on_response"] = None
            lua.execute(script.encode())
            if functions[b"envoy_on_response"]:
                # A response passes the filters from the last to the first.
                self._on_response.insert(0, functions[b"envoy_on_response"])
            return functions[b"envoy_on_request"]

        self._on_request = load(filter_script(policy, role, place))
        self._on_deferred = None if place == "waypoint" else load(deferred_script(policy, place))

    def explain(
        self,
        path: str,
        headers: Headers,
        chunks: Sequence[bytes],
        *,
        method: str = "POST",
        client: Client = LOCAL_CLIENT,
        response: bytes = b'{"priority":0}',
        response_head: Headers = ((":status", "200"), ("content-type", "application/json")),
        response_chunks: Sequence[bytes] | None = None,
    ) -> Explanation:
        """Run one request, its body in these chunks, and this response to it (or `response_chunks`, its pieces)."""
        metadata = Metadata(self._to_table)
        pseudo = [(b":method", method.encode()), (b":path", path.encode())]
        lines = pseudo + [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
        request = Stream(lines, chunks, metadata, self._on_deferred is not None, client)
        # lupa mixes up Python objects if Lua collects garbage while they come and go, so it collects between requests.
        self._collect(b"stop")
        self._on_request(request)
        if self._on_deferred is not None and request.response is None:
            self._on_deferred(request)
        rejection = request.response
        if rejection is None:
            head = [(name.lower().encode(), value.encode("latin-1")) for name, value in response_head]
            stream = Stream(head, response_chunks or [response], metadata)
        else:
            stream = Stream(list(rejection[0].items()), [rejection[1]], metadata)
        if self._routes_report and metadata.report is not None:
            stream.headers().replace(self._routes_report.encode(), metadata.report)
        for on_response in self._on_response:
            on_response(stream)
        self._collect(b"collect")
        return Explanation(
            report=_text(metadata.report),
            headers=request.listed(),
            body=b"".join(request.chunks),
            rejection=None if rejection is None else (int(rejection[0][b":status"]), rejection[1]),
            response=b"".join(stream.chunks) if b"response" in metadata.values else None,
            response_headers=stream.listed(),
            trusted_by=_text(metadata.values.get(b"trusted_by")),
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
