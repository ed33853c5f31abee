"""The command `run`."""

import contextlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from control_plane import memory, proxy
from control_plane.cli.arguments import (
    absolute_token_file,
    control_plane_endpoint,
    read_policy,
    sidecar_placement,
    tracing_of,
)
from control_plane.cli.options import (
    admin_option,
    control_plane_ca_option,
    control_plane_option,
    example,
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
    whole_numbers,
)
from control_plane.cli.terminal import complain
from control_plane.errors import BadInput
from control_plane.injector.settings import (
    WORKERS,
)
from control_plane.listener_secrets import ListenerFiles, ListenerSecrets
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import LoggedRequests
from control_plane.vllm import Role


@click.command(
    epilog=example(
        "vllm-priority run --role render --upstream 127.0.0.1:8000 --listen 127.0.0.1:18000\n"
        "vllm-priority run --role engine --upstream 127.0.0.1:8001 --listen 0.0.0.0:18001 --policy policy.yaml"
    )
)
@role_option
@option("--upstream", metavar="[https://]HOST:PORT", required=True, help="vLLM server to forward requests to.")
@upstream_tls_options
@option("--listen", metavar="HOST:PORT", required=True, help="Address of the sidecar.")
@admin_option
@policy_option
@policy_name_option
@control_plane_option
@control_plane_ca_option
@token_file_option
@option(
    "--concurrency", type=whole_numbers(WORKERS), default=2, show_default=True, help="Number of Envoy's worker threads."
)
@option("--envoy", metavar="FILE", help="Envoy program. Default: $ENVOY, or the one on the PATH or in the PyPI wheel.")
@option("--tls-cert", metavar="FILE", help="Certificate of the sidecar, in PEM. It is read again when it changes.")
@option("--tls-key", metavar="FILE", help="Key of the certificate, in PEM.")
@option(
    "--client-ca",
    metavar="FILE",
    help="CA that must have signed the certificates of clients, in PEM. It is read again when it changes.",
)
@option("--access-log", metavar="FILE", default="/dev/stdout", show_default=True, help="File of Envoy's access log.")
@logging_options
@request_timeout_option
@memory_limit_option(
    help="Memory that Envoy may use. Default: this container's limit, or a quarter of the machine's memory."
)
@option(
    "--drain-seconds", type=click.FloatRange(0, 86400), default=30, show_default=True, metavar="SECONDS",
    help="How long requests in flight may take to end after SIGTERM or SIGINT, in seconds.",
)  # fmt: skip
@option(
    "--drain-accept-seconds", type=click.FloatRange(0, 86400), metavar="SECONDS",
    help="How long new connections are still accepted in that time: longer than a load balancer needs to stop "
    "sending. Default: 5, or --drain-seconds where that is less.",
)  # fmt: skip
@spread_option
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
    log_requests: LoggedRequests,
    otlp_endpoint: str | None,
    trace_percent: float,
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
    """Run a sidecar in the foreground, in front of a running vLLM server.

    SIGHUP reads the file of --policy again, and no connection is lost. SIGTERM and SIGINT drain first.
    """
    endpoint = control_plane_endpoint(control_plane, control_plane_ca)
    placement = replace(
        sidecar_placement(role, upstream, listen, admin, spread=spread, **upstream_tls),
        access_log=access_log,
        logged_requests=log_requests,
        tracing=tracing_of(otlp_endpoint, trace_percent),
        request_timeout_seconds=request_timeout,
        control_plane=endpoint.address if endpoint else None,
        control_plane_trust=endpoint.trust if endpoint else None,
        token_file=absolute_token_file(token_file, control_plane),
        policy_name=policy_name,
        node_id=f"{role}-{os.uname().nodename}-{os.getpid()}",
        memory_limit_bytes=(
            memory.default_limit() if memory_limit is None else memory.parse_limit(memory_limit, "memory_limit")
        ),
    )
    if drain_accept_seconds is None:
        drain_accept_seconds = min(5.0, drain_seconds)
    elif drain_accept_seconds > drain_seconds:
        raise BadInput(
            f"--drain-accept-seconds: {drain_accept_seconds:g} is more than --drain-seconds, which is "
            f"{drain_seconds:g} and bounds it. Raise --drain-seconds, or lower this one."
        )
    chosen = read_policy(policy, policy_name)
    if chosen.reads_certificates and client_ca is None:
        complain(
            f"vllm-priority: {chosen.reads_certificates}: without --client-ca, no client has a certificate, so this "
            "matches no client."
        )
    program = proxy.find_envoy(envoy)
    placement = proxy.bounded(placement, concurrency)
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
        proxy.run_foreground(
            bootstrap(chosen, placement),
            placement,
            program,
            concurrency=concurrency,
            drain_seconds=drain_seconds,
            accept_seconds=drain_accept_seconds,
            reload=reload,
            secrets=secrets,
        )


def _listener_files(cert: str | None, key: str | None, client_ca: str | None) -> ListenerFiles | None:
    if cert is None and key is None:
        if client_ca is not None:
            raise BadInput("--client-ca: not used without TLS. Set --tls-cert and --tls-key too.")
        return None
    if cert is None or key is None:
        missing = "--tls-cert" if cert is None else "--tls-key"
        raise BadInput(f"{missing}: not set. TLS needs both a certificate and its key.")
    return ListenerFiles(Path(cert), Path(key), client_ca)
