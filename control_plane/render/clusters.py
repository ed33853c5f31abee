"""Envoy's clusters: the upstream, the control plane, and Envoy's own admin."""

from control_plane.policy.model import Policy
from control_plane.render.addresses import discovery_type, socket_address
from control_plane.render.filter import poll_token_script
from control_plane.render.placement import Placement
from control_plane.render.templates import Resource, render_template
from control_plane.render.tokens import keys_cluster
from control_plane.render.tracing import COLLECTOR
from control_plane.tls import to_server

# How bodies are handled in an Envoy that we configure.
CONNECTION_BUFFER = 262144
"""Where Envoy stops reading from a client or a server while the other side does not keep up, in bytes."""


def clusters(policy: Policy, placement: Placement) -> list[Resource]:
    """The Envoy clusters: the upstream, and those that the placement calls for."""
    found = [
        render_template(
            "cluster",
            discovery_type=discovery_type(placement.upstream, spread=placement.spread),
            address=socket_address(placement.upstream),
            buffer=CONNECTION_BUFFER,
            max_connections=placement.max_connections,
            health_checks=_HEALTH_CHECKS if placement.health else [],
            transport_socket=placement.upstream_trust and to_server(placement.upstream_trust),
        )
    ]
    if placement.control_plane:
        found.append(
            render_template(
                "control_plane_cluster",
                discovery_type=discovery_type(placement.control_plane),
                address=socket_address(placement.control_plane),
                health_checks=_CONTROL_PLANE_CHECKS if placement.health else [],
                transport_socket=placement.control_plane_trust and to_server(placement.control_plane_trust),
                token_script=placement.token_file and poll_token_script(placement.token_file),
            )
        )
    if placement.tracing:
        collector = placement.tracing.collector
        found.append(
            render_template(
                "trace_collector_cluster",
                name=COLLECTOR,
                discovery_type=discovery_type(collector),
                address=socket_address(collector),
            )
        )
    if policy.trust and policy.trust.claims and (keys := keys_cluster(policy.trust.claims)):
        found.append(keys)
    if placement.health:
        found.append(render_template("admin_cluster", address=socket_address(placement.admin)))
    return found


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
