"""The commands. Exit status: 0 done, 1 the thing asked about fails, 2 bad input: one line on stderr, no traceback."""

import asyncio
import contextlib
import ipaddress
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console

from control_plane import __version__, memory, sidecar
from control_plane.address import Address
from control_plane.endpoint import ControlPlaneEndpoint, UpstreamEndpoint
from control_plane.errors import BadInput, InvalidField, PolicyError, PriorityError
from control_plane.explain import Explanation, explain
from control_plane.injector.annotations import PREFIX, REQUEST_ANNOTATIONS
from control_plane.injector.manifests import inject_stream, uninject_stream
from control_plane.injector.resources import DEFAULT_RESOURCES, parse_resources
from control_plane.injector.settings import (
    DRAIN_SECONDS,
    ENVOY_IMAGE,
    REDIRECT_IMAGE,
    WORKERS,
    InjectorSettings,
    not_a_uid,
)
from control_plane.listener_secrets import ListenerFiles, ListenerSecrets
from control_plane.policy.difference import NOT_SET, policy_changes
from control_plane.policy.load import load_policies
from control_plane.policy.model import Policies, Policy
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import DEFAULT_REQUEST_TIMEOUT, Attachment, Placement
from control_plane.render.targets import TARGETS, render
from control_plane.render.templates import to_yaml
from control_plane.stream_handle import Client
from control_plane.vllm import INT64_MIN, ROLES, Role

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


OPTIONS: Mapping[str, str] = {
    "render": "--render",
    "engine": "--engine",
    "api_key": "--api-key",
    "header": "--header",
    "model": "--model",
    "priority": "--priority",
    "timeout": "--timeout",
    "queue_timeout": "--queue-timeout",
    "max_fill": "--max-fill",
}
"""Field of a settings object -> the option that sets it. Errors and advice from below name fields."""


def _option_of(field: str) -> str:
    return OPTIONS.get(field, "--" + field.replace("_", "-"))


def _example(text: str) -> str:
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in text.strip().splitlines())


def _policies(path: str | None) -> Policies:
    return Policies() if path is None else load_policies(path)


def _policy(path: str | None, name: str | None) -> Policy:
    policies = _policies(path)
    chosen = policies.choose({}, name)
    if chosen is None:
        known = ", ".join(policies.by_name)
        raise PolicyError(f"--policy-name: {path or 'the default policy'} has no policy {name!r}; allowed: {known}")
    return chosen


_ALL = tuple(TARGETS)
_FOR_EVERY_TARGET = ("role", "target", "policy", "policy_name", "output")
_FOR_SOME_TARGETS = (
    "spread", "upstream_server_name", "upstream_ca", "upstream_insecure", "upstream", "listen", "admin",
    "control_plane_ca", "token_file", "control_plane", "health", "access_log",
    "request_timeout", "memory_limit", "namespace", "selector", "gateway", "envoy", "check",
)  # fmt: skip
USED_BY: Mapping[str, tuple[str, ...]] = {_option_of(field): _ALL for field in _FOR_EVERY_TARGET} | {
    _option_of(field): tuple(name for name, target in TARGETS.items() if field in target.options)
    for field in _FOR_SOME_TARGETS
}
"""Option of `config` -> the targets that use it. With another target it would have no effect, so it is rejected."""

_PLACES = ("--upstream", "--listen", "--admin")
"""Where a sidecar stands: one command line for every target may name these, so they are let pass, with a word."""


def _used_by_some() -> str:
    lines = [f"  {option:<16} {', '.join(targets)}" for option, targets in USED_BY.items() if targets != _ALL]
    return "\b\nNot for every target:\n" + "\n".join(lines) + "\n\n"


def _say_unused(context: click.Context, target: str) -> None:
    given = {
        option
        for parameter in context.command.params
        if parameter.name and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
        for option in parameter.opts
    }
    for option, targets in USED_BY.items():
        if option in given and target not in targets:
            *firsts, last = targets
            users = f"{', '.join(firsts)} or {last}" if firsts else last
            line = f"{option}: --target {target} does not use it; allowed: with --target {users}"
            if option not in _PLACES:
                raise BadInput(line)
            click.echo(f"vllm-priority: note: {line}", err=True)


