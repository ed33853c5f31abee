"""The command `doctor`."""

import asyncio
import json
import sys

import click
from rich.console import Console

from control_plane.cli.options import (
    example,
    json_option,
    option,
    option_of,
    request_header,
)
from control_plane.cli.terminal import complain
from control_plane.vllm import INT64_MIN


@click.command(
    epilog=example(
        "vllm-priority doctor --render http://127.0.0.1:8000 --engine http://127.0.0.1:8001\n"
        "vllm-priority doctor --engine http://engine.vllm.svc:8000 --api-key $VLLM_API_KEY --json\n"
        "vllm-priority doctor --kubernetes --namespace vllm"
    )
)
@option("--render", "render_url", metavar="URL", help="Root URL of a render server, or of the sidecar in front of it.")
@option("--engine", "engine_url", metavar="URL", help="Root URL of an engine, or of the sidecar in front of it.")
@option("--api-key", metavar="KEY", envvar="VLLM_API_KEY", help="The servers' API key. Default: $VLLM_API_KEY.")
@option(
    "--header", metavar="NAME", default="x-vllm-priority", show_default=True,
    help="Request header that carries the priority.",
)  # fmt: skip
@option(
    "-H", "--request-header", "request_headers", multiple=True, metavar="'NAME: VALUE'",
    help="Header to send with each request, for example a tenant's. Repeatable.",
)  # fmt: skip
@option("--class", "class_name", metavar="NAME", help="Also examine this class of the policy.")
@option("--ca", metavar="FILE", help="CA that signed the servers' certificates, in PEM. Default: the system's CAs.")
@option("--client-cert", metavar="FILE", help="Certificate to present to the servers, in PEM.")
@option("--client-key", metavar="FILE", help="Key of --client-cert, in PEM. Default: it is in the same file.")
@option("--model", metavar="NAME", help="Name of the served model. Default: the first that /v1/models lists.")
@option(
    "--priority", metavar="N", type=click.IntRange(INT64_MIN, -1), default=-10, show_default=True,
    help="Urgent priority to send. It must be below 0 and within the range of the policy.",
)  # fmt: skip
@option(
    "--timeout", metavar="SECONDS", type=click.FloatRange(0.1, 600), default=10, show_default=True,
    help="How long to wait for a response, in seconds.",
)  # fmt: skip
@option(
    "--queue-timeout", metavar="SECONDS", type=click.FloatRange(0.1, 600), default=20, show_default=True,
    help="How long to wait for the queue to change, in seconds.",
)  # fmt: skip
@option(
    "--max-fill", metavar="N", type=click.IntRange(1, 1024), default=8, show_default=True,
    help="Largest number of slots to fill on an engine that runs several requests at the same time.",
)  # fmt: skip
@option(
    "--kubernetes", is_flag=True,
    help="Examine what runs in a cluster instead: which pods, Services and InferencePools bypass the sidecar.",
)  # fmt: skip
@option("--namespace", metavar="NAME", help="With --kubernetes: the namespace to examine. Default: all namespaces.")
@option(
    "--kubeconfig", metavar="FILE",
    help="With --kubernetes: the kubeconfig. Default: $KUBECONFIG, ~/.kube/config, or the service account of a pod.",
)  # fmt: skip
@option("--context", metavar="NAME", help="With --kubernetes: the context of the kubeconfig. Default: the current one.")
@json_option
@option("--prometheus", "as_metrics", is_flag=True, help="Print Prometheus metrics instead, for a periodic job.")
def doctor(
    render_url: str | None,
    engine_url: str | None,
    api_key: str | None,
    header: str,
    request_headers: tuple[str, ...],
    class_name: str | None,
    ca: str | None,
    client_cert: str | None,
    client_key: str | None,
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
    as_metrics: bool,
) -> None:
    """Examine a deployment route by route, and say where a priority is lost.

    It changes nothing in the deployment. It announces on standard error what it sends.
    """
    from control_plane import doctor as examination

    if as_json and as_metrics:
        raise click.UsageError("--json and --prometheus cannot be combined.")
    if kubernetes:
        if render_url is not None or engine_url is not None:
            raise click.UsageError("--kubernetes examines a cluster. Do not use --render and --engine with it.")
        access = examination.find_access(kubeconfig, context)
        where = "all namespaces" if namespace is None else f"the namespace {namespace}"
        complain(f"{access.url}: list the pods, Services, InferencePools and workloads of {where}.")
        cluster = asyncio.run(examination.examine_cluster(access, namespace))
        if as_metrics:
            click.echo(examination.exposition(cluster), nl=False)
        elif as_json:
            click.echo(json.dumps(cluster.to_json()))
        else:
            Console().print(examination.cluster_table(cluster))
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
        headers=tuple(map(request_header, request_headers)),
        class_name=class_name,
        ca=ca,
        client_cert=client_cert,
        client_key=client_key,
    )
    report = asyncio.run(examination.examine(settings, complain, option_of))
    if as_metrics:
        click.echo(examination.exposition(report), nl=False)
    elif as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        Console().print(examination.table(report))
        for entry in examination.further_help(report):
            click.echo(f"See {entry}")
    sys.exit(report.exit_status)
