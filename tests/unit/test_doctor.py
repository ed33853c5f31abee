"""The doctor against the simulator in every state a deployment can be in: what it says, and what it sends."""

import asyncio
import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from rich.console import Console

from control_plane import doctor
from control_plane.doctor import GENERATE_ROUTE, DoctorSettings, Report, Row, examine
from control_plane.errors import BadInput
from control_plane.policy import RENDER_ROUTES, Role
from control_plane.simulator import SimulatorSettings, run

ENGINE = SimulatorSettings(kind="engine")
RENDER = SimulatorSettings(kind="render")
BY_BODY, BY_HEADER = "order, by the body", "order, by the header"


def ask(**settings: Any) -> Report:
    return asyncio.run(examine(DoctorSettings(**settings)))


def ask_engine(simulated: SimulatorSettings, **settings: Any) -> Report:
    with run(simulated) as url:
        return ask(engine=url, **settings)


def verdicts(report: Report) -> dict[str, str]:
    return {row.check: row.verdict for row in report.rows}


def row(report: Report, check: str) -> Row:
    (found,) = [row for row in report.rows if row.check == check]
    return found


@pytest.fixture(scope="module")
def fault() -> Report:
    """A render server and an engine with nothing in front."""
    with run(RENDER) as render, run(ENGINE) as engine:
        return ask(render=render, engine=engine)


def test_a_header_is_lost_on_every_render_route(fault: Report) -> None:
    assert [row(fault, route).verdict for route in RENDER_ROUTES] == ["lost"] * 4


def test_each_render_route_shows_what_came_back_in_the_four_cases(fault: Report) -> None:
    assert row(fault, "/v1/chat/completions/render").seen == "none 0; header 0; body -10; both 3"


def test_messages_says_that_its_body_cannot_carry_a_priority(fault: Report) -> None:
    seen = row(fault, "/v1/messages/render").seen
    assert seen.startswith("none 0; header 0; body 0; both 0 (")
    assert "body cannot carry a priority" in seen


def test_the_order_shows_the_policy_and_that_only_the_body_counts(fault: Report) -> None:
    found = verdicts(fault)
    assert (found["scheduling policy"], found[BY_BODY], found[BY_HEADER]) == ("ok", "ok", "lost")


def test_generate_is_judged_without_running_anything(fault: Report) -> None:
    assert row(fault, GENERATE_ROUTE).verdict == "lost"


def test_each_lost_row_names_the_command_that_cures_it(fault: Report) -> None:
    steps = {(row.server, row.next_step.partition(" --upstream")[0]) for row in fault.rows if row.verdict == "lost"}
    assert steps == {
        (role, f"put a sidecar in front and send clients to it: vllm-priority run --role {role}")
        for role in ("render", "engine")
    }


def test_a_lost_priority_is_exit_status_1(fault: Report) -> None:
    assert fault.exit_status == 1
    assert fault.summary.startswith("A priority is lost: ")


def test_fcfs_is_blamed_instead_of_the_header() -> None:
    found = ask_engine(replace(ENGINE, scheduling="fcfs"))
    assert row(found, "scheduling policy").verdict == "lost"
    assert "--scheduling-policy priority" in row(found, "scheduling policy").next_step
    assert row(found, BY_HEADER).verdict == "unknown"
    assert BY_BODY not in verdicts(found)


def test_fcfs_told_by_server_info_sends_no_load() -> None:
    found = ask_engine(replace(ENGINE, scheduling="fcfs", dev_mode=True))
    assert "/server_info says fcfs" in row(found, "scheduling policy").seen


def test_two_slots_are_filled_before_the_order_is_judged() -> None:
    found = ask_engine(replace(ENGINE, slots=2))
    assert row(found, "scheduling policy").evidence["slots"] == 2
    assert (verdicts(found)[BY_BODY], verdicts(found)[BY_HEADER]) == ("ok", "lost")


@pytest.mark.parametrize(("dev_mode", "said"), [(False, "more than 2 slots"), (True, "3 slots (/server_info)")])
def test_more_slots_than_it_may_fill_prove_nothing(dev_mode: bool, said: str) -> None:
    found = ask_engine(replace(ENGINE, slots=3, dev_mode=dev_mode), max_fill=2)
    for check in (BY_BODY, BY_HEADER):
        assert row(found, check).verdict == "unknown"
        assert row(found, check).seen == f"{said}: nothing waits, so the order proves nothing"
        assert "--max-fill" in row(found, check).next_step
    assert row(found, GENERATE_ROUTE).verdict == "lost", "the header is judged all the same"


def test_scale_out_off_is_told_once_and_names_the_flag() -> None:
    found = ask_engine(replace(ENGINE, scale_out=False))
    assert [row.check for row in found.rows if row.verdict == "fail"] == ["scale-out"]
    assert "--enable-scale-out" in row(found, "scale-out").next_step
    assert found.exit_status == 1


def test_a_render_only_server_given_as_the_engine_is_told_apart() -> None:
    found = ask_engine(RENDER)
    last = found.rows[-1]
    assert (last.check, last.verdict) == ("scale-out", "fail")
    assert "render-only server" in last.seen


