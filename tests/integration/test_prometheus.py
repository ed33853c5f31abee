"""A real Prometheus scrapes a real sidecar and a real control plane: the dashboard's queries, and the alert rules."""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from control_plane.address import Address
from control_plane.policy.model import Policy
from control_plane.render.placement import Placement
from control_plane.simulator import SimulatorSettings
from control_plane.simulator import run as simulate
from tests.pem import write_pair
from tests.prometheus import program
from tools.build_dashboard import dashboard

from .conftest import GENERATE, RENDER
from .sidecars import RunningSidecar, load
from .test_control_plane import POLL_SECONDS, free_port
from .test_tls import TlsControlPlane
from .upstream import RecordingUpstream
from .waiting import until
from .wire import call, priority

RULES = Path(__file__).resolve().parents[2] / "deploy" / "prometheus" / "alerts.yaml"
POLICY = "{classes: {batch: 50, urgent: -20}, default: 1}"
WINDOW = "20s"


class Prometheus:
    """A Prometheus that scrapes each second."""

    def __init__(self, folder: Path, *targets: Address) -> None:
        self.address = Address("127.0.0.1", free_port())
        scrapes = [
            {
                "job_name": str(target), "metrics_path": path,
                "static_configs": [{"targets": [str(target)], "labels": {"namespace": "ml", "pod": "pod-1"}}],
            }
            for path, target in zip(("/stats/prometheus", "/metrics", "/metrics"), targets, strict=True)
        ]  # fmt: skip
        settings = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(RULES)],
            "scrape_configs": scrapes,
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
        command = [
            program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={self.address}", "--log.level=warn",
        ]  # fmt: skip
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def get(self, path: str, **parameters: str) -> dict[str, Any]:
        """The response of Prometheus' API.

        Raises:
            httpx.HTTPError: Prometheus does not respond yet, or responds 503 with a text while it starts.
        """
        assert self.process.poll() is None, self.log.read_text()
        response = httpx.get(f"http://{self.address}/api/v1/{path}", params=parameters, trust_env=False, timeout=10)
        if response.status_code == 503:
            response.raise_for_status()
        return dict(response.json())

    def query(self, expression: str) -> list[Any]:
        """The samples of a query."""
        found = self.get("query", query=expression)
        assert found["status"] == "success", f"{expression}: {found.get('error')}"
        return list(found["data"]["result"])

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


class PollingSidecar(RunningSidecar):
    """A sidecar that polls the control plane."""

    control_plane: Address

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        polling = replace(placement, control_plane=self.control_plane, node_id="pod-1", refresh_seconds=POLL_SECONDS)
        return super().configuration(policy, polling)


