"""Proxies that are not ours, with the filter in them: configs of the shape that Istio and Envoy Gateway give.

The shape is what matters to a filter: where it stands, what stands before it, how paths, bodies and timeouts are
treated. It was read from the two projects' own generators (istio/istio pilot/pkg/networking/core/listener_builder.go
and listener_inbound.go; envoyproxy/gateway internal/xds/translator). What only their own Envoy builds or control
planes can do is left out: Istio's peer metadata and stats filters, mTLS, the redirect to port 15006.
"""

import json
from dataclasses import replace
from typing import Any

import yaml

from control_plane.address import Address
from control_plane.policy.model import Policy
from control_plane.render.placement import Placement
from control_plane.render.targets import render
from control_plane.vllm import Role

from .sidecars import RunningSidecar

_HCM = "envoy.filters.network.http_connection_manager"
_API = "type.googleapis.com/envoy.extensions.filters"

_ISTIO = """
name: virtualInbound
traffic_direction: INBOUND
listener_filters:
- name: envoy.filters.listener.tls_inspector
  typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.listener.tls_inspector.v3.TlsInspector}
- name: envoy.filters.listener.http_inspector
  typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.listener.http_inspector.v3.HttpInspector}
filter_chains:
- name: virtualInbound-blackhole
  filter_chain_match: {destination_port: 15006}
  filters: &tcp
  - name: envoy.filters.network.tcp_proxy
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
      stat_prefix: BlackHoleCluster
      cluster: BlackHoleCluster
- name: 0.0.0.0_8000
  filter_chain_match: {transport_protocol: raw_buffer, application_protocols: [http/1.0, http/1.1, h2c]}
  filters: &http
  - name: envoy.filters.network.http_connection_manager
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
      stat_prefix: inbound_0.0.0.0_8000;
      server_name: istio-envoy
      use_remote_address: false
      forward_client_cert_details: APPEND_FORWARD
      set_current_client_cert_details: {subject: true, dns: true, uri: true}
      normalize_path: true
      path_with_escaped_slashes_action: KEEP_UNCHANGED
      stream_idle_timeout: 0s
      proxy_100_continue: true
      upgrade_configs: [{upgrade_type: websocket}]
      http_filters:
      - name: envoy.filters.http.rbac
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.http.rbac.v3.RBAC
          rules: {action: DENY, policies: {}}
      - name: envoy.filters.http.grpc_stats
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.http.grpc_stats.v3.FilterConfig
          emit_filter_state: true
          stats_for_all_methods: false
      - name: envoy.filters.http.fault
        typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault}
      - name: envoy.filters.http.cors
        typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.cors.v3.Cors}
      - name: envoy.filters.http.router
        typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
      route_config:
        name: inbound|8000||
        validate_clusters: false
        virtual_hosts:
        - name: inbound|http|8000
          domains: ["*"]
          routes:
          - name: default
            match: {prefix: /}
            decorator: {operation: "vllm.default.svc.cluster.local:8000/*"}
            route:
              cluster: inbound|8000||
              timeout: 0s
              max_stream_duration: {max_stream_duration: 0s, grpc_timeout_header_max: 0s}
              retry_policy: {retry_on: reset-before-request, num_retries: 2}
- name: virtualInbound-catchall-http
  filter_chain_match: {transport_protocol: raw_buffer}
  filters: *http
"""  # noqa: E501

_GATEWAY = """
name: default/eg/http
per_connection_buffer_limit_bytes: 134217728
filter_chains:
- filters:
  - name: envoy.filters.network.http_connection_manager
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
      stat_prefix: http-10080
      server_header_transformation: PASS_THROUGH
      use_remote_address: true
      normalize_path: true
      merge_slashes: true
      path_with_escaped_slashes_action: UNESCAPE_AND_REDIRECT
      common_http_protocol_options: {headers_with_underscores_action: REJECT_REQUEST}
      http2_protocol_options: {max_concurrent_streams: 100, initial_stream_window_size: 134217728, initial_connection_window_size: 134217728}
      http_filters:
      - name: envoy.filters.http.router
        typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router, suppress_envoy_headers: true}
"""  # noqa: E501


