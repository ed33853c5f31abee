"""The command `version`."""

import json
from pathlib import Path

import click

from control_plane import __version__, proxy
from control_plane.cli.options import example, json_option
from control_plane.errors import PriorityError


@click.command(epilog=example("vllm-priority version"))
@json_option
def version(as_json: bool) -> None:
    """Print the version of vllm-priority, and of the Envoy that it would run."""
    try:
        envoy = str(proxy.find_envoy())
        found = proxy.envoy_version(Path(envoy))
    except PriorityError:
        envoy, found = "", ""
    if as_json:
        click.echo(json.dumps({"version": __version__, "envoy": found or None, "envoy_path": envoy or None}))
    else:
        click.echo(f"vllm-priority {__version__} (Envoy {found or 'not found'})")
