"""The table of targets. A new target is a row here, a module and a template."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from control_plane.errors import InvalidField
from control_plane.policy.model import Policy
from control_plane.render.bootstrap import bootstrap, xds
from control_plane.render.envoy_gateway import envoy_gateway
from control_plane.render.istio import istio, istio_waypoint
from control_plane.render.placement import Placement
from control_plane.render.templates import Resource


@dataclass(frozen=True)
class Target:
    """Something that reads what we render.

    Attributes:
        documents: Renders the documents to write.
        options: The options of `vllm-priority config` that this target uses, besides those that every target uses. The
            command rejects the others, which would have no effect.
        note: What to do before the documents are applied, if anything.
    """

    documents: Callable[[Policy, Placement], list[Resource]]
    options: frozenset[str]
    note: str = ""


_ENVOY = frozenset(
    {
        "spread", "upstream", "upstream_ca", "upstream_server_name", "upstream_insecure", "listen",
        "control_plane", "control_plane_ca", "token_file", "access_log", "log_requests",
        "otlp_endpoint", "trace_percent", "request_timeout", "memory_limit",
    }
)  # fmt: skip

TARGETS: Mapping[str, Target] = {
    "bootstrap": Target(
        lambda policy, placement: [bootstrap(policy, placement)], _ENVOY | {"admin", "health", "check", "envoy"}
    ),
    "xds": Target(xds, _ENVOY),
    "istio": Target(istio, frozenset({"namespace", "selector"})),
    "istio-waypoint": Target(istio_waypoint, frozenset({"namespace", "upstream"})),
    "envoy-gateway": Target(
        envoy_gateway,
        frozenset({"namespace", "upstream", "gateway"}),
        note="Envoy Gateway 1.9 and later run Lua only where extensionApis.enableLua is true. Where it is not, the "
        "routes of these objects respond with 500. Set it before you apply them",
    ),
}
"""Name of a target -> how it is rendered."""


def render(target: str, policy: Policy, placement: Placement) -> list[Resource]:
    """Render the documents of a target. InvalidField for an unknown one."""
    if target not in TARGETS:
        raise InvalidField("target", f"{target!r} is not a valid target. It must be one of: {', '.join(TARGETS)}.")
    return TARGETS[target].documents(policy, placement)
