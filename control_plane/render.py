"""Policy and placement -> what each target reads: one function and one table row a target.

Values are worked out here; the templates in envoy/ only place them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from ipaddress import ip_address
from typing import Any, Literal, Self
from urllib.parse import quote

import jinja2
import yaml

from control_plane.errors import BadInput
from control_plane.lua_bundle import Setting, bundle
from control_plane.package_data import folder
from control_plane.policy import READS_HEADER, RESPONSE_ROUTES, ROLES, Policy, Role, Routes

Resource = dict[str, Any]
"""One Envoy or Kubernetes object, ready for yaml.dump or json.dumps."""

FILTER_NAME = "vllm_priority"
"""Name of the main filter, its ECDS resource, its dynamic metadata namespace, and the prefix of its stats."""

DEFERRED_NAME = f"{FILTER_NAME}_deferred"
"""Name of the deferred filter."""

STANDARD_STREAMS: Mapping[str, str] = {"/dev/stdout": "Stdout", "/dev/stderr": "Stderr"}
"""Access logs that Envoy writes by their descriptor -> the name of its logger."""


# RFC 1123, and the underscores that resolvers take. What ends in a number is an IPv4 address or a slip of the pen.
_HOST_NAME = (
    r"(?=.{1,253}$)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*(?![0-9]+\.?$)[A-Za-z0-9_]"
    r"([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?"
)


@dataclass(frozen=True)
class Address:
    """A host (name, IPv4, or IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, what: str) -> Self:
        """`HOST:PORT` or `[V6]:PORT`; BadInput names `what` was wrong."""
        host, _, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        address = cls(host, int(port)) if re.fullmatch(r"[0-9]{1,5}", port) else None
        named = (":" in host) == bracketed and (re.fullmatch(_HOST_NAME, host) or (address and address.is_ip))
        if not named or address is None or not 0 < address.port < 65536:
            raise BadInput(f"{what}: {text!r} is no address; allowed: HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000")
        return address

    @property
    def is_ip(self) -> bool:
        """Whether the host is an IP address, not a name to resolve."""
        try:
            ip_address(self.host)
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


DEFAULT_LISTEN: Mapping[Role, Address] = {"render": Address("0.0.0.0", 18000), "engine": Address("0.0.0.0", 18001)}
DEFAULT_UPSTREAM: Mapping[Role, Address] = {"render": Address("127.0.0.1", 8000), "engine": Address("127.0.0.1", 8001)}
DEFAULT_SERVICE: Mapping[Role, Address] = {role: Address(f"vllm-{role}", 8000) for role in ROLES}
DEFAULT_ADMIN: Mapping[Role, Address] = {"render": Address("127.0.0.1", 19000), "engine": Address("127.0.0.1", 19001)}


DEFAULT_REQUEST_TIMEOUT = 300
"""Seconds that a request may take to arrive, from its first byte to its last. 0: no bound."""
_HEADERS_TIMEOUT = 60
"""The same for its headers alone."""

# Names and label values as Kubernetes has them (RFC 1123, and apimachinery's validation of labels).
_NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_LABEL = rf"(({_NAME}\.)*{_NAME}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?"
_LABEL_VALUE = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"


def check_namespace(text: str, what: str) -> None:
    """BadInput names `what` was wrong, where Kubernetes takes no namespace of that name (RFC 1123's labels)."""
    if not re.fullmatch(_NAME, text):
        allowed = "1 to 63 lower-case letters, digits and -, such as vllm"
        raise BadInput(f"{what}: {text[:60]!r} is no namespace; allowed: {allowed}")


