"""Policy discovery: a discovery request and the policies -> the resources and the hash of their content.

REST xDS v3 in JSON, as Envoy speaks it (envoy docs, "xDS REST and gRPC protocol"): it posts {node, type_url,
version_info, resource_names} every few seconds and takes 200 with resources, or 304. Nothing here keeps state that an
answer depends on: every replica, and every process, gives the same answer to the same request and the same policies.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from control_plane import render
from control_plane.errors import BadInput
from control_plane.policy import ROLES, Policies, Policy, Role
from control_plane.render import FILTER_NAME, Address, ManagedEnvoy, Placement, Resource

State = Literal["found", "not_modified", "not_found"]


@dataclass(frozen=True)
class ResourceType:
    """One kind of resource: the name in its path, its type URL, and how a policy becomes the resources asked for."""

    name: str
    url: str
    resources: Callable[[Policy, "Question"], list[Resource]]


def _extension_configs(policy: Policy, question: "Question") -> list[Resource]:
    own = ManagedEnvoy(question.report_header)
    return [{"name": FILTER_NAME, "typed_config": render.filter_config(policy, question.role, own)}]


def _placement(question: "Question") -> Placement:
    return Placement(
        question.role,
        question.listen or render.DEFAULT_LISTEN[question.role],
        question.upstream or render.DEFAULT_UPSTREAM[question.role],
        render.DEFAULT_ADMIN[question.role],
    )


def _listeners(policy: Policy, question: "Question") -> list[Resource]:
    return render.listeners(policy, _placement(question))


def _clusters(policy: Policy, question: "Question") -> list[Resource]:
    return render.clusters(policy, _placement(question))


TYPES: Mapping[str, ResourceType] = {
    kind.name: kind
    for kind in (
        ResourceType(
            "extension_configs", "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig", _extension_configs
        ),
        ResourceType("listeners", "type.googleapis.com/envoy.config.listener.v3.Listener", _listeners),
        ResourceType("clusters", "type.googleapis.com/envoy.config.cluster.v3.Cluster", _clusters),
    )
}
"""The types that are served, at POST /v3/discovery:<name>."""


@dataclass(frozen=True, slots=True)
class Question:
    """All that an answer depends on, but the version that the asker has."""

    kind: str
    role: Role
    policy_name: str | None
    labels: tuple[tuple[str, str], ...]
    listen: Address | None
    upstream: Address | None
    report_header: str = ""
    """As in render.ManagedEnvoy; only for extension configs."""


@dataclass(frozen=True, slots=True)
class Asker:
    """A sidecar as it describes itself. `question` is None where there is nothing to serve, and `reason` says why."""

    node_id: str
    kind: str
    role: str
    question: Question | None
    reason: str
    error: str
    """What it says was wrong with the last configuration; empty where it says nothing."""
    held: str
    """The version_info that stands in the body anywhere but in front."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to send: a DiscoveryResponse in `body` where found, nothing where the asker has this version already."""

    state: State
    version: str = ""
    body: bytes = b""
    reason: str = ""


class _Message(BaseModel):
    # Envoy adds fields in every release, so unknown ones are let through.
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


_Text = Annotated[str, StringConstraints(max_length=1024)]
_Address = _Text | Annotated[int, Field(ge=1, le=65535)] | None


class _Metadata(_Message):
    role: _Text = ""
    policy: _Text | None = None
    labels: dict[_Text, _Text] | None = None
    listen: _Address = None
    upstream: _Address = None
    report_header: _Text | None = None


class _Node(_Message):
    id: _Text = ""
    metadata: _Metadata = _Metadata()


class _ErrorDetail(_Message):
    message: str = ""


class _DiscoveryRequest(_Message):
    """envoy.service.discovery.v3.DiscoveryRequest, as far as it is used here."""

    version_info: _Text = ""
    node: _Node
    resource_names: list[str] = []
    type_url: _Text = ""
    error_detail: _ErrorDetail | None = None


def read_asker(kind: str, body: bytes) -> Asker:
    """The asker of one discovery request. BadInput where the body is none, naming the field and what is allowed."""
    try:
        request = _DiscoveryRequest.model_validate_json(body)
    except ValidationError as error:
        raise BadInput(f"discovery request: {_first_problem(error)}") from None
    resource_type, metadata = TYPES[kind], request.node.metadata
    question, reason = None, ""
    role = next((role for role in ROLES if role == metadata.role), None)
    if request.type_url not in ("", resource_type.url):
        reason = f"type_url: {_shown(request.type_url)} is unknown here; allowed: {resource_type.url}"
    elif role is None:
        reason = f"node.metadata.role: {_shown(metadata.role)} is unknown; allowed: {', '.join(ROLES)}"
    elif kind == "extension_configs" and request.resource_names and FILTER_NAME not in request.resource_names:
        reason = f"resource_names: {_shown(request.resource_names[0])} is unknown; allowed: {FILTER_NAME}"
    else:
        # Only listeners and clusters depend on where the sidecar stands: one filter config serves all that began alike.
        placed = kind != "extension_configs"
        question = Question(
            kind,
            role,
            metadata.policy or None,
            tuple(sorted((metadata.labels or {}).items())),
            _address(metadata.listen, "listen", render.DEFAULT_LISTEN[role]) if placed else None,
            _address(metadata.upstream, "upstream", render.DEFAULT_UPSTREAM[role]) if placed else None,
            "" if placed else metadata.report_header or "",
        )
    error_line = " ".join(request.error_detail.message.split())[:500] if request.error_detail else ""
    return Asker(request.node.id, kind, metadata.role, question, reason, error_line, request.version_info)