def test_a_render_server_alone_is_enough() -> None:
    with run(RENDER) as url:
        found = ask(render=url)
    assert set(verdicts(found)) == {"reachable", "version", "model", "scale-out", *RENDER_ROUTES}
    assert "render-only" in row(found, "scale-out").seen


def test_an_engine_alone_is_asked_for_the_render_routes_too() -> None:
    assert set(RENDER_ROUTES) <= set(verdicts(ask_engine(ENGINE)))


@pytest.mark.parametrize(("key", "said"), [(None, "none was given"), ("wrong", "the one given is refused")])
def test_a_missing_or_wrong_api_key_is_told(key: str | None, said: str) -> None:
    found = ask_engine(replace(ENGINE, api_key="secret"), api_key=key)
    assert row(found, "API key").verdict == "fail"
    assert said in row(found, "API key").seen
    assert found.rows[-1].check == "API key"


def test_the_api_key_is_sent_everywhere() -> None:
    found = ask_engine(replace(ENGINE, api_key="secret"), api_key="secret")
    assert verdicts(found)[BY_BODY] == "ok"
    assert "secret" not in json.dumps(found.to_json())


def test_a_dead_server_is_one_row() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        found = ask(engine=f"http://127.0.0.1:{held.getsockname()[1]}")
    assert [(row.check, row.verdict, row.seen) for row in found.rows] == [("reachable", "fail", "connection refused")]
    assert found.exit_status == 1


def test_a_server_that_does_not_answer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = ask(engine=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
    assert row(found, "reachable").seen == "no answer within 0.3 s"


def test_a_host_that_does_not_exist_is_one_row() -> None:
    found = ask(engine="http://no-such-host.invalid:8000")
    assert [(row.check, row.verdict) for row in found.rows] == [("reachable", "fail")]


def test_one_dead_server_does_not_hide_the_other() -> None:
    with run(ENGINE) as url:
        found = ask(render="http://127.0.0.1:9", engine=url)
    assert {row.server for row in found.rows} == {"render", "engine"}
    assert verdicts(found)[BY_HEADER] == "lost"


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://h:1", "http://", "http://h:99999", "http://h:8000/v1", "http://h/?a=1", "http://u:p@h/"],
)  # fmt: skip
def test_a_wrong_url_is_bad_input(url: str) -> None:
    with pytest.raises(BadInput, match=r"^--engine: .*allowed: "):
        DoctorSettings(engine=url)


