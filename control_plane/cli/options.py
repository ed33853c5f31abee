"""The options that several commands have, and which target uses which."""

from collections.abc import Callable, Mapping
from functools import partial
from math import isnan
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from control_plane.errors import BadInput
from control_plane.render.placement import DEFAULT_REQUEST_TIMEOUT, LOGGED_REQUESTS
from control_plane.render.targets import TARGETS
from control_plane.vllm import ROLES

OPTIONS: Mapping[str, str] = {
    "image": "--sidecar-image",
    "resources": "--sidecar-resources",
    "uid": "--sidecar-uid",
    "listen_host": "--sidecar-listen-host",
    "concurrency": "--sidecar-concurrency",
    "class_name": "--class",
    "headers": "-H",
}
"""The options that are not called like the field that they set. Errors and advice of the core name fields."""


def option_of(field: str) -> str:
    """Return the option that sets a field of the settings."""
    return OPTIONS.get(field, "--" + field.replace("_", "-"))


_ALL = tuple(TARGETS)
_FOR_EVERY_TARGET = ("role", "target", "policy", "policy_name", "output")
_FOR_SOME_TARGETS = (
    "spread", "upstream_server_name", "upstream_ca", "upstream_insecure", "upstream", "listen", "admin",
    "control_plane_ca", "token_file", "control_plane", "health", "access_log",
    "log_requests", "trace_percent", "otlp_endpoint",
    "request_timeout", "memory_limit", "namespace", "selector", "gateway", "envoy", "check",
)  # fmt: skip
USED_BY: Mapping[str, tuple[str, ...]] = {option_of(field): _ALL for field in _FOR_EVERY_TARGET} | {
    option_of(field): tuple(name for name, target in TARGETS.items() if field in target.options)
    for field in _FOR_SOME_TARGETS
}
"""Option of `config` -> the targets that use it. With another target it would have no effect, so it is rejected."""


def example(text: str) -> str:
    """Return the part of a command's help with its examples."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in text.strip().splitlines())


class Option(click.Option):
    """An option whose errors are full sentences, and say what to use instead."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the value in the option's type. BadInput if it is not valid."""
        try:
            cast = super().type_cast_value(ctx, value)
            wrong = isinstance(cast, float) and isnan(cast)  # it is within no bounds
        except click.BadParameter:
            wrong = True
        if wrong or (cast == "" and self.metavar == "FILE"):
            text = ", ".join(value) if self.multiple else str(value)
            raise BadInput(f"{max(self.opts, key=len)}: {text[:60]!r} is not valid. {what_to_use(self)}")
        return cast

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the completions of a value. For a file, the shell itself knows them."""
        if self.metavar and self.metavar.startswith("FILE"):
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)


def what_to_use(parameter: click.Parameter) -> str:
    """Return which values a parameter accepts, as a sentence."""
    metavar = parameter.metavar or ""
    match parameter.type:
        case click.Choice(choices=choices):
            return f"It must be one of: {', '.join(choices)}."
        case click.IntRange(min=low, max=high):
            return f"Use a whole number from {low} to {high}."
        case click.FloatRange(min=low, max=high):
            return f"Use a number from {low} to {high}."
    return "Use the path of a file." if metavar.startswith("FILE") else f"Use {metavar}."


option = partial(click.option, cls=Option)
Command = TypeVar("Command", bound=Callable[..., Any])


def request_header(line: str) -> tuple[str, str]:
    """Return the name and the value of a header that -H gives. BadInput if it is not valid."""
    from control_plane.explain import parse_header

    parsed = parse_header(line)
    if parsed is None:
        raise BadInput(f"-H: {line!r} is not a valid header. Use NAME: VALUE, for example 'X-Vllm-Priority: -10'.")
    return parsed


def whole_numbers(numbers: range) -> click.IntRange:
    """Return the type of an option with these values."""
    return click.IntRange(numbers[0], numbers[-1])


role_option = option(
    "--role", type=click.Choice(ROLES), required=True, help="Role of the vLLM server behind the sidecar."
)
memory_limit_option = partial(option, "--memory-limit", metavar="AMOUNT")
policy_option = option("--policy", metavar="FILE", help="Policy in YAML. Default: the built-in policy.")
policy_name_option = option(
    "--policy-name",
    metavar="NAME",
    help="Name of one of the policies in the file. Default: the file's default policy.",
)
listen_option = option(
    "--listen",
    metavar="HOST:PORT",
    help="Address of the sidecar. Default: 0.0.0.0:18000 for render, 0.0.0.0:18001 for engine.",
)
admin_option = option(
    "--admin",
    metavar="HOST:PORT",
    help="Address of Envoy's admin interface. Default: 127.0.0.1:19000 for render, 127.0.0.1:19001 for engine.",
)
control_plane_option = option(
    "--control-plane", metavar="URL",
    help="A running `vllm-priority serve` that sends policy changes: https://HOST:PORT, or http://HOST:PORT.",
)  # fmt: skip
control_plane_ca_option = option(
    "--control-plane-ca", metavar="FILE", help="CA that signed the control plane's certificate, in PEM."
)
token_file_option = option(
    "--token-file",
    metavar="FILE",
    help="File whose first line is the token to send to the control plane. It is read again when it changes.",
)
request_timeout_option = option(
    "--request-timeout", type=whole_numbers(range(86401)), default=DEFAULT_REQUEST_TIMEOUT, show_default=True,
    metavar="SECONDS", help="How long a request may take to arrive, in seconds. 0: no limit.",
)  # fmt: skip
_LOGGING_OPTIONS = (
    option(
        "--log-requests", type=click.Choice(LOGGED_REQUESTS), default="all", show_default=True,
        help="Requests that the access log has. problems: those whose priority was not applied, or that the sidecar "
        "rejected.",
    ),
    option(
        "--otlp-endpoint", metavar="http://HOST:PORT",
        help="Collector that gets the spans of requests, by OTLP over gRPC. Default: no tracing.",
    ),
    option(
        "--trace-percent", type=click.FloatRange(0, 100), default=100, show_default=True, metavar="PERCENT",
        help="Percentage of requests that start a trace. A request that belongs to a trace keeps its own decision.",
    ),
)  # fmt: skip
spread_option = option(
    "--spread", is_flag=True,
    help="Treat the addresses of the upstream's name as several servers, and send requests to each in turn.",
)  # fmt: skip
json_option = option("--json", "as_json", is_flag=True, help="Print JSON.")
_UPSTREAM_TLS_OPTIONS = (
    option("--upstream-ca", metavar="FILE", help="CA that signed the certificate of the vLLM server, in PEM."),
    option(
        "--upstream-server-name",
        metavar="NAME",
        help="Name in the certificate of the vLLM server. Default: the host in --upstream.",
    ),
    option(
        "--upstream-insecure",
        is_flag=True,
        help="Do not verify the certificate of the vLLM server. Only for a server on this machine.",
    ),
)


def upstream_tls_options(command: Command) -> Command:
    """Give a command the options about TLS to vLLM."""
    for decorator in reversed(_UPSTREAM_TLS_OPTIONS):
        command = decorator(command)
    return command


def logging_options(command: Command) -> Command:
    """Give a command the options about logged and traced requests."""
    for decorator in reversed(_LOGGING_OPTIONS):
        command = decorator(command)
    return command
