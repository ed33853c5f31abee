"""Streams through the sidecar, and clients that leave: vLLM aborts a request when its connection closes, not before."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.queue_order import GENERATE, gauge, generate_request, wait_for_gauges

HEADER = {"X-Vllm-Priority": "-10"}
LONG = 4000
"""Tokens: some ten seconds of work, so that what ends sooner was aborted."""

GENERATED_TOKENS = "vllm:generation_tokens_total"


@pytest.fixture(autouse=True)
def idle_engine(engine_url: str) -> Iterator[None]:
    wait_for_gauges(engine_url, running=0, waiting=0)
    yield
    wait_for_gauges(engine_url, running=0, waiting=0)


def test_first_token_comes_while_the_rest_is_generated(
    engine_url: str, engine_sidecar_url: str, client: httpx.Client
) -> None:
    with client.stream(
        "POST", engine_sidecar_url + GENERATE, json=generate_request(500, stream=True), headers=HEADER
    ) as answer:
        assert answer.headers["x-vllm-priority-applied"] == "-10; source=header; outcome=inserted"
        lines = answer.iter_lines()
        first = next(lines)
        assert gauge(engine_url, "vllm:num_requests_running") == 1
        rest = [line for line in lines if line]
    assert first.startswith("data: ")
    assert rest[-1] == "data: [DONE]"
    tokens = [token for line in (first, *rest[:-1]) for token in json.loads(line[6:])["choices"][0]["token_ids"]]
    assert len(tokens) == 500


def test_headers_come_while_the_request_still_waits(
    engine_url: str, engine_sidecar_url: str, client: httpx.Client
) -> None:
    """vLLM sends the 200 of a stream before it has a slot. Held back, it would look like a dead server."""
    with slot_taken(client, engine_url):
        with client.stream(
            "POST", engine_sidecar_url + GENERATE, json=generate_request(2, stream=True), headers=HEADER
        ) as answer:
            assert answer.status_code == 200
            wait_for_gauges(engine_url, running=1, waiting=1)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "one answer"])
def test_a_client_that_leaves_frees_the_slot(stream: bool, engine_url: str, engine_sidecar_url: str) -> None:
    before = gauge(engine_url, GENERATED_TOKENS)
    leave_while(
        engine_url, engine_sidecar_url, generate_request(LONG, stream=stream), running=1, waiting=0, left=(0, 0)
    )
    assert gauge(engine_url, GENERATED_TOKENS) - before < LONG


def test_a_client_that_leaves_the_queue_is_not_served(
    engine_url: str, engine_sidecar_url: str, client: httpx.Client
) -> None:
    with slot_taken(client, engine_url):
        leave_while(engine_url, engine_sidecar_url, generate_request(LONG), running=1, waiting=1, left=(1, 0))


@contextlib.contextmanager
def slot_taken(client: httpx.Client, engine_url: str) -> Iterator[None]:
    """A request of ten seconds holds the one slot while the block runs, and is given up at its end."""
    with client.stream("POST", engine_url + GENERATE, json=generate_request(LONG, stream=True)):
        wait_for_gauges(engine_url, running=1, waiting=0)
        yield


def leave_while(
    engine_url: str, url: str, body: dict[str, Any], *, running: int, waiting: int, left: tuple[int, int]
) -> None:
    """Sends a request, hangs up once the gauges show it, and waits until they show (running, waiting) `left`."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"))
    with contextlib.closing(connection):
        connection.request("POST", GENERATE, json.dumps(body), {"content-type": "application/json", **HEADER})
        wait_for_gauges(engine_url, running=running, waiting=waiting)
    wait_for_gauges(engine_url, running=left[0], waiting=left[1])
