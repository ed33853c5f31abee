"""Finds the templates and the Lua: inside an installed wheel, or beside the package in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder `envoy` or `lua`."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def read_text(name: str, file: str) -> str:
    """The text of one file of `folder(name)`."""
    return (folder(name) / file).read_text(encoding="utf-8")
