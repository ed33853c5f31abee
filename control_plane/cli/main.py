"""The command line: its commands, and how their errors are reported."""

import os
import re
import sys
from collections.abc import Sequence

import click

from control_plane import __version__
from control_plane.cli.completion import completion
from control_plane.cli.config import config
from control_plane.cli.demo import demo
from control_plane.cli.doctor import doctor
from control_plane.cli.explain import explain_command
from control_plane.cli.inject import inject
from control_plane.cli.options import example, option_of, what_to_use
from control_plane.cli.policy import validate
from control_plane.cli.run import run
from control_plane.cli.serve import serve
from control_plane.cli.terminal import complain
from control_plane.cli.version import version
from control_plane.cli.watch import watch
from control_plane.errors import PriorityError

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


@click.group(
    invoke_without_command=True,
    context_settings=_CONTEXT,
    epilog=example(
        "vllm-priority demo\nvllm-priority run --role engine --upstream 127.0.0.1:8001 --listen 0.0.0.0:18001"
    ),
)
@click.version_option(__version__, message="%(prog)s %(version)s", help="Print the version and exit.")
@click.pass_context
def cli(context: click.Context) -> None:
    """Request priorities on the vLLM routes that ignore the X-Vllm-Priority header."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (completion, config, demo, doctor, explain_command, inject, run, serve, validate, version, watch):
    # click caches a command's --help with the options of whichever context asked for it first.
    command.context_settings.update(_CONTEXT)
    cli.add_command(command)


def _name(parameter: click.Parameter) -> str:
    return parameter.opts[-1] if isinstance(parameter, click.Option) else parameter.human_readable_name


def _usage_problem(error: click.UsageError) -> str:
    """Return what is wrong in full sentences, which click's own messages are not."""
    match error:
        case click.MissingParameter(param=click.Parameter() as missing):
            return f"{_name(missing)}: not set. {what_to_use(missing)}"
        case click.BadParameter(param=click.Parameter() as wrong):
            return f"{_name(wrong)}: not valid. {what_to_use(wrong)}"
        case click.NoSuchOption():
            close = f" Did you mean {error.possibilities[0]}?" if error.possibilities else ""
            return f"{error.option_name!r} is not an option of this command.{close}"
        case click.exceptions.NoSuchCommand():
            return f"{error.command_name!r} is not a command. It must be one of: {', '.join(sorted(cli.commands))}."
    message = error.format_message()
    extra = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", message)
    return f"{extra[1]!r} is not expected. Every value must follow its option." if extra else message


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line, by default that of this process, and exit."""
    try:
        status = cli.main(args=arguments, prog_name="vllm-priority", standalone_mode=False)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "vllm-priority"
        complain(f"{command}: {_usage_problem(error)} See {command} --help.")
        sys.exit(2)
    except PriorityError as error:
        setting = f"{option_of(error.field)}: " if error.field else ""
        complain(f"vllm-priority: {setting}{error.problem}")
        sys.exit(error.exit_status)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except BrokenPipeError:
        # The reader is gone, as with `| head`, so nobody would read a message.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)