def _placement(
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
    default = Placement.default(role, target)
    server = UpstreamEndpoint.parse(
        str(default.upstream) if upstream is None else upstream, upstream_ca, upstream_server_name, upstream_insecure
    )
    if server.trust and "upstream_ca" not in TARGETS[target].options:
        raise BadInput(f"--upstream: {upstream!r}: --target {target} cannot connect with TLS. Use HOST:PORT.")
    placement = replace(
        default,
        listen=_own_address(listen, "--listen") if listen is not None else default.listen,
        upstream=server.address,
        upstream_trust=server.trust,
        admin=_own_address(admin, "--admin") if admin is not None else default.admin,
        spread=spread,
    )
    if spread and placement.upstream.is_ip:
        raise BadInput(f"--spread: {placement.upstream} is one address. Use it with a name in --upstream.")
    for one, other in (("listen", "upstream"), ("listen", "admin"), ("admin", "upstream")):
        used = all(target in USED_BY[f"--{name}"] for name in (one, other))
        if used and getattr(placement, one) == getattr(placement, other):
            raise BadInput(f"--{one}: {getattr(placement, one)} is --{other} too; allowed: an address of its own")
    if server.warning:
        _complain(f"vllm-priority: {server.warning}")
    return placement


def _own_address(text: str, what: str) -> Address:
    """Where Envoy listens: it takes no names there."""
    address = Address.parse(text, what)
    if not address.is_ip:
        raise BadInput(f"{what}: {text!r} has a name for a host; allowed: IP:PORT, such as 127.0.0.1:18000")
    return address


def _endpoint(url: str | None, ca: str | None) -> ControlPlaneEndpoint | None:
    if url is None:
        if ca is not None:
            raise BadInput("--control-plane-ca: not used without --control-plane. Set --control-plane too.")
        return None
    endpoint = ControlPlaneEndpoint.parse(url, ca)
    if endpoint.warning:
        _complain(f"vllm-priority: {endpoint.warning}")
    return endpoint


def _listener_files(cert: str | None, key: str | None, client_ca: str | None) -> ListenerFiles | None:
    if cert is None and key is None:
        if client_ca is not None:
            raise BadInput("--client-ca: not used without TLS. Set --tls-cert and --tls-key too.")
        return None
    if cert is None or key is None:
        missing = "--tls-cert" if cert is None else "--tls-key"
        raise BadInput(f"{missing}: not set. TLS needs both a certificate and its key.")
    return ListenerFiles(Path(cert), Path(key), client_ca)


def _absolute(token_file: str | None, control_plane: str | None) -> str | None:
    """The token file as Envoy reads it, whatever its working folder."""
    if token_file is None:
        return None
    if control_plane is None:
        raise BadInput("--token-file: not used without --control-plane. Set --control-plane too.")
    return str(Path(token_file).absolute())


class _Option(click.Option):
    """Says of each type in one form what was wrong and what is allowed. click's own words do not always say that."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        try:
            cast = super().type_cast_value(ctx, value)
            wrong = isinstance(cast, float) and isnan(cast)  # no bound holds it
        except click.BadParameter:
            wrong = True
        if wrong:
            value = ", ".join(value) if self.multiple else value
            raise BadInput(f"{self.long_name}: {str(value)[:60]!r} is not allowed; allowed: {self._allowed}")
        if cast == "" and self.metavar == "FILE":
            raise BadInput(f"{self.long_name}: '' is no file; allowed: a path")
        return cast

    @property
    def long_name(self) -> str:
        return max(self.opts, key=len)

    @property
    def _allowed(self) -> str:
        if isinstance(self.type, click.Choice):
            return ", ".join(self.type.choices)
        assert isinstance(self.type, (click.IntRange, click.FloatRange)), self.type
        return f"{self.type.min} to {self.type.max}"


_option = partial(click.option, cls=_Option)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _whole(numbers: range) -> click.IntRange:
    return click.IntRange(numbers[0], numbers[-1])


_role = _option("--role", type=click.Choice(ROLES), required=True, help="What vLLM does there.")
_memory_limit = partial(_option, "--memory-limit", metavar="AMOUNT")
_policy_file = _option("--policy", metavar="FILE", help="Policy in YAML. Default: the built-in policy.")
_policy_name = _option("--policy-name", metavar="NAME", help="One of the file's named policies.")
_listen = _option("--listen", metavar="HOST:PORT", help="Where the sidecar listens. Default: as the role has it.")
_admin = _option("--admin", metavar="HOST:PORT", help="Envoy's admin: metrics and drain. Default: loopback.")
_control_plane = _option(
    "--control-plane", metavar="URL",
    help="A running `vllm-priority serve` that sends policy changes: https://HOST:PORT, or http://HOST:PORT.",
)  # fmt: skip
_UPSTREAM_TLS_OPTIONS = (
    _option("--upstream-ca", metavar="FILE", help="CA that signed the vLLM server's certificate, in PEM."),
    _option(
        "--upstream-server-name", metavar="NAME", help="Name in that certificate. Default: the host in --upstream."
    ),
    _option("--upstream-insecure", is_flag=True, help="Do not verify that certificate. Only for a server on loopback."),
)


def _upstream_tls_options(command: _Command) -> _Command:
    for option in reversed(_UPSTREAM_TLS_OPTIONS):
        command = option(command)
    return command


_token_file = _option(
    "--token-file", metavar="FILE", help="File whose first line is the token that polls carry. It may change."
)
_control_plane_ca = _option(
    "--control-plane-ca", metavar="FILE", help="CA that signed the control plane's certificate, in PEM."
)
_request_timeout = _option(
    "--request-timeout", type=_whole(range(86401)), default=DEFAULT_REQUEST_TIMEOUT, show_default=True,
    metavar="SECONDS", help="How long a request may take to arrive. Responses are not bound by it. 0: no bound.",
)  # fmt: skip
_spread = _option(
    "--spread", is_flag=True,
    help="Send requests to every address of the upstream's name in turn, as to several servers.",
)  # fmt: skip
_json_flag = _option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group(
    invoke_without_command=True,
    context_settings=_CONTEXT,
    epilog=_example(
        "vllm-priority demo\nvllm-priority run --role engine --upstream 127.0.0.1:8001 --listen 0.0.0.0:18001"
    ),
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Request priorities on the vLLM routes that ignore the X-Vllm-Priority header."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@cli.command(epilog=_example("vllm-priority version"))
@_json_flag
def version(as_json: bool) -> None:
    """Say which version this is, and which Envoy it would run."""
    try:
        envoy = str(sidecar.find_envoy())
        found = sidecar.envoy_version(Path(envoy))
    except PriorityError:
        envoy, found = "", ""
    if as_json:
        click.echo(json.dumps({"version": __version__, "envoy": found or None, "envoy_path": envoy or None}))
    else:
        click.echo(f"vllm-priority {__version__} (Envoy {found or 'not found'})")


@cli.command(
    epilog=_example("vllm-priority validate -f policy.yaml\nvllm-priority validate -f new.yaml --against old.yaml")
)
@_option("-f", "--file", "path", metavar="FILE", required=True, help="Policy in YAML.")
@_option("--against", metavar="FILE", help="Another policy in YAML: print what changes if the first one replaces it.")
@_json_flag
def validate(path: str, against: str | None, as_json: bool) -> None:
    """Check a policy file."""
    policies = load_policies(path)
    changes = policy_changes(load_policies(against), policies) if against is not None else []
    names = [entry.name for entry in policies.named]
    for name, policy in policies.by_name.items():
        if policy.open_routes:
            _complain(f"vllm-priority: {path}: policy {name}: {policy.open_routes}.")
    if as_json:
        report = {"valid": True, "default": policies.default.model_dump(mode="json"), "named": names}
        if against is not None:
            report["changes"] = [change._asdict() for change in changes]
        click.echo(json.dumps(report))
        return
    click.echo(f"{path}: valid" + (f"; named policies: {', '.join(names)}" if names else ""))
    for change in changes:
        old, new = (value if value == NOT_SET else json.dumps(value) for value in (change.old, change.new))
        click.echo(f"{change.policy}: {change.key}: {old} -> {new}")
    if against is not None and not changes:
        click.echo(f"Nothing changes: it has the same values as {against}.")


@cli.command(
    epilog=_used_by_some()
    + _example(
        "vllm-priority config --role render --target bootstrap -o render.yaml\n"
        "vllm-priority config --role engine --target istio --selector app=vllm-engine | kubectl apply -f -\n"
        "vllm-priority config --role render --target envoy-gateway --upstream vllm-render:8000 --gateway infra/eg"
    )
)
@_role
@_option("--target", type=click.Choice(list(TARGETS)), required=True, help="What will read it.")
@_policy_file
@_policy_name
@_option(
    "--upstream", metavar="[https://]HOST:PORT", help="The vLLM server, or its Service. Default: as the role has it."
)
@_upstream_tls_options
@_listen
@_admin
@_control_plane
@_control_plane_ca
@_token_file
@_option("--health", metavar="HOST:PORT", help="Address for GET /ready and GET /stats/prometheus. Default: none.")
@_option("--access-log", metavar="FILE", default="/dev/stdout", show_default=True, help="Envoy's access log.")
@_request_timeout
@_memory_limit(help="Memory that Envoy may use, such as 1280Mi. Default: 1280Mi.")
@_option("--namespace", metavar="NAME", help="Of the objects for Istio and Envoy Gateway. Default: kubectl's.")
@_option(
    "--selector", multiple=True, metavar="KEY=VALUE",
    help="istio: a label of the pods; may be given several times. Default: vllm-priority.io/role=ROLE.",
)  # fmt: skip
@_option("--gateway", metavar="[NAMESPACE/]NAME", help="envoy-gateway: the Gateway. Default: eg.")
@_spread
@_option("--check", is_flag=True, help="Have Envoy check a bootstrap before it is written.")
@_option("--envoy", metavar="FILE", help="Envoy for --check. Default: $ENVOY, the PATH, the PyPI wheel.")
@_option("-o", "--output", metavar="FILE", help="Where to write. Default: standard output.")
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
        raise BadInput("--envoy: nothing runs it; allowed: with --check")
    endpoint = _endpoint(control_plane, control_plane_ca)
    placement = replace(
        _placement(role, upstream, listen, admin, target, spread=spread, **upstream_tls),
        access_log=access_log,
        request_timeout_seconds=request_timeout,
        control_plane=endpoint.address if endpoint else None,
        control_plane_trust=endpoint.trust if endpoint else None,
        token_file=_absolute(token_file, control_plane),
        health=_own_address(health, "--health") if health is not None else None,
        policy_name=policy_name,
        attachment=Attachment.parse(namespace, selector, gateway),
        memory_limit_bytes=(
            Placement.memory_limit_bytes if memory_limit is None else memory.parse_limit(memory_limit, "--memory-limit")
        ),
    )
    documents = render(target, _policy(policy, policy_name), placement)
    if TARGETS[target].note:
        click.echo(f"vllm-priority: note: {TARGETS[target].note}.", err=True)
    if check:
        sidecar.check_config(sidecar.find_envoy(envoy), documents[0])
    text = to_yaml(documents)
    if output is None:
        click.echo(text, nl=False)
        return
    _write(Path(output), text)


@cli.command(
    epilog=_example(
        "vllm-priority run --role render --upstream 127.0.0.1:8000 --listen 127.0.0.1:18000\n"
        "vllm-priority run --role engine --upstream 127.0.0.1:8001 --listen 0.0.0.0:18001 --policy policy.yaml"
    )
)
@_role
@_option("--upstream", metavar="[https://]HOST:PORT", required=True, help="The vLLM server.")
@_upstream_tls_options
@_option("--listen", metavar="HOST:PORT", required=True, help="Where the sidecar listens.")
@_admin
@_policy_file
@_policy_name
@_control_plane
@_control_plane_ca
@_token_file
@_option("--concurrency", type=_whole(WORKERS), default=2, show_default=True, help="Envoy workers.")
@_option("--envoy", metavar="FILE", help="Envoy to run. Default: $ENVOY, the PATH, the PyPI wheel.")
@_option("--tls-cert", metavar="FILE", help="Certificate that the sidecar serves, in PEM. It may change.")
@_option("--tls-key", metavar="FILE", help="Key of that certificate, in PEM.")
@_option("--client-ca", metavar="FILE", help="CA that clients' certificates must be signed by, in PEM. It may change.")
@_option("--access-log", metavar="FILE", default="/dev/stdout", show_default=True, help="Envoy's access log.")
@_request_timeout
@_memory_limit(
    help="Memory that Envoy may use, such as 1280Mi. Default: this container's limit, or a quarter of the machine's."
)
@_option(
    "--drain-seconds", type=click.FloatRange(0, 86400), default=30, show_default=True, metavar="SECONDS",
    help="How long the requests in flight may take to end after SIGTERM or SIGINT.",
)  # fmt: skip
@_option(
    "--drain-accept-seconds", type=click.FloatRange(0, 86400), metavar="SECONDS",
    help="How long new connections are still accepted in that time: longer than a load balancer needs to stop "
    "sending. Default: 5, or --drain-seconds where that is less.",
)  # fmt: skip
@_spread
def run(
    role: Role,
    upstream: str,
    listen: str,
    admin: str | None,
    policy: str | None,
    policy_name: str | None,
    control_plane: str | None,
    control_plane_ca: str | None,
    token_file: str | None,
    concurrency: int,
    envoy: str | None,
    access_log: str,
    request_timeout: int,
    memory_limit: str | None,
    drain_seconds: float,
    drain_accept_seconds: float | None,
    spread: bool,
    tls_cert: str | None,
    tls_key: str | None,
    client_ca: str | None,
    **upstream_tls: Any,
) -> None:
    """Run a sidecar in the foreground, in front of a vLLM server that is running.

    SIGHUP reads the file of --policy again, and no connection is lost. SIGTERM and SIGINT drain first.
    """
    endpoint = _endpoint(control_plane, control_plane_ca)
    placement = replace(
        _placement(role, upstream, listen, admin, spread=spread, **upstream_tls),
        access_log=access_log,
        request_timeout_seconds=request_timeout,
        control_plane=endpoint.address if endpoint else None,
        control_plane_trust=endpoint.trust if endpoint else None,
        token_file=_absolute(token_file, control_plane),
        policy_name=policy_name,
        node_id=f"{role}-{os.uname().nodename}-{os.getpid()}",
        memory_limit_bytes=(
            memory.default_limit() if memory_limit is None else memory.parse_limit(memory_limit, "--memory-limit")
        ),
    )
    if drain_accept_seconds is None:
        drain_accept_seconds = min(5.0, drain_seconds)
    elif drain_accept_seconds > drain_seconds:
        raise BadInput(
            f"--drain-accept-seconds: {drain_accept_seconds:g} is more than --drain-seconds, which is "
            f"{drain_seconds:g} and bounds it. Raise --drain-seconds, or lower this one."
        )
    chosen = _policy(policy, policy_name)
    program = sidecar.find_envoy(envoy)
    placement = sidecar.bounded(placement, concurrency)
    files = _listener_files(tls_cert, tls_key, client_ca)
    with contextlib.ExitStack() as stack:
        reload = None
        if policy is not None and control_plane is None:
            from control_plane.server.local import LocalControlPlane

            local = stack.enter_context(LocalControlPlane(Path(policy)))
            placement, reload = replace(placement, control_plane=local.address, refresh_seconds=1), local.reload
        secrets = None
        if files:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-priority-"))
            secrets = ListenerSecrets(files, Path(folder))
            placement = replace(placement, listen_tls=secrets.tls)
        sidecar.run_foreground(
            bootstrap(chosen, placement),
            placement,
            program,
            concurrency=concurrency,
            drain_seconds=drain_seconds,
            accept_seconds=drain_accept_seconds,
            reload=reload,
            secrets=secrets,
        )


@cli.command(
    name="explain",
    epilog=_example(
        "vllm-priority explain --path /v1/chat/completions/render -H 'X-Vllm-Priority: -10' -d '{\"messages\":[]}'\n"
        "vllm-priority explain --path /inference/v1/generate -H 'X-Vllm-Priority: high' -d @request.json --json\n"
        "vllm-priority explain --path /v1/chat/completions -H 'X-Vllm-Priority: 5' --policy policy.yaml --peer 10.1.2.3"
    ),
)
@_option("--path", required=True, metavar="PATH", help="Request target, such as /inference/v1/generate.")
@_option("-H", "--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="May be given several times.")
@_option("-d", "--data", metavar="BODY|@FILE", default="{}", show_default=True, help="Request body. @-: stdin.")
@_option("-X", "--method", default="POST", show_default=True, help="Request method.")
@_option(
    "--peer", metavar="IP", default="127.0.0.1", show_default=True,
    help="Address that the connection comes from, for a policy with trust.",
)  # fmt: skip
@_option("--identity", metavar="NAME", multiple=True, help="URI or DNS name in the client's verified certificate.")
@_option("--role", type=click.Choice(ROLES), default="engine", show_default=True, help="What vLLM does there.")
@_policy_file
@_policy_name
@_json_flag
def explain_command(
    path: str,
    headers: tuple[str, ...],
    data: str,
    method: str,
    peer: str,
    identity: tuple[str, ...],
    role: Role,
    policy: str | None,
    policy_name: str | None,
    as_json: bool,
) -> None:
    """Say what the sidecar would do to a request. It runs the sidecar's own Lua here, and sends nothing."""
    if not re.fullmatch(r"/\S*", path) or not path.isprintable():
        raise BadInput(f"--path: {path!r} is no request target; allowed: a path that starts with / and has no blanks")
    if not re.fullmatch(_TOKEN, method):
        raise BadInput(f"--method: {method!r} is no method; allowed: such as POST")
    lines = [_header(line) for line in headers]
    body = _body(data)
    names = {name.lower() for name, _ in lines}
    if "content-type" not in names:
        lines.append(("content-type", "application/json"))
    if not names & {"content-length", "transfer-encoding"}:
        lines.append(("content-length", str(len(body))))
    chosen = _policy(policy, policy_name)
    # In pieces, as Envoy gets it: a long body is not changed from its first byte on.
    chunks = [body[at : at + 16384] for at in range(0, len(body), 16384)]
    sender = _client(peer, identity)
    found = explain(chosen, role, path, lines, chunks, method=method.upper(), client=sender)
    if as_json:
        click.echo(json.dumps(_explained(found)))
    else:
        _print_explanation(found, chosen)


# RFC 9110, 5.6.2 and 5.5: names and methods are tokens; values are bytes of Latin-1 without controls but the tab.
_TOKEN = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
_VALUE = r"[\t\x20-\x7e\x80-\xff]*"


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not re.fullmatch(_TOKEN, name) or not re.fullmatch(_VALUE, value):
        raise BadInput(f"-H: {line!r} is no header; allowed: 'Name: value'")
    return name, value.strip(" \t")


def _client(peer: str, identities: tuple[str, ...]) -> Client:
    try:
        address = ipaddress.ip_address(peer)
    except ValueError:
        raise BadInput(f"--peer: {peer!r} is not an IP address. Use one, for example 10.1.2.3 or 2001:db8::1") from None
    return Client(f"[{address}]:1" if address.version == 6 else f"{address}:1", identities)


def _body(data: str) -> bytes:
    if not data.startswith("@"):
        return data.encode("utf-8", "surrogateescape")
    if data == "@-":
        return sys.stdin.buffer.read()
    try:
        return Path(data[1:]).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"-d: {data[1:]!r}: cannot be read: {reason}; allowed: BODY or @FILE") from None