@dataclass(frozen=True)
class Attachment:
    """Which proxy that is not ours takes the filter: for the targets from istio on.

    `namespace`: of the objects; None leaves it to kubectl. `selector`: labels of the pods whose Istio sidecars are
    meant; empty is `vllm-priority.io/role: ROLE`. `gateway`: NAME or NAMESPACE/NAME of the Gateway.
    """

    namespace: str | None = None
    selector: Mapping[str, str] = field(default_factory=dict)
    gateway: str = "eg"

    @classmethod
    def parse(cls, namespace: str | None, selector: Sequence[str], gateway: str | None) -> Self:
        """From the command's texts; `selector` holds KEY=VALUE. BadInput names what was wrong."""
        labels: dict[str, str] = {}
        for text in selector:
            key, equals, value = text.partition("=")
            if not equals or not re.fullmatch(_LABEL, key) or not re.fullmatch(_LABEL_VALUE, value):
                raise BadInput(f"--selector: {text!r} is no label; allowed: KEY=VALUE, such as app=vllm-render")
            if labels.setdefault(key, value) != value:
                raise BadInput(f"--selector: {key!r} is given twice; allowed: one value for each label")
        if namespace is not None:
            check_namespace(namespace, "--namespace")
        gateway = cls.gateway if gateway is None else gateway
        if not re.fullmatch(rf"({_NAME}/)?({_NAME}\.)*{_NAME}", gateway):
            raise BadInput(f"--gateway: {gateway!r} is no Gateway; allowed: NAME or NAMESPACE/NAME")
        return cls(namespace, labels, gateway)


@dataclass(frozen=True)
class Drain:
    """How a pod's preStop hook asks its sidecar to drain: `GET /drain/TOKEN` on the health listener.

    token: part of the path, so that other pods, which can reach the health listener, cannot drain the sidecar.
    response_delay_seconds: how long the response waits. Draining begins at once.
    """

    token: str
    response_delay_seconds: int = 0

    @property
    def path(self) -> str:
        """The path of the request."""
        return f"/drain/{self.token}"


@dataclass(frozen=True)
class Placement:
    """Where one sidecar stands. `health` and `control_plane` are left out where None.

    `request_timeout_seconds`: how long a request may take to arrive; 0 is no bound.
    `idle_timeout_seconds`: how long a client's connection may be idle. `drain_timeout_seconds`: how much later it is
    closed; until then a request on it is served, and its response announces the end. `drain`: needs `health`.
    `max_connections`: from clients, and as many again to the upstream. `spread`: send requests to every address of the
    upstream's name, as to several servers; otherwise all addresses of a name are one server's.
    """

    role: Role
    listen: Address
    upstream: Address
    admin: Address
    health: Address | None = None
    control_plane: Address | None = None
    node_id: str = "vllm-priority"
    labels: Mapping[str, str] = field(default_factory=dict)
    policy_name: str | None = None
    access_log: str = "/dev/stdout"
    max_connections: int = 50_000
    spread: bool = False
    refresh_seconds: float = 5.0
    request_timeout_seconds: int = DEFAULT_REQUEST_TIMEOUT
    idle_timeout_seconds: int = 3600
    drain_timeout_seconds: int = 5
    drain: Drain | None = None
    attachment: Attachment = Attachment()
    memory_limit_bytes: int = 1280 * 1024**2
    """What Envoy may use of the machine's or the container's memory: its resident set stays below it."""

    @classmethod
    def default(cls, role: Role, target: str = "bootstrap") -> Self:
        """The placement the commands use where nothing is named. Some targets name vLLM by its Service."""
        upstream = DEFAULT_SERVICE if target in {"istio-waypoint", "envoy-gateway"} else DEFAULT_UPSTREAM
        return cls(role, DEFAULT_LISTEN[role], upstream[role], DEFAULT_ADMIN[role])


def _held_memory(placement: Placement) -> int:
    """The resident set in bytes above which the filter sheds bodies; lua/memory.lua may use an eighth more.

    What is left is for what grows between two readings: the allocator's own memory, the buffers of connections, LuaJIT.
    """
    return placement.memory_limit_bytes * 3 // 4


def _max_heap(placement: Placement) -> int:
    """What Envoy's overload manager takes for the whole heap, in bytes. It counts no free pages, and not LuaJIT's."""
    return placement.memory_limit_bytes * 9 // 10


# How bodies are handled in an Envoy that we configure.
_CONNECTION_BUFFER = 262144
"""Where Envoy stops reading from a client or a server while the other side does not keep up, in bytes."""
_HTTP2_WINDOW = _CONNECTION_BUFFER
"""Bytes that an HTTP/2 client may send on although Envoy has stopped reading."""
_HELD_HERE = 32768
"""A longer body, and one of unknown length, is held by the deferred filter: HELD_HERE in lua/filter.lua."""
_HELD_SLACK = 1048576
"""Bytes that Envoy may hold beyond `limits.max_body_bytes`, so that the filter sees where a body passes that limit."""
_UNLIMITED = 2**32 - 1
"""Bytes that Envoy may hold where the policy sets no limit: lua/memory.lua sets it, not this."""


