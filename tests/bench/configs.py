"""Envoy configs of the benchmark. All come from one bootstrap, so that only the filter differs."""

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from processes import BenchError, Config, Cores, Process, free_port, start_envoy

Filter = dict[str, Any]
"""One entry of an http_filters list."""

_TYPES = "type.googleapis.com/envoy.extensions"
_HCM = f"{_TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager"
_LUA = f"{_TYPES}.filters.http.lua.v3.Lua"
_ROUTER = {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{_TYPES}.filters.http.router.v3.Router"}}

HEADER_ONLY = """
function envoy_on_request(handle)
  local value = handle:headers():get("x-vllm-priority")
end
"""
"""The least that a Lua filter can do and still know whether it is wanted: contender (b)."""


def _listener(port: int, stat_prefix: str, filters: list[Filter], route: dict[str, Any]) -> dict[str, Any]:
    manager = {
        "@type": _HCM,
        "stat_prefix": stat_prefix,
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [*filters, _ROUTER],
    }
    return {
        "name": stat_prefix,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }


def drain(port: int, admin: int) -> Config:
    """An upstream that reads the whole of any body and answers 200 with two bytes.

    `direct_response` alone answers as soon as the headers are in and closes the connection on the rest of the body.
    The buffer filter in front of it holds the request until its last byte has come; it moves Envoy's slices and copies
    nothing.
    """
    holder = {
        "name": "envoy.filters.http.buffer",
        "typed_config": {"@type": f"{_TYPES}.filters.http.buffer.v3.Buffer", "max_request_bytes": 2**30},
    }
    answer = {"match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": "{}"}}}
    return {
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin}}},
        "static_resources": {"listeners": [_listener(port, "drain", [holder], answer)]},
    }


def lua_filter(script: str) -> Filter:
    """The Lua filter on this script."""
    return {"name": "lua", "typed_config": {"@type": _LUA, "default_source_code": {"inline_string": script}}}


def product() -> Config:
    """The sidecar's own bootstrap, as `vllm-priority config --role engine` writes it, with the default policy."""
    from control_plane.address import Address
    from control_plane.policy.model import Policy
    from control_plane.render.bootstrap import bootstrap
    from control_plane.render.placement import Placement

    anywhere = Address("127.0.0.1", 1)
    config: Config = bootstrap(Policy(), Placement("engine", anywhere, anywhere, anywhere, access_log="/dev/null"))
    # Every contender writes a line a request: the log is the listener's, and would otherwise count against one only.
    for manager in _managers(config):
        for log in manager.get("access_log", []):
            log.pop("filter", None)
    return config


def is_ours(entry: Filter) -> bool:
    """Whether this is the sidecar's filter."""
    return entry.get("name") == "vllm_priority"


def with_filter(
    base: Config,
    replacement: list[Filter],
    clusters: list[dict[str, Any]] | None = None,
    *,
    answers: bool = False,
) -> Config:
    """`base` with its own Lua filter replaced by these filters, and these clusters added. All else is the same.

    Two things that the routes do are ours as well, and go with it: the report's header and the second filter.
    `answers`: the header stays, for a filter that leaves a report.
    """
    config = copy.deepcopy(base)
    found = 0
    for manager in _managers(config):
        filters = manager["http_filters"]
        if any(is_ours(entry) for entry in filters):
            found += 1
            at = next(index for index, entry in enumerate(filters) if is_ours(entry))
            filters[at : at + 1] = copy.deepcopy(replacement)
            for route in manager["route_config"]["virtual_hosts"][0]["routes"]:
                route.get("typed_per_filter_config", {}).pop("vllm_priority_deferred", None)
                if not answers:
                    route.pop("response_headers_to_add", None)
    if found != 1:
        raise BenchError(f"the sidecar's bootstrap has its filter in {found} listeners; the benchmark expects one")
    config["static_resources"].setdefault("clusters", []).extend(copy.deepcopy(clusters or []))
    return config


def placed(config: Config, port: int, upstream: int) -> Config:
    """`config` listening on `port`, with its upstream at `upstream`, and every other port a free one."""
    config = copy.deepcopy(config)
    resources = config.get("static_resources", {})
    listeners = resources.get("listeners", [])
    clusters = resources.get("clusters", [])
    if not listeners or not clusters:
        raise BenchError("the config has no static listener or no static cluster: it cannot be put before an upstream")
    for index, listener in enumerate(listeners):
        address = listener["address"]["socket_address"]
        address["address"], address["port_value"] = "127.0.0.1", port if index == 0 else free_port()
    main = next((cluster for cluster in clusters if cluster["name"] == "upstream"), clusters[0])
    for group in main["load_assignment"]["endpoints"]:
        for endpoint in group["lb_endpoints"]:
            address = endpoint["endpoint"]["address"]["socket_address"]
            address["address"], address["port_value"] = "127.0.0.1", upstream
    if "admin" in config:
        address = config["admin"]["address"]["socket_address"]
        address["address"], address["port_value"] = "127.0.0.1", free_port()
    return config


def load_config(named: str) -> Config:
    """A config from the command line.

    `none`, `header-only` or `ours`; a .lua file, put in place of our filter; or a bootstrap in YAML or JSON.
    """
    if named == "ours":
        return product()
    if named == "none":
        return with_filter(product(), [])
    if named == "header-only":
        return with_filter(product(), [lua_filter(HEADER_ONLY)])
    path = Path(named)
    if not path.exists():
        raise BenchError(f"{named}: no such file; allowed: none, header-only, ours, a .lua script, an Envoy bootstrap")
    text = path.read_text()
    if path.suffix == ".lua":
        config = product()
        for manager in _managers(config):
            for entry in filter(is_ours, manager["http_filters"]):
                entry["typed_config"]["default_source_code"]["inline_string"] = text
        return config
    loaded = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    if not isinstance(loaded, dict):
        raise BenchError(f"{named}: not an Envoy bootstrap")
    return loaded


def _managers(config: Config) -> list[dict[str, Any]]:
    return [
        entry["typed_config"]
        for listener in config["static_resources"].get("listeners", [])
        for chain in listener.get("filter_chains", [])
        for entry in chain["filters"]
        if entry["typed_config"]["@type"].endswith("HttpConnectionManager")
    ]


@contextmanager
def side_by_side(
    envoy: str, named: Mapping[str, str], cores: Cores, folder: Path
) -> Iterator[tuple[Process, dict[str, tuple[Process, int]]]]:
    """A drain, and in front of it one Envoy for each name's config: the drain, and name -> Envoy and its port."""
    drain_port = free_port()
    with ExitStack() as running:

        def start(config: Config, name: str, port: int, core: str | None) -> Process:
            return running.enter_context(start_envoy(envoy, config, name, port, folder, core))

        upstream = start(drain(drain_port, free_port()), "drain", drain_port, cores.upstream)
        proxies = {}
        for name, config in named.items():
            port = free_port()
            proxies[name] = start(placed(load_config(config), port, drain_port), name, port, cores.proxy), port
        yield upstream, proxies
