"""Joins lua/*.lua and a policy's settings into one script that needs no `require`.

Envoy Gateway and Istio run a filter's script with `require` and `load` taken away, and Envoy's
own way to hand a script its settings differs by version (LuaPerRoute.filter_context from 1.36 on,
Lua.filter_context from 1.40 on, neither by ECDS on all). One literal table at the top of the script
works on all of them, is read once per worker and never per request, and is data: written here by a
serialiser, never by hand.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal

from control_plane.package_data import read_text

# What each file is handed, as its `...`; a script is what its file needs, in that order, and the file.
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "json_edit": (),
    "priority": (),
    "buffer": ("json_edit",),
    "report": ("settings",),
    "answer": ("settings", "json_edit", "priority", "buffer", "report"),
    "filter": ("settings", "json_edit", "priority", "buffer", "report", "answer"),
    "behind": ("report", "answer"),
}

# A line that is nothing else.
_COMMENT = re.compile(r"^ *--.*\n", re.MULTILINE)

Setting = str | int | bool | None | Mapping[str, "Setting"]
Script = Literal["filter", "behind"]


def bundle(settings: Mapping[str, Setting], script: Script = "filter", *, comments: bool = True) -> str:
    """A whole script for these settings. Keys with a None value are left out: nil in Lua.

    `comments`: whether it is for people too. Without them it is a fifth shorter.
    """
    parts = [f"local settings = {lua_literal(settings)}\n"]
    for name, needs in _NEEDS.items():
        if name in ("filter", "behind") and name != script:
            continue
        head = "" if name == script else f"local {name} = "
        parts.append(f"-- lua/{name}.lua\n{head}(function(...)\n{_source(name)}end)({', '.join(needs)});\n")
    return "\n".join(parts) if comments else _COMMENT.sub("", "\n".join(parts))


def lua_literal(value: Setting) -> str:
    """`value` as a Lua expression; the same text for the same value, whatever the order of its keys."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _quoted(value)
    if value is None:
        return "nil"
    items = (f"[{_quoted(key)}] = {lua_literal(value[key])}" for key in sorted(value) if value[key] is not None)
    return "{ " + ", ".join(items) + " }"


def _quoted(text: str) -> str:
    """A Lua string of printable ASCII: every other byte as \\ddd, which no context can misread."""
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03d}" for b in text.encode()) + '"'


@cache
def _source(name: str) -> str:
    return read_text("lua", f"{name}.lua")
