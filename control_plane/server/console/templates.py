"""Fills in the console's pages. Everything that is placed in them is escaped."""

import time
import unicodedata
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import jinja2

_FOLDER = Path(__file__).resolve().parent
STATIC = {"style.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}
"""The files that pages load, with their media types."""


def render(template: str, **values: Any) -> str:
    """Return a page with these values."""
    return _environment().get_template(f"{template}.html.j2").render(values)


@cache
def static(name: str) -> bytes:
    """Return the content of one of STATIC."""
    return (_FOLDER / "static" / name).read_bytes()


def visible(text: str) -> str:
    r"""Return a text in which each character can be seen: controls, and those that turn the text around, as \u202e."""
    return "".join(
        char if char in "\n\t" or (char.isprintable() and unicodedata.category(char) != "Mn") else _escaped(char)
        for char in text
    )


def shortened(text: str, limit: int = 80) -> str:
    """Return a visible text of at most `limit` characters and an ellipsis. The end stays: it tells pods apart."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-(limit - limit // 2) :]}"
    return visible(text)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _iso(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _ago(seconds: float) -> str:
    since = max(0, int(time.time() - seconds))
    return f"{since} s ago" if since < 120 else f"{since // 60} min ago" if since < 7200 else f"{since // 3600} h ago"


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER / "templates"),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(clock=_clock, iso=_iso, ago=_ago, short=shortened, visible=visible)
    environment.globals["file"] = lambda name: f"/console/{name}?v={sha256(static(name)).hexdigest()[:8]}"
    return environment
