"""The command line: its commands, and how their errors are reported."""

import os
import sys
from collections.abc import Sequence

import click

from control_plane.cli.config import config
from control_plane.cli.demo import demo
from control_plane.cli.doctor import doctor
from control_plane.cli.explain import explain_command
from control_plane.cli.inject import inject
from control_plane.cli.options import example, option_of
from control_plane.cli.policy import validate
from control_plane.cli.run import run
from control_plane.cli.serve import serve
from control_plane.cli.terminal import complain
from control_plane.cli.version import version
from control_plane.cli.watch import watch
from control_plane.errors import InvalidField, PriorityError

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(
    invoke_without_command=True,
    context_settings=_CONTEXT,
    epilog=example(
        "vllm-priority demo\nvllm-priority run --role engine --upstream 127.0.0.1:8001 --listen 0.0.0.0:18001"
    ),
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Request priorities on the vLLM routes that ignore the X-Vllm-Priority header."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (config, demo, doctor, explain_command, inject, run, serve, validate, version, watch):
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point."""
    try:
        status = cli.main(args=arguments, prog_name="vllm-priority", standalone_mode=False)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "vllm-priority"
        message = " ".join(error.format_message().split())
        complain(f"{path}: {message} (see {path} --help)")
        sys.exit(2)
    except click.ClickException as error:
        complain(f"vllm-priority: {error.format_message()}")
        sys.exit(2)
    except InvalidField as error:
        complain(f"vllm-priority: {option_of(error.field)}: {error.problem}")
        sys.exit(error.exit_status)
    except PriorityError as error:
        complain(f"vllm-priority: {error}")
        sys.exit(error.exit_status)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # The reader went, as `| head` does: nothing is left to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)
