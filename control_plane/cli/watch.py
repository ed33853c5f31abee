"""The command `watch`."""

from typing import Any

import click

from control_plane.cli.options import example, json_option, option


@click.command(
    epilog=example(
        "vllm-priority watch --sidecar http://127.0.0.1:19000 --engine http://127.0.0.1:8001\n"
        "vllm-priority watch --sidecar http://127.0.0.1:19000 --json --count 10"
    )
)
@option("--sidecar", metavar="URL", multiple=True, help="Where a sidecar serves its metrics. Repeatable.")
@option("--engine", metavar="URL", multiple=True, help="Root URL of an engine. Repeatable.")
@option("--control-plane", metavar="URL", help="Root URL of the control plane.")
@option(
    "--interval", metavar="SECONDS", type=click.FloatRange(0.1, 3600), default=2, show_default=True,
    help="Time between two readings, in seconds.",
)  # fmt: skip
@option("--count", metavar="N", type=click.IntRange(1, 2**31), help="End after this many readings. Default: no end.")
@json_option
def watch(as_json: bool, **settings: Any) -> None:
    """Show live what becomes of priorities, from the metrics of sidecars, engines and the control plane.

    On a terminal it is a table, elsewhere lines of text. A server that does not respond leaves a gap.
    """
    from control_plane.watch import WatchSettings, run_watch

    run_watch(WatchSettings(**settings), as_json=as_json)
