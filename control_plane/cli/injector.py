"""The options that set up injected sidecars: the same for the webhook (`serve`) and for files (`inject`)."""

import re
from collections.abc import Mapping
from typing import Any

import click

from control_plane.cli.arguments import control_plane_endpoint, tracing_of
from control_plane.cli.options import Command, logging_options, option, whole_numbers
from control_plane.errors import InvalidField
from control_plane.injector.annotations import PREFIX, REQUEST_ANNOTATIONS
from control_plane.injector.resources import DEFAULT_RESOURCES, parse_resources
from control_plane.injector.settings import (
    DRAIN_SECONDS,
    ENVOY_IMAGE,
    REDIRECT_IMAGE,
    WORKERS,
    InjectorSettings,
    not_a_uid,
)

# How injected sidecars are set up: the same options for the webhook and for files.
_OPTIONS = (
    option("--sidecar-image", metavar="IMAGE", default=ENVOY_IMAGE, show_default=True, help="Image of Envoy."),
    option("--redirect-image", metavar="IMAGE", default=REDIRECT_IMAGE, help="Image with nft, for mode redirect."),
    option("--sidecar-resources", metavar="JSON", help='Resources, for example {"requests": {"cpu": "100m"}}.'),
    option(
        "--sidecar-concurrency", type=whole_numbers(WORKERS), default=2, show_default=True,
        help="Number of Envoy's worker threads.",
    ),
    option(
        "--sidecar-uid", metavar="UID|none", default="65532", show_default=True,
        help="User id of the sidecar. none: the cluster chooses it (OpenShift), and there is no mode redirect.",
    ),
    option(
        "--sidecar-listen-host", metavar="0.0.0.0|::", default="0.0.0.0", show_default=True,
        help="Address on which the sidecar listens. Use :: for IPv4 and IPv6.",
    ),
    option(
        "--forbid-annotation", multiple=True,
        type=click.Choice([name.removeprefix(PREFIX) for name in REQUEST_ANNOTATIONS]),
        help="An annotation that pods must not have, without its prefix. Repeatable.",
    ),
    option(
        "--native", type=click.Choice(["auto", "true", "false"]), default="auto", show_default=True,
        help="Run the sidecar as a restartable init container. auto: if --kubernetes-version is 1.33 or later.",
    ),
    option(
        "--kubernetes-version", metavar="VERSION",
        help="Version of the cluster, for example 1.33. Default: not known, so the sidecar is a plain container.",
    ),
    option("--control-plane", metavar="URL", help="Where injected sidecars fetch policy changes: https://HOST:PORT."),
    option(
        "--token-audience", metavar="NAME",
        help="Give sidecars service account tokens for this audience, and accept only polls that carry one.",
    ),
    option("--control-plane-ca", metavar="FILE", help="CA that signed the control plane's certificate, in PEM."),
    option(
        "--drain-seconds", type=whole_numbers(DRAIN_SECONDS), default=5, show_default=True,
        help="How long vLLM continues to serve when its pod stops, in seconds.",
    ),
)  # fmt: skip


def injector_options(command: Command) -> Command:
    """Give a command these options."""
    command = logging_options(command)
    for decorator in reversed(_OPTIONS):
        command = decorator(command)
    return command


def injector_settings(options: Mapping[str, Any]) -> InjectorSettings:
    """Return the settings that the values of these options stand for. InvalidField if one is not valid."""
    uid, resources = options["sidecar_uid"], options["sidecar_resources"]
    endpoint = control_plane_endpoint(options["control_plane"], options["control_plane_ca"])
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
        logged_requests=options["log_requests"],
        tracing=tracing_of(options["otlp_endpoint"], options["trace_percent"]),
    )
