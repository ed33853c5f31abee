"""The Grafana dashboard: what became of priorities, whether they helped, and how sidecars and control plane are."""

import json
from typing import Any

from control_plane.server.fleet import CONFIG_STATUSES

REJECTED = ("invalid", "out_of_range", "ambiguous", "invalid_path", "not_allowed", "untrusted")
"""Outcomes of a priority that a client may not send, or not so."""
LOST = (
    "unsupported_media_type",
    "unsupported_charset",
    "unsupported_encoding",
    "malformed_json",
    "not_an_object",
    "empty_body",
    "upstream_error",
    "too_large",
    "overloaded",
)
"""Outcomes of a priority that the body cannot carry."""

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SIDECAR = "envoy_vllm_priority"
_CONTROL_PLANE = "vllm_priority_control_plane"
_WHERE = 'namespace=~"$namespace"'


def dashboard() -> str:
    """Return the dashboard as JSON, for Grafana's import and for the chart's ConfigMap."""
    panels = [
        _stat("Requests with a priority", _requests('outcome!="absent"'), "reqps", 0, 0),
        _stat("Share of rejected priorities", _share(REJECTED), "percentunit", 6, 0, warn_at=0.01),
        _stat("Share of priorities that could not be set", _share(LOST), "percentunit", 12, 0, warn_at=0.01),
        # Without a control plane there is no value, and not a reassuring 0.
        _stat("Sidecars not in sync", _sidecars('status!="SYNCED"'), "short", 18, 0, warn_at=1),
        _series("Requests by outcome", [(_by("outcome"), "{{outcome}}")], "reqps", 0, 4, 8),
        _series("Requests by priority", [(_by("priority"), "{{priority}}")], "reqps", 8, 4, 8, stacked=True),
        _series("Requests by route", [(_by("route"), "{{route}}")], "reqps", 16, 4, 8, stacked=True),
        _series(
            "Time to first byte, median, by priority",
            [(_quantile("0.5", "time_to_first_byte", "priority"), "{{priority}}")],
            "ms", 0, 12, 8,
        ),
        _series(
            "Time to first byte, p99, by class",
            [(_quantile("0.99", "time_to_first_byte", "class"), "{{class}}")],
            "ms", 8, 12, 8,
        ),
        _series(
            "Time in the sidecar before vLLM, and size of requests, p99",
            [
                (f'{_quantile("0.99", "filter_time")} / 1000', "time in ms"),
                (f'{_quantile("0.99", "request_bytes")} / 1000', "size in kB"),
            ],
            "short", 16, 12, 8,
        ),
        _series(
            "Sidecars by status",
            [(_sidecars(f'status="{status}"'), status) for status in CONFIG_STATUSES],
            "short", 0, 20, 8, stacked=True,
        ),
        _series(
            "Sidecars by version of the policy",
            [(f'sum by (role, version) ({_CONTROL_PLANE}_sidecars{{{_WHERE}}})', "{{role}} {{version}}")],
            "short", 8, 20, 8, stacked=True,
        ),
        _series(
            "Sidecars: Lua errors, and responses by class",
            [
                (f"sum(increase(envoy_http_lua_vllm_priority_errors{{{_WHERE}}}[$__rate_interval]))", "Lua errors"),
                (
                    "sum by (envoy_response_code_class) (rate(envoy_http_downstream_rq_xx"
                    f'{{{_WHERE},envoy_http_conn_manager_prefix="vllm_priority"}}[$__rate_interval]))',
                    "{{envoy_response_code_class}}xx",
                ),
            ],
            "short", 16, 20, 8,
        ),
        _series(
            "Control plane: requests by type and result",
            [
                (
                    f"sum by (type, result) (rate({_CONTROL_PLANE}_requests_total{{{_WHERE}}}[$__rate_interval]))",
                    "{{type}} {{result}}",
                )
            ],
            "reqps", 0, 28, 8,
        ),
        _series(
            "Control plane: time to inject",
            [
                (
                    f"histogram_quantile({q}, sum by (le) (rate({_CONTROL_PLANE}_inject_seconds_bucket"
                    f"{{{_WHERE}}}[$__rate_interval])))",
                    name,
                )
                for q, name in (("0.5", "p50"), ("0.99", "p99"))
            ],
            "s", 8, 28, 8,
        ),
        _series(
            "Control plane: problems",
            [
                (f'max({_CONTROL_PLANE}_policy_broken{{{_WHERE}}})', "policy file not valid"),
                (
                    f"sum(increase({_CONTROL_PLANE}_policy_reloads_total"
                    f'{{{_WHERE},result="rejected"}}[$__rate_interval]))',
                    "rejected reloads",
                ),
                (
                    f'min({_CONTROL_PLANE}_certificate_expiry_timestamp_seconds{{{_WHERE}}} - time()) / 86400',
                    "days until the certificate expires",
                ),
            ],
            "short", 16, 28, 8,
        ),
        _series(
            "Webhook: pods by result and reason",
            [(_injections('result!="warned"', "result, reason"), "{{result}} {{reason}}")],
            "short", 0, 36, 12,
        ),
        _series(
            "Webhook: warnings and pods without a sidecar, by namespace",
            [
                (
                    _injections('result!="injected",reason!="NotRequested"', "pod_namespace, reason"),
                    "{{pod_namespace}} {{reason}}",
                )
            ],
            "short", 12, 36, 12,
        ),
        # vLLM's metrics do not tell priorities apart. The time to first byte by priority, above, is the sidecar's.
        _series("Engines: time in the queue", _of_engines("request_queue_time_seconds"), "s", 0, 44, 8),
        _series("Engines: time to first token", _of_engines("time_to_first_token_seconds"), "s", 8, 44, 8),
        _series(
            "Engines: requests that run and that wait",
            [(f"sum(vllm:num_requests_{state}{{{_WHERE}}})", state) for state in ("running", "waiting")],
            "short", 16, 44, 8,
        ),
    ]  # fmt: skip
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    namespaces = (
        f'label_values({{__name__=~"envoy_http_lua_vllm_priority_executions|{_CONTROL_PLANE}_sidecars"}}, namespace)'
    )
    document = {
        "uid": "vllm-priority",
        "title": "vllm-priority",
        "tags": ["vllm", "envoy"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
                {
                    "name": "namespace",
                    "label": "Namespace",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": {"query": namespaces, "refId": "namespaces"},
                    "refresh": 2,
                    "includeAll": True,
                    "allValue": ".*",
                    "multi": True,
                    "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
                },
            ]
        },
        "panels": panels,
    }
    return json.dumps(document, indent=2) + "\n"


