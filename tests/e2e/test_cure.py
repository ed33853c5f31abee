"""Through the sidecars the priority in the header arrives, on every scale-out route, and nothing else changes."""

import json
from typing import Any

import httpx
import pytest

from tests.e2e.queue_order import GENERATE, finish_order, generate_request
from tests.e2e.render_requests import (
    BODIES,
    CHAT,
    MESSAGES,
    ROUTES,
    ROUTES_THAT_TAKE_A_BODY_PRIORITY,
    generate_requests,
    priorities,
)

HEADER = {"X-Vllm-Priority": "-10"}
APPLIED = "x-vllm-priority-applied"
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("server", ["render_sidecar_url", "engine_sidecar_url"])
def test_render_routes_answer_with_the_headers_priority(
    server: str, route: str, client: httpx.Client, request: pytest.FixtureRequest
) -> None:
    answer = client.post(request.getfixturevalue(server) + route, json=BODIES[route], headers=HEADER)
    assert priorities(answer) == {-10}
    outcome = "response_edited" if route == MESSAGES else "inserted"
    assert answer.headers[APPLIED] == f"-10; source=header; outcome={outcome}"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("value", ["0", "-9223372036854775808", "9223372036854775807", "1_000", "+5", "007"])
def test_every_int64_arrives_exactly(value: str, route: str, render_sidecar_url: str, client: httpx.Client) -> None:
    answer = client.post(render_sidecar_url + route, json=BODIES[route], headers={"X-Vllm-Priority": value})
    assert priorities(answer) == {int(value)}


@pytest.mark.parametrize("route", ROUTES_THAT_TAKE_A_BODY_PRIORITY)
def test_header_beats_body(route: str, render_sidecar_url: str, client: httpx.Client) -> None:
    answer = client.post(render_sidecar_url + route, json={**BODIES[route], "priority": 3}, headers=HEADER)
    assert priorities(answer) == {-10}
    assert answer.headers[APPLIED] == "-10; source=header; outcome=replaced"


@pytest.mark.parametrize("members", [b'"priority": 1, "priority": 2', b'"\\u0070riority": 3', b'"priority": "4"'])
def test_header_beats_every_priority_in_the_body(members: bytes, render_sidecar_url: str, client: httpx.Client) -> None:
    body = json.dumps(BODIES[CHAT]).encode()[:-1] + b", " + members + b"}"
    answer = client.post(render_sidecar_url + CHAT, content=body, headers={**JSON, **HEADER})
    assert priorities(answer) == {-10}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("members", [{}, {"priority": 3}], ids=["none", "3"])
def test_without_the_header_the_body_decides(
    members: dict[str, Any], route: str, render_url: str, render_sidecar_url: str, client: httpx.Client
) -> None:
    body = {**BODIES[route], **members}
    straight, through = (client.post(url + route, json=body) for url in (render_url, render_sidecar_url))
    assert without_ids(through) == without_ids(straight)


HARD_BODIES = {
    "the word elsewhere": (
        b'{"service_tier": "priority", "metadata": {"priority": "x"}, "model": "tiny", "max_tokens": 4,'
        b' "messages": [{"role": "user", "content": "\\"priority\\": 1}"}], "Priority": 8}'
    ),
    "numbers and empties": (
        b'{"seed": 9007199254740993, "stop": [], "logit_bias": {}, "temperature": 1.0, "model": "tiny",'
        b' "max_tokens": 4, "messages": [{"role": "user", "content": "x", "name": "n"}]}'
    ),
    "per cent": b'{"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "100% %1 %% %20"}]}',
    "escapes and UTF-8": (
        '{"model": "tiny", "max_tokens": 4, "messages":'
        ' [{"role": "user", "content": "\\u00e9é\\ud83d\\ude00😀\\\\\\"}{\\/"}], "x": "\\ud800"}'
    ).encode(),
    "BOM and white space": (
        b'\xef\xbb\xbf \n{"model": "tiny", "max_tokens": 4,\r\n"messages": [{"role": "user", "content": "x"}]\t} \n'
    ),
    "NaN": b'{"model": "tiny", "max_tokens": 4, "x": NaN, "messages": [{"role": "user", "content": "x"}]}',
    "long": b'{"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "'
    + b"priority: " * 250
    + b'"}]}',
}


@pytest.mark.parametrize("body", HARD_BODIES.values(), ids=HARD_BODIES)
def test_all_but_the_priority_is_as_without_the_sidecar(
    body: bytes, render_url: str, render_sidecar_url: str, client: httpx.Client
) -> None:
    """Token ids above all: a prompt that was changed by a byte would miss every prefix cache."""
    straight = without_ids(client.post(render_url + CHAT, content=body, headers=JSON))
    through = without_ids(client.post(render_sidecar_url + CHAT, content=body, headers={**JSON, **HEADER}))
    assert [request.pop("priority") for request in straight] == [0]
    assert [request.pop("priority") for request in through] == [-10]
    assert through == straight


def test_generate_puts_the_urgent_request_first(engine_sidecar_url: str) -> None:
    assert finish_order(engine_sidecar_url, HEADER) == "ACB"


def test_generate_puts_the_header_before_the_body(engine_sidecar_url: str) -> None:
    assert finish_order(engine_sidecar_url, HEADER, {"priority": 10}) == "ACB"


def test_generate_keeps_a_patient_request_behind(engine_sidecar_url: str) -> None:
    """The other way round: the body says -10, the header 10, and C waits its turn."""
    assert finish_order(engine_sidecar_url, {"X-Vllm-Priority": "10"}, {"priority": -10}) == "ABC"


def test_messages_keeps_its_only_channel(engine_sidecar_url: str) -> None:
    """vLLM reads the header itself on /v1/messages, and has no other way to be told: the sidecar leaves it there."""
    assert finish_order(engine_sidecar_url, HEADER, path="/v1/messages", c_body=BODIES[MESSAGES]) == "ACB"


def test_generate_answers_as_without_the_sidecar(
    engine_url: str, engine_sidecar_url: str, client: httpx.Client
) -> None:
    body = generate_request(8)
    body["sampling_params"]["temperature"] = 0.0
    straight, through = (
        client.post(url + GENERATE, json=body, headers=HEADER).json() for url in (engine_url, engine_sidecar_url)
    )
    for answer in (straight, through):
        del answer["request_id"], answer["created"]
    assert through == straight


def without_ids(answer: httpx.Response) -> list[dict[str, Any]]:
    """The GenerateRequests, without the id that vLLM draws at random for each."""
    return [{key: value for key, value in each.items() if key != "request_id"} for each in generate_requests(answer)]
