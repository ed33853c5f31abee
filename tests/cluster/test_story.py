"""Install, inject, upgrade, change the policy, lose the control plane, uninstall: in this order, on a real API."""

import copy
import json
from typing import Any

import pytest
from cryptography import x509

from control_plane.policy.load import parse_policies
from tests.cluster.cluster import Cluster, CommandError, ControlPlane, Release, eventually, run

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
    template = {"metadata": {"labels": POD["metadata"]["labels"]}, "spec": POD["spec"]}
    selector = {"matchLabels": {"app": "vllm"}}
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
    with pytest.raises(CommandError, match="'nobody' is no policy here"):
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
        "mutatingwebhookconfigurations",
    ]  # fmt: skip
    selector = f"app.kubernetes.io/instance={release.name}"

    def gone() -> bool:
        return not cluster.get(",".join(kinds), "--all-namespaces", "-l", selector)

    eventually("nothing with the release's label is left", gone)
    helms = cluster.get("secrets", "-n", release.namespace, "-l", f"name={release.name},owner=helm")
    assert not helms
