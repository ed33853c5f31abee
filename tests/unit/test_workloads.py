"""What is warned of when a workload is created or changed."""

from typing import Any

import pytest

from control_plane.injector.admission import read_review
from control_plane.injector.reasons import WarningCode, Warnings
from control_plane.injector.settings import InjectorSettings
from control_plane.injector.workloads import workload_warnings
from control_plane.policy.load import parse_policies

POLICIES = parse_policies("{}")
SETTINGS = InjectorSettings(kubernetes_version="1.35", own_namespace="vllm-priority")
LABEL = {"vllm-priority.io/inject": "true"}
CONTAINER = {"name": "vllm", "command": ["vllm", "serve", "m"], "ports": [{"name": "http", "containerPort": 8000}]}


def template(labels: Any = LABEL, **spec: Any) -> dict[str, Any]:
    return {"metadata": {"labels": labels}, "spec": {"containers": [CONTAINER], **spec}}


def workload(kind: str, spec: Any, labels: Any = None) -> dict[str, Any]:
    return {"apiVersion": "x/v1", "kind": kind, "metadata": {"name": "m", "labels": labels}, "spec": spec}


def warnings(manifest: Any, namespace: str = "ml", settings: InjectorSettings = SETTINGS) -> Warnings:
    request = {
        "uid": "1", "kind": {"kind": manifest["kind"]}, "namespace": namespace, "operation": "CREATE",
        "object": manifest,
    }  # fmt: skip
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    return workload_warnings(read_review(review), POLICIES, settings)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Deployment", {"template": template()}),
        ("StatefulSet", {"template": template()}),
        ("DaemonSet", {"template": template()}),
        ("Job", {"template": template(restartPolicy="Never")}),
        ("CronJob", {"jobTemplate": {"spec": {"template": template(restartPolicy="Never")}}}),
        ("Rollout", {"template": template()}),
        ("LeaderWorkerSet", {"leaderWorkerTemplate": {"leaderTemplate": template(), "workerTemplate": template({})}}),
    ],
)
def test_every_kind_of_workload_gets_the_warnings_of_its_pods(kind: str, spec: Any) -> None:
    found = warnings(workload(kind, spec))
    assert WarningCode.ROLE_GUESSED in [warning.code for warning in found]
    assert all(warning.message.startswith(f"{kind}/m") for warning in found)


def test_a_pod_that_would_be_rejected_is_a_warning_with_the_reason() -> None:
    broken = template()
    broken["metadata"]["annotations"] = {"vllm-priority.io/role": "x"}
    (warning,) = warnings(workload("Deployment", {"template": broken}))
    assert warning.code == WarningCode.NOT_INJECTED
    assert "its pods will be rejected: not injected (InvalidAnnotation): " in warning.message


def test_a_label_on_the_workload_instead_of_its_pod_template_is_a_warning() -> None:
    (warning,) = warnings(workload("Deployment", {"template": template({})}, LABEL))
    assert warning.code == WarningCode.LABEL_NOT_ON_TEMPLATE
    assert "Set it on the pod template." in warning.message


@pytest.mark.parametrize(
    "manifest",
    [
        workload("Deployment", {"template": template({})}),
        workload("Deployment", {"template": template({"vllm-priority.io/inject": "false"})}),
        workload("ConfigMap", {}, LABEL),
        workload("Deployment", None),
        workload("Deployment", {"template": {"metadata": None}}),
        workload("Deployment", {"template": {"metadata": {"labels": []}}}),
    ],
)
def test_an_object_without_the_label_gets_no_warning(manifest: Any) -> None:
    assert warnings(manifest) == ()


@pytest.mark.parametrize("namespace", ["kube-system", "vllm-priority"])
def test_excluded_namespaces_get_no_warning(namespace: str) -> None:
    assert warnings(workload("Deployment", {"template": template()}), namespace) == ()


def test_a_template_that_is_not_valid_is_a_warning_and_never_an_error() -> None:
    (warning,) = warnings(
        workload("Deployment", {"template": {"metadata": {"labels": LABEL}, "spec": {"containers": [{"name": 5}]}}})
    )
    assert warning.code == WarningCode.NOT_INJECTED