@pytest.mark.parametrize(
    "settings",
    [
        {"priority": 0}, {"timeout": 0}, {"queue_timeout": float("inf")}, {"max_fill": 0}, {"header": "a b"},
        {"header": ""}, {"api_key": "a\nb"}, {"api_key": "clé"}, {"engine": None}, {"engine": "http://[::1"},
        {"engine": "http://\u2603.\ud800/"},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_bad_input(settings: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="allowed: "):
        DoctorSettings(**{"engine": "http://h", **settings})


def test_a_model_that_is_not_served_names_those_that_are() -> None:
    found = ask_engine(ENGINE, model="other")
    assert row(found, "model").seen == "'other' is not served: simulated"


Answer = Callable[[str], tuple[int, str, bytes]]


@contextmanager
def other_server(answer: Answer) -> Iterator[str]:
    """An HTTP server that is not vLLM: `answer` gives status, media type and body of a path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            status, media_type, body = answer(self.path)
            self.send_response(status)
            self.send_header("content-type", media_type)
            self.send_header("location", "https://elsewhere.example/")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "check", "said"),
    [
        (lambda path: (200, "text/html", b"<h1>Hello</h1>"), "vLLM", "this is not vLLM"),
        (lambda path: (404, "text/plain", b""), "vLLM", "this is not vLLM"),
        (lambda path: (200, "application/json", b'{"version": 5}'), "vLLM", "this is not vLLM"),
        (lambda path: (200, "application/json", b'{"version": "0.32.0"}'), "model", "GET /v1/models: 200"),
        (lambda path: (503, "text/plain", b"no healthy upstream"), "reachable", "503, no healthy upstream"),
        (lambda path: (301, "text/plain", b""), "reachable", "moved to https://elsewhere.example/"),
        (lambda path: (200, "text/plain", b"\xff\x00\x1b[31m"), "vLLM", "this is not vLLM"),
        (lambda path: (200, "application/json", b"[" * 50_000), "vLLM", "this is not vLLM"),
    ],
)
def test_a_server_that_is_not_vllm_is_one_failed_row(answer: Answer, check: str, said: str) -> None:
    with other_server(answer) as url:
        found = ask(engine=url)
    assert [row.check for row in found.rows if row.verdict == "fail"] == [check]
    assert said in row(found, check).seen
    assert row(found, check).next_step


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        (lambda path: (404, "text/plain", b"nope"), "GET /version answers 404, nope, and GET /v1/models 404"),
        (lambda path: (404, "text/html", b"<h1>No</h1>"), "GET /version answers 404, an HTML page, and GET /v1/models"),
        (lambda path: (200, "text/html", b""), "GET /version answers 200, an HTML page, and GET /v1/models 200"),
    ],
)
@pytest.mark.parametrize("role", ["render", "engine"])
def test_that_it_is_not_vllm_is_the_first_and_only_finding(role: Role, answer: Answer, seen: str) -> None:
    with other_server(answer) as url:
        (only,) = ask(**{role: url}).rows
    assert (only.check, only.verdict) == ("vLLM", "fail")
    assert seen in only.seen
    assert "(Server: BaseHTTP/" in only.seen, "which names what it is"
    assert 'vLLM answers GET /version with {"version": ...}' in only.seen
    assert only.next_step == f"correct --{role}: the root URL of a vLLM server, without a path"


def test_a_server_of_the_same_api_that_is_not_vllm_is_told_apart() -> None:
    """Ollama, LiteLLM and others list models in the same way, and are no servers of these routes."""

    def answer(path: str) -> tuple[int, str, bytes]:
        if path == "/v1/models":
            return 200, "application/json", b'{"data": [{"id": "llama", "owned_by": "library"}]}'
        return 404, "text/plain", b"404 page not found"

    with other_server(answer) as url:
        first = ask(engine=url).rows[0]
    assert (first.check, first.verdict) == ("vLLM", "warn")
    assert "its models are owned by 'library', vLLM's by 'vllm'" in first.seen
    assert first.next_step


def test_a_busy_server_is_not_judged() -> None:
    body = {"token_ids": [5], "stream": True, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
    with run(replace(ENGINE, tokens_per_second=50)) as url, httpx.stream("POST", url + GENERATE_ROUTE, json=body):
        found = ask(engine=url, queue_timeout=0.3)
    assert verdicts(found)[BY_BODY] == verdicts(found)[BY_HEADER] == "unknown"
    assert "other requests are in its queue (1 running, 0 waiting)" in row(found, BY_BODY).seen
    assert row(found, GENERATE_ROUTE).verdict == "lost", "this needs no queue"


def test_nothing_is_left_running() -> None:
    with run(replace(ENGINE, slots=2)) as url:
        ask(engine=url)
        deadline = time.monotonic() + 30
        while 'num_requests_running{engine="0",model_name="simulated"} 0.0' not in httpx.get(f"{url}/metrics").text:
            assert time.monotonic() < deadline


def test_what_will_be_sent_is_named_before_it_is_sent() -> None:
    said: list[str] = []
    sent: list[str] = []
    unannounced: list[str] = []

    def answer(path: str) -> tuple[int, str, bytes]:
        sent.append(path)
        if not any(path in line for line in said):
            unannounced.append(path)
        return 404, "text/plain", b""

    for role in ("render", "engine"):
        said.clear()
        with other_server(answer) as url:
            asyncio.run(examine(DoctorSettings(**{role: url}), said.append))
        assert all(url in line for line in said)
    assert (set(sent), unannounced) == ({"/health", "/version", "/v1/models"}, [])


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (b"", "without vllm:num_requests_running"),
        (b"vllm:num_requests_running NaN\n", "without vllm:num_requests_running"),
        (b'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_running{engine="1"} 0.0\n', "2 engines behind"),
    ],
)
def test_gauges_that_do_not_tell_the_queue_leave_the_order_undecided(metrics: bytes, said: str) -> None:
    answers = {
        "/version": (200, b'{"version": "0.32.0"}'),
        "/v1/models": (200, b'{"data": [{"id": "m"}]}'),
        "/metrics": (200, metrics),
        GENERATE_ROUTE: (400, b'{"error": {"message": "  {\'loc\': \'body.sampling_params\'}"}}'),
    }

    def answer(path: str) -> tuple[int, str, bytes]:
        status, body = answers.get(path, (404, b""))
        return status, "application/json", body

    with other_server(answer) as url:
        found = ask(render=url, engine=url)
    assert row(found, BY_HEADER).verdict == "unknown"
    assert said in row(found, BY_HEADER).seen


def test_the_plan_for_the_queue_names_its_load() -> None:
    said: list[str] = []
    with run(ENGINE) as url:
        asyncio.run(examine(DoctorSettings(engine=url, max_fill=5), said.append))
    assert f"up to 6 long requests to {GENERATE_ROUTE}" in said[-1]


def test_json_holds_the_same_as_the_table(fault: Report) -> None:
    document = json.loads(json.dumps(fault.to_json()))
    assert document["exit_status"] == 1
    assert [check["check"] for check in document["checks"]] == [row.check for row in fault.rows]
    chat = next(check for check in document["checks"] if check["check"] == "/v1/chat/completions/render")
    assert chat["evidence"]["header"] == {"status": 200, "priority": 0}
    assert chat["evidence"]["applied"] is None


def test_the_table_has_each_check_with_its_verdict_even_on_a_narrow_terminal(fault: Report) -> None:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as printed:
        console.print(doctor.table(fault))
    text = printed.get()
    assert text.count("│ lost") == [row.verdict for row in fault.rows].count("lost")
    assert max(map(len, text.splitlines())) <= 80
