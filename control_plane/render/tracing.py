"""Spans of requests, by Envoy's own OpenTelemetry tracer (Envoy docs, "envoy.tracers.opentelemetry").

With it, vLLM gets the `traceparent` of the sidecar's span. Without it, the headers of traces pass untouched.
"""

from control_plane.render.filter import FILTER_NAME
from control_plane.render.placement import Tracing
from control_plane.render.templates import Resource
from control_plane.vllm import Role

COLLECTOR = "trace_collector"
"""The name of the collector's cluster."""

ATTRIBUTES = ("outcome", "value", "source", "class", "route")
"""Attributes of a span, after the prefix: fields of the report that lua/report.lua leaves."""


def tracing(settings: Tracing, role: Role) -> Resource:
    """The tracing of the HTTP connection manager. A trace that a client started keeps the client's own decision."""
    return {
        "random_sampling": {"value": settings.percent},
        "spawn_upstream_span": False,
        "max_path_tag_length": 256,
        "custom_tags": [
            {
                "tag": f"{FILTER_NAME}.{field}",
                "metadata": {
                    "kind": {"request": {}},
                    "metadata_key": {"key": FILTER_NAME, "path": [{"key": "report"}, {"key": field}]},
                },
            }
            for field in ATTRIBUTES
        ],
        "provider": {
            "name": "envoy.tracers.opentelemetry",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.config.trace.v3.OpenTelemetryConfig",
                "grpc_service": {"envoy_grpc": {"cluster_name": COLLECTOR}, "timeout": "1s"},
                "service_name": f"vllm-priority-{role}",
            },
        },
    }