@dataclass(frozen=True)
class ManagedEnvoy:
    """An Envoy that we configure: its routes add the report to responses, and say where the deferred filter is on.

    `report_header`: the name under which they add it: that of the policy it started with; empty where they add none.
    """

    report_header: str

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """As `listeners()` configures one that starts with this policy."""
        return cls(policy.report_header or "")


Place = ManagedEnvoy | Literal["mesh", "waypoint"]
"""Where a filter runs: in an Envoy that we configure; in a mesh, with the deferred filter after it; or alone."""


def filter_settings(policy: Policy, role: Role, place: Place) -> dict[str, Setting]:
    """What the main filter's Lua reads of a policy. Priorities are texts: Lua's numbers cannot hold every int64."""
    default = policy.default_value
    renamed = isinstance(place, ManagedEnvoy) and place.report_header != (policy.report_header or "")
    return {
        "header": policy.header,
        "report_header": policy.report_header,
        "keep_header": policy.keep_header,
        "reject_invalid": policy.on_invalid == "reject",
        "reject_unmovable": policy.on_unmovable == "reject",
        "negate": policy.engine == "sglang",
        "default": None if default is None else str(default),
        "min": None if policy.range.min is None else str(policy.range.min),
        "max": None if policy.range.max is None else str(policy.range.max),
        "clamp": policy.range.outside == "clamp",
        "classes": {name: str(value) for name, value in policy.classes.items()},
        "routes": policy.routes.kinds(role),
        "max_body_bytes": policy.limits.max_body_bytes,
        "deferred": place == "mesh",
        "routes_report": place.report_header if isinstance(place, ManagedEnvoy) and renamed else None,
        "count_by_cluster": isinstance(place, ManagedEnvoy),
    }


def deferred_settings(policy: Policy, place: Place) -> dict[str, Setting]:
    """What the deferred filter's Lua reads of the policy that its proxy starts with."""
    managed = isinstance(place, ManagedEnvoy)
    return {
        "header": policy.header,
        "report_header": policy.report_header,
        "report_by_routes": managed,
        "count_by_cluster": managed,
    }


OUTCOMES = (
    "inserted", "replaced", "kept", "response_edited", "absent",
    "invalid", "out_of_range", "ambiguous", "invalid_path", "too_large",
    "unsupported_media_type", "unsupported_charset", "unsupported_encoding",
    "malformed_json", "not_an_object", "empty_body", "upstream_error", "overloaded",
)  # fmt: skip
"""What can become of a priority. Each has a counter."""


def filter_script(policy: Policy, role: Role, place: Place) -> str:
    """The main filter's script. It sees responses where nothing else can: alone, and where the report is renamed."""
    settings = filter_settings(policy, role, place)
    sees_responses = place == "waypoint" or settings["routes_report"] is not None
    return bundle(settings, sees_responses=sees_responses, comments=not isinstance(place, ManagedEnvoy))


def deferred_script(policy: Policy, place: Place) -> str:
    """The deferred filter's script."""
    settings = deferred_settings(policy, place)
    return bundle(settings, "deferred", sees_responses=True, comments=not isinstance(place, ManagedEnvoy))


def filter_config(policy: Policy, role: Role, place: Place) -> Resource:
    """The main filter's typed_config."""
    return _lua(filter_script(policy, role, place))


def deferred_config(policy: Policy, place: Place) -> Resource:
    """The deferred filter's typed_config."""
    return _lua(deferred_script(policy, place))


def _lua(script: str) -> Resource:
    return _place("filter", filter_name=FILTER_NAME, script=script)


def held_bytes(policy: Policy) -> int:
    """How many bytes of one body a proxy has to hold."""
    limit = policy.limits.max_body_bytes
    return _UNLIMITED if limit is None else min(limit + _HELD_SLACK, _UNLIMITED)


