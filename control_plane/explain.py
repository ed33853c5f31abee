"""What the sidecar would do to one request: the same Lua, run by LuaJIT in this process."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lupa import luajit21

from control_plane.errors import InvalidField
from control_plane.policy.model import Policy
from control_plane.render.filter import ManagedEnvoy, Place, deferred_script, filter_script
from control_plane.render.tokens import metadata_key
from control_plane.report_header import SidecarReport, parse_report
from control_plane.stream_handle import LOCAL_CLIENT, Client, Metadata, Stream
from control_plane.vllm import Role

Headers = Sequence[tuple[str, str]]

# RFC 9110, 5.6.2 and 5.5: names and methods are tokens; values are bytes of Latin-1 without controls but the tab.
_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_VALUE = r"[\t\x20-\x7e\x80-\xff]*"


@dataclass(frozen=True)
class Explanation:
    """What becomes of a request, and what the sidecar reports about it.

    `report` is what the response header and the access log say; None on a route that is not edited.
    `headers` and `body` are what vLLM receives. `rejection` is the sidecar's own response (status, body) if nothing
    reaches vLLM.
    `trusted_by` is the rule of the policy's `trust` that lets the client set a priority: "nothing" if no rule does,
    None if the policy has no `trust`. `tenant` is the client's tenant among those of the policy, or None.
    `response` is the body that the client receives on a route whose response is edited, by default of `{"priority":0}`.
    """

    report: str | None
    headers: tuple[tuple[str, str], ...]
    body: bytes
    rejection: tuple[int, bytes] | None
    response: bytes | None
    response_headers: tuple[tuple[str, str], ...]
    trusted_by: str | None
    tenant: str | None

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


def parse_header(line: str) -> tuple[str, str] | None:
    """Return the name and the value of a header line, or None if it is not valid."""
    name, colon, value = line.partition(":")
    return (name, value.strip(" \t")) if colon and _is_token(name) and re.fullmatch(_VALUE, value) else None


def check_request_line(method: str, path: str) -> None:
    """Raise InvalidField if a request cannot have this method or this target."""
    if not re.fullmatch(r"/\S*", path) or not path.isprintable():
        raise InvalidField(
            "path",
            f"{path!r} is not a valid request target. Use a path that starts with / and has no spaces, for"
            " example /inference/v1/generate.",
        )
    if not _is_token(method):
        raise InvalidField("method", f"{method!r} is not a valid method. Use a token, for example POST.")


def client_at(peer: str, identities: Sequence[str], claims: Mapping[str, str | list[str]] | None = None) -> Client:
    """Return a client with this address, these names in its certificate, and these claims in its token.

    InvalidField if it is not an address.
    """
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        raise InvalidField(
            "peer", f"{peer!r} is not an IP address. Use one, for example 10.1.2.3 or 2001:db8::1."
        ) from None
    return Client(f"[{address}]:1" if address.version == 6 else f"{address}:1", tuple(identities), claims or {})


def with_framing(headers: Headers, body: bytes) -> list[tuple[str, str]]:
    """Return the headers with a content type and a length, as clients add them."""
    lines = list(headers)
    names = {name.lower() for name, _ in lines}
    if "content-type" not in names:
        lines.append(("content-type", "application/json"))
    if not names & {"content-length", "transfer-encoding"}:
        lines.append(("content-length", str(len(body))))
    return lines


def in_chunks(body: bytes) -> list[bytes]:
    """Return the body in pieces, as Envoy gets it: a long body is not changed from its first byte on."""
    return [body[at : at + 16384] for at in range(0, len(body), 16384)]


def _is_token(text: str) -> bool:
    return re.fullmatch(_TOKEN, text) is not None


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
        self._token_key = metadata_key(policy.trust.claims) if policy.trust and policy.trust.claims else None
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
        if client.claims and self._token_key:
            payload = {
                name.encode(): value.encode() if isinstance(value, str) else self._to_table([v.encode() for v in value])
                for name, value in client.claims.items()
            }
            # Envoy verifies the token before the filter sees it, and the time, too.
            metadata.tokens = {self._token_key.encode(): self._to_table({b"exp": 2**53, **payload})}
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
            tenant=_text(metadata.values.get(b"tenant")),
        )


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
