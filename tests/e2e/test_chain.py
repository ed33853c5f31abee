"""What a scale-out router does, through both sidecars: render, generate, derender, with text at the end."""

import json
from typing import Any

import httpx
import pytest

from tests.e2e.queue_order import GENERATE, SHORT, finish_order
from tests.e2e.render_requests import BODIES, CHAT, COMPLETIONS, MESSAGES, ROUTES, generate_requests

HEADER = {"X-Vllm-Priority": "-10"}
DERENDER_CHAT, DERENDER_COMPLETIONS = "/v1/chat/completions/derender", "/v1/completions/derender"
GREEDY = {"temperature": 0}
"""So that the coupled routes, asked the same, give the same text."""


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_rendered_is_generated_as_it_came(
    route: str, render_sidecar_url: str, engine_sidecar_url: str, client: httpx.Client
) -> None:
    rendered = client.post(render_sidecar_url + route, json=BODIES[route], headers=HEADER)
    for request in generate_requests(rendered):
        answer = client.post(engine_sidecar_url + GENERATE, json=request)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"]
        # The body names its priority, no header does: the engine's sidecar has nothing to do.
        assert answer.headers["x-vllm-priority-applied"] == "none; outcome=absent"


def test_chat_chain_ends_with_the_text_of_the_coupled_route(
    render_sidecar_url: str, engine_sidecar_url: str, engine_url: str, client: httpx.Client
) -> None:
    body = {**BODIES[CHAT], **GREEDY}
    rendered = client.post(render_sidecar_url + CHAT, json=body, headers=HEADER)
    assert rendered.json()["priority"] == -10
    # The answer's bytes go on as they are: no decoding in between.
    generated = client.post(
        engine_sidecar_url + GENERATE, content=rendered.content, headers={"content-type": "application/json"}
    )
    derendered = client.post(
        render_sidecar_url + DERENDER_CHAT,
        json={
            "generate_response": generated.json(),
            "chat_request": body,
            "prompt_tokens": len(rendered.json()["token_ids"]),
        },
    )
    coupled = client.post(engine_url + "/v1/chat/completions", json=body).json()
    text = derendered.json()["choices"][0]["message"]["content"]
    assert text
    assert text == coupled["choices"][0]["message"]["content"]
    assert derendered.json()["usage"] == coupled["usage"]


def test_completions_chain_ends_with_a_text_for_each_prompt(
    render_sidecar_url: str, engine_sidecar_url: str, engine_url: str, client: httpx.Client
) -> None:
    body = {**BODIES[COMPLETIONS], **GREEDY}
    requests = generate_requests(client.post(render_sidecar_url + COMPLETIONS, json=body, headers=HEADER))
    assert {request["priority"] for request in requests} == {-10}
    generated = [client.post(engine_sidecar_url + GENERATE, json=request).json() for request in requests]
    derendered = client.post(render_sidecar_url + DERENDER_COMPLETIONS, json={"generate_responses": generated}).json()
    coupled = client.post(engine_url + "/v1/completions", json=body).json()
    texts = [choice["text"] for choice in derendered["choices"]]
    assert all(texts)
    assert texts == [choice["text"] for choice in coupled["choices"]]


def test_streamed_chain_ends_with_the_text_of_the_coupled_route(
    render_sidecar_url: str, engine_sidecar_url: str, engine_url: str, client: httpx.Client
) -> None:
    """Each chunk that the engine sends is derendered as it comes; its state travels with the client."""
    body = {**BODIES[CHAT], **GREEDY, "stream": True}
    rendered = client.post(render_sidecar_url + CHAT, json=body, headers=HEADER).json()
    assert rendered["priority"] == -10
    text, state = "", None
    for chunk in events(client, engine_sidecar_url + GENERATE, rendered):
        derendered = client.post(
            render_sidecar_url + DERENDER_CHAT,
            json={"stream": True, "generate_chunk": chunk, "chat_request": body, "stream_state": state},
        ).json()
        state = derendered["stream_state"]
        text += "".join(choice["delta"].get("content") or "" for choice in derendered["chunk"]["choices"])
    coupled = client.post(engine_url + "/v1/chat/completions", json={**body, "stream": False}).json()
    assert text
    assert text == coupled["choices"][0]["message"]["content"]


@pytest.mark.parametrize("route", [CHAT, MESSAGES])
def test_a_header_on_render_alone_puts_the_request_first_on_the_engine(
    route: str, render_sidecar_url: str, engine_url: str, client: httpx.Client
) -> None:
    """Whoever puts a sidecar in front of render servers only gets this much, by what is in the GenerateRequest."""
    rendered = generate_requests(client.post(render_sidecar_url + route, json=BODIES[route], headers=HEADER))[0]
    rendered["sampling_params"] |= {"max_tokens": SHORT, "ignore_eos": True}
    assert finish_order(engine_url, c_body=rendered) == "ACB"


def events(client: httpx.Client, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of each server-sent event up to [DONE], which has to come."""
    with client.stream("POST", url, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]