def listeners(policy: Policy, placement: Placement) -> list[Resource]:
    """The Envoy listeners: the sidecar's own, and the health one where the placement has it."""
    typed_config = filter_config(policy, placement.role, ManagedEnvoy.of(policy))
    if placement.control_plane:
        http_filter = _place(
            "discovered_filter",
            filter_name=FILTER_NAME,
            typed_config=typed_config,
            refresh_delay=f"{placement.refresh_seconds:g}s",
        )
    else:
        http_filter = {"name": FILTER_NAME, "typed_config": typed_config}
    listener = _place(
        "listener",
        filter_name=FILTER_NAME,
        listen=_socket_address(placement.listen),
        access_log=_access_log(placement.access_log),
        http_filter=http_filter,
        deferred_filter={
            "name": DEFERRED_NAME,
            "disabled": True,
            "typed_config": deferred_config(policy, ManagedEnvoy.of(policy)),
        },
        buffer=_CONNECTION_BUFFER,
        window=_HTTP2_WINDOW,
        note=_FORWARDED_PROTO_NOTE,
        request_timeout=f"{placement.request_timeout_seconds}s",
        headers_timeout=f"{_HEADERS_TIMEOUT}s",
        idle_timeout=f"{placement.idle_timeout_seconds}s",
        drain_timeout=f"{placement.drain_timeout_seconds}s",
        default_host=str(placement.upstream),
        ignored_upgrades=_everything_but("websocket"),
        local_replies={"mappers": _local_replies(policy, placement)},
        routes=_routes(policy, _held_memory(placement)),
    )
    if placement.health is None:
        return [listener]
    drain = placement.drain
    health = _place(
        "health_listener",
        address=_socket_address(placement.health),
        # Envoy counts the time that a response is delayed as a part of the request's.
        request_timeout=f"{5 + (drain.response_delay_seconds if drain else 0)}s",
        drain=drain,
        drain_path=drain and drain.path,
        drain_delay=drain and f"{drain.response_delay_seconds}s",
    )
    return [listener, health]


def clusters(policy: Policy, placement: Placement) -> list[Resource]:
    """The Envoy clusters: the upstream, those that the placement calls for, and the counters."""
    found = [
        _place(
            "cluster",
            discovery_type=_discovery_type(placement.upstream, spread=placement.spread),
            address=_socket_address(placement.upstream),
            buffer=_CONNECTION_BUFFER,
            max_connections=placement.max_connections,
            health_checks=_HEALTH_CHECKS if placement.health else [],
        )
    ]
    if placement.control_plane:
        found.append(
            _place(
                "control_plane_cluster",
                discovery_type=_discovery_type(placement.control_plane),
                address=_socket_address(placement.control_plane),
                health_checks=_CONTROL_PLANE_CHECKS if placement.health else [],
            )
        )
    if placement.health:
        found.append(_place("admin_cluster", address=_socket_address(placement.admin)))
    return found + [_place("counter_cluster", name=f"{FILTER_NAME}_{outcome}") for outcome in OUTCOMES]


def node_metadata(policy: Policy, placement: Placement) -> Resource:
    """What a sidecar that starts with this policy tells the control plane of itself, as `node.metadata`."""
    return {
        "role": placement.role,
        "listen": str(placement.listen),
        "upstream": str(placement.upstream),
        "labels": dict(placement.labels),
        "report_header": ManagedEnvoy.of(policy).report_header,
    } | ({"policy": placement.policy_name} if placement.policy_name else {})


def bootstrap(policy: Policy, placement: Placement) -> Resource:
    """A whole Envoy configuration."""
    return _place(
        "bootstrap",
        placement=placement,
        max_heap=_max_heap(placement),
        node_metadata=node_metadata(policy, placement),
        admin=_socket_address(placement.admin),
        listeners=listeners(policy, placement),
        clusters=clusters(policy, placement),
    )


def xds(policy: Policy, placement: Placement) -> list[Resource]:
    """The same as discovery resources, each with its type, for a control plane of one's own."""
    return [
        {"@type": "type.googleapis.com/envoy.config.listener.v3.Listener", **resource}
        for resource in listeners(policy, placement)
    ] + [
        {"@type": "type.googleapis.com/envoy.config.cluster.v3.Cluster", **resource}
        for resource in clusters(policy, placement)
    ]


