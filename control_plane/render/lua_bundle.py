"""Joins lua/*.lua and a policy's settings into one script that needs no `require`.

Envoy Gateway and Istio run a filter's script with `require` and `load` taken away, and Envoy's
own ways to hand a script its settings differ by version (Lua.filter_context exists from 1.40 on) or do not
work by ECDS (LuaPerRoute.filter_context). One literal table at the top of the script
works on all of them, is read once per worker and never per request, and is data: written here by a
serialiser, never by hand.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Literal

from control_plane.package_data import read_text
from control_plane.render.lua_packing import self_unpacking

# What each file receives as its `...`. A script consists of its own files and of what they need, in this order.
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "json_scan": (),
    "json_edit": ("json_scan",),
    "body": ("json_edit",),
    "memory": (),
    "priority": (),
    "body_rule": ("priority",),
    "trust": (),
    "claims": (),
    "report": ("settings",),
    "rejection": ("settings", "priority"),
    "response": ("settings", "json_edit", "priority", "body", "report"),
    "filter": (
        "settings",
        "json_edit",
        "priority",
        "body_rule",
        "body",
        "report",
        "rejection",
        "response",
        "memory",
        "trust",
        "claims",
    ),
    "deferred": ("body", "rejection", "report"),
    "on_response": ("response",),
    "poll_token": ("settings",),
}

# Comments, indentation and empty lines. No text in the Lua files has several lines, or two dashes after a blank.
_FOR_PEOPLE = re.compile(r"^\s*--.*\n|\s+--\s.*$|^\s+", re.MULTILINE)

Setting = str | int | bool | None | Mapping[str, "Setting"] | tuple["Setting", ...]
Script = Literal["filter", "deferred", "poll_token"]


def bundle(
    settings: Mapping[str, Setting], script: Script = "filter", *, sees_responses: bool = False, comments: bool = True
) -> str:
    """Return a whole script for these settings. Keys whose value is None are left out, which is nil in Lua.

    `sees_responses`: whether Envoy calls it for responses, too. `comments`: whether to keep comments and indentation.
    """
    entries = {script, "on_response"} if sees_responses else {script}
    needed: set[str] = set(entries)
    for name in reversed(list(_NEEDS)):
        needed.update(_NEEDS[name] if name in needed else ())
    parts = [f"local settings = {lua_literal(settings)}\n"]
    for name in _NEEDS:
        if name in needed:
            if name in _OPTIONAL and name not in parts_of(settings):
                parts.append(f"local {name}\n")  # most policies need none
                continue
            parts.append(_call(name, "" if name in entries else f"local {name} = "))
    text = "\n".join(parts)
    return text if comments else _without_comments(text)


_ENTRIES: Mapping[str, Script] = {"filter": "filter", "deferred": "deferred", "on_response": "deferred"}


_OPTIONAL = frozenset({"trust", "claims"})


def parts_of(settings: Mapping[str, Setting]) -> frozenset[str]:
    """Return the optional files that these settings need."""
    trust = settings.get("trust")
    claims = isinstance(trust, Mapping) and trust.get("claims")
    needed = {"trust": trust or settings.get("tenant_identities"), "claims": claims}
    return frozenset(name for name in needed if needed[name])


@cache
def library(optional: frozenset[str]) -> str:
    """Return one text for both filters of an Envoy: a function of the settings and of the script's name, packed.

    `optional`: the optional files that it has, see `parts_of`.
    """
    parts = ["local settings, script = ...\n"]
    for name in _NEEDS:
        if name == "poll_token":  # A script of its own, for another filter: it would replace envoy_on_request here.
            continue
        if name in _ENTRIES:
            parts.append(f'if script == "{_ENTRIES[name]}" then\n{_call(name)}end\n')
        elif name in _OPTIONAL and name not in optional:
            parts.append(f"local {name}\n")
        else:
            parts.append(_call(name, f"local {name} = "))
    return self_unpacking(_without_comments("\n".join(parts)))


def loader(settings: Mapping[str, Setting], script: Script, variable: str) -> str:
    """Return a script that finds its `library()` in an environment variable of Envoy's process."""
    source = f'assert(loadstring(os.getenv("{variable}"), "={variable}"))'
    return f'local settings = {lua_literal(settings)}\n{source}(settings, "{script}")\n'


def _call(name: str, head: str = "") -> str:
    """A file as a function that is called at once with what the file needs."""
    return f"-- lua/{name}.lua\n{head}(function(...)\n{_source(name)}end)({', '.join(_NEEDS[name])});\n"


def _without_comments(text: str) -> str:
    return _FOR_PEOPLE.sub("", text)


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
    if isinstance(value, tuple):
        return "{ " + ", ".join(map(lua_literal, value)) + " }"
    items = (f"[{_quoted(key)}] = {lua_literal(value[key])}" for key in sorted(value) if value[key] is not None)
    return "{ " + ", ".join(items) + " }"


def _quoted(text: str) -> str:
    r"""A Lua string of printable ASCII: every other byte as \ddd, which no context can misread."""
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\{b:03d}" for b in text.encode()) + '"'


@cache
def _source(name: str) -> str:
    return read_text("lua", f"{name}.lua")
