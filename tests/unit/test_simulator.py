"""The simulator behaves like vLLM: what it reads, ignores and rejects, and which request it serves first.

The end-to-end tests compare it with real vLLM. These tests need no vLLM.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.simulator import SimulatorSettings, run
from control_plane.simulator.coupled import header_priority
from control_plane.simulator.scheduler import Slots
from control_plane.vllm import GENERATE_ROUTE, PRIORITY_HEADER

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{name}/render" for name in ("chat/completions", "completions", "responses", "messages")
)
TURN = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURN},
    COMPLETIONS: {"prompt": "hello"},
    RESPONSES: {"input": "hello"},
    MESSAGES: {"model": "simulated", "messages": TURN, "max_tokens": 5},
}
HEADER = {PRIORITY_HEADER: "-10"}


@pytest.fixture(scope="module")
def render() -> Iterator[httpx.Client]:
    with run(SimulatorSettings(kind="render")) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.fixture(scope="module")
def engine() -> Iterator[httpx.Client]:
    with run(SimulatorSettings(tokens_per_second=5000)) as url, httpx.Client(base_url=url) as client:
        yield client


def rendered_priority(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    document = response.json()
    value = (document[0] if isinstance(document, list) else document)["priority"]
    assert isinstance(value, int)
    return value


@pytest.mark.parametrize("route", BODIES)
def test_render_routes_ignore_the_header(render: httpx.Client, route: str) -> None:
    assert rendered_priority(render.post(route, json=BODIES[route], headers=HEADER)) == 0


@pytest.mark.parametrize(("route", "expected"), [(CHAT, 7), (COMPLETIONS, 7), (RESPONSES, 7), (MESSAGES, 0)])
def test_render_routes_use_the_body_priority_except_on_messages(
    render: httpx.Client, route: str, expected: int
) -> None:
    assert rendered_priority(render.post(route, json={**BODIES[route], "priority": 7}, headers=HEADER)) == expected


def test_completions_render_returns_a_list_with_one_request_per_prompt(render: httpx.Client) -> None:
    response = render.post(COMPLETIONS, json={"prompt": ["a", "bc"], "priority": 4}).json()
    assert [(item["priority"], len(item["token_ids"])) for item in response] == [(4, 1), (4, 2)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"5"', 5), ('" 5 "', 5), ("5.0", 5), ("1e3", 1000), ("true", 1), ("-0", 0),
        ("9223372036854775807", 2**63 - 1), ("-9223372036854775808", -(2**63)), ('1,"priority":2', 2),
    ],
)  # fmt: skip
def test_a_body_priority_is_coerced_as_in_pydantics_lax_mode(render: httpx.Client, text: str, expected: int) -> None:
    body = json.dumps(BODIES[CHAT])[:-1] + f',"priority":{text}}}'
    response = render.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert rendered_priority(response) == expected


@pytest.mark.parametrize("text", ["5.5", "null", '""', "[]", "9223372036854775808", "NaN", '"x"'])
def test_a_body_priority_that_is_not_an_integer_gets_a_400_that_names_it(render: httpx.Client, text: str) -> None:
    body = json.dumps(BODIES[CHAT])[:-1] + f',"priority":{text}}}'
    response = render.post(CHAT, content=body, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"], error["code"]) == (
        400, "Bad Request", "body.priority", 400,
    )  # fmt: skip
    assert error["message"].startswith("1 validation error:\n  {'type': ")


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200), ("Application/JSON; charset=utf-8", 200), ("application/x+json", 400),
        ("text/json", 400), ("", 400),
    ],
)  # fmt: skip
def test_only_application_json_is_accepted(render: httpx.Client, content_type: str, status: int) -> None:
    response = render.post(CHAT, content=json.dumps(BODIES[CHAT]), headers={"content-type": content_type})
    assert response.status_code == status


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/chat/completions%2Frender", 200), ("/v1/chat/completions/%72ender?x=1", 200),
        ("/v1/chat/completions/render/", 307), ("//v1/chat/completions/render", 404),
        ("/V1/chat/completions/render", 404), ("/v1/chat/completions", 404), (GENERATE_ROUTE, 404),
    ],
)  # fmt: skip
def test_paths_are_matched_as_starlette_matches_them(render: httpx.Client, path: str, status: int) -> None:
    url = httpx.URL(str(render.base_url)).copy_with(raw_path=path.encode())
    assert render.post(url, json=BODIES[CHAT]).status_code == status


def test_an_engine_without_scale_out_returns_403_before_it_reads_the_body() -> None:
    with run(SimulatorSettings(scale_out=False)) as url:
        responses = [httpx.post(url + route, content=b"{") for route in (*BODIES, GENERATE_ROUTE)]
    assert {response.status_code for response in responses} == {403}
    assert {response.json()["error"]["type"] for response in responses} == {"PermissionDeniedError"}


@pytest.mark.parametrize(
    ("authorization", "status"), [(None, 401), ("Bearer wrong", 401), ("Basic k", 401), ("bearer k", 200)]
)
def test_an_api_key_guards_v1_but_not_health(authorization: str | None, status: int) -> None:
    headers = {"authorization": authorization} if authorization else {}
    with run(SimulatorSettings(api_key="k")) as url:
        response = httpx.get(f"{url}/v1/models", headers=headers)
        assert httpx.get(f"{url}/health").status_code == 200
    assert response.status_code == status


def test_server_info_exists_only_in_dev_mode(engine: httpx.Client) -> None:
    assert engine.get("/server_info").status_code == 404
    with run(SimulatorSettings(dev_mode=True, scheduling="fcfs", slots=3)) as url:
        info = httpx.get(f"{url}/server_info?config_format=json").json()
    assert info["vllm_config"]["scheduler_config"] == {"policy": "fcfs", "max_num_seqs": 3}


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, 2), ("5", 5), ("+5", 5), (" -5 ", -5), ("007", 7), ("1_000", 1000), ("-0", 0),
        ("5.0", 2), ("1e3", 2), ("0x10", 2), ("true", 2), ("", 2), ("5, 6", 2),
    ],
)  # fmt: skip
def test_coupled_routes_parse_the_header_like_python_and_fall_back_to_the_body(
    header: str | None, expected: int
) -> None:
    assert header_priority(header, 2) == expected


def test_a_header_beyond_64_bits_gets_a_500_or_an_error_event(engine: httpx.Client) -> None:
    header = {PRIORITY_HEADER: str(2**64)}
    whole = engine.post("/v1/chat/completions", json=BODIES[CHAT], headers=header)
    streamed = engine.post("/v1/chat/completions", json={**BODIES[CHAT], "stream": True}, headers=header)
    assert whole.status_code == 500
    assert streamed.status_code == 200
    assert '"code":500' in streamed.text


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": TURN, "max_tokens": 3}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 3}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 3}),
        ("/v1/messages", {"model": "simulated", "messages": TURN, "max_tokens": 3}),
    ],
)
def test_coupled_routes_respond_whole_and_streamed(engine: httpx.Client, route: str, body: dict[str, Any]) -> None:
    assert " Th" in engine.post(route, json=body).text
    streamed = engine.post(route, json={**body, "stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert streamed.text.count("data: ") >= 4


def test_a_rendered_request_generates_and_derenders_to_text(engine: httpx.Client) -> None:
    """A scale-out router passes each response on unchanged."""
    rendered = engine.post(CHAT, json={**BODIES[CHAT], "max_tokens": 20}).json()
    generated = engine.post(GENERATE_ROUTE, json=rendered).json()
    response = engine.post("/v1/chat/completions/derender", json={"generate_response": generated}).json()
    assert response["choices"][0]["message"]["content"] == " The quick brown fox"


def test_streamed_tokens_derender_to_the_same_text_when_characters_are_cut(engine: httpx.Client) -> None:
    tokens = [byte + 3 for byte in "aé€😀".encode()]
    state, text = None, ""
    for token in tokens:
        chunk = {"choices": [{"index": 0, "token_ids": [token]}]}
        body = {"stream": True, "generate_chunk": chunk, "stream_state": state}
        response = engine.post("/v1/completions/derender", json=body).json()
        state, text = response["stream_state"], text + response["chunk"]["choices"][0]["text"]
    assert text == "aé€😀"


def generate(max_tokens: int = 2, **more: Any) -> dict[str, Any]:
    return {"token_ids": [5], "sampling_params": {"max_tokens": max_tokens, "ignore_eos": True}, **more}


def gauges(url: str) -> tuple[int, int]:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return int(values["vllm:num_requests_running"]), int(values["vllm:num_requests_waiting"])


def wait_for(url: str, running: int, waiting: int) -> None:
    """Wait until the gauges show exactly this. Fail after half a minute, so that a broken queue cannot hang the run."""
    deadline = time.monotonic() + 30
    while (seen := gauges(url)) != (running, waiting):
        assert time.monotonic() < deadline, f"{seen} instead of {(running, waiting)}"
        time.sleep(0.005)


@pytest.mark.parametrize(("by_priority", "expected"), [(True, ["C", "D", "B"]), (False, ["B", "C", "D"])])
def test_the_queue_is_ordered_by_priority_then_arrival(by_priority: bool, expected: list[str]) -> None:
    """A holds the only slot and is not evicted, while B (0), C (-10) and D (-10) wait in the queue."""
    order: list[str] = []

    async def take(slots: Slots, name: str, priority: int) -> None:
        async with slots.slot(priority):
            order.append(name)
            await asyncio.sleep(0)
            assert slots.running == 1

    async def queue_up() -> None:
        slots = Slots(1, by_priority)
        async with asyncio.TaskGroup() as queue, slots.slot(100):
            for waiting, (name, priority) in enumerate((("B", 0), ("C", -10), ("D", -10)), 1):
                queue.create_task(take(slots, name, priority))
                await asyncio.sleep(0)
                assert (slots.running, slots.waiting) == (1, waiting)

    asyncio.run(queue_up())
    assert order == expected


def test_a_client_that_disconnects_frees_its_slot_and_its_place_in_the_queue() -> None:
    with run(SimulatorSettings(tokens_per_second=1)) as url:
        with httpx.stream("POST", url + GENERATE_ROUTE, json=generate(4000, stream=True)):
            wait_for(url, 1, 0)
            with httpx.stream("POST", url + GENERATE_ROUTE, json=generate(4000, stream=True)) as queued:
                # The status line is sent while the request still waits.
                assert queued.status_code == 200
                wait_for(url, 1, 1)
            wait_for(url, 1, 0)
        wait_for(url, 0, 0)


def test_a_client_that_disconnects_without_streaming_frees_its_slot() -> None:
    with run(SimulatorSettings(tokens_per_second=1)) as url:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + GENERATE_ROUTE, json=generate(4000), timeout=httpx.Timeout(5, read=0.2))
        wait_for(url, 0, 0)


def test_several_slots_run_at_the_same_time() -> None:
    with run(SimulatorSettings(slots=2)) as url:
        body = generate(4000, stream=True)
        with (
            httpx.stream("POST", url + GENERATE_ROUTE, json=body),
            httpx.stream("POST", url + GENERATE_ROUTE, json=body),
        ):
            wait_for(url, 2, 0)
