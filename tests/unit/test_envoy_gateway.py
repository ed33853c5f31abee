"""The target envoy-gateway: what Gateway API's schema and Envoy Gateway's own validator of scripts ask for."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import lupa.lua51 as lua51
import lupa.luajit21 as luajit21
import pytest
import yaml

from control_plane.address import Address
from control_plane.errors import BadInput
from control_plane.policy.load import parse_policies
from control_plane.policy.model import Policy
from control_plane.render.placement import Attachment, Placement
from control_plane.render.targets import render
from control_plane.vllm import ROLES, Role
from tests.crd_schemas import problems

POLICIES = {
    "default": "{}",
    "rich": "default: 3\nclasses: {batch: 10}\nrange: {min: -9, max: 10, outside: clamp}\n"
    "limits: {max_body_bytes: 8}\nroutes: {extra: [/example_value]}\n",
    "clamping": "body: clamp\nrange: {min: 0}\ntenants: {header: x-tenant, rules: {batch: {default: 10}}}\n",
    "quiet": "report_header: null\non_invalid: ignore\non_unmovable: forward\nkeep_header: true\n",
}


def _policy(text: str) -> Policy:
    return parse_policies(text).default


def _objects(policy: str = "{}", role: Role = "render", **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    placement = replace(Placement.default(role, "envoy-gateway"), **changes)
    route, extension = render("envoy-gateway", _policy(policy), placement)
    return route, extension


def _with_extra_paths(count: int) -> str:
    return json.dumps({"routes": {"extra": [f"/x/{number}" for number in range(count)]}})


def _paths(route: dict[str, Any]) -> list[str]:
    return [match["path"]["value"] for rule in route["spec"]["rules"] for match in rule["matches"]]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_the_route_passes_the_published_schema(policy: str, role: Role) -> None:
    for objects in (
        _objects(policy, role),
        _objects(policy, role, policy_name="night", attachment=Attachment("ml", {}, "infra/eg")),
    ):
        assert problems(objects[0]) == []


def test_more_paths_than_a_rule_holds_make_more_rules() -> None:
    route, _ = _objects(_with_extra_paths(100), "engine")
    assert problems(route) == []
    assert len(_paths(route)) == 102
    assert [len(rule["matches"]) for rule in route["spec"]["rules"]][:2] == [8, 8]


def test_more_paths_than_a_route_holds_are_refused() -> None:
    with pytest.raises(BadInput, match=r"routes\.engine: 152 paths .*Use 1 to 128\."):
        _objects(_with_extra_paths(150), "engine")


def test_a_role_without_a_path_of_its_own_is_refused() -> None:
    with pytest.raises(BadInput, match=r"routes\.render: 0 paths"):
        _objects("routes: {render: []}", "render")


@pytest.mark.parametrize("policy", ["{}", "routes: {extra: [/v1/embeddings, /v1/score]}", POLICIES["rich"]])
def test_each_path_has_one_backend_at_a_gateway(policy: str) -> None:
    render_paths, engine_paths = (_paths(_objects(policy, role)[0]) for role in ROLES)
    assert not set(render_paths) & set(engine_paths)
    every = {path for role in ROLES for path in _policy(policy).routes.for_role(role)}
    assert {*render_paths, *engine_paths} == every


def test_a_path_that_no_url_has_letters_for_is_percent_encoded() -> None:
    route, extension = _objects("routes: {extra: [/größe, '/a:b']}", "engine")
    assert _paths(route)[-2:] == ["/gr%C3%B6%C3%9Fe", "/a:b"]
    assert problems(route) == []
    assert r"/gr\195\182\195\159e" in extension["spec"]["lua"][0]["inline"], "the script reads decoded paths"


def test_the_policy_is_attached_to_the_route_and_nothing_times_a_queue_out() -> None:
    route, extension = _objects()
    assert extension["spec"]["targetRefs"] == [
        {"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "name": route["metadata"]["name"]}
    ]
    assert {rule["timeouts"]["request"] for rule in route["spec"]["rules"]} == {"0s"}
    assert {match["method"] for rule in route["spec"]["rules"] for match in rule["matches"]} == {"POST"}


@pytest.mark.parametrize(
    ("host", "service"),
    [
        ("vllm", {"name": "vllm"}),
        ("vllm.ml", {"name": "vllm", "namespace": "ml"}),
        ("vllm.ml.svc", {"name": "vllm", "namespace": "ml"}),
        ("vllm.ml.svc.cluster.local", {"name": "vllm", "namespace": "ml"}),
    ],
)
def test_the_upstream_is_a_service(host: str, service: Mapping[str, str]) -> None:
    route, _ = _objects(upstream=Address(host, 80))
    assert route["spec"]["rules"][0]["backendRefs"] == [{**service, "port": 80}]
    assert problems(route) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "vllm.example.com", "Vllm", "a_b", "-a", "vllm."])
def test_what_is_no_service_is_refused(host: str) -> None:
    with pytest.raises(BadInput, match="upstream: .* is not a valid Service. Use NAME:PORT or NAME.NAMESPACE:PORT"):
        _objects(upstream=Address(host, 80))


@pytest.mark.parametrize(
    ("gateway", "parent"), [("eg", {"name": "eg"}), ("infra/inference", {"name": "inference", "namespace": "infra"})]
)
def test_the_route_hangs_on_the_named_gateway(gateway: str, parent: Mapping[str, str]) -> None:
    route, _ = _objects(attachment=Attachment.parse("ml", [], gateway))
    assert route["spec"]["parentRefs"] == [parent]
    assert route["metadata"]["namespace"] == "ml"


@pytest.mark.parametrize("gateway", ["", "a/b/c", "/eg", "eg/", "Eg", "a b"])
def test_what_is_no_gateway_is_refused(gateway: str) -> None:
    with pytest.raises(BadInput, match="gateway: .* is not a valid Gateway. Use NAME or NAMESPACE/NAME"):
        Attachment.parse(None, [], gateway)


# What Envoy Gateway runs a script with before it accepts it (internal/gatewayapi/luavalidator, at 1.9): the whole
# script, then one of its two functions on a handle that answers every question the same way. It runs in the
# controller, so what could reach beyond the script is taken away first. The handle has no stats(), and the Lua is
# gopher-lua: that of 5.1, with none of LuaJIT's libraries.
_TAKEN_AWAY = (
    "require", "load", "loadstring", "loadfile", "dofile", "package", "debug", "rawget", "rawset", "getmetatable",
    "setmetatable", "getfenv", "setfenv", "newproxy", "module", "_G", "bit", "jit", "ffi",
)  # fmt: skip

_HANDLE = """
local told, chunks = ...
local function nothing() end
local headers = {
  get = function(_, name) return told[name] or told["*"] end,
  getAtIndex = function(_, name) return told[name] or told["*"] end,
  getNumValues = function() return 1 end,
  add = nothing, remove = nothing, replace = nothing,
}
local buffer = {
  length = function() return 10 end,
  getBytes = function() return "example_bytes" end,
  setBytes = nothing,
}
local metadata = { get = function() return "get_result" end, set = nothing }
return {
  headers = function() return headers end,
  trailers = function() return headers end,
  body = function() return buffer end,
  bodyChunks = function()
    local left = chunks
    return function()
      left = left - 1
      return left >= 0 and buffer or nil
    end
  end,
  streamInfo = function() return { dynamicMetadata = function() return metadata end } end,
  respond = function(_, fields) return "status " .. fields[":status"] end,
  httpCall = function(_, cluster) error("no cluster " .. cluster) end,
}
"""


def _validate(script: str, function: str, told: Mapping[str, str], chunks: int = 3) -> None:
    for kind in (lua51, luajit21):
        lua = kind.LuaRuntime(register_eval=False, register_builtins=False)
        lua.globals()["StreamHandle"] = lua.execute(_HANDLE, lua.table_from(dict(told)), chunks)
        lua.execute("io.popen, os.execute, os.exit = nil\n" + "\n".join(f"{name} = nil" for name in _TAKEN_AWAY))
        lua.execute(f"{script}\n{function}(StreamHandle)")


SCRIPTS = [(name, role, index) for name in POLICIES for role in ROLES for index in ("0", "1")]


@pytest.fixture(params=SCRIPTS, ids="-".join)
def script(request: pytest.FixtureRequest) -> Iterator[str]:
    """The main filter's script, or the deferred one's."""
    name, role, index = request.param
    yield _objects(POLICIES[name], role)[1]["spec"]["lua"][int(index)]["inline"]


def _functions(script: str) -> list[str]:
    """The validator calls each that the script's text contains (internal/gatewayapi/luavalidator)."""
    return [name for name in ("envoy_on_request", "envoy_on_response") if name in script]


