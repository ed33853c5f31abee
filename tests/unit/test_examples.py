"""Kubernetes accepts the manifests under deploy/examples, with and without sidecars."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from control_plane.doctor.kubernetes import RESOURCES
from control_plane.injector.manifests import inject_stream, uninject_stream
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.model import Policies
from tests.helm import KUBERNETES_VERSIONS
from tools.build_manifests import injected_example

EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"
TEXTS = {file.name: file.read_text() for file in sorted(EXAMPLES.glob("*/*.yaml"))} | {"injected": injected_example()}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(TEXTS[name]))


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
@pytest.mark.parametrize("name", TEXTS)
def test_kubernetes_accepts_it(name: str, version: str) -> None:
    for document in documents(name):
        kubernetes_validate.validate(document, version, strict=True)


def test_the_periodic_doctor_may_list_what_it_looks_at_and_nothing_else() -> None:
    (role,) = (document for document in documents("cronjob.yaml") if document["kind"] == "ClusterRole")
    allowed = {
        (group, resource) for rule in role["rules"] for group in rule["apiGroups"] for resource in rule["resources"]
    }
    needed = {(path.split("/")[2] if path != "/api/v1" else "", plural) for path, plural in RESOURCES.values()}
    assert allowed == needed
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"list"}


@pytest.mark.parametrize("name", ["scale-out.yaml", "injected"])
def test_every_service_targets_a_port_by_its_name(name: str) -> None:
    ports = [port for d in documents(name) if d["kind"] == "Service" for port in d["spec"]["ports"]]
    assert [port["targetPort"] for port in ports] == ["http", "http"]


def test_in_the_injected_example_the_port_name_belongs_to_the_sidecar() -> None:
    for document in documents("injected"):
        if document["kind"] == "Deployment":
            containers = document["spec"]["template"]["spec"]["containers"]
            owners = [c["name"] for c in containers for port in c["ports"] if port["name"] == "http"]
            assert owners == ["vllm-priority"]


def test_the_engine_orders_by_priority_and_serves_the_scale_out_routes() -> None:
    (engine,) = (
        d for d in documents("scale-out.yaml") if d["metadata"]["name"] == "vllm-engine" and "template" in d["spec"]
    )
    arguments = engine["spec"]["template"]["spec"]["containers"][0]["args"]
    assert {"--enable-scale-out", "--scheduling-policy=priority"} <= set(arguments)


def test_taking_the_sidecars_out_gives_the_example_back() -> None:
    text = TEXTS["scale-out.yaml"]
    injected, _ = inject_stream(text, Policies(), InjectorSettings())
    assert injected != text
    assert uninject_stream(injected)[0] == text
