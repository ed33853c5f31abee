"""Renders a policy and a placement as what Envoy, Istio or Envoy Gateway reads.

targets        the table of targets: which function renders each, and which options it uses
bootstrap      a whole Envoy configuration, or its parts as discovery resources
listener       the sidecar's listeners: one for requests, one for health checks
routes         what happens to which request before and after the filters
local_replies  Envoy's own error responses
loggers        the access log and the metrics
tracing        spans of requests
clusters       the upstream, the control plane, and Envoy's admin
istio          an EnvoyFilter, or a TrafficExtension for a waypoint
envoy_gateway  an HTTPRoute and an EnvoyExtensionPolicy
objects        what Kubernetes objects have in common
filter         the two Lua filters: their settings, scripts and typed_config
tokens         how Envoy verifies the tokens of clients
lua_bundle     joins lua/*.lua and the settings into one script
lua_packing    a script in half its size, for pods
placement      where a sidecar stands, and how it is attached to a mesh or gateway
addresses      how Envoy writes addresses
templates      fills in the templates in envoy/, and writes YAML

The values are computed here. The templates place them and decide nothing.
"""