def _explained(found: Explanation) -> dict[str, Any]:
    return {
        "outcome": found.outcome,
        "priority": found.value,
        "source": found.source,
        "report": found.report,
        "trusted_by": found.trusted_by,
        "reaches_vllm": found.refusal is None,
        "headers": list(found.headers),
        "body": found.body.decode("utf-8", "backslashreplace"),
        "answer": None
        if found.refusal is None
        else {"status": found.refusal[0], "body": found.refusal[1].decode("utf-8", "backslashreplace")},
        "edited_answer": None if found.answer is None else found.answer.decode("utf-8", "backslashreplace"),
    }


def _print_explanation(found: Explanation, policy: Policy) -> None:
    if found.outcome is None:
        click.echo("outcome: none. No POST on a route that the policy edits: it passes untouched.")
        return
    click.echo(f"outcome: {found.outcome}")
    if policy.report_header:
        click.echo(f"answer's header: {policy.report_header}: {found.report}")
    if found.trusted_by is not None:
        click.echo(f"trusted by: {found.trusted_by}")
    if found.refusal is not None:
        click.echo(
            f"answered by the sidecar: {found.refusal[0]} {found.refusal[1].decode('utf-8', 'backslashreplace')}"
        )
        return
    click.echo("what vLLM gets:")
    for name, value in found.headers:
        click.echo(f"  {name}: {value}")
    click.echo(f"  {found.body.decode('utf-8', 'backslashreplace')}")
    if found.answer is not None:
        click.echo(f'an answer {{"priority":0}} reaches the client as: {found.answer.decode()}')


