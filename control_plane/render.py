"""Policy and placement -> what each target reads: one function and one table row a target.

Values are worked out here; the templates in envoy/ only place them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from typing import Any, Self

import jinja2
import yaml

from control_plane.errors import BadInput
from control_plane.lua_bundle import Setting, bundle
from control_plane.package_data import folder
from control_plane.policy import RESPONSE_ROUTES, Policy, Role

Resource = dict[str, Any]
"""One Envoy or Kubernetes object, ready for yaml.dump or json.dumps."""

FILTER_NAME = "vllm_priority"
"""Name of the HTTP filter, its ECDS resource, its dynamic metadata namespace, and the prefix of its stats."""


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
        wrong = not host or (":" in host) != bracketed or any(c.isspace() or c in "/@?#[]" for c in host)
        if wrong or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            raise BadInput(f"{what}: {text!r} is no address; allowed: HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000")
        return cls(host, int(port))

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
DEFAULT_ADMIN: Mapping[Role, Address] = {"render": Address("127.0.0.1", 19000), "engine": Address("127.0.0.1", 19001)}


@dataclass(frozen=True)
class Placement:
    """Where one sidecar stands. `health` and `control_plane` are left out where None."""

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
    refresh_seconds: float = 5.0

    @classmethod
    def default(cls, role: Role) -> Self:
        """The placement the commands use where nothing is named."""
        return cls(role, DEFAULT_LISTEN[role], DEFAULT_UPSTREAM[role], DEFAULT_ADMIN[role])


def filter_settings(policy: Policy, role: Role, count_by_cluster: bool) -> dict[str, Setting]:
    """What the Lua reads of a policy. Priorities are texts: Lua's numbers are doubles, which hold no int64."""
    routes = policy.routes.for_role(role)
    negate = policy.engine == "sglang"
    default = policy.default_value
    return {
        "header": policy.header,
        "report_header": policy.report_header,
        "keep_header": policy.keep_header,
        "reject_invalid": policy.on_invalid == "reject",
        "reject_unmovable": policy.on_unmovable == "reject",
        "negate": negate,
        "default": None if default is None else str(default),
        "min": None if policy.range.min is None else str(policy.range.min),
        "max": None if policy.range.max is None else str(policy.range.max),
        "clamp": policy.range.outside == "clamp",
        "classes": {name: str(value) for name, value in policy.classes.items()},
        "routes": {path: "response" if path in RESPONSE_ROUTES else "request" for path in routes},
        "max_body_bytes": policy.limits.max_body_bytes,
        "count_by_cluster": count_by_cluster,
    }


# Outcomes, in the order of the README's table; each is a counter.
OUTCOMES = (
    "inserted", "replaced", "response_edited", "default", "absent", "invalid",
    "out_of_range", "ambiguous", "not_json", "encoded", "too_large",
)  # fmt: skip


def filter_config(policy: Policy, role: Role, count_by_cluster: bool = True) -> Resource:
    """The Lua filter's typed_config. `count_by_cluster`: Envoy before 1.38 counts by the clusters of `clusters()`."""
    script = bundle(filter_settings(policy, role, count_by_cluster))
    return _place("filter", filter_name=FILTER_NAME, script=script)


def listeners(policy: Policy, placement: Placement) -> list[Resource]:
    """The Envoy listeners: the sidecar's own, and the health one where the placement has it."""
    typed_config = filter_config(policy, placement.role)
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
        access_log=placement.access_log,
        log_fields=_LOG_FIELDS,
        http_filter=http_filter,
    )
    if placement.health is None:
        return [listener]
    return [listener, _place("health_listener", address=_socket_address(placement.health))]


def clusters(policy: Policy, placement: Placement) -> list[Resource]:
    """The Envoy clusters: the upstream, the control plane where the placement has it, and the counters."""
    found = [
        _place(
            "cluster",
            discovery_type=_discovery_type(placement.upstream),
            address=_socket_address(placement.upstream),
            health_checks=_HEALTH_CHECKS if placement.health else [],
        )
    ]
    if placement.control_plane:
        found.append(
            _place(
                "control_plane_cluster",
                discovery_type=_discovery_type(placement.control_plane),
                address=_socket_address(placement.control_plane),
            )
        )
    return found + [_place("counter_cluster", name=f"{FILTER_NAME}_{outcome}") for outcome in OUTCOMES]


def node_metadata(placement: Placement) -> Resource:
    """What a sidecar tells the control plane of itself, as `node.metadata`."""
    return {
        "role": placement.role,
        "listen": str(placement.listen),
        "upstream": str(placement.upstream),
        "labels": dict(placement.labels),
    } | ({"policy": placement.policy_name} if placement.policy_name else {})


def bootstrap(policy: Policy, placement: Placement) -> Resource:
    """A whole Envoy configuration."""
    return _place(
        "bootstrap",
        placement=placement,
        node_metadata=node_metadata(placement),
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


TARGETS: Mapping[str, Callable[[Policy, Placement], list[Resource]]] = {
    "bootstrap": lambda policy, placement: [bootstrap(policy, placement)],
    "xds": xds,
}
"""Target name -> function of (policy, placement) that gives the documents to write."""


def render(target: str, policy: Policy, placement: Placement) -> list[Resource]:
    """The documents of a target; BadInput for an unknown one."""
    if target not in TARGETS:
        raise BadInput(f"target: {target!r} is unknown; allowed: {', '.join(TARGETS)}")
    return TARGETS[target](policy, placement)


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
    "priority": f"%DYNAMIC_METADATA({FILTER_NAME}:value)%",
    "source": f"%DYNAMIC_METADATA({FILTER_NAME}:source)%",
    "outcome": f"%DYNAMIC_METADATA({FILTER_NAME}:outcome)%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
}


def _discovery_type(address: Address) -> str:
    return "STATIC" if address.is_ip else "STRICT_DNS"


def _socket_address(address: Address) -> Resource:
    return {"socket_address": {"address": address.host, "port_value": address.port}}


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
