"""Without a sidecar, vLLM's scale-out routes lose the header. Where one of these fails, vLLM has learnt to read it."""

import httpx
import pytest

from tests.e2e.queue_order import finish_order
from tests.e2e.render_requests import BODIES, MESSAGES, ROUTES, ROUTES_THAT_TAKE_A_BODY_PRIORITY, priorities

HEADER = {"X-Vllm-Priority": "-10"}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("server", ["render_url", "engine_url"])
def test_render_routes_lose_the_header(
    server: str, route: str, client: httpx.Client, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(server)
    assert priorities(client.post(url + route, json=BODIES[route], headers=HEADER)) == {0}


@pytest.mark.parametrize("route", ROUTES_THAT_TAKE_A_BODY_PRIORITY)
def test_render_routes_take_a_priority_in_the_body(route: str, render_url: str, client: httpx.Client) -> None:
    assert priorities(client.post(render_url + route, json={**BODIES[route], "priority": -10})) == {-10}


def test_messages_render_takes_no_priority_at_all(render_url: str, client: httpx.Client) -> None:
    body = {**BODIES[MESSAGES], "priority": -10}
    assert priorities(client.post(render_url + MESSAGES, json=body, headers=HEADER)) == {0}


def test_generate_loses_the_header_so_the_urgent_request_waits_its_turn(engine_url: str) -> None:
    assert finish_order(engine_url, c_headers=HEADER, c_members={}) == "ABC"


def test_generate_takes_a_priority_in_the_body_so_the_urgent_request_goes_first(engine_url: str) -> None:
    assert finish_order(engine_url, c_headers={}, c_members={"priority": -10}) == "ACB"