@cli.command(
    epilog=_example(
        "vllm-priority doctor --render http://127.0.0.1:8000 --engine http://127.0.0.1:8001\n"
        "vllm-priority doctor --engine http://engine.vllm.svc:8000 --api-key $VLLM_API_KEY --json\n"
        "vllm-priority doctor --kubernetes --namespace vllm"
    )
)
@_option("--render", "render_url", metavar="URL", help="Root URL of a render server, or of the sidecar in front of it.")
@_option("--engine", "engine_url", metavar="URL", help="Root URL of an engine, or of the sidecar in front of it.")
@_option("--api-key", metavar="KEY", envvar="VLLM_API_KEY", help="The servers' API key. Default: $VLLM_API_KEY.")
@_option(
    "--header", metavar="NAME", default="x-vllm-priority", show_default=True,
    help="Request header that carries the priority.",
)  # fmt: skip
@_option("--model", metavar="NAME", help="Name of the served model. Default: the first that /v1/models lists.")
@_option(
    "--priority", metavar="N", type=click.IntRange(INT64_MIN, -1), default=-10, show_default=True,
    help="Urgent priority to send. It must be below 0 and within the range of the policy.",
)  # fmt: skip
@_option(
    "--timeout", metavar="SECONDS", type=click.FloatRange(0.1, 600), default=10, show_default=True,
    help="How long to wait for a response, in seconds.",
)  # fmt: skip
@_option(
    "--queue-timeout", metavar="SECONDS", type=click.FloatRange(0.1, 600), default=20, show_default=True,
    help="How long to wait for the queue to change, in seconds.",
)  # fmt: skip
@_option(
    "--max-fill", metavar="N", type=click.IntRange(1, 1024), default=8, show_default=True,
    help="Largest number of slots to fill on an engine that runs several requests at the same time.",
)  # fmt: skip
@_option(
    "--kubernetes", is_flag=True,
    help="Examine what runs in a cluster instead: which pods, Services and InferencePools bypass the sidecar.",
)  # fmt: skip
@_option("--namespace", metavar="NAME", help="With --kubernetes: the namespace to examine. Default: all namespaces.")
@_option(
    "--kubeconfig", metavar="FILE",
    help="With --kubernetes: the kubeconfig. Default: $KUBECONFIG, ~/.kube/config, or the service account of a pod.",
)  # fmt: skip
@_option(
    "--context", metavar="NAME", help="With --kubernetes: the context of the kubeconfig. Default: the current one."
)
@_json_flag
def doctor(
    render_url: str | None,
    engine_url: str | None,
    api_key: str | None,
    header: str,
    model: str | None,
    priority: int,
    timeout: float,
    queue_timeout: float,
    max_fill: int,
    kubernetes: bool,
    namespace: str | None,
    kubeconfig: str | None,
    context: str | None,
    as_json: bool,
) -> None:
    """Examine a deployment route by route, and say where a priority is lost.

    It changes nothing in the deployment. It announces on standard error what it sends.
    """
    from control_plane import doctor as examination

    if kubernetes:
        if render_url is not None or engine_url is not None:
            raise click.UsageError("--kubernetes examines a cluster. Do not use --render and --engine with it.")
        cluster = asyncio.run(examination.examine_cluster(examination.find_access(kubeconfig, context), namespace))
        click.echo(json.dumps(cluster.to_json())) if as_json else Console().print(examination.cluster_table(cluster))
        sys.exit(cluster.exit_status)
    if namespace is not None or kubeconfig is not None or context is not None:
        raise click.UsageError("--namespace, --kubeconfig and --context have an effect only with --kubernetes.")
    settings = examination.DoctorSettings(
        render=render_url,
        engine=engine_url,
        api_key=api_key,
        header=header,
        model=model,
        priority=priority,
        timeout=timeout,
        queue_timeout=queue_timeout,
        max_fill=max_fill,
    )
    report = asyncio.run(examination.examine(settings, lambda line: click.echo(line, err=True), _option_of))
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        Console().print(examination.table(report))
    sys.exit(report.exit_status)