def istio(policy: Policy, placement: Placement) -> list[Resource]:
    """An EnvoyFilter for the Istio sidecars of the selected pods: the filter, right before their router.

    No clusters are added to a mesh to count by, so an Envoy before 1.38 has no counters there.
    """
    return [
        _place(
            "istio",
            metadata=_object_metadata(placement),
            selector=dict(placement.attachment.selector or {ROLE_LABEL: placement.role}),
            filter_name=FILTER_NAME,
            deferred_name=DEFERRED_NAME,
            held_bytes=held_bytes(policy),
            typed_config=filter_config(policy, placement.role, "mesh"),
            deferred_config=deferred_config(policy, "mesh"),
        )
    ]


def istio_waypoint(policy: Policy, placement: Placement) -> list[Resource]:
    """A TrafficExtension for the waypoint of the upstream, a Service: Istio 1.30 and later, whose own API this is.

    BadInput where the upstream is no Service, or is in another namespace than the object.
    """
    service = _service(placement.upstream)
    namespace = placement.attachment.namespace or service.get("namespace")
    if service.get("namespace", namespace) != namespace:
        raise BadInput(
            f"--namespace: {namespace} is not where the Service is; allowed: {service['namespace']}, as for the Service"
        )
    attachment = replace(placement.attachment, namespace=namespace)
    return [
        _place(
            "istio_waypoint",
            metadata=_object_metadata(replace(placement, attachment=attachment)),
            service=service["name"],
            script=filter_script(policy, placement.role, "waypoint"),
        )
    ]


def envoy_gateway(policy: Policy, placement: Placement) -> list[Resource]:
    """An HTTPRoute for the edited paths, and the EnvoyExtensionPolicy that runs the script on it.

    The upstream is a Service: NAME, NAME.NAMESPACE, or its whole DNS name. BadInput where it is none, and where
    the policy leaves the role no path.
    """
    namespace, _, gateway = placement.attachment.gateway.rpartition("/")
    placed = _place(
        "envoy_gateway",
        metadata=_object_metadata(placement),
        gateway={"name": gateway} | ({"namespace": namespace} if namespace else {}),
        service=_service(placement.upstream),
        matches_by_rule=[
            [{"path": {"type": "Exact", "value": path}, "method": "POST"} for path in paths]
            for paths in _gateway_paths(policy, placement.role)
        ],
        scripts=[filter_script(policy, placement.role, "mesh"), deferred_script(policy, "mesh")],
    )
    return [placed["route"], placed["extension_policy"]]


TARGETS: Mapping[str, Callable[[Policy, Placement], list[Resource]]] = {
    "bootstrap": lambda policy, placement: [bootstrap(policy, placement)],
    "xds": xds,
    "istio": istio,
    "istio-waypoint": istio_waypoint,
    "envoy-gateway": envoy_gateway,
}
"""Target name -> function of (policy, placement) that gives the documents to write."""


def render(target: str, policy: Policy, placement: Placement) -> list[Resource]:
    """The documents of a target; BadInput for an unknown one."""
    if target not in TARGETS:
        raise BadInput(f"target: {target!r} is unknown; allowed: {', '.join(TARGETS)}")
    return TARGETS[target](policy, placement)


ROLE_LABEL = "vllm-priority.io/role"
"""The label that an EnvoyFilter selects pods by where none is named."""

# Gateway API before 1.1 allows 8 matches a rule; every version allows 16 rules.
_MATCHES_PER_RULE, _MAX_RULES = 8, 16


def _object_metadata(placement: Placement) -> Resource:
    """Named by role and policy, so that applying again replaces, and two policies do not meet."""
    name = "-".join(filter(None, ("vllm-priority", placement.role, placement.policy_name)))
    namespace = placement.attachment.namespace
    return {
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        "labels": {"app.kubernetes.io/name": "vllm-priority", ROLE_LABEL: placement.role},
    }


