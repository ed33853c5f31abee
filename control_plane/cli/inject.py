"""The command `inject`."""

import sys
from pathlib import Path
from typing import Any

import click

from control_plane.cli.arguments import read_policies
from control_plane.cli.injector import injector_options, injector_settings
from control_plane.cli.options import example, option, policy_option
from control_plane.errors import BadInput
from control_plane.injector.manifests import inject_stream, uninject_stream


@click.command(
    name="inject",
    epilog=example(
        "vllm-priority inject -f deployment.yaml | kubectl apply -f -\n"
        "helm template my-vllm ./chart | vllm-priority inject -f - --policy policy.yaml\n"
        "vllm-priority inject -f injected.yaml --uninject > deployment.yaml"
    ),
)
@option("-f", "--file", "path", metavar="FILE|-", required=True, help="Manifests in YAML or JSON. -: standard input.")
@option("--uninject", is_flag=True, help="Remove the sidecars.")
@policy_option
@injector_options
def inject(path: str, uninject: bool, policy: str | None, **options: Any) -> None:
    """Inject sidecars into manifests, without a cluster. Everything else in the text is left unchanged."""
    settings = injector_settings(options)
    try:
        text = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode()
    except OSError as error:
        raise BadInput(f"-f: {path}: cannot be read: {error.strerror}. Use a file, or - for stdin.") from None
    except ValueError:
        raise BadInput(f"-f: {path}: not UTF-8 text. Use manifests in YAML or JSON.") from None
    written, notes = uninject_stream(text) if uninject else inject_stream(text, read_policies(policy), settings)
    if written == text:
        what = "it contains no sidecar" if uninject else "it contains no pod template of a vLLM server"
        notes = [*notes, f"{path}: unchanged" if notes else f"{path}: unchanged: {what}"]  # The notes say why.
    for note in notes:
        click.echo(f"vllm-priority inject: {note}", err=True)
    sys.stdout.buffer.write(written.encode())
    sys.stdout.buffer.flush()
