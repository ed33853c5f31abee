"""One script without require, and settings that reach it as data whatever is in them."""

from collections.abc import Callable
from functools import partial

import lupa.luajit21 as luajit
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from control_plane.policy.load import parse_policies
from control_plane.policy.model import Policy
from control_plane.render.filter import (
    ManagedEnvoy,
    deferred_script,
    environment,
    filter_script,
    filter_settings,
)
from control_plane.render.lua_bundle import Script, Setting, bundle, library, lua_literal
from control_plane.render.lua_packing import self_unpacking
from control_plane.vllm import ROLES, Role


def read_back(value: Setting) -> object:
    """What Lua makes of the literal."""

    def plain(found: object) -> object:
        if isinstance(found, bytes):
            return found.decode("utf-8", "surrogateescape")
        if hasattr(found, "items"):
            return {plain(key): plain(entry) for key, entry in found.items()}
        return found

    lua = luajit.LuaRuntime(encoding=None)
    return plain(lua.execute(f"return {lua_literal(value)}".encode()))


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        (None, "nil"),
        (True, "true"),
        (False, "false"),
        (0, "0"),
        (-5, "-5"),
        ("", '""'),
        ("a b", '"a b"'),
        ('"', '"\\034"'),
        ("\\", '"\\092"'),
        ("\n]]--", '"\\010]]--"'),
        ("1\n2", '"1\\0102"'),
        ("é", '"\\195\\169"'),
        ("\0", '"\\000"'),
        ({}, "{  }"),
        ({"b": 1, "a": {"x": False}, "n": None}, '{ ["a"] = { ["x"] = false }, ["b"] = 1 }'),
    ],
)
def test_a_literal(value: Setting, literal: str) -> None:
    assert lua_literal(value) == literal


texts = st.text(st.characters(exclude_categories=["Cs"]))
values = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | texts, lambda inner: st.dictionaries(texts, inner), max_leaves=20
)


@given(values)
@settings(deadline=None)
def test_lua_reads_back_what_was_written(value: Setting) -> None:
    assert read_back(value) == value
    assert lua_literal(value).isascii()
    assert lua_literal(value).isprintable()


def test_a_literal_does_not_depend_on_the_order_of_its_keys() -> None:
    assert lua_literal({"a": 1, "b": 2}) == lua_literal({"b": 2, "a": 1})


# What Envoy Gateway's and Istio's validators take away, and what no filter needs.
FORBIDDEN = ("require", "load", "loadstring", "dofile", "loadfile", "package", "io", "os", "debug", "ffi", "jit")


@pytest.mark.parametrize("role", ROLES)
def test_the_script_runs_with_nothing_but_the_language(role: Role) -> None:
    lua = luajit.LuaRuntime(encoding=None)
    for name in FORBIDDEN:
        lua.globals()[name.encode()] = None
    before = set(lua.globals())
    lua.execute(filter_script(Policy(), role, "waypoint").encode())
    assert set(lua.globals()) - before == {b"envoy_on_request", b"envoy_on_response"}, "no other global is left"


CLAIMS = {"issuer": "x", "jwks": "https://issuer.test/keys"}


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"trust": {"peers": ["10.0.0.0/8"]}},
        {"trust": {"claims": CLAIMS}},
        {"tenants": {"identity": True, "rules": {"a.test": {}}}},
    ],
)
@pytest.mark.parametrize(
    ("render", "handlers"),
    [
        (partial(filter_script, role="render"), {b"envoy_on_request"}),
        (deferred_script, {b"envoy_on_request", b"envoy_on_response"}),
    ],
)
def test_both_filters_find_their_text_in_the_environment(
    render: Callable[..., str], handlers: set[bytes], text: dict[str, object]
) -> None:
    policy = Policy.model_validate(text)
    variables = {name.encode(): text.encode() for name, text in environment(policy).items()}
    lua = luajit.LuaRuntime(encoding=None)
    lua.globals()[b"os"][b"getenv"] = variables.get
    before = set(lua.globals())
    lua.execute(render(policy, place=ManagedEnvoy.of(policy, shares_script=True)).encode())
    assert set(lua.globals()) - before == handlers


@pytest.mark.parametrize("path", ["/]]--", '/"x', "/\\n", "/'", "/é", "/${x}", "/$(x)", "/--[["])
def test_a_route_cannot_break_out_of_its_literal(path: str) -> None:
    policy = Policy.model_validate({"routes": {"extra": [path]}})
    lua = luajit.LuaRuntime(encoding=None)
    lua.execute(bundle(filter_settings(policy, "render", "mesh")).encode())
    assert read_back(filter_settings(policy, "render", "mesh")["routes"])[path] == "request"  # type: ignore[index]


@pytest.mark.parametrize("script", ["filter", "deferred"])
def test_without_comments_it_is_the_same_program(script: Script) -> None:
    read, bare = (bundle(filter_settings(Policy(), "engine", "mesh"), script, comments=kept) for kept in (True, False))
    assert "\n--" in read
    assert len(bare) < 0.85 * len(read)
    lua = luajit.LuaRuntime(encoding=None)
    compiled = lua.eval(b"function(script) return string.dump(assert(loadstring(script)), 'sd') end")
    assert compiled(bare.encode()) == compiled(read.encode())


def test_the_same_policy_makes_the_same_script() -> None:
    one = parse_policies("{classes: {a: 1, b: 2}, default: a}").default
    other = parse_policies("{default: a, classes: {b: 2, a: 1}}").default
    assert bundle(filter_settings(one, "render", "mesh")) == bundle(filter_settings(other, "render", "mesh"))


def unpacked(script: str) -> str:
    """What a packed script loads, by running it in LuaJIT."""
    lua = luajit.LuaRuntime()
    found: list[str] = []

    def load(text: str, _: str) -> object:
        found.append(text)
        return lua.eval("function() end")

    lua.globals().loadstring = load
    lua.execute(script)
    return found[0]


@given(st.text(st.characters(min_codepoint=10, max_codepoint=126, exclude_characters="!\r"), max_size=300))
@settings(deadline=None)
@example("")
@example("abcde" * 500)
@example("abcdefgh" + "x" * 9000 + "abcdefgh")
@example("\n\nlocal a = 1\n")
def test_a_packed_script_is_the_same_text_once_it_runs(text: str) -> None:
    assert unpacked(self_unpacking(text)) == text


def test_errors_have_the_line_numbers_of_the_text_that_was_packed() -> None:
    lua = luajit.LuaRuntime()
    with pytest.raises(luajit.LuaError, match=r"vllm_priority:3: here"):
        lua.execute(self_unpacking("\n\nerror('here')\n"))


@pytest.mark.parametrize("text", ["a!", "a\r\nb", "\u00e9", "]==]"])
def test_a_text_that_cannot_be_packed_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="a script to pack has no"):
        self_unpacking(text)


@pytest.mark.parametrize("optional", [frozenset(), frozenset({"trust"}), frozenset({"trust", "claims"})])
def test_the_shared_text_has_no_script_but_those_of_the_two_filters(optional: frozenset[str]) -> None:
    """The script of the polls defines envoy_on_request, too, and would replace the one that edits requests."""
    text = unpacked(library(optional))
    assert "token_file" not in text
    assert text.count("function envoy_on_request(") == 2