def _gateway_paths(policy: Policy, role: Role) -> list[list[str]]:
    """The paths that a gateway sends to this role, in rules. Each path has one backend there.

    So the render servers' paths are not the engines' too, and `extra` ones, on both roles, are the engines'.
    """
    to_render = Routes(render=policy.routes.render).for_role("render")
    paths = [path for path in policy.routes.for_role(role) if (path in to_render) == (role == "render")]
    if not 0 < len(paths) <= _MATCHES_PER_RULE * _MAX_RULES:
        most = _MATCHES_PER_RULE * _MAX_RULES
        raise BadInput(f"routes.{role}: {len(paths)} paths for a gateway's {role} route; allowed: 1 to {most}")
    # What a URL has no letter for comes percent-encoded, and Gateway API takes a path only so.
    encoded = [quote(path, safe="/-._~!$&'()*+,;=:@") for path in paths]
    return [encoded[start : start + _MATCHES_PER_RULE] for start in range(0, len(encoded), _MATCHES_PER_RULE)]


def _service(upstream: Address) -> Resource:
    """A backendRef of Gateway API."""
    found = re.fullmatch(rf"({_NAME})(?:\.({_NAME})(?:\.svc(?:\..+)?)?)?", upstream.host)
    if upstream.is_ip or found is None:
        raise BadInput(f"--upstream: {upstream} is no Service; allowed: NAME:PORT or NAME.NAMESPACE:PORT")
    name, namespace = found[1], found[3]
    return {"name": name} | ({"namespace": namespace} if namespace else {}) | {"port": upstream.port}


class _Dumper(yaml.SafeDumper):
    """Block style for texts of several lines, so that a script is read as it was written; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def to_yaml(documents: list[Resource]) -> str:
    """YAML, one document each, keys in the order in which they were placed."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000, explicit_start=len(documents) > 1)


_FORWARDED_PROTO_NOTE = "x-vllm-priority-forwarded-proto"

_WITHOUT_LUA = {
    FILTER_NAME: {
        "@type": "type.googleapis.com/envoy.extensions.filters.http.lua.v3.LuaPerRoute",
        "disabled": True,
    }
}


_FROM_A_PAGE = "'origin' in request.headers"
"""CEL: whether a page in a browser sent the request. A header whose value is empty otherwise is not added by Envoy."""
_TO_A_PAGE = (
    f"{_FROM_A_PAGE} && '{FILTER_NAME}' in metadata.filter_metadata"
    f" && 'report' in metadata.filter_metadata['{FILTER_NAME}']"
)
"""CEL: whether a page gets a report. It can read the report only if the response exposes that header."""


def _cel_text(text: str) -> str:
    """A string of CEL. Header names may contain quotes, and percent signs, which would end Envoy's command."""
    return "'" + re.sub(r"[^a-z0-9_-]", lambda found: f"\\x{ord(found[0]):02x}", text) + "'"


