"""`ordinary: enforce` in front of real vLLM: on its ordinary routes, a priority arrives as the policy allows it."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from control_plane.policy.load import parse_policies
from tests.e2e.conftest import sidecar
from tests.e2e.queue_order import SHORT, finish_order, wait_for_gauges
from tests.e2e.vllm_server import MODEL_NAME

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
POLICY = "ordinary: enforce\nbody: reject\nclasses: {urgent: -10}\n"
APPLIED = "x-vllm-priority-applied"
SHORT_BODY: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": SHORT, "ignore_eos": True}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**SHORT_BODY, "messages": [{"role": "user", "content": "The quick brown fox"}]},
    COMPLETIONS: {**SHORT_BODY, "prompt": "The quick brown fox"},
}
TOO_LARGE = [2**63, 2**64, -(2**63) - 1]
"""vLLM rejects these in a body with 400. In the header it accepts the first, and responds with 500 to the others."""


@pytest.fixture(scope="module")
def enforcing_url(engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The engine, through a sidecar with `ordinary: enforce`."""
    policy = parse_policies(POLICY).default
    yield from sidecar("engine", engine_url, tmp_path_factory.mktemp("enforcing-sidecar"), policy)


@pytest.mark.parametrize("route", BODIES)
def test_a_class_arrives_as_its_number(route: str, enforcing_url: str, client: httpx.Client) -> None:
    answer = client.post(enforcing_url + route, json=BODIES[route], headers={"X-Vllm-Priority": "urgent"})
    assert answer.status_code == 200, answer.text
    assert answer.headers[APPLIED] == "-10; source=class; outcome=header_set"


def test_a_class_is_served_first(enforcing_url: str, engine_sidecar_url: str) -> None:
    def order(url: str) -> str:
        return finish_order(url, {"X-Vllm-Priority": "urgent"}, path=CHAT, c_body=BODIES[CHAT])

    assert order(enforcing_url) == "ACB"
    assert order(engine_sidecar_url) == "ABC", "vLLM ignores a value that is not an integer"


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("value", TOO_LARGE)
@pytest.mark.parametrize("place", ["header", "body"])
def test_an_integer_beyond_int64_is_rejected_and_no_slot_leaks(
    place: str, value: int, route: str, engine_url: str, enforcing_url: str, client: httpx.Client
) -> None:
    body = BODIES[route] if place == "header" else {**BODIES[route], "priority": value}
    headers = {"X-Vllm-Priority": str(value)} if place == "header" else {}
    answer = client.post(enforcing_url + route, json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].lower() == "x-vllm-priority"
    outcome = "out_of_range" if place == "header" else "not_allowed"
    assert answer.headers[APPLIED] == f"none; outcome={outcome}"
    wait_for_gauges(engine_url, running=0, waiting=0)
    assert client.post(enforcing_url + route, json=BODIES[route]).status_code == 200
    wait_for_gauges(engine_url, running=0, waiting=0)


@pytest.mark.parametrize("value", TOO_LARGE[1:])
def test_vllm_itself_responds_with_500_to_such_a_header(value: int, engine_url: str, client: httpx.Client) -> None:
    answer = client.post(engine_url + CHAT, json=BODIES[CHAT], headers={"X-Vllm-Priority": str(value)})
    assert answer.status_code == 500
    wait_for_gauges(engine_url, running=0, waiting=0)


def test_a_priority_below_another_is_served_later(enforcing_url: str) -> None:
    """Without this, "ACB" above could be the order of the routes."""
    assert finish_order(enforcing_url, {"X-Vllm-Priority": "10"}, path=CHAT, c_body=BODIES[CHAT]) == "ABC"
