"""The command `serve`."""

from pathlib import Path
from typing import Any

import click

from control_plane.address import Address
from control_plane.cli.injector import injector_options, injector_settings
from control_plane.cli.options import example, option


@click.command(
    epilog=example(
        "vllm-priority serve --policy policy.yaml --listen 127.0.0.1:8080\n"
        "vllm-priority serve --policy policy.yaml --tls-cert tls.crt --tls-key tls.key"
    )
)
@option("--policy", metavar="FILE", required=True, help="Policy file in YAML. It is reloaded when it changes.")
@option("--listen", metavar="HOST:PORT", default="0.0.0.0:8080", show_default=True, help="Address for plain HTTP.")
@option("--tls-listen", metavar="HOST:PORT", help="Address for TLS. Default: 0.0.0.0:8443.")
@option("--tls-cert", metavar="FILE", help="TLS certificate in PEM. It is reloaded when it changes.")
@option("--tls-key", metavar="FILE", help="Key of the TLS certificate, in PEM.")
@option(
    "--token-file",
    metavar="FILE",
    help="File of tokens, one on each line. Polls must carry one. It is read again when it changes.",
)
@option(
    "--api-token-file", metavar="FILE",
    help="File of tokens, one on each line. Requests for /api/, /metrics and the console must carry one.",
)  # fmt: skip
@option(
    "--console-proxy", metavar="IP", multiple=True,
    help="Address of a proxy that authenticates the users of the console. Repeatable.",
)  # fmt: skip
@option("--read-services", is_flag=True, help="Read the Services of a pod's namespace from the Kubernetes API.")
@option("--write-events", is_flag=True, help="Write Events about injections and their warnings, on the owners of pods.")
@option(
    "--numeric-services", type=click.Choice(["warn", "redirect"]), default="warn", show_default=True,
    help="What to do if a Service targets vLLM's port by number and thus bypasses the sidecar.",
)  # fmt: skip
@option(
    "--on-injection-failure", type=click.Choice(["fail", "ignore"]), default="fail", show_default=True,
    help="What to do with a labelled pod that cannot be injected.",
)  # fmt: skip
@option("--own-namespace", metavar="NAME", help="The control plane's namespace. Its pods are not injected.")
@injector_options
def serve(
    policy: str,
    listen: str,
    tls_listen: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    token_file: str | None,
    api_token_file: str | None,
    console_proxy: tuple[str, ...],
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
            listen=Address.parse(listen, "listen"),
            tls_listen=Address.parse(tls_listen, "tls_listen") if tls_listen is not None else None,
            tls_cert=Path(tls_cert) if tls_cert is not None else None,
            tls_key=Path(tls_key) if tls_key is not None else None,
            injector=injector_settings(options),
            read_services=read_services,
            write_events=write_events,
            token_file=Path(token_file) if token_file is not None else None,
            token_audience=options["token_audience"],
            api_token_file=Path(api_token_file) if api_token_file is not None else None,
            console_proxies=console_proxy,
        )
    )
