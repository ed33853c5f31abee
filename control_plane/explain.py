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
    """What becomes of a request, and what the sidecar says of it.

    `report` is what the response header and the access log say; None on a route that is not edited.
    `headers` and `body` are what vLLM gets; `refusal` is the answer where nothing reaches vLLM (status, body).
    `trusted_by` is the rule of the policy's `trust` that lets the client name a priority: "nothing" where none does,
    None where the policy has no `trust`.
    `answer` is what becomes of an answer `{"priority":0}` on a route whose answer is edited.
    """

    report: str | None
    headers: tuple[tuple[str, str], ...]
    body: bytes
    refusal: tuple[int, bytes] | None
    answer: bytes | None
    answer_headers: tuple[tuple[str, str], ...]
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
    answer: bytes = b'{"priority":0}',
) -> Explanation:
    """Run one request, its body in these chunks, through the filter with this policy."""
    return Filter(policy, role).explain(path, headers, chunks, method=method, client=client, answer=answer)


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
        answer: bytes = b'{"priority":0}',
        answer_head: Headers = ((":status", "200"), ("content-type", "application/json")),
        answer_chunks: Sequence[bytes] | None = None,
    ) -> Explanation:
        """Run one request, its body in these chunks, and this response to it (`answer_chunks`: the same, in pieces)."""
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
            head = [(name.lower().encode(), value.encode("latin-1")) for name, value in answer_head]
            response = Stream(head, answer_chunks or [answer], metadata)
        else:
            response = Stream(list(rejection[0].items()), [rejection[1]], metadata)
        if self._routes_report and metadata.report is not None:
            response.headers().replace(self._routes_report.encode(), metadata.report)
        for on_response in self._on_response:
            on_response(response)
        self._collect(b"collect")
        return Explanation(
            report=_text(metadata.report),
            headers=request.listed(),
            body=b"".join(request.chunks),
            refusal=None if rejection is None else (int(rejection[0][b":status"]), rejection[1]),
            answer=b"".join(response.chunks) if b"response" in metadata.values else None,
            answer_headers=response.listed(),
            trusted_by=_text(metadata.values.get(b"trusted_by")),
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
