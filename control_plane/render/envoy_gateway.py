"""Objects for Envoy Gateway: an HTTPRoute, and the EnvoyExtensionPolicy that runs the script on it."""

from urllib.parse import quote

from control_plane.errors import BadInput
from control_plane.policy.model import Policy, Routes
from control_plane.render.filter import deferred_script, filter_script
from control_plane.render.objects import object_metadata, service_reference
from control_plane.render.placement import Placement
from control_plane.render.templates import Resource, render_template
from control_plane.vllm import Role

# Gateway API before 1.1 allows 8 matches a rule; every version allows 16 rules.
_MATCHES_PER_RULE, _MAX_RULES = 8, 16


def envoy_gateway(policy: Policy, placement: Placement) -> list[Resource]:
    """An HTTPRoute for the edited paths, and the EnvoyExtensionPolicy that runs the script on it.

    The upstream is a Service: NAME, NAME.NAMESPACE, or its whole DNS name. BadInput where it is none, and where
    the policy leaves the role no path.
    """
    if policy.ordinary == "enforce":
        raise BadInput(
            "ordinary: 'enforce' needs every route of vLLM, and this target's HTTPRoute has only the edited ones. "
            "Use pass here, and enforce in a sidecar next to vLLM"
        )
    if policy.trust and policy.trust.claims:
        raise BadInput(
            "trust.claims: a SecurityPolicy of Envoy Gateway rejects requests whose token is not valid, and vLLM's own "
            "API key is not a token. Use claims in a sidecar next to vLLM, or a policy without them"
        )
    namespace, _, gateway = placement.attachment.gateway.rpartition("/")
    placed = render_template(
        "envoy_gateway",
        metadata=object_metadata(placement),
        gateway={"name": gateway} | ({"namespace": namespace} if namespace else {}),
        service=service_reference(placement.upstream),
        matches_by_rule=[
            [{"path": {"type": "Exact", "value": path}, "method": "POST"} for path in paths]
            for paths in _gateway_paths(policy, placement.role)
        ],
        scripts=[filter_script(policy, placement.role, "mesh"), deferred_script(policy, "mesh")],
    )
    return [placed["route"], placed["extension_policy"]]


def _gateway_paths(policy: Policy, role: Role) -> list[list[str]]:
    """The paths that a gateway sends to this role, in rules. Each path has one backend there.

    So the render servers' paths are not the engines' too, and `extra` ones, on both roles, are the engines'.
    """
    to_render = Routes(render=policy.routes.render).for_role("render")
    paths = [path for path in policy.routes.for_role(role) if (path in to_render) == (role == "render")]
    if not 0 < len(paths) <= _MATCHES_PER_RULE * _MAX_RULES:
        most = _MATCHES_PER_RULE * _MAX_RULES
        raise BadInput(f"routes.{role}: {len(paths)} paths do not fit into a gateway's {role} route. Use 1 to {most}.")
    # What a URL has no letter for comes percent-encoded, and Gateway API takes a path only so.
    encoded = [quote(path, safe="/-._~!$&'()*+,;=:@") for path in paths]
    return [encoded[start : start + _MATCHES_PER_RULE] for start in range(0, len(encoded), _MATCHES_PER_RULE)]
