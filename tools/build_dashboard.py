"""The Grafana dashboard: the outcomes of requests, and the status of the sidecars and of the control plane."""

import json
from typing import Any

from control_plane.render.filter import FILTER_NAME, OUTCOMES
from control_plane.server.fleet import CONFIG_STATUSES

REFUSED = ("invalid", "out_of_range", "ambiguous", "invalid_path")
"""Outcomes of a header that is not a valid priority. The policy's on_invalid says what happens to the request."""
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
"""Outcomes of a priority that the body cannot carry. The policy's on_unmovable says what happens to the request."""

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_CONTROL_PLANE = "vllm_priority_control_plane"
_WHERE = 'namespace=~"$namespace"'


def dashboard() -> str:
    """Return the dashboard as JSON, for Grafana's import and for the chart's ConfigMap."""
    panels = [
        _stat("Requests with a priority", _total(OUTCOMES, less=("absent",)), "reqps", 0, 0),
        _stat("Invalid priority headers", _share(REFUSED), "percentunit", 6, 0, warn_at=0.01),
        _stat("Priorities that could not be moved", _share(LOST), "percentunit", 12, 0, warn_at=0.01),
        _stat("Sidecars not in sync", _sidecars('status!="SYNCED"'), "short", 18, 0, warn_at=1),
        _series("Requests by outcome", [(_rate(outcome), outcome) for outcome in OUTCOMES], "reqps", 0, 4, 12),
        _series(
            "Share of requests with a problem",
            [(_share((outcome,)), outcome) for outcome in (*REFUSED, *LOST)],
            "percentunit", 12, 4, 12,
        ),
        _series(
            "Sidecars by status",
            [(_sidecars(f'status="{status}"'), status) for status in CONFIG_STATUSES],
            "short", 0, 12, 12, stacked=True,
        ),
        _series(
            "Sidecars by version of the policy",
            [(f'sum by (role, version) ({_CONTROL_PLANE}_sidecars{{{_WHERE}}})', "{{role}} {{version}}")],
            "short", 12, 12, 12, stacked=True,
        ),
        _series(
            "Control plane: requests by type and result",
            [
                (
                    f"sum by (type, result) (rate({_CONTROL_PLANE}_requests_total{{{_WHERE}}}[$__rate_interval]))",
                    "{{type}} {{result}}",
                )
            ],
            "reqps", 0, 20, 8,
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
            "s", 8, 20, 8,
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
            "short", 16, 20, 8,
        ),
    ]  # fmt: skip
    for number, panel in enumerate(panels, start=1):
        panel["id"] = number
    namespaces = (
        f'label_values({{__name__=~"envoy_http_lua_{FILTER_NAME}_executions|{_CONTROL_PLANE}_sidecars"}}, namespace)'
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


def _rate(outcome: str) -> str:
    """Requests per second. Before 1.38, Envoy counts an outcome as a call to a cluster without endpoints."""
    stat = f"envoy_http_lua_{FILTER_NAME}_{outcome}{{{_WHERE}}}"
    older = f'envoy_cluster_upstream_cx_none_healthy{{envoy_cluster_name="{FILTER_NAME}_{outcome}",{_WHERE}}}'
    return f"((sum(rate({stat}[$__rate_interval])) or vector(0)) + (sum(rate({older}[$__rate_interval])) or vector(0)))"


def _total(outcomes: tuple[str, ...], less: tuple[str, ...] = ()) -> str:
    return " + ".join(_rate(outcome) for outcome in outcomes if outcome not in less)


def _share(outcomes: tuple[str, ...]) -> str:
    """From 0 to 1. There is no value while there are no requests."""
    return f"({_total(outcomes)}) / ({_total(OUTCOMES)} > 0)"


def _sidecars(selector: str) -> str:
    """Number of sidecars. One that moved to another replica is counted twice until the first replica forgets it."""
    return f"sum({_CONTROL_PLANE}_sidecars{{{_WHERE},{selector}}}) or vector(0)"


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
