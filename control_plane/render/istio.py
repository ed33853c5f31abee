"""Objects for Istio: an EnvoyFilter for sidecars, a TrafficExtension for a waypoint."""

from dataclasses import replace

from control_plane.errors import BadInput, InvalidField
from control_plane.policy.model import Policy
from control_plane.render.filter import (
    DEFERRED_NAME,
    FILTER_NAME,
    deferred_config,
    filter_config,
    filter_script,
    held_bytes,
)
from control_plane.render.objects import ROLE_LABEL, object_metadata, service_reference
from control_plane.render.placement import Placement
from control_plane.render.templates import Resource, render_template
from control_plane.render.tokens import token_filter

_MAX_RETRIED_BYTES = 1048576
"""The longest body that Envoy's router keeps for a retry where no limit is set: its default buffer limit."""


def istio(policy: Policy, placement: Placement) -> list[Resource]:
    """An EnvoyFilter for the Istio sidecars of the selected pods: the filter, right before their router.

    No clusters are added to a mesh to count by, so an Envoy before 1.38 has no counters there.
    """
    claims = policy.trust.claims if policy.trust else None
    if claims and isinstance(claims.jwks, str):
        raise BadInput(
            "trust.claims.jwks: an EnvoyFilter has no cluster for this URI. Use the keys themselves or a file, or a "
            "sidecar of vllm-priority"
        )
    return [
        render_template(
            "istio",
            metadata=object_metadata(placement),
            selector=dict(placement.attachment.selector or {ROLE_LABEL: placement.role}),
            filter_name=FILTER_NAME,
            deferred_name=DEFERRED_NAME,
            held_bytes=held_bytes(policy),
            max_retried=_MAX_RETRIED_BYTES,
            token_filter=token_filter(claims) if claims else None,
            typed_config=filter_config(policy, placement.role, "mesh"),
            deferred_config=deferred_config(policy, "mesh"),
        )
    ]


MAX_WAYPOINT_SCRIPT_BYTES = 65536
"""The longest script in a TrafficExtension (Istio's CRD, spec.lua.inlineCode, maxLength)."""


def istio_waypoint(policy: Policy, placement: Placement) -> list[Resource]:
    """A TrafficExtension for the waypoint of the upstream, a Service: Istio 1.30 and later, whose own API this is.

    BadInput if the upstream is not a Service, or is in another namespace than the object.
    """
    service = service_reference(placement.upstream)
    namespace = placement.attachment.namespace or service.get("namespace")
    if service.get("namespace", namespace) != namespace:
        raise InvalidField("namespace", f"{namespace} is not the namespace of the Service. Use {service['namespace']}.")
    if policy.trust:
        raise BadInput(
            "trust: a waypoint does not see the client's connection, so it cannot decide whom to trust. Use the target "
            "istio on the pods, or a policy without trust"
        )
    if policy.tenants and policy.tenants.identity:
        raise BadInput(
            "tenants.identity: a waypoint does not see the client's certificate. Use the target istio on the pods, or "
            "a header that names the tenant"
        )
    script = filter_script(policy, placement.role, "waypoint")
    if len(script.encode()) > MAX_WAYPOINT_SCRIPT_BYTES:
        raise BadInput(
            f"policy: the script for a waypoint has {len(script.encode())} bytes with it, and Istio accepts "
            f"{MAX_WAYPOINT_SCRIPT_BYTES}. Use fewer classes, tenants and routes, or the target istio on the pods"
        )
    attachment = replace(placement.attachment, namespace=namespace)
    return [
        render_template(
            "istio_waypoint",
            metadata=object_metadata(replace(placement, attachment=attachment)),
            service=service["name"],
            script=script,
        )
    ]