_VERSION_FIRST = re.compile(rb'\{"version_info":"([0-9A-Za-z._-]{1,64})",')


class Askers:
    """Remembers whom a body described, by the body's digest, so that a poll is hashed and not parsed.

    Envoy names all of its extensions in every poll: 77 KB of JSON in 1.40, the same bytes each time but for the
    version, which it writes first. Bounded: past `limit` bodies the oldest is forgotten, and read anew.
    """

    def __init__(self, limit: int = 25_000) -> None:
        self._known: _Bounded[tuple[str, bytes], Asker] = _Bounded(limit)

    def read(self, kind: str, body: bytes) -> tuple[Asker, str]:
        """The asker, and the version it has (empty: none yet). BadInput as `read_asker`."""
        if not body.startswith(b"{"):
            asker = read_asker(kind, body)
            return asker, asker.held
        first = _VERSION_FIRST.match(body)
        rest = memoryview(body)[first.end() if first else 1 :]
        key = kind, sha256(rest).digest()
        known = self._known.get(key)
        if known is None:
            known = read_asker(kind, b"{" + rest)
            self._known.add(key, known)
        return known, known.held or (first[1].decode() if first else "")


class Snapshot:
    """The answers that one set of policies gives. Remembers what it rendered, within bounds."""

    def __init__(self, policies: Policies) -> None:
        """Renders each policy's filter for both roles: one that cannot be rendered raises here, not at a request."""
        self.policies = policies
        self._answers: _Bounded[Question, Answer] = _Bounded(25_000)
        self._rendered: _Bounded[tuple[object, ...], Answer] = _Bounded(500)
        for name, policy in policies.by_name.items():
            for role in ROLES:
                self._current(_of_one_born_with(policy, name, role))

    def answer(self, asker: Asker, version: str) -> Answer:
        """What to send to an asker that has `version`."""
        current = self.current(asker)
        return _NOT_MODIFIED if current.version == version and current.state == "found" else current

    def current(self, asker: Asker) -> Answer:
        """What an asker gets that has nothing yet."""
        if asker.question is None:
            return Answer("not_found", reason=asker.reason)
        return self._known(asker.question)

    def version(self, name: str, policy: Policy, role: Role) -> str:
        """The version of a named policy's filter config, for a sidecar that began with that policy."""
        return self._known(_of_one_born_with(policy, name, role)).version

    def versions(self) -> list[str]:
        """The versions of all that was rendered so far."""
        return [answer.version for answer in self._rendered.values()]

    def _known(self, question: Question) -> Answer:
        known = self._answers.get(question)
        return self._current(question) if known is None else known

    def _current(self, question: Question) -> Answer:
        policy = self.policies.choose(dict(question.labels), question.policy_name)
        if policy is None:
            names = ", ".join(self.policies.by_name)
            answer = Answer(
                "not_found",
                reason=f"node.metadata.policy: {_shown(question.policy_name)} is unknown; allowed: {names}",
            )
        else:
            # By identity: the policies live as long as this snapshot does.
            key = question.kind, question.role, id(policy), question.listen, question.upstream, question.report_header
            rendered = self._rendered.get(key)
            if rendered is None:
                rendered = _rendered(question, policy)
                self._rendered.add(key, rendered)
            answer = rendered
        self._answers.add(question, answer)
        return answer


def _of_one_born_with(policy: Policy, name: str, role: Role) -> Question:
    return Question("extension_configs", role, name, (), None, None, ManagedEnvoy.of(policy).report_header)


_NOT_MODIFIED = Answer("not_modified")


def _rendered(question: Question, policy: Policy) -> Answer:
    resource_type = TYPES[question.kind]
    resources = [{"@type": resource_type.url, **resource} for resource in resource_type.resources(policy, question)]
    version = sha256(_json(resources)).hexdigest()[:16]
    return Answer(
        "found", version, _json({"version_info": version, "resources": resources, "type_url": resource_type.url})
    )


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _address(value: str | int | None, what: str, default: Address) -> Address:
    if value is None or value == "":
        return default
    text = f"{default.host}:{value}" if isinstance(value, int) or value.isdigit() else value
    return Address.parse(text, f"discovery request: node.metadata.{what}")


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=True)[0]
    # pydantic adds the name of a union's member to the path of an error: that is no field of the request.
    where = ".".join(str(part) for part in problem["loc"] if not str(part).startswith("constrained-"))
    if problem["type"] == "json_invalid":
        return f"not JSON: {problem['ctx']['error']}; allowed: an Envoy discovery request in JSON"
    if problem["type"] == "missing":
        return f"{where}: is missing; allowed: an Envoy discovery request, with node"
    allowed = {"model_type": "an object", "dict_type": "an object", "string_type": "a text", "list_type": "a list"}
    wanted = allowed.get(problem["type"], problem["msg"])
    if where in {"node.metadata.listen", "node.metadata.upstream"}:
        wanted = "HOST:PORT, or a port"
    return f"{where or 'body'}: {_shown(problem['input'])} is not allowed; allowed: {wanted}"


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class _Bounded(Generic[_Key, _Value]):
    """A dict that forgets its oldest entry once it holds `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[_Key, _Value] = {}
        self.get = self._entries.get
        self.values = self._entries.values

    def add(self, key: _Key, value: _Value) -> None:
        if len(self._entries) >= self._limit:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = value
