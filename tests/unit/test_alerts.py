"""The alert rules, checked and carried out by promtool: when each fires, and when not."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.prometheus import program
from tools.build_dashboard import LOST, REJECTED

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yaml"
NS = 'namespace="ml"'
PLANE = "vllm_priority_control_plane"
OURS = 'envoy_http_conn_manager_prefix="vllm_priority"'


def rules() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def requests(outcome: str, values: str) -> tuple[str, str]:
    return f'envoy_vllm_priority_requests{{{NS},instance="a",outcome="{outcome}"}}', values


def traffic(instance: str, values: str) -> tuple[str, str]:
    return f'envoy_http_downstream_rq_total{{{NS},pod="{instance}",instance="{instance}",{OURS}}}', values


def gauge(name: str, values: str, labels: str = "") -> tuple[str, str]:
    return f'{PLANE}_{name}{{{NS},job="cp",instance="c"{labels}}}', values


def stale(values: str) -> tuple[str, str]:
    return gauge("sidecars", values, ',status="STALE"')


ALWAYS = "0+60x200"
CASES: dict[str, tuple[list[tuple[str, str]], str, set[str]]] = {
    "nothing is there": ([], "2h", set()),
    "all is well": (
        [
            requests("inserted", ALWAYS), requests("absent", ALWAYS), traffic("a", ALWAYS), traffic("b", ALWAYS),
            gauge("policy_broken", "0x200"), gauge("sidecars", "3x200", ',status="SYNCED"'),
            gauge("certificate_expiry_timestamp_seconds", f"{90 * 86400}x200"),
            (f"envoy_http_lua_vllm_priority_errors{{{NS},{OURS}}}", "0x200"),
            (f"envoy_http_downstream_rq_overload_close{{{NS},{OURS}}}", "0x200"),
        ],
        "2h", set(),
    ),
    "2 % are rejected": ([requests("inserted", "0+98x200"), requests("invalid", "1+2x200")], "1h",
                         {"VllmPrioritiesRejected"}),
    "0.5 % are rejected": ([requests("inserted", "0+995x200"), requests("invalid", "1+5x200")], "1h", set()),
    "a few are rejected once": ([requests("inserted", "0+5x200"), requests("invalid", "_x50 1+1x3 4x100")], "1h",
                                set()),
    "2 % are lost": ([requests("inserted", "0+98x200"), requests("malformed_json", "1+2x200")], "1h",
                     {"VllmPrioritiesLost"}),
    "a sidecar stays behind": ([stale("0x10 1x100")], "30m", {"VllmPrioritySidecarsNotInSync"}),
    "a sidecar is behind for 5 minutes": ([stale("0x10 1x4 0x100")], "16m", set()),
    "a sidecar needs a restart": ([gauge("sidecars_to_restart", "0x10 1x100", ',key="routes.root_path"')], "1h",
                                  {"VllmPrioritySidecarsToRestart"}),
    "a sidecar is restarted": ([gauge("sidecars_to_restart", "0x10 1x20 0x100", ',key="ordinary"')], "1h", set()),
    "the doctor finds an engine with fcfs": (
        [('vllm_priority_doctor_check{server="engine",check="scheduling policy",verdict="lost"}', "1x100")], "1h",
        {"VllmPriorityDoctorFindsLoss"},
    ),
    "the doctor finds a Service that bypasses": (
        [('vllm_priority_doctor_objects{kind="Service",object_namespace="ml",verdict="lost"}', "2x100")], "1h",
        {"VllmPriorityDoctorFindsLoss"},
    ),
    "the doctor finds no label in the cluster": (
        [("vllm_priority_doctor_priority_lost", "1x100")], "1h", {"VllmPriorityDoctorFindsLoss"},
    ),
    "the doctor runs no more": (
        [("vllm_priority_doctor_last_run_timestamp_seconds", "60x200")], "3h", {"VllmPriorityDoctorStopped"},
    ),
    "the doctor finds nothing": (
        [
            ('vllm_priority_doctor_check{server="engine",check="scheduling policy",verdict="ok"}', "1x100"),
            ('vllm_priority_doctor_objects{kind="Service",object_namespace="ml",verdict="ok"}', "2x100"),
        ],
        "1h", set(),
    ),
    "the policy is not valid": ([gauge("policy_broken", "0x10 1x100")], "30m", {"VllmPriorityPolicyNotValid"}),
    "the control plane is gone": ([gauge("policy_broken", "0x10 stale")], "30m", {"VllmPriorityControlPlaneGone"}),
    "another replica takes over": (
        [gauge("policy_broken", "0x10 stale"), (f'{PLANE}_policy_broken{{{NS},job="cp",instance="d"}}', "0x100")],
        "30m", set(),
    ),
    "Lua fails once": ([(f"envoy_http_lua_vllm_priority_errors{{{NS},{OURS}}}", "0x10 1x100")], "20m",
                       {"VllmPriorityLuaErrors"}),
    "the filter sheds one request": ([requests("absent", "5x100"), requests("overloaded", "_x10 1x100")], "15m",
                                     {"VllmPrioritySidecarsOverloaded"}),
    "it shed one long ago": ([requests("overloaded", "_x10 1x100")], "50m", set()),
    "Envoy sheds": ([(f"envoy_http_downstream_rq_overload_close{{{NS},{OURS}}}", "0x10 3x100")], "20m",
                    {"VllmPrioritySidecarsOverloaded"}),
    "the certificate ends in 13 days": ([gauge("certificate_expiry_timestamp_seconds", f"{13 * 86400}x100")], "20m",
                                        {"VllmPriorityCertificateExpires"}),
    "one of two sidecars is idle": ([traffic("a", ALWAYS), traffic("b", "7x200")], "2h",
                                    {"VllmPrioritySidecarWithoutTraffic"}),
    "a sidecar is idle, and its engine is not": (
        [traffic("b", "0x200"), (f'vllm:request_success_total{{{NS},pod="b"}}', ALWAYS)], "2h",
        {"VllmPrioritySidecarWithoutTraffic"},
    ),
    "nobody sends anything": ([traffic("a", "7x200"), traffic("b", "0x200")], "2h", set()),
    "a sidecar is new": ([traffic("a", ALWAYS), traffic("b", "_x100 0x100")], "2h", set()),
}  # fmt: skip
"""What happens: the series, one value a minute; when to look; and the alerts that fire then."""


@pytest.mark.parametrize("case", CASES)
def test_an_alert_fires_when_it_should(case: str, tmp_path: Path) -> None:
    series, when, alerts = CASES[case]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": when,
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(alerts)],
            }
        ],
    }
    file = tmp_path / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([program("promtool"), "test", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run([program("promtool"), "check", "rules", str(RULES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case() -> None:
    assert set(rules()) == set().union(*(alerts for _, _, alerts in CASES.values()))


@pytest.mark.parametrize(("name", "outcomes"), [("VllmPrioritiesRejected", REJECTED), ("VllmPrioritiesLost", LOST)])
def test_alerts_and_dashboard_agree_on_the_outcomes(name: str, outcomes: tuple[str, ...]) -> None:
    found = re.search(r'outcome=~"([^"]*)"', rules()[name]["expr"])
    assert found and found[1].split("|") == list(outcomes)