@cli.command(
    epilog=_example(
        "vllm-priority watch --sidecar http://127.0.0.1:19000 --engine http://127.0.0.1:8001\n"
        "vllm-priority watch --sidecar http://127.0.0.1:19000 --json --count 10"
    )
)
@_option("--sidecar", metavar="URL", multiple=True, help="Where a sidecar serves its metrics. Repeatable.")
@_option("--engine", metavar="URL", multiple=True, help="Root URL of an engine. Repeatable.")
@_option("--control-plane", metavar="URL", help="Root URL of the control plane.")
@_option(
    "--interval", metavar="SECONDS", type=click.FloatRange(0.1, 3600), default=2, show_default=True,
    help="Time between two readings, in seconds.",
)  # fmt: skip
@_option("--count", metavar="N", type=click.IntRange(1, 2**31), help="End after this many readings. Default: no end.")
@_json_flag
def watch(as_json: bool, **settings: Any) -> None:
    """Show live what becomes of priorities, from the metrics of sidecars, engines and the control plane.

    On a terminal it is a table, elsewhere lines of text. A server that does not respond leaves a gap.
    """
    from control_plane.watch import WatchSettings, run_watch

    run_watch(WatchSettings(**settings), as_json=as_json)


@cli.command(epilog=_example("vllm-priority demo"))
@_option(
    "--envoy", metavar="FILE", help="Envoy to run. Default: $ENVOY, else the one on the PATH or in the PyPI wheel."
)
@_json_flag
def demo(envoy: str | None, as_json: bool) -> None:
    """Show the fault and its cure on this machine, with simulated vLLM servers and real sidecars.

    The exit status is 0 if the servers lose the priority and the sidecars cure it.
    """
    from control_plane.demo import run_demo

    sys.exit(run_demo(sidecar.find_envoy(envoy), as_json=as_json))