def _report_headers(policy: Policy) -> list[Resource]:
    """What adds the report to a response, Envoy's own included. Lua would take three times as long."""
    if not policy.report_header:
        return []
    value = f"%DYNAMIC_METADATA({FILTER_NAME}:report)%"
    header = {"key": policy.report_header, "value": value}
    name = f"%CEL({_TO_A_PAGE} ? {_cel_text(policy.report_header)} : '')%"
    exposed = {"key": "access-control-expose-headers", "value": name}
    return [
        {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"},
        {"header": exposed, "append_action": "APPEND_IF_EXISTS_OR_ADD"},
    ]


def _routes(policy: Policy, held_memory: int) -> list[Resource]:
    """Every request goes to the one cluster; routes differ in what they remove and hold, and in which filters run.

    No policy can edit another method than POST, or a route on which vLLM reads the header itself: Lua is off there. The
    deferred filter runs where a body may be edited in chunks, and where the response is edited.
    """
    not_post = {"name": ":method", "string_match": {"exact": "POST"}, "invert_match": True}
    long = {"name": "content-length", "range_match": {"start": _HELD_HERE + 1, "end": 2**63 - 1}}
    unknown_length = {"name": "content-length", "present_match": True, "invert_match": True}
    edited = {"response_headers_to_add": _report_headers(policy), "request_body_buffer_limit": held_bytes(policy)}
    deferred = edited | {
        "typed_per_filter_config": {
            DEFERRED_NAME: {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}
        },
        # The main filter edits chunks only where this says that they will be held.
        "metadata": {"filter_metadata": {FILTER_NAME: {"deferred": True, "held_memory": held_memory}}},
    }
    without_lua = {"typed_per_filter_config": _WITHOUT_LUA}
    # Lua decodes a path as vLLM does; Envoy compares it as it came.
    percent_encoded = {"name": ":path", "string_match": {"contains": "%"}}
    # Envoy joins the lines of a repeated content-type, and only Lua can separate equal ones again.
    single = {
        "name": "content-type",
        "string_match": {"contains": ","},
        "invert_match": True,
        "treat_missing_header_as_empty": True,
    }
    kinds: list[tuple[Resource, Resource]] = [
        ({"prefix": "/", "headers": [not_post, single]}, without_lua),
        *(({"path": path, "headers": [single]}, without_lua) for path in sorted(policy.routes.with_root(READS_HEADER))),
        ({"prefix": "/", "headers": [long]}, deferred),
        ({"prefix": "/", "headers": [unknown_length]}, deferred),
        *(({"path": path}, deferred) for path in sorted(policy.routes.with_root(RESPONSE_ROUTES))),
        ({"prefix": "/", "headers": [percent_encoded]}, deferred),
        ({"prefix": "/"}, edited),
    ]
    routes = []
    noted = {"name": _FORWARDED_PROTO_NOTE, "present_match": True}
    for match, options in kinds:
        for wanted, removed in (
            ({**match, "headers": [*match.get("headers", []), noted]}, _FORWARDED_PROTO_NOTE),
            (match, "x-forwarded-proto"),
        ):
            upstream = {"cluster": "upstream", "timeout": "0s"}
            routes.append({"match": wanted, "request_headers_to_remove": [removed], "route": upstream, **options})
    return routes


def _everything_but(word: str) -> list[Resource]:
    """String matchers for every text except `word`, ignoring case: RE2 has no negative lookahead.

    One for each place where a text may differ, since Envoy 1.37 refuses a regular expression as long as all of them.
    """
    differs = [f"{word[:at]}([^{letter}].*)?" for at, letter in enumerate(word)]
    return [{"safe_regex": {"regex": f"(?i){pattern}"}} for pattern in (*differs, f"{word}.+")]


def _local_replies(policy: Policy, placement: Placement) -> list[Resource]:
    """What Envoy's own responses become. The first mapper whose filter matches is used, so the last one matches all.

    Each lets a browser's page read the response, as vLLM's own do (`--allowed-origins`, by default all).
    """
    bound = placement.request_timeout_seconds
    late = f"The headers of a request must arrive within {_HEADERS_TIMEOUT} seconds"
    if bound:
        late += f", and all of it within {bound} seconds (set by --request-timeout)"
    again = "Send the request again later."
    cut = 'response.code_details.startsWith("upstream_reset_before_response_started'
    no_connection = " || ".join(
        f'{cut}{{{reason}")'
        for reason in ("remote_connection_failure", "local_connection_failure", "connection_timeout")
    )
    kinds: list[tuple[Resource, Resource]] = [
        (_status("EQ", 408), _error(408, f"{late}.")),
        (
            _details('response.code_details == "overload"'),
            _error(
                503,
                f"the sidecar is short of memory and accepts no requests. {again}"
                " If this happens often, raise the sidecar's memory limit.",
            ),
        ),
        (
            _details('response.code_details == "request_payload_too_large"'),
            _error(
                413,
                f"the request body is larger than the {held_bytes(policy)} bytes that the sidecar can hold."
                " Send a smaller body, or raise limits.max_body_bytes and restart the sidecar.",
            ),
        ),
        (
            _details('response.code_details == "no_healthy_upstream"'),
            _error(
                503,
                "the sidecar has no vLLM server to send the request to: the server's address is unknown, or the server"
                f" fails its health check. {again}",
            ),
        ),
        (
            _details(no_connection),
            _error(503, f"the sidecar cannot connect to the vLLM server. Check that the server is running. {again}"),
        ),
        (
            _details(f'response.code == 503 && {cut}")'),
            _error(
                503,
                "the vLLM server closed the connection before it responded. The sidecar sends each request once. Send"
                " it again if that is safe.",
            ),
        ),
        (_status("GE", 100), {}),
    ]
    return [{"filter": matched, "headers_to_add": [_READABLE], **changes} for matched, changes in kinds]


_STATUS_NAMES = {408: "Request Timeout", 413: "Payload Too Large", 503: "Service Unavailable"}


def _error(status: int, message: str) -> Resource:
    """A body in the shape of vLLM's errors, for Envoy's own responses. Where a mapper has none, Envoy's text stays."""
    error = {"error": {"message": message, "type": _STATUS_NAMES[status], "param": None, "code": status}}
    text = json.dumps(error).replace("%", "%%")
    return {"body_format_override": {"text_format_source": {"inline_string": text}, "content_type": "application/json"}}


def _details(expression: str) -> Resource:
    """A filter of local responses by a CEL expression."""
    cel = "type.googleapis.com/envoy.extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    return {
        "extension_filter": {
            "name": "envoy.access_loggers.extension_filters.cel",
            "typed_config": {"@type": cel, "expression": expression},
        }
    }


