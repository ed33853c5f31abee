"""Writes messages on standard error."""

import click


def complain(message: str) -> None:
    """On stderr, as one line: a path or a value that it names may hold line breaks, or worse for a terminal."""
    click.echo("".join(c if c.isprintable() else repr(c)[1:-1] for c in message), err=True)
