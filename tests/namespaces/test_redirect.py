"""Redirect for real: the init container's own command in a network namespace, Envoy as its own user, real traffic.

These tests need root, iproute2 and nftables.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.admission import InjectorSettings, mutate
from control_plane.policy import Policies

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


def test_what_comes_from_outside_for_the_apps_port_passes_the_sidecar(pod):
    status, text, headers = pod.ask("POST", GENERATE, port=8000, body=PLAIN, headers=URGENT)
    seen = json.loads(text)
    assert status == 200
    assert json.loads(seen["body"]) == MOVED
    assert seen["header"] is None
    assert headers["x-vllm-priority-applied"].startswith("-7; source=header")


def test_what_a_neighbour_in_the_pod_sends_passes_it_too(pod):
    seen = json.loads(pod.ask("POST", GENERATE, port=8000, body=PLAIN, headers=URGENT, inside=True)[1])
    assert json.loads(seen["body"]) == MOVED


def test_envoys_own_user_is_let_through_to_the_app(pod):
    """Were it not, its requests would come back to itself until its connections ran out."""
    assert json.loads(pod.ask("GET", "/health", port=8000)[1])["peer"].endswith("127.0.0.1")


def test_other_ports_are_not_touched(pod):
    assert pod.ask("GET", "/", port=8001)[0] == 0
    assert pod.readiness() == 200


def test_running_the_init_container_again_changes_nothing(pod):
    before = pod.rules()
    pod.run_init("vllm-priority-redirect")
    assert pod.rules() == before
    assert before.count("redirect to :18001") == 2


def test_the_sidecar_is_known_by_its_pods_name(pod):
    answer = json.loads(pod.ask("GET", "/server_info", port=19001, inside=True)[1])
    assert answer["node"]["id"] == "ml/m-1"
    assert answer["node"]["cluster"]


def test_the_admin_listener_is_not_reached_from_outside(pod):
    assert pod.ask("GET", "/server_info", port=19001)[0] == 0


def test_ipv6_is_redirected_where_the_sidecar_listens_on_it(envoy):
    require_namespaces("nft")
    with PodNamespace(injected("::"), envoy) as namespace:
        namespace.run_app(8000)
        namespace.run_init("vllm-priority-redirect")
        namespace.run_sidecar()
        namespace.until_ready()
        for host in (POD_ADDRESS_6, None):
            seen = json.loads(namespace.ask("POST", GENERATE, port=8000, body=PLAIN, headers=URGENT, host=host)[1])
            assert json.loads(seen["body"]) == MOVED
