"""Discovery requests: the body that a client sends, decoded once into a typed form.

The format is envoy.service.discovery.v3.DiscoveryRequest in JSON (Envoy docs, "xDS REST and gRPC protocol").
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from sys import getsizeof
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from control_plane.address import Address
from control_plane.errors import BadInput
from control_plane.policy.model import RootPath
from control_plane.policy.restart import StartedWith
from control_plane.render.filter import FILTER_NAME
from control_plane.render.placement import DEFAULT_LISTEN, DEFAULT_UPSTREAM, MAX_LABELS
from control_plane.server.bounded_cache import BoundedCache
from control_plane.vllm import ROLES, Role

TYPE_URLS: Mapping[str, str] = {
    "extension_configs": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
    "listeners": "type.googleapis.com/envoy.config.listener.v3.Listener",
    "clusters": "type.googleapis.com/envoy.config.cluster.v3.Cluster",
}
"""The resource types: name in the path POST /v3/discovery:<name> -> type URL."""

MAX_REMEMBERED_BYTES = 64 * 2**20
"""What the decoded requests may take, and the same again for the list of sidecars: a fraction of the memory limit."""


@dataclass(frozen=True, slots=True)
class ResourceKey:
    """All that the requested resources depend on. Clients with equal keys get the same response."""

    type_name: str
    role: Role
    policy_name: str | None
    labels: tuple[tuple[str, str], ...]
    listen: Address | None
    """Only for listeners and clusters, like `upstream`. All sidecars of a role share one filter configuration."""
    upstream: Address | None
    report_header: str = ""
    """The response header that the client's bootstrap adds. Only for extension configurations."""
    root_path: RootPath | None = None
    """vLLM's --root-path, for a policy that sets none."""


@dataclass(frozen=True, slots=True)
class DiscoveryClient:
    """A discovery client, as it describes itself. `role` is its own text, which may not be a valid role."""

    node_id: str
    type_name: str
    role: str
    key: ResourceKey | None
    """None if nothing can be served to it; `reason` says why."""
    reason: str
    error: str
    """The client's own description of why it rejected the last configuration, or the empty string."""
    size: int = field(default=0, compare=False)
    """About how much memory this takes, in bytes."""
    started_with: StartedWith = StartedWith()
    """What the client's own configuration has of the policy that it started with."""
    probe: bool = False
    """Whether the client only tests the control plane, as `helm test` does, and is not a sidecar."""


class DiscoveryRequest(NamedTuple):
    """A decoded discovery request. `version` is the version that the client has; empty if it has none."""

    client: DiscoveryClient
    version: str


class _Message(BaseModel):
    # Unknown fields are ignored, because every Envoy release adds some.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


_Text = Annotated[str, StringConstraints(max_length=1024)]
# Kubernetes' own bounds: a prefix is a DNS subdomain of 253 characters, a name and a value have 63 (apimachinery's
# validation of labels).
_LabelKey = Annotated[str, StringConstraints(max_length=253 + 1 + 63)]
_LabelValue = Annotated[str, StringConstraints(max_length=63)]
_Address = _Text | Annotated[int, Field(ge=1, le=65535)] | None


class _StartedWith(_Message):
    ordinary: Literal["pass", "enforce"] = "pass"
    root_path: RootPath | None = None
    # Envoy's metadata has doubles, so 99 can arrive as 99.0.
    max_body_bytes: Annotated[int, Field(strict=False, ge=0, le=2**52)] | None = StartedWith().max_body_bytes
    claims: _Text | None = None


class _Metadata(_Message):
    role: _Text = ""
    policy: _Text | None = None
    labels: Annotated[dict[_LabelKey, _LabelValue], Field(max_length=MAX_LABELS)] | None = None
    listen: _Address = None
    upstream: _Address = None
    report_header: _Text | None = None
    root_path: RootPath | None = None
    started_with: _StartedWith = _StartedWith()
    probe: bool = False


class _Node(_Message):
    id: _Text = ""
    metadata: _Metadata = _Metadata()


class _ErrorDetail(_Message):
    message: str = ""


class _DiscoveryRequest(_Message):
    """The fields of envoy.service.discovery.v3.DiscoveryRequest that are used here."""

    version_info: _Text = ""
    node: _Node
    resource_names: list[str] = []
    type_url: _Text = ""
    error_detail: _ErrorDetail | None = None