def _status(comparison: str, status: int) -> Resource:
    """A filter of local responses by their status. Envoy requires a runtime key; nothing sets this one."""
    value = {"default_value": status, "runtime_key": f"{FILTER_NAME}.local_reply"}
    return {"status_code_filter": {"comparison": {"op": comparison, "value": value}}}


_READABLE = {
    "header": {"key": "access-control-allow-origin", "value": f"%CEL({_FROM_A_PAGE} ? '*' : '')%"},
    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
}
"""Lets a page in a browser read Envoy's own responses."""


_HEALTH_CHECKS = [
    {
        "timeout": "1s",
        "interval": "2s",
        "no_traffic_interval": "2s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "tcp_health_check": {},
    }
]

_LOG_FIELDS = {
    "time": "%START_TIME%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(:PATH)%",
    "status": "%RESPONSE_CODE%",
    "flags": "%RESPONSE_FLAGS%",
    "priority": f"%DYNAMIC_METADATA({FILTER_NAME}:report)%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
}


_CONTROL_PLANE_CHECKS = [
    {
        "timeout": "5s",
        "interval": "30s",
        "no_traffic_interval": "30s",
        "unhealthy_interval": "10s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "tcp_health_check": {},
        "event_logger": [
            {
                "name": "envoy.health_check.event_sink.file",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions."
                    "health_check.event_sinks.file.v3.HealthCheckEventFileSink",
                    "event_log_path": "/dev/stdout",
                },
            }
        ],
    }
]
"""For an Envoy that runs without `vllm-priority run`: it logs when the control plane becomes unreachable and when it is
back. The checks decide nothing: with its only host unhealthy, Envoy goes on polling it (panic threshold)."""


def _access_log(path: str) -> Resource:
    """Envoy's access logger. It cannot open /dev/stdout by its path where that is a socket, as under systemd."""
    stream = STANDARD_STREAMS.get(path)
    kind = f"stream.v3.{stream}AccessLog" if stream else "file.v3.FileAccessLog"
    return {
        "@type": f"type.googleapis.com/envoy.extensions.access_loggers.{kind}",
        **({} if stream else {"path": path}),
        "log_format": {"json_format": _LOG_FIELDS},
    }


def _discovery_type(address: Address, *, spread: bool = False) -> str:
    if address.is_ip:
        return "STATIC"
    # With LOGICAL_DNS Envoy tries a name's addresses one after the other (happy eyeballs). With STRICT_DNS each
    # address is a server of its own, and those on which nothing listens fail every request that they get.
    return "STRICT_DNS" if spread else "LOGICAL_DNS"


def _socket_address(address: Address) -> Resource:
    # "::" takes IPv4 too, as elsewhere: Envoy would take IPv6 alone.
    both = {"ipv4_compat": True} if address.host == "::" else {}
    return {"socket_address": {"address": address.host, "port_value": address.port, **both}}


def _place(template: str, **values: Any) -> Resource:
    """The template's YAML with these values placed. Every value is placed as JSON, so none can break out."""
    document = yaml.load(_templates().get_template(f"{template}.yaml.j2").render(values), Loader=_Loader)
    assert isinstance(document, dict), template
    return document


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder("envoy")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=True)
    return environment
