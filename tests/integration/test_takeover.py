"""Takeover: a Service's endpoints as Kubernetes resolves them, and whether Kubernetes and Envoy accept the pod."""

import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from control_plane.address import Address
from control_plane.injector.admission import mutate
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.model import Policies

from .kubelet import environment, expand

Pod = Any

POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "m-1", "labels": {"app": "engine"}},
    "spec": {
        "containers": [
            {"name": "exporter", "image": "x/exporter", "ports": [{"name": "metrics", "containerPort": 9400}]},
            {
                "name": "vllm",
                "image": "vllm/vllm-openai:v0.33.0",
                "command": ["vllm", "serve", "tiny"],
                "ports": [{"name": "http", "containerPort": 8000}],
                "readinessProbe": {"httpGet": {"path": "/health", "port": "http"}},
                "livenessProbe": {"tcpSocket": {"port": "http"}},
                "startupProbe": {"httpGet": {"path": "/health", "port": 8000}},
                "lifecycle": {"postStart": {"httpGet": {"path": "/warm", "port": "http"}}},
            },
        ]
    },
}


def find_port(pod: Pod, target: Any, protocol: str = "TCP", version: tuple[int, int] = (1, 35)) -> int | None:
    """The port of a pod's endpoint, as pkg/api/v1/pod.FindPort of Kubernetes works it out; None: no endpoint.

    A number is taken as it is. A name is looked up in the containers in their order, by name and protocol, then (from
    1.33 on: kubernetes#128850) in the init containers that are restarted always.
    """
    if isinstance(target, int):
        return target
    searched = list(pod["spec"]["containers"])
    if version >= (1, 33):
        searched += [c for c in pod["spec"].get("initContainers", ()) if c.get("restartPolicy") == "Always"]
    for container in searched:
        for port in container.get("ports", ()):
            if port.get("name") == target and port.get("protocol", "TCP") == protocol:
                return int(port["containerPort"])
    return None


@pytest.mark.parametrize("version", ["1.28", "1.34"])
def test_in_mode_swap_names_and_numbers_lead_to_the_sidecar(version: str) -> None:
    pod = injected(version, "swap")
    containers = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())]
    sidecar = next(container for container in containers if container["name"] == "vllm-priority")
    vllm = next(container for container in containers if container["name"] == "vllm")
    assert (
        sidecar["ports"][0]["containerPort"] == find_port(pod, "http", version=(1, 34)) == find_port(pod, 8000) == 8000
    )
    assert [*vllm["command"], *vllm.get("args", [])] == ["vllm", "serve", "tiny", "--port", "18001"]
    for probe in ("readinessProbe", "livenessProbe", "startupProbe"):
        assert probe_port(vllm, vllm[probe]) == 18001, "a probe of vLLM still means vLLM"


def probe_port(container: Any, handler: Any) -> int | None:
    """The port of a probe or hook, as the kubelet's ResolveContainerPort has it: by the names of this container."""
    port = (handler.get("httpGet") or handler.get("tcpSocket"))["port"]
    if isinstance(port, int):
        return port
    return next((p["containerPort"] for p in container.get("ports", ()) if p.get("name") == port), None)


def injected(version: str, mode: str = "takeover") -> Pod:
    """The pod with its sidecar, as on a cluster of this version."""
    pod = {**POD, "metadata": {**POD["metadata"], "annotations": {"vllm-priority.io/mode": mode}}}  # type: ignore[dict-item]
    return mutate(pod, Policies(), InjectorSettings(kubernetes_version=version, concurrency=1)).pod


def container(pod: Pod, name: str) -> Any:
    return next(c for c in (*pod["spec"]["containers"], *pod["spec"].get("initContainers", ())) if c["name"] == name)


@pytest.mark.parametrize("version", ["1.27", "1.29", "1.32", "1.33", "1.35"])
def test_a_service_by_name_reaches_the_sidecar_on_every_version(version: str) -> None:
    major, minor = version.split(".")
    numbers = int(major), int(minor)
    assert find_port(POD, "http", version=numbers) == 8000
    pod = injected(version)
    assert find_port(pod, "http", version=numbers) == 18001
    assert find_port(pod, "metrics", version=numbers) == 9400


def test_a_native_sidecars_port_name_is_not_found_before_1_33() -> None:
    """So that the row above can fail: a native sidecar's name is found by nobody before 1.33."""
    pod = injected("1.33")
    assert find_port(pod, "http", version=(1, 32)) is None
    assert find_port(pod, "http", version=(1, 33)) == 18001


def test_a_service_by_number_bypasses_the_sidecar_and_causes_a_warning() -> None:
    annotations = {"vllm-priority.io/mode": "takeover"}
    pod = {**POD, "metadata": {"labels": {"app": "engine"}, "annotations": annotations}}
    mutation = mutate(pod, Policies(), InjectorSettings(kubernetes_version="1.35"))
    assert find_port(mutation.pod, 8000) == 8000
    assert any("8000 bypasses it" in warning for warning in mutation.messages)


@pytest.mark.parametrize("version", ["1.32", "1.35"])
def test_probes_and_hooks_still_reach_vllm_itself(version: str) -> None:
    app = container(injected(version), "vllm")
    for handler in (app["readinessProbe"], app["livenessProbe"], app["startupProbe"], app["lifecycle"]["postStart"]):
        assert probe_port(app, handler) == 8000


@pytest.mark.parametrize("version", ["1.32", "1.35"])
def test_the_probes_of_the_sidecar_find_its_health_listener(version: str) -> None:
    sidecar = container(injected(version), "vllm-priority")
    assert probe_port(sidecar, sidecar["readinessProbe"]) == probe_port(sidecar, sidecar["livenessProbe"]) == 19002


@pytest.mark.parametrize("mode", ["swap", "takeover", "redirect", "port"])
@pytest.mark.parametrize("version", ["1.32", "1.35"])
def test_kubernetes_accepts_the_pod(version: str, mode: str) -> None:
    kubernetes_validate.validate(injected(version, mode), "1.35", strict=True)


@pytest.mark.parametrize("control_plane", [None, Address("vllm-priority.infra.svc", 8080)])
def test_envoy_accepts_the_arguments(envoy: Path, control_plane: Address | None) -> None:
    chosen = InjectorSettings(control_plane=control_plane)
    sidecar = container(mutate(POD, Policies(), chosen).pod, "vllm-priority")
    args = expand(sidecar["args"], {"POD_NAME": "m-1", "POD_NAMESPACE": "ml"})
    done = subprocess.run(
        [envoy, "--mode", "validate", *args], env=environment(sidecar),
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
