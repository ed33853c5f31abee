"""Turns the values of options into what the core works with."""

from dataclasses import replace
from pathlib import Path

from control_plane.address import Address
from control_plane.cli.options import USED_BY
from control_plane.cli.terminal import complain
from control_plane.endpoint import ControlPlaneEndpoint, UpstreamEndpoint, otlp_collector
from control_plane.errors import BadInput, InvalidField
from control_plane.policy.load import load_policies
from control_plane.policy.model import Policies, Policy
from control_plane.render.placement import Placement, Tracing
from control_plane.render.targets import TARGETS
from control_plane.vllm import Role


def read_policies(path: str | None) -> Policies:
    """Return the policies of a file, or the built-in ones."""
    return Policies() if path is None else load_policies(path)


def read_policy(path: str | None, name: str | None) -> Policy:
    """Return one policy of a file, by default the one that is not named."""
    policies = read_policies(path)
    chosen = policies.choose({}, name)
    if chosen is None:
        known = ", ".join(policies.by_name)
        raise BadInput(f"--policy-name: {path or 'the built-in policy'} has no policy {name!r}. Use one of: {known}.")
    return chosen


def sidecar_placement(
    role: Role,
    upstream: str | None,
    listen: str | None,
    admin: str | None,
    target: str = "bootstrap",
    *,
    spread: bool = False,
    upstream_ca: str | None = None,
    upstream_server_name: str | None = None,
    upstream_insecure: bool = False,
) -> Placement:
    """Return the placement that these options describe. BadInput names the option that is wrong."""
    default = Placement.default(role, target)
    server = UpstreamEndpoint.parse(
        str(default.upstream) if upstream is None else upstream, upstream_ca, upstream_server_name, upstream_insecure
    )
    if server.trust and "upstream_ca" not in TARGETS[target].options:
        raise BadInput(f"--upstream: {upstream!r}: --target {target} cannot connect with TLS. Use HOST:PORT.")
    placement = replace(
        default,
        listen=listen_address(listen, "listen") if listen is not None else default.listen,
        upstream=server.address,
        upstream_trust=server.trust,
        admin=listen_address(admin, "admin") if admin is not None else default.admin,
        spread=spread,
    )
    if spread and placement.upstream.is_ip:
        raise BadInput(f"--spread: {placement.upstream} is one address. Use it with a name in --upstream.")
    for one, other in (("listen", "upstream"), ("listen", "admin"), ("admin", "upstream")):
        used = all(target in USED_BY[f"--{name}"] for name in (one, other))
        if used and getattr(placement, one) == getattr(placement, other):
            raise BadInput(f"--{one}: {getattr(placement, one)} is the address in --{other}. Use another address.")
    if server.warning:
        complain(f"vllm-priority: {server.warning}")
    return placement


def listen_address(text: str, field: str) -> Address:
    """Return the address of a listener: an IP address, because Envoy resolves no names there."""
    address = Address.parse(text, field)
    if not address.is_ip:
        raise InvalidField(field, f"{text!r} is not an IP address and a port. Use both, for example 127.0.0.1:18000.")
    return address


def control_plane_endpoint(url: str | None, ca: str | None) -> ControlPlaneEndpoint | None:
    """Return where to poll, or None. It warns about plain HTTP."""
    if url is None:
        if ca is not None:
            raise BadInput("--control-plane-ca: not used without --control-plane. Set --control-plane too.")
        return None
    endpoint = ControlPlaneEndpoint.parse(url, ca)
    if endpoint.warning:
        complain(f"vllm-priority: {endpoint.warning}")
    return endpoint


def absolute_token_file(token_file: str | None, control_plane: str | None) -> str | None:
    """The token file as Envoy reads it, whatever its working folder."""
    if token_file is None:
        return None
    if control_plane is None:
        raise BadInput("--token-file: not used without --control-plane. Set --control-plane too.")
    return str(Path(token_file).absolute())


def tracing_of(otlp_endpoint: str | None, trace_percent: float) -> Tracing | None:
    """Return the tracing that these options stand for. InvalidField if one is not valid or has no effect."""
    if otlp_endpoint is not None:
        return Tracing(otlp_collector(otlp_endpoint), trace_percent)
    if trace_percent != 100:
        raise InvalidField("trace_percent", "not used without a collector. Set --otlp-endpoint too.")
    return None
