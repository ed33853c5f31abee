"""One plain request for each render route, and how its answer is read."""

from typing import Any

import httpx

CHAT = "/v1/chat/completions/render"
COMPLETIONS = "/v1/completions/render"
RESPONSES = "/v1/responses/render"
MESSAGES = "/v1/messages/render"

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": [{"role": "user", "content": "The quick brown fox"}], "max_tokens": 8},
    COMPLETIONS: {"model": "tiny", "prompt": ["The quick", "brown fox"], "max_tokens": 8},
    RESPONSES: {"model": "tiny", "input": "The quick brown fox", "max_output_tokens": 8},
    MESSAGES: {"model": "tiny", "messages": [{"role": "user", "content": "The quick brown fox"}], "max_tokens": 8},
}
ROUTES = tuple(BODIES)
ROUTES_THAT_TAKE_A_BODY_PRIORITY = (CHAT, COMPLETIONS, RESPONSES)


def generate_requests(answer: httpx.Response) -> list[dict[str, Any]]:
    """The GenerateRequests of a 200: from completions a list, one for each prompt; from the others one object."""
    assert answer.status_code == 200, (answer.status_code, answer.text)
    document = answer.json()
    return document if isinstance(document, list) else [document]


def priorities(answer: httpx.Response) -> set[int]:
    """The priorities that came back. Every GenerateRequest has one."""
    return {request["priority"] for request in generate_requests(answer)}
