"""The command `demo`."""

import sys
from pathlib import Path

import click

from control_plane import proxy
from control_plane.cli.options import example, json_option, option


@click.command(epilog=example("vllm-priority demo --picture latency.svg"))
@option("--envoy", metavar="FILE", help="Envoy program. Default: $ENVOY, or the one on the PATH or in the PyPI wheel.")
@option("--picture", metavar="FILE", help="Write a picture of the latencies, as an SVG.")
@json_option
def demo(envoy: str | None, picture: str | None, as_json: bool) -> None:
    """Show the fault and its cure on this machine, with simulated vLLM servers and real sidecars.

    The exit status is 0 if the servers lose the priority and the sidecars cure it.
    """
    from control_plane.demo import run_demo

    sys.exit(run_demo(proxy.find_envoy(envoy), as_json=as_json, picture_file=Path(picture) if picture else None))
