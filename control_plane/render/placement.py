"""Where a sidecar stands: its addresses, limits and timeouts, and what it is attached to."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self, get_args

from control_plane.address import Address
from control_plane.errors import InvalidField
from control_plane.tls import ListenerTls, ServerTrust
from control_plane.vllm import DEFAULT_PORT, ROLES, Role

DEFAULT_LISTEN: Mapping[Role, Address] = {"render": Address("0.0.0.0", 18000), "engine": Address("0.0.0.0", 18001)}

DEFAULT_UPSTREAM: Mapping[Role, Address] = {
    "render": Address("127.0.0.1", DEFAULT_PORT),
    "engine": Address("127.0.0.1", 8001),
}

DEFAULT_SERVICE: Mapping[Role, Address] = {role: Address(f"vllm-{role}", DEFAULT_PORT) for role in ROLES}

DEFAULT_ADMIN: Mapping[Role, Address] = {"render": Address("127.0.0.1", 19000), "engine": Address("127.0.0.1", 19001)}

DEFAULT_REQUEST_TIMEOUT = 300
"""Seconds that a request may take to arrive, from its first byte to its last. 0: no bound."""

# Names and label values as Kubernetes has them (RFC 1123, and apimachinery's validation of labels).
NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"

LABEL = rf"(({NAME}\.)*{NAME}/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?"

LABEL_VALUE = r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?"

MAX_LABELS = 64
"""Labels of a pod that its sidecar may send with each poll. Kubernetes does not bound their number."""


def check_namespace(text: str, field: str) -> None:
    """InvalidField, which names `field`, if Kubernetes accepts no namespace of that name (RFC 1123's labels)."""
    if not re.fullmatch(NAME, text):
        raise InvalidField(
            field,
            f"{text[:60]!r} is not a valid namespace. Use 1 to 63 lower-case letters, digits and -, for example vllm.",
        )


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
        """Return the attachment of these texts; `selector` holds KEY=VALUE. InvalidField if one is not valid."""
        labels: dict[str, str] = {}
        for text in selector:
            key, equals, value = text.partition("=")
            if not equals or not re.fullmatch(LABEL, key) or not re.fullmatch(LABEL_VALUE, value):
                raise InvalidField(
                    "selector", f"{text!r} is not a valid label. Use KEY=VALUE, for example app=vllm-render."
                )
            if labels.setdefault(key, value) != value:
                raise InvalidField("selector", f"{key!r} has two values. Use one value for each label.")
        if namespace is not None:
            check_namespace(namespace, "namespace")
        gateway = cls.gateway if gateway is None else gateway
        if not re.fullmatch(rf"({NAME}/)?({NAME}\.)*{NAME}", gateway):
            raise InvalidField(
                "gateway", f"{gateway!r} is not a valid Gateway. Use NAME or NAMESPACE/NAME, for example infra/eg."
            )
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


LoggedRequests = Literal["all", "problems", "none"]
"""Which requests on edited routes the access log has: all, those whose priority was not applied or that the sidecar
rejected, or none."""
LOGGED_REQUESTS: tuple[LoggedRequests, ...] = get_args(LoggedRequests)


@dataclass(frozen=True)
class Tracing:
    """Where spans are sent, by OTLP over gRPC, and the percentage of requests that start a trace of their own."""

    collector: Address
    percent: float = 100.0


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
    upstream_trust: ServerTrust | None = None
    """How to verify the upstream. None: it has no TLS."""
    listen_tls: ListenerTls | None = None
    """How to serve TLS. None: the sidecar serves plain HTTP."""
    control_plane_trust: ServerTrust | None = None
    """How to verify the control plane. None: polls are plain HTTP."""
    token_file: str | None = None
    """The file with the token that each poll carries. None: polls carry no token."""
    node_id: str = "vllm-priority"
    labels: Mapping[str, str] = field(default_factory=dict)
    policy_name: str | None = None
    root_path: str | None = None
    """vLLM's --root-path, for a policy that sets none."""
    access_log: str = "/dev/stdout"
    logged_requests: LoggedRequests = "all"
    tracing: Tracing | None = None
    """None: no spans, and the headers of traces pass untouched."""
    max_connections: int = 50_000
    spread: bool = False
    refresh_seconds: float = 5.0
    request_timeout_seconds: int = DEFAULT_REQUEST_TIMEOUT
    idle_timeout_seconds: int = 3600
    drain_timeout_seconds: int = 5
    drain: Drain | None = None
    shares_script: bool = False
    """Whether Envoy finds the text of its scripts in its environment (`filter.environment`), once for both."""
    attachment: Attachment = Attachment()
    memory_limit_bytes: int = 1280 * 1024**2
    """What Envoy may use of the machine's or the container's memory: its resident set stays below it."""

    @classmethod
    def default(cls, role: Role, target: str = "bootstrap") -> Self:
        """The placement the commands use where nothing is named. Some targets name vLLM by its Service."""
        upstream = DEFAULT_SERVICE if target in {"istio-waypoint", "envoy-gateway"} else DEFAULT_UPSTREAM
        return cls(role, DEFAULT_LISTEN[role], upstream[role], DEFAULT_ADMIN[role])