# How injected sidecars are set up: the same options for the webhook and for files.
_INJECTOR_OPTIONS = (
    _option("--sidecar-image", metavar="IMAGE", default=ENVOY_IMAGE, show_default=True, help="Envoy's image."),
    _option("--redirect-image", metavar="IMAGE", default=REDIRECT_IMAGE, help="Image with nft, for mode redirect."),
    _option("--sidecar-resources", metavar="JSON", help='Resources, for example {"requests": {"cpu": "100m"}}.'),
    _option("--sidecar-concurrency", type=_whole(WORKERS), default=2, show_default=True, help="Worker threads."),
    _option(
        "--sidecar-uid", metavar="UID|none", default="65532", show_default=True,
        help="User id of the sidecar. none: the cluster chooses it (OpenShift), and there is no mode redirect.",
    ),
    _option(
        "--sidecar-listen-host", metavar="0.0.0.0|::", default="0.0.0.0", show_default=True,
        help="Address on which the sidecar listens. Use :: for IPv4 and IPv6.",
    ),
    _option(
        "--forbid-annotation", multiple=True,
        type=click.Choice([name.removeprefix(PREFIX) for name in REQUEST_ANNOTATIONS]),
        help="An annotation that pods must not have, for example image; may be given several times.",
    ),
    _option(
        "--native", type=click.Choice(["auto", "true", "false"]), default="auto", show_default=True,
        help="Run the sidecar as a restartable init container. auto: if --kubernetes-version is 1.33 or later.",
    ),
    _option(
        "--kubernetes-version", metavar="VERSION",
        help="Version of the cluster, for example 1.33. Default: not known, so the sidecar is a plain container.",
    ),
    _option("--control-plane", metavar="URL", help="Where injected sidecars fetch policy changes: https://HOST:PORT."),
    _option(
        "--token-audience", metavar="NAME",
        help="Give sidecars service account tokens for this audience, and accept only polls that carry one.",
    ),
    _option("--control-plane-ca", metavar="FILE", help="CA that signed the control plane's certificate, in PEM."),
    _option(
        "--drain-seconds", type=_whole(DRAIN_SECONDS), default=5, show_default=True,
        help="How long vLLM goes on serving after its pod began to stop, in seconds.",
    ),
)  # fmt: skip


