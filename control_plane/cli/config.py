"""The command `config`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from control_plane import memory, proxy
from control_plane.cli.arguments import (
    absolute_token_file,
    control_plane_endpoint,
    listen_address,
    read_policy,
    sidecar_placement,
    tracing_of,
)
from control_plane.cli.options import (
    USED_BY,
    admin_option,
    control_plane_ca_option,
    control_plane_option,
    example,
    listen_option,
    logging_options,
    memory_limit_option,
    option,
    policy_name_option,
    policy_option,
    request_timeout_option,
    role_option,
    spread_option,
    token_file_option,
    upstream_tls_options,
)
from control_plane.errors import BadInput
from control_plane.render.placement import Attachment, LoggedRequests, Placement
from control_plane.render.targets import TARGETS, render
from control_plane.render.templates import to_yaml
from control_plane.vllm import Role

_PLACES = ("--upstream", "--listen", "--admin")
"""Addresses of a sidecar. They are accepted with a note, so that one command line works with every target."""


def _used_by_some() -> str:
    lines = [f"  {name:<16} {', '.join(targets)}" for name, targets in USED_BY.items() if len(targets) < len(TARGETS)]
    return "\b\nNot for every target:\n" + "\n".join(lines) + "\n\n"


@click.command(
    epilog=_used_by_some()
    + example(
        "vllm-priority config --role render --target bootstrap -o render.yaml\n"
        "vllm-priority config --role engine --target istio --selector app=vllm-engine | kubectl apply -f -\n"
        "vllm-priority config --role render --target envoy-gateway --upstream vllm-render:8000 --gateway infra/eg"
    )
)
@role_option
@option("--target", type=click.Choice(list(TARGETS)), required=True, help="Where the configuration will be used.")
@policy_option
@policy_name_option
@option(
    "--upstream",
    metavar="[https://]HOST:PORT",
    help="vLLM server, or its Service. Default: the local server, or the Service vllm-ROLE.",
)
@upstream_tls_options
@listen_option
@admin_option
@control_plane_option
@control_plane_ca_option
@token_file_option
@option(
    "--health",
    metavar="HOST:PORT",
    help="Address of a listener for GET /ready and GET /stats/prometheus. Default: none.",
)
@option("--access-log", metavar="FILE", default="/dev/stdout", show_default=True, help="File of Envoy's access log.")
@logging_options
@request_timeout_option
@memory_limit_option(help="Memory that Envoy may use. Default: 1280Mi.")
@option(
    "--namespace",
    metavar="NAME",
    help="Namespace of the objects for Istio and Envoy Gateway. Default: that of kubectl.",
)
@option(
    "--selector", multiple=True, metavar="KEY=VALUE",
    help="Label of the pods, for istio. Repeatable. Default: vllm-priority.io/role=ROLE.",
)  # fmt: skip
@option("--gateway", metavar="[NAMESPACE/]NAME", help="Gateway, for envoy-gateway. Default: eg.")
@spread_option
@option("--check", is_flag=True, help="Have Envoy check the bootstrap before it is written.")
@option(
    "--envoy",
    metavar="FILE",
    help="Envoy program for --check. Default: $ENVOY, or the one on the PATH or in the PyPI wheel.",
)
@option("-o", "--output", metavar="FILE", help="File to write. Default: standard output.")
@click.pass_context
def config(
    context: click.Context,
    /,
    role: Role,
    target: str,
    policy: str | None,
    policy_name: str | None,
    upstream: str | None,
    listen: str | None,
    admin: str | None,
    control_plane: str | None,
    control_plane_ca: str | None,
    token_file: str | None,
    health: str | None,
    access_log: str,
    log_requests: LoggedRequests,
    otlp_endpoint: str | None,
    trace_percent: float,
    request_timeout: int,
    memory_limit: str | None,
    namespace: str | None,
    selector: tuple[str, ...],
    gateway: str | None,
    spread: bool,
    check: bool,
    envoy: str | None,
    output: str | None,
    **upstream_tls: Any,
) -> None:
    """Write the configuration for Envoy, Istio or Envoy Gateway."""
    _say_unused(context, target)
    if envoy is not None and not check:
        raise BadInput("--envoy: not used without --check. Set --check too.")
    endpoint = control_plane_endpoint(control_plane, control_plane_ca)
    placement = replace(
        sidecar_placement(role, upstream, listen, admin, target, spread=spread, **upstream_tls),
        access_log=access_log,
        logged_requests=log_requests,
        tracing=tracing_of(otlp_endpoint, trace_percent),
        request_timeout_seconds=request_timeout,
        control_plane=endpoint.address if endpoint else None,
        control_plane_trust=endpoint.trust if endpoint else None,
        token_file=absolute_token_file(token_file, control_plane),
        health=listen_address(health, "health") if health is not None else None,
        policy_name=policy_name,
        attachment=Attachment.parse(namespace, selector, gateway),
        memory_limit_bytes=(
            Placement.memory_limit_bytes if memory_limit is None else memory.parse_limit(memory_limit, "memory_limit")
        ),
    )
    documents = render(target, read_policy(policy, policy_name), placement)
    if TARGETS[target].note:
        click.echo(f"vllm-priority: note: {TARGETS[target].note}.", err=True)
    if check:
        proxy.check_config(proxy.find_envoy(envoy), documents[0])
    text = to_yaml(documents)
    if output is None:
        click.echo(text, nl=False)
        return
    _write(Path(output), text)


def _say_unused(context: click.Context, target: str) -> None:
    given = {
        name
        for parameter in context.command.params
        if parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
        for name in parameter.opts
    }
    for name, targets in USED_BY.items():
        if name in given and target not in targets:
            *firsts, last = targets
            users = f"{', '.join(firsts)} or {last}" if firsts else last
            line = f"{name}: not used by --target {target}. It has an effect only with --target {users}."
            if name not in _PLACES:
                raise BadInput(line)
            click.echo(f"vllm-priority: note: {line}", err=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"-o: {path}: cannot be written: {reason}. Use a file in a folder that exists.") from None
