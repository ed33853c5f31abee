"""A whole Envoy configuration, or its parts as discovery resources."""

from control_plane.policy.model import Policy
from control_plane.policy.restart import StartedWith
from control_plane.render.addresses import socket_address
from control_plane.render.clusters import clusters
from control_plane.render.filter import ManagedEnvoy
from control_plane.render.listener import listeners
from control_plane.render.placement import Placement
from control_plane.render.templates import Resource, render_template


def bootstrap(policy: Policy, placement: Placement) -> Resource:
    """A whole Envoy configuration."""
    return render_template(
        "bootstrap",
        placement=placement,
        max_heap=max_heap(placement),
        node_metadata=node_metadata(policy, placement),
        admin=socket_address(placement.admin),
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


def node_metadata(policy: Policy, placement: Placement) -> Resource:
    """What a sidecar that starts with this policy tells the control plane of itself, as `node.metadata`."""
    started_with = StartedWith.of(policy).told()
    return {
        "role": placement.role,
        "listen": str(placement.listen),
        "upstream": str(placement.upstream),
        "labels": dict(placement.labels),
        "report_header": ManagedEnvoy.of(policy).report_header,
        **({"policy": placement.policy_name} if placement.policy_name else {}),
        **({"root_path": placement.root_path} if placement.root_path else {}),
        **({"started_with": started_with} if started_with else {}),
    }


_BESIDE_THE_HEAP = 70 * 1024**2
"""What an Envoy under load uses beside its heap, in bytes, as measured: its program, LuaJIT, and the stacks."""


def max_heap(placement: Placement) -> int:
    """What Envoy's overload manager takes for the whole heap, in bytes. It counts no free pages, and not LuaJIT's."""
    limit = placement.memory_limit_bytes
    return min(limit * 9 // 10, max(limit // 2, limit - _BESIDE_THE_HEAP))