def _injector_options(command: _Command) -> _Command:
    for option in reversed(_INJECTOR_OPTIONS):
        command = option(command)
    return command


# Fields of InjectorSettings whose options have other names.
_INJECTOR_FLAGS = {
    "image": "--sidecar-image",
    "resources": "--sidecar-resources",
    "uid": "--sidecar-uid",
    "listen_host": "--sidecar-listen-host",
    "concurrency": "--sidecar-concurrency",
}


def _injector(options: Mapping[str, Any]) -> InjectorSettings:
    try:
        return _injector_settings(options)
    except InvalidField as error:
        flag = _INJECTOR_FLAGS.get(error.field, "--" + error.field.replace("_", "-"))
        raise BadInput(f"{flag}: {error.problem}") from None


def _injector_settings(options: Mapping[str, Any]) -> InjectorSettings:
    uid, resources = options["sidecar_uid"], options["sidecar_resources"]
    endpoint = _endpoint(options["control_plane"], options["control_plane_ca"])
    if not re.fullmatch(r"none|[0-9]{1,10}", uid):
        raise InvalidField("uid", not_a_uid(uid))
    return InjectorSettings(
        image=options["sidecar_image"],
        redirect_image=options["redirect_image"],
        resources=parse_resources(resources) if resources is not None else DEFAULT_RESOURCES,
        native={"auto": None, "true": True, "false": False}[options["native"]],
        kubernetes_version=options["kubernetes_version"],
        control_plane=endpoint.address if endpoint else None,
        control_plane_trust=endpoint.trust if endpoint else None,
        token_audience=options["token_audience"],
        numeric_services=options.get("numeric_services", "warn"),
        on_injection_failure=options.get("on_injection_failure", "fail"),
        own_namespace=options.get("own_namespace"),
        forbidden_annotations=options["forbid_annotation"],
        uid=None if uid == "none" else int(uid),
        listen_host=options["sidecar_listen_host"],
        concurrency=options["sidecar_concurrency"],
        drain_seconds=options["drain_seconds"],
    )