def review() -> dict[str, Any]:
    """The review of a pod that asks for a sidecar and has no vLLM."""
    pod = {
        "metadata": {"name": "bare", "labels": {"vllm-priority.io/inject": "true"}},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    request = {
        "uid": "1", "kind": {"group": "", "version": "v1", "kind": "Pod"}, "operation": "CREATE", "namespace": "ml",
        "resource": {"group": "", "version": "v1", "resource": "pods"}, "object": pod,
    }  # fmt: skip
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


class Run:
    """Everything that runs in these tests."""

    def __init__(self, plane: TlsControlPlane, sidecar: RunningSidecar, engine: str, prometheus: Prometheus) -> None:
        self.plane, self.sidecar, self.engine, self.prometheus = plane, sidecar, engine, prometheus

    def load(self) -> None:
        """Send requests of every kind."""
        for path, body, value in (
            (RENDER, b"{}", "batch"), (RENDER, b"{}", "urgent"), (GENERATE, b"{}", "5"), (GENERATE, b"{}", "high"),
            (GENERATE, b"{", "5"),
        ):  # fmt: skip
            call(self.sidecar.address, path, body, priority(value))
        tokens = {"token_ids": [1], "sampling_params": {"max_tokens": 1}}
        httpx.post(f"{self.engine}{GENERATE}", json=tokens, trust_env=False).raise_for_status()
        httpx.post(f"http://{self.plane.address}/inject", json=review(), trust_env=False).raise_for_status()


@pytest.fixture(scope="module")
def run(envoy: Path, _upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run under a little load, until the histograms, which Envoy updates every 5 seconds, have a rate."""
    folder = tmp_path_factory.mktemp("prometheus")
    program("prometheus")
    _upstream.clear()
    (folder / "policy.yaml").write_text(POLICY)
    write_pair(folder, days=10)
    with TlsControlPlane(folder / "policy.yaml", folder) as plane, simulate(SimulatorSettings()) as engine:
        PollingSidecar.control_plane = plane.address
        sidecar = PollingSidecar(envoy, folder, "engine", load(POLICY), _upstream.address)
        try:
            prometheus = Prometheus(
                folder, sidecar.admin, plane.address, Address.parse(engine.removeprefix("http://"), "engine")
            )
            try:
                running = Run(plane, sidecar, engine, prometheus)
                until(lambda: _answers(prometheus), "Prometheus")

                def measured() -> bool:
                    running.load()
                    rate = f"sum(rate(envoy_vllm_priority_duration_count[{WINDOW}])) > 0"
                    return bool(prometheus.query(rate))

                until(measured, "a rate of the histograms")
                yield running
            finally:
                prometheus.stop()
        finally:
            sidecar.stop()


def _answers(prometheus: Prometheus) -> bool:
    try:
        return bool(prometheus.query("up == 1"))
    except httpx.HTTPError:
        return False


def queries() -> dict[str, str]:
    """The dashboard's queries by panel and legend, as Grafana sends them."""
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        .replace("$__rate_interval", WINDOW)
        .replace("$namespace", ".*")
        for panel in json.loads(dashboard())["panels"]
        for target in panel["targets"]
    }


def test_every_query_of_the_dashboard_has_a_value(run: Run) -> None:
    found = {name: run.prometheus.query(query) for name, query in queries().items()}
    assert [name for name, samples in found.items() if not samples] == []
    numbers = [name for name, samples in found.items() if all(sample["value"][1] == "NaN" for sample in samples)]
    assert numbers == []


def test_the_dashboard_shows_what_happened(run: Run) -> None:
    def by(panel: str, label: str) -> set[str]:
        (query,) = [query for name, query in queries().items() if name.startswith(panel + ":")]
        return {sample["metric"].get(label, "") for sample in run.prometheus.query(query)}

    assert by("Requests by outcome", "outcome") == {"inserted", "invalid", "malformed_json"}
    assert by("Requests by route", "route") == {RENDER, GENERATE}
    assert by("Time to first byte, p99, by class", "class") >= {"batch", "urgent"}
    (share,) = run.prometheus.query(queries()["Share of rejected priorities: "])
    assert float(share["value"][1]) == pytest.approx(0.2, abs=0.1)
    (behind,) = run.prometheus.query(queries()["Sidecars not in sync: "])
    assert behind["value"][1] == "0"


def test_the_dashboards_variable_finds_the_namespaces(run: Run) -> None:
    variables = json.loads(dashboard())["templating"]["list"]
    (query,) = [variable["query"]["query"] for variable in variables if variable["name"] == "namespace"]
    selector = re.fullmatch(r"label_values\((.*), namespace\)", query)
    assert selector
    found = run.prometheus.query(f"count by (namespace, __name__) ({selector[1]})")
    assert {sample["metric"]["namespace"] for sample in found} == {"ml"}
    assert len(found) == 2


def alerts(run: Run) -> dict[str, dict[str, Any]]:
    groups = run.prometheus.get("rules")["data"]["groups"]
    return {rule["name"]: rule for group in groups for rule in group["rules"]}


def active(run: Run) -> set[str]:
    return {name for name, rule in alerts(run).items() if rule["state"] != "inactive"}


def test_the_alert_rules_are_evaluated_without_an_error(run: Run) -> None:
    until(lambda: all(rule["health"] == "ok" for rule in alerts(run).values()), "the first evaluation")
    assert [rule.get("lastError") for rule in alerts(run).values() if rule.get("lastError")] == []
    # 20% of the requests are rejected and 20% are lost, and the certificate is valid for 10 days.
    expected = {"VllmPrioritiesRejected", "VllmPrioritiesLost", "VllmPriorityCertificateExpires"}
    until(lambda: active(run) >= expected, "the alerts")
    assert active(run) == expected


def test_every_metric_of_an_alert_is_there(run: Run) -> None:
    text = " ".join(rule["query"] for rule in alerts(run).values())
    names = set(re.findall(r"(?:envoy|vllm_priority_control_plane)_\w+", text)) - {"envoy_http_conn_manager_prefix"}
    assert len(names) >= 6
    assert [name for name in sorted(names) if not run.prometheus.query(f"count({name})")] == []


def test_an_alert_sees_that_the_control_plane_is_gone(run: Run) -> None:
    run.plane.kill()
    try:
        until(lambda: "VllmPriorityControlPlaneGone" in active(run), "the alert")
        assert run.prometheus.query(queries()["Sidecars not in sync: "]) == []  # and no reassuring 0
    finally:
        run.plane.start()