def test_the_script_passes_envoy_gateways_validator(script: str) -> None:
    for function in _functions(script):
        _validate(script, function, {"*": "example_value"})


RENDER = {":path": "/v1/chat/completions/render", ":method": "POST", "content-type": "application/json"}


@pytest.mark.parametrize("chunks", [0, 1, 3])
@pytest.mark.parametrize(
    "told",
    [
        {"*": "example_value", ":path": RENDER[":path"]},
        {"*": "example_value", ":path": RENDER[":path"], ":method": "POST"},
        {"*": "example_value", **RENDER},
        {"*": "example_value", **RENDER, "x-vllm-priority": "5"},
        {"*": "example_value", **RENDER, "x-vllm-priority": "5", "content-encoding": "identity"},
        {"*": "7", **RENDER},
        {"*": "7", **RENDER, ":path": "/v1/messages/render"},
        {"*": "5,6", **RENDER},
    ],
    ids=str,
)
def test_the_script_stands_a_handle_that_is_further_from_the_truth(
    script: str, told: Mapping[str, str], chunks: int
) -> None:
    for function in _functions(script):
        _validate(script, function, told, chunks)


def test_the_stand_in_for_the_validator_refuses_what_the_real_one_does() -> None:
    for script in (
        "local f = require('ffi')\nfunction envoy_on_request(h) end",
        "function envoy_on_request(h) h:stats() end",
        "function envoy_on_request(h) return tonumber(h:headers():get('content-length')) > 1 end",
        "local t = setmetatable({}, {})\nfunction envoy_on_request(h) end",
        "local band = bit.band\nfunction envoy_on_request(h) end",
        "function envoy_on_request(h) goto out ::out:: end",
    ):
        with pytest.raises((lua51.LuaError, luajit21.LuaError)):
            _validate(script, "envoy_on_request", {"*": "example_value"})


