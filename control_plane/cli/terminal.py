"""Writes messages on standard error."""

import click


def complain(message: str) -> None:
    """Print a message on standard error, in one line: it may quote line breaks and control characters."""
    click.echo("".join(c if c.isprintable() else repr(c)[1:-1] for c in message), err=True)