def apply_envoy_filter(envoy_filter: dict[str, Any], listener: dict[str, Any]) -> None:
    """What istiod does with the patches of an EnvoyFilter to an inbound listener."""
    for patch in envoy_filter["spec"]["configPatches"]:
        assert patch["match"]["context"] == "SIDECAR_INBOUND"
        managers = [
            network_filter["typed_config"]
            for chain in listener["filter_chains"]
            for network_filter in chain["filters"]
            if network_filter["name"] == "envoy.filters.network.http_connection_manager"
        ]
        if patch["applyTo"] in {"VIRTUAL_HOST", "HTTP_ROUTE"}:
            assert patch["patch"]["operation"] == "MERGE"
            for manager in managers:
                for host in manager.get("route_config", {}).get("virtual_hosts", []):
                    if patch["applyTo"] == "VIRTUAL_HOST":
                        _merge(host, patch["patch"]["value"])
                        continue
                    assert patch["match"]["routeConfiguration"] == {"vhost": {"route": {"action": "ROUTE"}}}
                    for route in host["routes"]:
                        if "route" in route:
                            _merge(route, patch["patch"]["value"])
            continue
        assert patch["applyTo"] == "HTTP_FILTER"
        assert patch["patch"]["operation"] == "INSERT_BEFORE"
        wanted = patch["match"]["listener"]["filterChain"]["filter"]["subFilter"]["name"]
        for manager in managers:
            names = [entry["name"] for entry in manager["http_filters"]]
            manager["http_filters"].insert(names.index(wanted), patch["patch"]["value"])


def _merge(into: dict[str, Any], value: dict[str, Any]) -> None:
    """What protobuf's Merge does: messages are merged, lists are appended, and the rest is replaced."""
    for key, new in value.items():
        if isinstance(new, dict):
            _merge(into.setdefault(key, {}), new)
        elif isinstance(new, list):
            into[key] = [*into.get(key, []), *new]
        else:
            into[key] = new


class IstioSidecar(RunningSidecar):
    """The inbound side of an Istio sidecar with the target istio's EnvoyFilter applied."""

    def envoy_filters(self, policy: Policy, placement: Placement) -> list[dict[str, Any]]:
        """The EnvoyFilters that select the pod, in Istio's order."""
        return render("istio", policy, placement)

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        listener = json.loads(json.dumps(yaml.safe_load(_ISTIO)))  # each chain gets filters of its own
        for envoy_filter in self.envoy_filters(policy, placement):
            apply_envoy_filter(envoy_filter, listener)
        return _bootstrap(listener, [_cluster("inbound|8000||", placement.upstream), _cluster("BlackHoleCluster")])


class SharedIstioSidecar(IstioSidecar):
    """With the EnvoyFilters of both roles, each of them twice: in the root namespace and in the pod's own."""

    def envoy_filters(self, policy: Policy, placement: Placement) -> list[dict[str, Any]]:
        both: tuple[Role, Role] = ("render", "engine")
        return [found for role in both for found in render("istio", policy, replace(placement, role=role))] * 2


class WaypointProxy(RunningSidecar):
    """The script of the target istio-waypoint's TrafficExtension where a waypoint has it: right before the router.

    Nothing else of a waypoint is here: its listeners for HBONE, its routes, and the filters of Istio's own builds.
    """

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        service = Placement.default(self.role, "istio-waypoint").upstream
        (extension,) = render("istio-waypoint", policy, Placement(
            self.role, placement.listen, service, placement.admin))  # fmt: skip
        listener = yaml.safe_load(_ISTIO)
        code = {"default_source_code": {"inline_string": extension["spec"]["lua"]["inlineCode"]}}
        lua = {"name": "vllm-priority", "typed_config": {"@type": f"{_API}.http.lua.v3.Lua", **code}}
        (manager,) = (entry["typed_config"] for entry in listener["filter_chains"][1]["filters"])
        manager["http_filters"].insert(-1, lua)
        listener["filter_chains"][2]["filters"] = listener["filter_chains"][1]["filters"]
        return _bootstrap(listener, [_cluster("inbound|8000||", placement.upstream), _cluster("BlackHoleCluster")])