def decode(type_name: str, body: bytes) -> DiscoveryRequest:
    """Decode the body of a request for one of TYPE_URLS.

    BadInput where it is not a discovery request; the message names the field. A request for something that does not
    exist, such as an unknown role, is decoded: its client has a `reason` and no key.
    """
    try:
        message = _DiscoveryRequest.model_validate(from_json(body, allow_inf_nan=False))
    except ValidationError as error:
        raise BadInput(f"discovery request: {_first_problem(error)}") from None
    except ValueError as error:
        raise BadInput(f"discovery request: malformed JSON: {error}") from None
    metadata, names = message.node.metadata, message.resource_names
    key, reason = None, ""
    role = next((role for role in ROLES if role == metadata.role), None)
    if message.type_url not in ("", TYPE_URLS[type_name]):
        reason = f"type_url: {shown(message.type_url)} is not valid for this path. Use {TYPE_URLS[type_name]}."
    elif role is None:
        reason = f"node.metadata.role: {shown(metadata.role)} is not a valid role. Use {' or '.join(ROLES)}."
    elif type_name == "extension_configs" and names and FILTER_NAME not in names:
        reason = f"resource_names: {shown(names[0])} is not served. Use {FILTER_NAME}."
    else:
        has_place = type_name != "extension_configs"
        key = ResourceKey(
            type_name,
            role,
            metadata.policy or None,
            tuple(sorted((metadata.labels or {}).items())),
            _address(metadata.listen, "listen", DEFAULT_LISTEN[role]) if has_place else None,
            _address(metadata.upstream, "upstream", DEFAULT_UPSTREAM[role]) if has_place else None,
            "" if has_place else metadata.report_header or "",
            metadata.root_path,
        )
    error_line = " ".join(message.error_detail.message.split())[:500] if message.error_detail else ""
    texts = (
        message.node.id,
        metadata.role,
        message.version_info,
        error_line,
        reason,
        metadata.policy or "",
        metadata.report_header or "",
        metadata.started_with.root_path or "",
        metadata.started_with.claims or "",
        *(metadata.labels or {}),
        *(metadata.labels or {}).values(),
    )
    size = 1000 + sum(map(getsizeof, texts))
    started_with = StartedWith(**dict(metadata.started_with))
    client = DiscoveryClient(
        message.node.id, type_name, metadata.role, key, reason, error_line, size, started_with, metadata.probe
    )
    return DiscoveryRequest(client, message.version_info)


_VERSION_FIRST = re.compile(rb'\{"version_info":"([0-9A-Za-z._-]{1,64})",')


class RequestDecoder:
    """Decodes requests, and caches the result by the digest of the body, so that most polls are hashed but not parsed.

    Envoy names all of its extensions in every poll: 77 KB of JSON in Envoy 1.40. The bytes are the same each time,
    except for the version, which Envoy writes first. The cache holds at most `limit` requests, and `max_bytes` of them.
    """

    def __init__(self, limit: int = 25_000, max_bytes: int = MAX_REMEMBERED_BYTES) -> None:
        self._cache: BoundedCache[tuple[str, bytes], DiscoveryRequest] = BoundedCache(limit, max_bytes)

    def decode(self, type_name: str, body: bytes) -> DiscoveryRequest:
        """Like the function `decode`, and faster for a body that was decoded before."""
        if not body.startswith(b"{"):
            return decode(type_name, body)
        first = _VERSION_FIRST.match(body)
        rest = memoryview(body)[first.end() if first else 1 :]
        key = type_name, sha256(rest).digest()
        request = self._cache.get(key)
        if request is None:
            request = decode(type_name, b"{" + rest)
            self._cache.add(key, request, request.client.size)
        # Of two members "version_info" the last one counts, as in any JSON parser that accepts both.
        return request if request.version or not first else DiscoveryRequest(request.client, first[1].decode())


def _address(value: str | int | None, field: str, default: Address) -> Address:
    if value is None or value == "":
        return default
    text = f"{default.host}:{value}" if isinstance(value, int) or value.isdigit() else value
    try:
        return Address.parse(text, field)
    except BadInput:
        raise BadInput(f"discovery request: node.metadata.{field}: {_not_an_address(value)}") from None


def _not_an_address(value: object) -> str:
    return f"{shown(value)} is not a valid address. Use HOST:PORT or a port, for example 127.0.0.1:8000."


_TYPES_OF_JSON = {
    "model_type": "an object",
    "dict_type": "an object",
    "string_type": "a string",
    "list_type": "a list",
    "bool_type": "true or false",
}


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=True)[0]
    # pydantic adds the member of a union to the path of an error, which is not a field of the request.
    parts = (str(part) for part in problem["loc"] if not str(part).startswith("constrained-"))
    where = ".".join(part if re.fullmatch(r"[\w.-]{1,63}", part) else shown(part) for part in parts)
    if problem["type"] == "missing":
        return f"{where} is missing"
    if where in {"node.metadata.listen", "node.metadata.upstream"}:
        return f"{where}: {_not_an_address(problem['input'])}"
    value, wanted = shown(problem["input"]), _TYPES_OF_JSON.get(problem["type"])
    return f"{where or 'body'}: {value} is not {wanted}" if wanted else f"{where}: {value}: {problem['msg']}"


def shown(value: object) -> str:
    """Return a client's value as short text for a message: ASCII, in one line."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
