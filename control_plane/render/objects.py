"""What the Kubernetes objects of meshes and gateways have in common."""

import re

from control_plane.address import Address
from control_plane.errors import InvalidField
from control_plane.render.placement import NAME, Placement
from control_plane.render.templates import Resource

ROLE_LABEL = "vllm-priority.io/role"
"""The label that an EnvoyFilter selects pods by where none is named."""


def object_metadata(placement: Placement) -> Resource:
    """Named by role and policy, so that applying again replaces, and two policies do not meet."""
    name = "-".join(filter(None, ("vllm-priority", placement.role, placement.policy_name)))
    namespace = placement.attachment.namespace
    return {
        "name": name,
        **({"namespace": namespace} if namespace else {}),
        "labels": {"app.kubernetes.io/name": "vllm-priority", ROLE_LABEL: placement.role},
    }


def service_reference(upstream: Address) -> Resource:
    """A backendRef of Gateway API."""
    found = re.fullmatch(rf"({NAME})(?:\.({NAME})(?:\.svc(?:\..+)?)?)?", upstream.host)
    if upstream.is_ip or found is None:
        raise InvalidField(
            "upstream",
            f"{upstream} is not a valid Service. Use NAME:PORT or NAME.NAMESPACE:PORT, for example vllm-render:8000.",
        )
    name, namespace = found[1], found[3]
    return {"name": name} | ({"namespace": namespace} if namespace else {}) | {"port": upstream.port}