class GatewayProxy(RunningSidecar):
    """Envoy Gateway 1.9.0's proxy with the target envoy-gateway's two objects translated.

    Each script stands in a filter of its own in the listener, off; the route turns it on. Other paths go to the same
    Service by an HTTPRoute of its owner's, for the tests' sake.
    """

    @staticmethod
    def lua(index: int, policy_name: str, source: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
        """The name of a script's filter, its configuration in the listener, and in the route."""
        per_route = {"@type": "type.googleapis.com/envoy.config.route.v3.FilterConfig", "config": {}}
        return f"envoy.filters.http.lua/{policy_name}", {"default_source_code": source}, per_route

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        service = Placement.default(self.role, "envoy-gateway").upstream
        route, extension = render("envoy-gateway", policy, Placement(
            self.role, placement.listen, service, placement.admin))  # fmt: skip
        (target,) = extension["spec"]["targetRefs"]
        assert (target["kind"], target["name"]) == ("HTTPRoute", route["metadata"]["name"])
        listener = yaml.safe_load(_GATEWAY)
        (manager,) = (entry["typed_config"] for entry in listener["filter_chains"][0]["filters"])
        per_filter: dict[str, Any] = {}
        for index, lua in enumerate(extension["spec"]["lua"]):
            policy_name = f"envoyextensionpolicy/default/{extension['metadata']['name']}/lua/{index}"
            name, lua_filter, per_route = self.lua(index, policy_name, {"inline_string": lua["inline"]})
            lua_filter = {"@type": f"{_API}.http.lua.v3.Lua", **lua_filter}
            manager["http_filters"].insert(index, {"name": name, "disabled": True, "typed_config": lua_filter})
            per_filter[name] = per_route
        routes = [
            {
                "match": {
                    "path": match["path"]["value"],
                    "headers": [{"name": ":method", "string_match": {"exact": match["method"]}}],
                },
                # Without a request timeout there is no idle timeout either (internal/xds/translator/route.go).
                "route": {"cluster": "httproute/default/vllm/rule/0", "timeout": "0s", "idle_timeout": "0s"},
                "typed_per_filter_config": per_filter,
            }
            for rule in route["spec"]["rules"]
            if rule["timeouts"] == {"request": "0s"}
            for match in rule["matches"]
        ]
        other = {"match": {"prefix": "/"}, "route": {"cluster": "httproute/default/vllm/rule/0", "timeout": "0s"}}
        manager["route_config"] = {
            "name": "default/eg/http",
            "virtual_hosts": [{"name": "default/eg/http/*", "domains": ["*"], "routes": [*routes, other]}],
        }
        return _bootstrap(listener, [_cluster("httproute/default/vllm/rule/0", placement.upstream)])


class OlderGatewayProxy(GatewayProxy):
    """Before 1.9 the script stood in each route."""

    @staticmethod
    def lua(index: int, policy_name: str, source: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
        per_route = {"@type": f"{_API}.http.lua.v3.LuaPerRoute", "source_code": source}
        return f"envoy.filters.http.lua/{index}", {}, per_route


class NewerGatewayProxy(GatewayProxy):
    """After 1.9.0, on the main branch, policies share the listener's filters, and the route names the script."""

    @staticmethod
    def lua(index: int, policy_name: str, source: dict[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
        per_route = {"@type": f"{_API}.http.lua.v3.LuaPerRoute", "name": policy_name}
        return f"envoy.filters.http.lua/default/eg/http/{index}", {"source_codes": {policy_name: source}}, per_route


def _bootstrap(listener: dict[str, Any], clusters: list[dict[str, Any]]) -> dict[str, Any]:
    loopback = {"socket_address": {"address": "127.0.0.1", "port_value": 0}}
    return {
        "admin": {"address": loopback},
        "static_resources": {"listeners": [{**listener, "address": loopback}], "clusters": clusters},
    }


def _cluster(name: str, to: Address | None = None) -> dict[str, Any]:
    endpoint = to and {"endpoint": {"address": {"socket_address": {"address": to.host, "port_value": to.port}}}}
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "10s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}] if endpoint else []},
    }
