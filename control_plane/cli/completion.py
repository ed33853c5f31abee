"""The command `completion`."""

import click
from click.shell_completion import BashComplete, FishComplete, ShellComplete, ZshComplete

from control_plane.cli.options import example

_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}


@click.command(
    epilog=example(
        'eval "$(vllm-priority completion bash)"\n'
        "vllm-priority completion fish > ~/.config/fish/completions/vllm-priority.fish"
    )
)
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands, options and files in bash, zsh or fish.

    Evaluate it at the start of your shell, for example in ~/.bashrc.
    """
    # click finds the variable by the name of the program.
    complete = _SHELLS[shell](context.find_root().command, {}, "vllm-priority", "_VLLM_PRIORITY_COMPLETE")
    click.echo(complete.source())
