"""Redirect for real: the init container's own command in a network namespace, Envoy as its own user, real traffic.

These tests need root, iproute2 and nftables.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.injector.admission import mutate
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.model import Policies

from .pod_namespace import POD_ADDRESS_6, PodNamespace, require_namespaces

GENERATE = "/inference/v1/generate"
URGENT = {"content-type": "application/json", "x-vllm-priority": "-7"}
PLAIN = '{"token_ids":[1]}'
MOVED = {"token_ids": [1], "priority": -7}


def injected(listen_host: str = "0.0.0.0") -> object:
    """A pod whose container has an unnamed port 8000, with a redirect."""
    pod = {
        "metadata": {"name": "m-1", "annotations": {"vllm-priority.io/mode": "redirect"}},
        "spec": {
            "containers": [{"name": "vllm", "command": ["vllm", "serve", "x"], "ports": [{"containerPort": 8000}]}]
        },
    }
    settings = InjectorSettings(kubernetes_version="1.35", concurrency=1, listen_host=listen_host)
    return mutate(pod, Policies(), settings).pod


@pytest.fixture(scope="module")
def pod(envoy: Path) -> Iterator[PodNamespace]:
    """App and sidecar up and ready, the redirect in place; seen without it first."""
    require_namespaces("nft")
    with PodNamespace(injected(), envoy) as namespace:
        namespace.run_app(8000)
        seen = json.loads(namespace.ask("POST", GENERATE, port=8000, body=PLAIN, headers=URGENT)[1])
        assert (json.loads(seen["body"]), seen["header"]) == ({"token_ids": [1]}, "-7"), "moved before the redirect"
        namespace.run_init("vllm-priority-redirect")
        namespace.run_sidecar()
        namespace.until_ready()
        yield namespace


def test_traffic_from_outside_to_vllms_port_goes_through_the_sidecar(pod: PodNamespace) -> None:
    status, text, headers = pod.ask("POST", GENERATE, port=8000, body=PLAIN, headers=URGENT)
    seen = json.loads(text)
    assert status == 200
    assert json.loads(seen["body"]) == MOVED
    assert seen["header"] is None
    assert headers["x-vllm-priority-applied"].startswith("-7; source=header")


def test_traffic_from_another_container_goes_through_the_sidecar(pod: PodNamespace) -> None:
    seen = json.loads(pod.ask("POST", GENERATE, port=8000, body=PLAIN, headers=URGENT, inside=True)[1])
    assert json.loads(seen["body"]) == MOVED


def test_what_envoys_user_sends_reaches_vllm(pod: PodNamespace) -> None:
    """Were it not, its requests would come back to itself until its connections ran out."""
    assert json.loads(pod.ask("GET", "/health", port=8000)[1])["peer"].endswith("127.0.0.1")


def test_other_ports_are_not_redirected(pod: PodNamespace) -> None:
    assert pod.ask("GET", "/", port=8001)[0] == 0
    assert pod.readiness() == 200


def test_running_the_init_container_again_changes_nothing(pod: PodNamespace) -> None:
    before = pod.rules()
    pod.run_init("vllm-priority-redirect")
    assert pod.rules() == before
    assert before.count("redirect to :18001") == 2


def test_the_node_id_of_the_sidecar_is_the_pods_name(pod: PodNamespace) -> None:
    answer = json.loads(pod.ask("GET", "/server_info", port=19001, inside=True)[1])
    assert answer["node"]["id"] == "ml/m-1"
    assert answer["node"]["cluster"]


def test_the_admin_listener_is_not_reachable_from_outside(pod: PodNamespace) -> None:
    assert pod.ask("GET", "/server_info", port=19001)[0] == 0


def test_ipv6_is_redirected_if_the_sidecar_listens_on_it(envoy: Path) -> None:
    require_namespaces("nft")
    with PodNamespace(injected("::"), envoy) as namespace:
        namespace.run_app(8000)
        namespace.run_init("vllm-priority-redirect")
        namespace.run_sidecar()
        namespace.until_ready()
        for host in (POD_ADDRESS_6, None):
            seen = json.loads(namespace.ask("POST", GENERATE, port=8000, body=PLAIN, headers=URGENT, host=host)[1])
            assert json.loads(seen["body"]) == MOVED