# Where Envoy Gateway's API has them: https://gateway.envoyproxy.io/latest/api/extension_types/
FIELDS = {
    "ClientTrafficPolicy": {
        "connection.bufferLimit",
        "http2.initialStreamWindowSize", "http2.initialConnectionWindowSize",
    },
    "BackendTrafficPolicy": {"timeout.http.connectionIdleTimeout"},
}  # fmt: skip


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    if not isinstance(value, dict):
        yield path
        return
    for key, below in value.items():
        yield from _leaves(below, f"{path}.{key}" if path else key)


def test_the_policies_of_the_docs_name_fields_of_the_api_and_do_not_conflict() -> None:
    """Of two ClientTrafficPolicies on one Gateway, Envoy Gateway accepts one and marks the other Conflicted."""
    page = (Path(__file__).parents[2] / "docs" / "guides" / "envoy-gateway.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    policies = [d for block in blocks for d in yaml.safe_load_all(block) if d.get("kind") in FIELDS]
    targets = [(d["kind"], target["kind"], target["name"]) for d in policies for target in d["spec"].pop("targetRefs")]
    assert len(targets) == len(set(targets))
    found = {kind: {leaf for d in policies if d["kind"] == kind for leaf in _leaves(d["spec"])} for kind in FIELDS}
    assert found == FIELDS