@cli.command(
    name="inject",
    epilog=_example(
        "vllm-priority inject -f deployment.yaml | kubectl apply -f -\n"
        "helm template my-vllm ./chart | vllm-priority inject -f - --policy policy.yaml\n"
        "vllm-priority inject -f injected.yaml --uninject > deployment.yaml"
    ),
)
@_option("-f", "--file", "path", metavar="FILE|-", required=True, help="Manifests in YAML or JSON. -: stdin.")
@_option("--uninject", is_flag=True, help="Take the sidecars out again.")
@_policy_file
@_injector_options
def inject(path: str, uninject: bool, policy: str | None, **options: Any) -> None:
    """Inject sidecars into manifests, without a cluster. All that need not change keeps its bytes."""
    settings = _injector(options)
    try:
        text = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode()
    except OSError as error:
        raise BadInput(f"-f: {path}: cannot be read: {error.strerror}. Use a file, or - for stdin.") from None
    except ValueError:
        raise BadInput(f"-f: {path}: not UTF-8 text. Use manifests in YAML or JSON.") from None
    written, notes = uninject_stream(text) if uninject else inject_stream(text, _policies(policy), settings)
    if written == text:
        what = "it contains no sidecar" if uninject else "it contains no pod template of a vLLM server"
        notes = [*notes, f"{path}: unchanged" if notes else f"{path}: unchanged: {what}"]  # The notes say why.
    for note in notes:
        click.echo(f"vllm-priority inject: {note}", err=True)
    sys.stdout.buffer.write(written.encode())
    sys.stdout.buffer.flush()


@cli.command(
    epilog=_example(
        "vllm-priority serve --policy policy.yaml --listen 127.0.0.1:8080\n"
        "vllm-priority serve --policy policy.yaml --tls-cert tls.crt --tls-key tls.key"
    )
)
@_option("--policy", metavar="FILE", required=True, help="Policy file in YAML. It is reloaded when it changes.")
@_option("--listen", metavar="HOST:PORT", default="0.0.0.0:8080", show_default=True, help="Address for plain HTTP.")
@_option("--tls-listen", metavar="HOST:PORT", help="Address for TLS. Default: 0.0.0.0:8443.")
@_option("--tls-cert", metavar="FILE", help="TLS certificate in PEM. It is reloaded when it changes.")
@_option("--tls-key", metavar="FILE", help="Key of the TLS certificate, in PEM.")
@_option("--token-file", metavar="FILE", help="Tokens, one a line, of which polls must carry one. It may change.")
@_option(
    "--api-token-file", metavar="FILE",
    help="Tokens, one a line, of which requests for /api/ and /metrics must carry one. It may change.",
)  # fmt: skip
@_option("--read-services", is_flag=True, help="Read the Services of a pod's namespace from the Kubernetes API.")
@_option("--write-events", is_flag=True, help="Write an Event on a pod's owner that says what was done and warned of.")
@_option(
    "--numeric-services", type=click.Choice(["warn", "redirect"]), default="warn", show_default=True,
    help="What to do if a Service targets vLLM's port by number and thus bypasses the sidecar.",
)  # fmt: skip
@_option(
    "--on-injection-failure", type=click.Choice(["fail", "ignore"]), default="fail", show_default=True,
    help="What to do with a labelled pod that cannot be injected.",
)  # fmt: skip
@_option("--own-namespace", metavar="NAME", help="The control plane's namespace. Its pods are not injected.")
@_injector_options
def serve(
    policy: str,
    listen: str,
    tls_listen: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    token_file: str | None,
    api_token_file: str | None,
    read_services: bool,
    write_events: bool,
    **options: Any,
) -> None:
    """Serve the policy to running sidecars, and inject sidecars into pods."""
    from control_plane.server.process import serve as run_server
    from control_plane.server.settings import ServeSettings

    run_server(
        ServeSettings(
            policy=Path(policy),
            listen=Address.parse(listen, "--listen"),
            tls_listen=Address.parse(tls_listen, "--tls-listen") if tls_listen is not None else None,
            tls_cert=Path(tls_cert) if tls_cert is not None else None,
            tls_key=Path(tls_key) if tls_key is not None else None,
            injector=_injector(options),
            read_services=read_services,
            write_events=write_events,
            token_file=Path(token_file) if token_file is not None else None,
            token_audience=options["token_audience"],
            api_token_file=Path(api_token_file) if api_token_file is not None else None,
        )
    )


def _complain(message: str) -> None:
    """On stderr, as one line: a path or a value that it names may hold line breaks, or worse for a terminal."""
    click.echo("".join(c if c.isprintable() else repr(c)[1:-1] for c in message), err=True)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"-o: {path}: cannot be written: {reason}; allowed: a file in a folder that is there") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point."""
    try:
        status = cli.main(args=arguments, prog_name="vllm-priority", standalone_mode=False)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "vllm-priority"
        message = " ".join(error.format_message().split())
        _complain(f"{command}: {message} (see {command} --help)")
        sys.exit(2)
    except click.ClickException as error:
        _complain(f"vllm-priority: {error.format_message()}")
        sys.exit(2)
    except InvalidField as error:
        _complain(f"vllm-priority: {_option_of(error.field)}: {error.problem}")
        sys.exit(error.exit_status)
    except PriorityError as error:
        _complain(f"vllm-priority: {error}")
        sys.exit(error.exit_status)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # The reader went, as `| head` does: nothing is left to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
