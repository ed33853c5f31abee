"""The Grafana dashboard: what the sidecars did, and whether each has the policy it should have."""

import json
from typing import Any

from control_plane.fleet import STANDINGS
from control_plane.render import FILTER_NAME, OUTCOMES

REFUSED = ("invalid", "out_of_range", "ambiguous", "invalid_path")
"""Outcomes of a header that is no priority. What is done with one is the policy's on_invalid."""
LOST = (
    "unsupported_media_type",
    "unsupported_charset",
    "unsupported_encoding",
    "malformed_json",
    "not_an_object",
    "empty_body",
    "upstream_error",
    "too_large",
)
"""Outcomes of a priority that the body cannot carry. What is done with it is the policy's on_unmovable."""

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_CONTROL_PLANE = "vllm_priority_control_plane"
_WHERE = 'namespace=~"$namespace"'


def dashboard() -> str:
    """The dashboard's JSON, for Grafana's import and for the chart's ConfigMap."""
    panels = [
        _stat("Requests with a priority", _total(OUTCOMES, less=("absent",)), "reqps", 0, 0),
        _stat("Headers that are not a valid priority", _share(REFUSED), "percentunit", 6, 0, warn_at=0.01),
        _stat("Bodies that cannot carry a priority", _share(LOST), "percentunit", 12, 0, warn_at=0.01),
        _stat("Sidecars not up to date", _sidecars('standing!="up_to_date"'), "short", 18, 0, warn_at=1),
        _series("Requests by outcome", [(_rate(outcome), outcome) for outcome in OUTCOMES], "reqps", 0, 4, 12),
        _series(
            "Share of requests by what went wrong",
            [(_share((outcome,)), outcome) for outcome in (*REFUSED, *LOST)],
            "percentunit", 12, 4, 12,
        ),
        _series(
            "Sidecars by standing",
            [(_sidecars(f'standing="{standing}"'), standing) for standing in STANDINGS],
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
            "Control plane: is anything wrong",
            [
                (f'max({_CONTROL_PLANE}_policy_broken{{{_WHERE}}})', "policy file refused"),
                (
                    f"sum(increase({_CONTROL_PLANE}_policy_reloads_total"
                    f'{{{_WHERE},result="refused"}}[$__rate_interval]))',
                    "refused reloads",
                ),
                (
                    f'min({_CONTROL_PLANE}_certificate_expiry_timestamp_seconds{{{_WHERE}}} - time()) / 86400',
                    "days left of the certificate",
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
    """Per second. Envoy before 1.38 counts an outcome as a call to a cluster that has no endpoints."""
    stat = f"envoy_http_lua_{FILTER_NAME}_{outcome}{{{_WHERE}}}"
    older = f'envoy_cluster_upstream_cx_none_healthy{{envoy_cluster_name="{FILTER_NAME}_{outcome}",{_WHERE}}}'
    return f"((sum(rate({stat}[$__rate_interval])) or vector(0)) + (sum(rate({older}[$__rate_interval])) or vector(0)))"


def _total(outcomes: tuple[str, ...], less: tuple[str, ...] = ()) -> str:
    return " + ".join(_rate(outcome) for outcome in outcomes if outcome not in less)


def _share(outcomes: tuple[str, ...]) -> str:
    """0 to 1; no value while there are no requests."""
    return f"({_total(outcomes)}) / ({_total(OUTCOMES)} > 0)"


def _sidecars(selector: str) -> str:
    """Each replica knows those that poll it: one that moved to another is counted twice until the first forgets it."""
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
