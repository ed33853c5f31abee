"""Install, inject, upgrade, change the policy, lose the control plane, uninstall: in this order, on a real API."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from control_plane.injector.annotations import MODES
from control_plane.policy.load import parse_policies
from tests.cluster.cluster import PATIENCE, Cluster, CommandError, ControlPlane, Release, eventually, run
from tests.cluster.rollout import client, served

POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"generateName": "vllm-", "labels": {"app": "vllm", "vllm-priority.io/inject": "true"}},
    "spec": {
        "automountServiceAccountToken": False,
        "containers": [
            {
                "name": "vllm",
                "image": "registry.k8s.io/pause:3.9",
                "command": ["vllm", "launch", "render", "model"],
                "ports": [{"name": "http", "containerPort": 8000}],
            }
        ],
    },
}


def pod(name: str, **labels: str) -> dict[str, Any]:
    """POD under a name of its own, with these labels instead of the one that asks for the sidecar."""
    made = copy.deepcopy(POD)
    made["metadata"] = {"name": name, "labels": {"app": "vllm", **labels}}
    return made


def deployment(name: str) -> dict[str, Any]:
    template = {"metadata": {"labels": {**POD["metadata"]["labels"], "app": name}}, "spec": POD["spec"]}
    selector = {"matchLabels": {"app": name}}
    spec = {"replicas": 2, "selector": selector, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": name}, "spec": spec}


def containers(found: Any) -> dict[str, Any]:
    spec = found["spec"]
    return {c["name"]: c for c in [*spec["containers"], *spec.get("initContainers", [])]}


def has_sidecar(found: Any) -> bool:
    return "vllm-priority" in containers(found)


def test_it_installs_with_nothing_else_to_prepare(release: Release) -> None:
    release.install()
    assert release.webhook["failurePolicy"] == "Ignore"


def test_its_certificate_is_signed_by_the_ca_that_the_api_server_trusts(release: Release) -> None:
    secret = release.secret
    ca, leaf = (x509.load_pem_x509_certificate(secret[key].encode()) for key in ("ca.crt", "tls.crt"))
    leaf.verify_directly_issued_by(ca)


def test_newer_kinds_are_there_only_where_the_cluster_has_them(cluster: Cluster, release: Release) -> None:
    has_budgets = "policy/v1" in cluster.kubectl("api-versions").splitlines()
    budget = cluster.get("poddisruptionbudgets", release.name, "-n", release.namespace)
    assert bool(budget) == has_budgets
    if not has_budgets:
        cluster.unchecked.append("no PodDisruptionBudget: the cluster has no policy/v1")


def test_a_pod_starts_without_a_sidecar_while_no_control_plane_answers(
    cluster: Cluster, control_plane: ControlPlane, apps: str
) -> None:
    if cluster.runs_pods:
        pytest.skip("the control plane answers already")
    assert not has_sidecar(cluster.dry_run(POD, apps))
    control_plane.start()


def test_a_dry_run_shows_the_sidecar_and_leaves_nothing(cluster: Cluster, apps: str) -> None:
    made = cluster.dry_run(POD, apps)
    assert has_sidecar(made)
    ports = {p["name"]: name for name, c in containers(made).items() for p in c.get("ports", ())}
    assert ports["http"] == "vllm-priority"
    assert not cluster.get("pods", "-n", apps)


def test_a_labelled_deployment_becomes_pods_with_the_sidecar(cluster: Cluster, apps: str) -> None:
    cluster.kubectl("create", "-n", apps, "-f", "-", stdin=deployment("vllm"))

    def both() -> Any:
        found = cluster.get("pods", "-n", apps, "-l", "app=vllm")
        return found if len(found) == 2 else None

    pods = eventually("the Deployment has its pods", both)
    assert [has_sidecar(found) for found in pods] == [True, True]
    (owner,) = pods[0]["metadata"]["ownerReferences"]
    assert owner["kind"] == "ReplicaSet"


def test_it_is_native_where_the_cluster_resolves_names_on_native_sidecars(cluster: Cluster, apps: str) -> None:
    found = cluster.dry_run(POD, apps)
    inside = [c["name"] for c in found["spec"].get("initContainers", [])]
    assert ("vllm-priority" in inside) == (cluster.version >= (1, 33))
    if cluster.version < (1, 33):
        cluster.unchecked.append("native sidecars: the cluster is older than 1.33")


def test_pods_without_the_label_are_not_touched(cluster: Cluster, apps: str) -> None:
    assert not has_sidecar(cluster.dry_run(pod("plain"), apps))
    assert not has_sidecar(cluster.dry_run(pod("refused", **{"vllm-priority.io/inject": "false"}), apps))


def test_kube_system_and_its_own_namespace_are_left_alone(cluster: Cluster, release: Release) -> None:
    for namespace in ("kube-system", release.namespace):
        assert not has_sidecar(cluster.dry_run(POD, namespace)), namespace


def test_an_update_changes_nothing(cluster: Cluster, apps: str) -> None:
    created = pod("later")
    cluster.kubectl("create", "-n", apps, "-f", "-", stdin=created)
    cluster.kubectl("label", "pod", "later", "-n", apps, "vllm-priority.io/inject=true")
    assert not has_sidecar(cluster.get("pod", "later", "-n", apps))


def test_a_pod_that_cannot_have_one_is_refused_with_the_reason(cluster: Cluster, apps: str) -> None:
    impossible = copy.deepcopy(POD)
    impossible["metadata"]["annotations"] = {"vllm-priority.io/policy": "nobody"}
    with pytest.raises(CommandError, match="there is no policy 'nobody'"):
        cluster.dry_run(impossible, apps)


def test_two_upgrades_keep_the_ca_and_do_not_roll_the_pods(release: Release) -> None:
    secret, webhook, template = release.secret, release.webhook, release.deployment["spec"]["template"]
    release.upgrade()
    release.upgrade()
    assert release.secret == secret
    assert release.webhook == webhook
    assert release.deployment["spec"]["template"] == template


def test_a_certificate_in_its_last_tenth_is_renewed_without_a_gap(
    cluster: Cluster, release: Release, control_plane: ControlPlane, apps: str
) -> None:
    before, template = release.secret, release.deployment["spec"]["template"]
    secret = "secret", f"{release.name}-tls", "-n", release.namespace
    cluster.kubectl("annotate", "--overwrite", *secret, "vllm-priority.io/renew-after=1")
    # The annotation is kubectl's now: helm is told to take it back.
    release.upgrade("--force-conflicts")
    after = release.secret
    assert after["tls.crt"] != before["tls.crt"]
    # The CA is the same, so that sidecars and the API server trust both certificates.
    assert after["ca.crt"] == before["ca.crt"]
    assert has_sidecar(cluster.dry_run(POD, apps))
    assert release.deployment["spec"]["template"] != template
    if control_plane.process is not None:
        control_plane.follow()
        eventually(
            "the new certificate is served", lambda: control_plane.served_certificate() == after["tls.crt"].strip()
        )
    assert has_sidecar(cluster.dry_run(POD, apps))
    release.upgrade()
    assert release.secret == after


def test_a_policy_change_reaches_what_the_control_plane_serves(
    cluster: Cluster, release: Release, control_plane: ControlPlane
) -> None:
    before = control_plane.served_version("render")
    release.upgrade(policy=json.dumps({"classes": {"interactive": -10}, "default": "interactive"}))
    assert parse_policies(release.policy).default.default_value == -10
    if control_plane.process is not None:
        control_plane.follow()
        cluster.unchecked.append("that the kubelet renews a mounted ConfigMap: this test wrote the file itself")
    eventually("the new policy is served", lambda: control_plane.served_version("render") != before)


def test_a_contradiction_is_refused_and_the_release_stays(release: Release) -> None:
    kept = dict(release.values)
    with pytest.raises(CommandError, match="certificates.source is secret"):
        release.upgrade(certificates__source='"secret"')
    release.values = kept
    assert release.webhook["failurePolicy"] == "Ignore"


def test_a_key_that_is_left_out_of_the_policy_is_taken_back(release: Release) -> None:
    release.upgrade(policy=json.dumps({"default": 3}))
    policy = parse_policies(release.policy).default
    assert (policy.default_value, policy.classes) == (3, {})


def test_kubectl_apply_of_a_workload_prints_the_warnings_of_its_pods(cluster: Cluster, apps: str) -> None:
    if cluster.version < (1, 28):
        cluster.unchecked.append("warnings for a workload without the label itself: the cluster is older than 1.28")
    workload = deployment("warned")
    workload["metadata"]["labels"] = POD["metadata"]["labels"]
    for arguments in (("apply",), ("apply", "--dry-run=server")):
        warnings = cluster.warnings(*arguments, "-n", apps, "-f", "-", stdin=workload)
        assert any("Deployment/warned: container 'vllm' is taken for a render server" in line for line in warnings)
    if cluster.version >= (1, 28):
        assert cluster.warnings("apply", "-n", apps, "-f", "-", stdin=deployment("warned-by-template"))


def test_a_workload_without_the_label_gets_no_warning(cluster: Cluster, apps: str) -> None:
    workload = deployment("plain")
    workload["spec"]["template"]["metadata"]["labels"] = {"app": "plain"}
    warnings = cluster.warnings("apply", "-n", apps, "-f", "-", stdin=workload)
    assert not [line for line in warnings if "vllm" in line]


def test_the_pods_of_a_controller_say_what_was_done_and_warned_of(cluster: Cluster, apps: str) -> None:
    def statuses() -> list[str]:
        found = cluster.get("pods", "-n", apps, "-l", "app=vllm")
        annotations = [pod["metadata"].get("annotations", {}) for pod in found]
        return [text for each in annotations if (text := each.get("vllm-priority.io/status"))]

    for status in eventually("the pods have the annotation", statuses):
        assert status.startswith("injected: mode ")
        assert "RoleGuessed: " in status


def test_an_event_of_the_owner_says_what_was_warned_of(cluster: Cluster, apps: str) -> None:
    if not cluster.runs_pods:
        cluster.unchecked.append("Events: the control plane ran outside the cluster, without a service account")
        pytest.skip("the control plane has no service account")

    def events() -> Any:
        return cluster.get("events", "-n", apps, "--field-selector", "reason=RoleGuessed,source=vllm-priority")

    found = eventually("the Event is there", events)
    owner = found[0]["involvedObject"]
    assert owner["kind"] == "ReplicaSet"
    assert "RoleGuessed" in cluster.kubectl("describe", "replicaset", owner["name"], "-n", apps)


def test_the_doctor_finds_the_service_that_bypasses_the_sidecars(cluster: Cluster, apps: str) -> None:
    by_number = {"selector": {"app": "takeover"}, "ports": [{"port": 80, "targetPort": 8000}]}
    by_name = {"selector": {"app": "takeover"}, "ports": [{"port": 80, "targetPort": "http"}]}
    for name, spec in (("by-number", by_number), ("by-name", by_name)):
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}
        cluster.kubectl("apply", "-n", apps, "-f", "-", stdin=service)
    target = copy.deepcopy(POD)
    target["metadata"] = {
        "name": "takeover",
        "labels": {**POD["metadata"]["labels"], "app": "takeover"},
        "annotations": {"vllm-priority.io/mode": "takeover"},
    }
    cluster.kubectl("apply", "-n", apps, "-f", "-", stdin=target)
    status, report = doctor(apps)
    verdicts = {f["name"]: f["verdict"] for f in report["findings"] if f["kind"] == "Service"}
    assert (status, verdicts) == (1, {"by-number": "lost", "by-name": "ok"})


def doctor(namespace: str) -> tuple[int, Any]:
    """The exit status and the report of the doctor, with the kubeconfig of the tests."""
    command = [str(Path(sys.executable).parent / "vllm-priority"), "doctor", "--kubernetes", "--json"]
    done = subprocess.run([*command, "--namespace", namespace], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(("mode", "target_port"), [("takeover", "http"), ("swap", 8000)])
def test_a_rollout_restart_under_load_loses_no_request(
    cluster: Cluster, apps: str, mode: str, target_port: int | str
) -> None:
    if not cluster.runs_pods:
        cluster.unchecked.append(f"a rollout restart under load, in mode {mode}: no pod runs here")
        pytest.skip("no node")
    if mode not in MODES:
        pytest.skip(f"there is no mode {mode}")
    assert cluster.image is not None
    name, sender = f"served-{mode}", f"client-{mode}"
    cluster.kubectl("apply", "-n", apps, "-f", "-", stdin=served(name, cluster.image, mode, target_port))
    wait = ("rollout", "status", f"deployment/{name}", "-n", apps, f"--timeout={PATIENCE:g}s")
    cluster.kubectl(*wait)
    cluster.kubectl("apply", "-n", apps, "-f", "-", stdin=client(sender, cluster.image, name, 60))
    log = ("logs", sender, "-n", apps)
    eventually("the client sends", lambda: phase(cluster, sender, apps) == "Running" and cluster.kubectl(*log))
    before = names(cluster, name, apps)
    cluster.kubectl("rollout", "restart", f"deployment/{name}", "-n", apps)
    cluster.kubectl(*wait)
    eventually("the client has ended", lambda: phase(cluster, sender, apps) in ("Succeeded", "Failed"), 60 + PATIENCE)
    result = json.loads(cluster.kubectl(*log).splitlines()[-1])
    assert not before & names(cluster, name, apps), "each pod was replaced while the client was sending"
    assert result["failures"] == []
    assert result["counts"]["short"] > 500
    assert result["counts"]["long"] > 8
    assert list(result["reports"]) == ["-10; source=header; outcome=inserted"], "every request passed a sidecar"


def phase(cluster: Cluster, name: str, namespace: str) -> str:
    """The phase of a pod."""
    return str(cluster.get("pod", name, "-n", namespace)["status"].get("phase"))


def names(cluster: Cluster, app: str, namespace: str) -> set[str]:
    """The names of the pods with this label that are not about to end."""
    found = cluster.get("pods", "-n", namespace, "-l", f"app={app}")
    return {pod["metadata"]["name"] for pod in found if not pod["metadata"].get("deletionTimestamp")}


def test_the_chart_s_own_test_passes(cluster: Cluster, release: Release) -> None:
    if not cluster.runs_pods:
        cluster.unchecked.append("helm test: its pod has no node to run on")
        pytest.skip("no node")
    assert "FAILED" not in run("helm", "test", release.name, "--namespace", release.namespace, "--logs")


def test_with_fail_a_lost_control_plane_stops_labelled_pods_and_no_others(
    cluster: Cluster, release: Release, control_plane: ControlPlane, apps: str
) -> None:
    release.upgrade(webhook__failurePolicy='"Fail"')
    control_plane.stop()
    with pytest.raises(CommandError, match=r"inject\.vllm-priority\.io"):
        cluster.dry_run(POD, apps)
    assert not has_sidecar(cluster.dry_run(pod("other"), apps))
    if cluster.version >= (1, 21):
        assert not has_sidecar(cluster.dry_run(POD, "kube-system"))
        assert not has_sidecar(cluster.dry_run(POD, release.namespace))
    else:
        cluster.unchecked.append("namespaces by name: before 1.21 they do not carry their name as a label")


def test_uninstalled_it_leaves_no_trace_and_locks_nobody_out(cluster: Cluster, release: Release, apps: str) -> None:
    release.uninstall()
    assert not has_sidecar(cluster.dry_run(POD, apps))
    kinds = [
        "deployments", "replicasets", "services", "secrets", "configmaps", "serviceaccounts", "networkpolicies",
        "poddisruptionbudgets", "roles", "rolebindings", "clusterroles", "clusterrolebindings",
        "mutatingwebhookconfigurations", "validatingwebhookconfigurations",
    ]  # fmt: skip
    selector = f"app.kubernetes.io/instance={release.name}"

    def gone() -> bool:
        return not cluster.get(",".join(kinds), "--all-namespaces", "-l", selector)

    eventually("nothing with the release's label is left", gone)
    helms = cluster.get("secrets", "-n", release.namespace, "-l", f"name={release.name},owner=helm")
    assert not helms