def _requests(selector: str) -> str:
    return f"sum(rate({_SIDECAR}_requests{{{_WHERE},{selector}}}[$__rate_interval]))"


def _injections(selector: str, labels: str) -> str:
    return f"sum by ({labels}) (increase({_CONTROL_PLANE}_injections_total{{{_WHERE},{selector}}}[$__rate_interval]))"


def _by(label: str) -> str:
    return f"sum by ({label}) (rate({_SIDECAR}_requests{{{_WHERE}}}[$__rate_interval]))"


def _share(outcomes: tuple[str, ...]) -> str:
    """From 0 to 1. There is no value while there are no requests."""
    some = _requests(f'outcome=~"{"|".join(outcomes)}"')
    return f"({some} or vector(0)) / (sum(rate({_SIDECAR}_requests{{{_WHERE}}}[$__rate_interval])) > 0)"


def _quantile(quantile: str, histogram: str, label: str = "") -> str:
    labels = f"le, {label}" if label else "le"
    buckets = f"rate({_SIDECAR}_{histogram}_bucket{{{_WHERE}}}[$__rate_interval])"
    return f"histogram_quantile({quantile}, sum by ({labels}) ({buckets}))"


def _sidecars(selector: str) -> str:
    """Number of sidecars. One that moved to another replica is counted twice until the first replica forgets it."""
    there = f"(max({_CONTROL_PLANE}_policy_broken{{{_WHERE}}}) * 0)"
    return f"sum({_CONTROL_PLANE}_sidecars{{{_WHERE},{selector}}}) or {there}"


def _of_engines(histogram: str) -> list[tuple[str, str]]:
    """The median and the p99 of a histogram of vLLM."""
    rate = f"sum by (le) (rate(vllm:{histogram}_bucket{{{_WHERE}}}[$__rate_interval]))"
    return [(f"histogram_quantile({q}, {rate})", name) for q, name in (("0.5", "p50"), ("0.99", "p99"))]


def _stat(title: str, expression: str, unit: str, x: int, y: int, warn_at: float | None = None) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if warn_at is not None:
        steps.append({"color": "orange", "value": warn_at})
    thresholds = {"mode": "absolute", "steps": steps}
    return {
        "type": "stat",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"h": 4, "w": 6, "x": x, "y": y},
        "targets": _targets([(expression, "")]),
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "thresholds": thresholds}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"},
    }


def _series(
    title: str, queries: list[tuple[str, str]], unit: str, x: int, y: int, width: int, stacked: bool = False
) -> dict[str, Any]:
    custom = {"lineWidth": 1, "fillOpacity": 10, "stacking": {"mode": "normal" if stacked else "none", "group": "A"}}
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"h": 8, "w": width, "x": x, "y": y},
        "targets": _targets(queries),
        "fieldConfig": {"defaults": {"unit": unit, "min": 0, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _targets(queries: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [
        {"refId": chr(ord("A") + n), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
        for n, (expression, legend) in enumerate(queries)
    ]
