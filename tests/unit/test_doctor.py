"""The doctor examines simulated servers in every state of a deployment: what it reports, and what it sends."""

import asyncio
import io
import json
import re
import shlex
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from control_plane import doctor
from control_plane.doctor import DoctorSettings, Report, Row, Verdict, examine
from control_plane.doctor.responses import gauge_values
from control_plane.doctor.server import Server
from control_plane.errors import InvalidField
from control_plane.simulator import SimulatorSettings, run
from control_plane.vllm import GENERATE_ROUTE, RENDER_ROUTES, Role
from tests.pem import Authority, write_pair

ENGINE = SimulatorSettings(kind="engine")
RENDER = SimulatorSettings(kind="render")
BY_BODY, BY_HEADER = "order, by the body", "order, by the header"


def ask(**settings: Any) -> Report:
    """Examine with these settings. Every row of every test must be whole sentences and say what to do."""
    report = asyncio.run(examine(DoctorSettings(**settings), spell=lambda field: f"<{field}>"))
    for row in report.rows:
        assert_is_prose(row.seen)
        if row.next_step or row.verdict != "ok":
            assert_is_prose(row.next_step)
    return report


def assert_is_prose(text: str) -> None:
    """The text consists of sentences; a command to run may follow, without a full stop that would be copied along."""
    sentences, _, command = text.partition(": vllm-priority ")
    assert re.fullmatch(r"[A-Z/].*", sentences), text
    assert command or sentences.endswith("."), text


def ask_engine(simulated: SimulatorSettings, **settings: Any) -> Report:
    with run(simulated) as url:
        return ask(engine=url, **settings)


def verdicts(report: Report) -> dict[str, Verdict]:
    return {row.check: row.verdict for row in report.rows}


def row(report: Report, check: str) -> Row:
    (found,) = [row for row in report.rows if row.check == check]
    return found


@pytest.fixture(scope="module")
def fault() -> Report:
    """A render server and an engine without sidecars."""
    with run(RENDER) as render, run(ENGINE) as engine:
        return ask(render=render, engine=engine)


def test_the_header_is_lost_on_every_render_route(fault: Report) -> None:
    assert [row(fault, route).verdict for route in RENDER_ROUTES] == ["lost"] * 4


def test_a_render_route_shows_the_priority_in_each_of_the_four_cases(fault: Report) -> None:
    assert row(fault, "/v1/chat/completions/render").seen == (
        "The rendered priority is 0 without a priority, 0 with -10 in the header, -10 with -10 in the body, and 3 with "
        "-10 in the header and 3 in the body."
    )


def test_the_messages_route_says_that_its_body_cannot_carry_a_priority(fault: Report) -> None:
    found = row(fault, "/v1/messages/render")
    assert [found.evidence[case]["priority"] for case in ("none", "header", "body", "both")] == [0, 0, 0, 0]
    assert "The body of this route cannot carry a priority" in found.seen


def test_the_order_shows_the_scheduling_policy_and_that_only_the_body_counts(fault: Report) -> None:
    found = verdicts(fault)
    assert (found["scheduling policy"], found[BY_BODY], found[BY_HEADER]) == ("ok", "ok", "lost")


def test_the_generate_route_is_judged_without_generating(fault: Report) -> None:
    assert row(fault, GENERATE_ROUTE).verdict == "lost"


def test_each_lost_row_names_the_command_that_cures_it(fault: Report) -> None:
    steps = {(row.server, row.next_step.partition(" --upstream")[0]) for row in fault.rows if row.verdict == "lost"}
    assert steps == {
        (role, f"Put a sidecar in front of this server and send clients to it: vllm-priority run --role {role}")
        for role in ("render", "engine")
    }


def test_the_command_that_cures_it_has_only_options_that_exist(fault: Report) -> None:
    from control_plane.cli import cli

    for lost in (row for row in fault.rows if row.verdict == "lost"):
        _, command, *arguments = shlex.split(lost.next_step.partition("to it: ")[2])
        cli.commands[command].make_context(command, arguments)


@pytest.mark.parametrize(
    ("report", "advice"),
    [
        (None, "Put a sidecar in front of this server and send clients to it: vllm-priority run --role engine"),
        ("none; outcome=absent", "The sidecar saw no priority header."),
        ("none; outcome=kept", "It kept the body's own priority."),
        ("4; source=default; outcome=inserted", "It applied the policy's default."),
        ("none; outcome=too_large", "Raise limits.max_body_bytes"),
        ("none; outcome=upstream_error", "was not a JSON response with status 200"),
        ("none; outcome=invalid", "Check the sidecar's policy"),
        ("-10; source=header; outcome=inserted", "Check the sidecar's policy"),
        ("not a report", "Check the sidecar's policy"),
    ],
)
def test_the_advice_for_a_lost_header_follows_from_the_sidecars_report(report: str | None, advice: str) -> None:
    server = Server(DoctorSettings(engine="http://h:1"), "engine", "http://h:1", httpx.AsyncClient(), [])
    assert advice in server.advice_for_lost_header(report)


@pytest.mark.parametrize(
    ("check", "verdict", "evidence", "topic"),
    [
        (RENDER_ROUTES[0], "ok", {}, ""),
        (RENDER_ROUTES[0], "lost", {}, "the-sidecar-does-not-report"),
        (RENDER_ROUTES[0], "lost", {"applied": "none; outcome=absent"}, "the-sidecar-applied-no-priority"),
        (RENDER_ROUTES[0], "lost", {"applied": "5; source=body; outcome=kept"}, "the-priority-is-applied-and-nothing"),
        ("order, by the header", "lost", {"applied": None}, "the-sidecar-does-not-report"),
        ("order, by the body", "lost", {}, "the-priority-is-applied-and-nothing-changes"),
        ("scheduling policy", "lost", {"policy": "fcfs"}, "the-priority-is-applied-and-nothing-changes"),
        ("reachable", "fail", {}, "errors"),
    ],
)
def test_each_result_leads_to_its_entry_of_the_troubleshooting_page(
    check: str, verdict: Verdict, evidence: dict[str, Any], topic: str
) -> None:
    found = Row("engine", check, verdict, "Seen.", evidence=evidence).see
    assert found.startswith(f"docs/troubleshooting.md#{topic}" if topic else "")
    assert bool(found) == bool(topic)


def test_a_lost_priority_gives_exit_status_1(fault: Report) -> None:
    assert fault.exit_status == 1
    assert fault.summary.startswith("A priority is lost: ")


def test_fcfs_is_reported_instead_of_a_lost_header() -> None:
    found = ask_engine(replace(ENGINE, scheduling="fcfs"))
    assert row(found, "scheduling policy").verdict == "lost"
    assert "--scheduling-policy priority" in row(found, "scheduling policy").next_step
    assert row(found, BY_HEADER).verdict == "unknown"
    assert BY_BODY not in verdicts(found)


def test_no_load_is_sent_if_server_info_reports_fcfs() -> None:
    found = ask_engine(replace(ENGINE, scheduling="fcfs", dev_mode=True))
    assert "is fcfs (first come, first served), according to /server_info" in row(found, "scheduling policy").seen


def test_two_slots_are_filled_before_the_order_is_judged() -> None:
    found = ask_engine(replace(ENGINE, slots=2))
    assert row(found, "scheduling policy").evidence["slots"] == 2
    assert (verdicts(found)[BY_BODY], verdicts(found)[BY_HEADER]) == ("ok", "lost")


@pytest.mark.parametrize(
    ("dev_mode", "said"), [(False, "more than 2 slots"), (True, "3 slots, according to /server_info")]
)
def test_more_slots_than_the_limit_leave_the_order_undecided(dev_mode: bool, said: str) -> None:
    found = ask_engine(replace(ENGINE, slots=3, dev_mode=dev_mode), max_fill=2)
    for check in (BY_BODY, BY_HEADER):
        assert row(found, check).verdict == "unknown"
        assert row(found, check).seen == f"The engine has {said}, so no request waits and the order proves nothing."
        assert "<max_fill>" in row(found, check).next_step
    assert row(found, GENERATE_ROUTE).verdict == "lost", "the header is judged nevertheless"


def test_disabled_scale_out_is_reported_once_with_vllms_option() -> None:
    found = ask_engine(replace(ENGINE, scale_out=False))
    assert [row.check for row in found.rows if row.verdict == "fail"] == ["scale-out"]
    assert "--enable-scale-out" in row(found, "scale-out").next_step
    assert found.exit_status == 1


def test_a_render_only_server_given_as_the_engine_is_recognized() -> None:
    found = ask_engine(RENDER)
    last = found.rows[-1]
    assert (last.check, last.verdict) == ("scale-out", "fail")
    assert "render-only server" in last.seen


def test_a_render_server_alone_can_be_examined() -> None:
    with run(RENDER) as url:
        found = ask(render=url)
    assert set(verdicts(found)) == {"reachable", "version", "model", "scale-out", *RENDER_ROUTES}
    assert "render-only" in row(found, "scale-out").seen


def test_an_engine_alone_is_examined_on_the_render_routes_too() -> None:
    assert set(RENDER_ROUTES) <= set(verdicts(ask_engine(ENGINE)))


@pytest.mark.parametrize(("key", "said"), [(None, "none was given"), ("wrong", "it rejected the one that was given")])
def test_a_missing_or_wrong_api_key_is_reported(key: str | None, said: str) -> None:
    found = ask_engine(replace(ENGINE, api_key="secret"), api_key=key)
    assert row(found, "API key").verdict == "fail"
    assert said in row(found, "API key").seen
    assert found.rows[-1].check == "API key"


def test_the_api_key_is_sent_on_every_route_and_never_shown() -> None:
    found = ask_engine(replace(ENGINE, api_key="secret"), api_key="secret")
    assert verdicts(found)[BY_BODY] == "ok"
    assert "secret" not in json.dumps(found.to_json())


def test_a_dead_server_gives_one_row() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        found = ask(engine=f"http://127.0.0.1:{held.getsockname()[1]}")
    assert [(row.check, row.verdict, row.seen) for row in found.rows] == [
        ("reachable", "fail", "The server cannot be reached: the connection was refused.")
    ]
    assert found.exit_status == 1


def test_a_server_that_does_not_respond_gives_one_row() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = ask(engine=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
    assert row(found, "reachable").seen == "The server cannot be reached: there was no response within 0.3 s."


def test_a_host_that_does_not_exist_gives_one_row() -> None:
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
def test_an_invalid_url_is_rejected_with_an_example(url: str) -> None:
    with pytest.raises(InvalidField, match=r"^engine: .*Use the ") as raised:
        DoctorSettings(engine=url)
    assert raised.value.field == "engine"


def test_a_password_in_a_url_is_rejected_without_repeating_it() -> None:
    with pytest.raises(InvalidField, match="user name or password") as raised:
        DoctorSettings(engine="http://user:secret@h/")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"priority": 0}, {"timeout": 0}, {"queue_timeout": float("inf")}, {"max_fill": 0}, {"header": "a b"},
        {"header": ""}, {"api_key": "a\nb"}, {"api_key": "clé"}, {"engine": None}, {"engine": "http://[::1"},
        {"engine": "http://\u2603.\ud800/"},
    ],
)  # fmt: skip
def test_an_invalid_setting_is_rejected_with_its_field_and_what_to_use(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidField, match=r" Use ") as raised:
        DoctorSettings(**{"engine": "http://h", **settings})
    assert raised.value.field in {*settings, "render"}


def test_for_an_unknown_model_the_served_models_are_named() -> None:
    found = ask_engine(ENGINE, model="other")
    assert row(found, "model").seen == "The model 'other' is not served. The server has: simulated."


Respond = Callable[[str], tuple[int, str, bytes]]


@contextmanager
def other_server(respond: Respond) -> Iterator[str]:
    """An HTTP server that is not vLLM: `respond` gives status, media type and body for a path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            status, media_type, body = respond(self.path)
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
    ("respond", "check", "said"),
    [
        (lambda path: (200, "text/html", b"<h1>Hello</h1>"), "vLLM", "This is not vLLM"),
        (lambda path: (404, "text/plain", b""), "vLLM", "This is not vLLM"),
        (lambda path: (200, "application/json", b'{"version": 5}'), "vLLM", "This is not vLLM"),
        (lambda path: (200, "application/json", b'{"version": "0.32.0"}'), "model", "GET /v1/models returned 200"),
        (lambda path: (503, "text/plain", b"no healthy upstream"), "reachable", "503: no healthy upstream"),
        (lambda path: (301, "text/plain", b""), "reachable", "a redirect to https://elsewhere.example/"),
        (lambda path: (200, "text/plain", b"\xff\x00\x1b[31m"), "vLLM", "This is not vLLM"),
        (lambda path: (200, "application/json", b"[" * 50_000), "vLLM", "This is not vLLM"),
    ],
)
def test_a_server_that_is_not_vllm_gives_one_failed_row(respond: Respond, check: str, said: str) -> None:
    with other_server(respond) as url:
        found = ask(engine=url)
    assert [row.check for row in found.rows if row.verdict == "fail"] == [check]
    assert said in row(found, check).seen
    assert row(found, check).next_step


@pytest.mark.parametrize(
    ("respond", "seen"),
    [
        (
            lambda path: (404, "text/plain", b"nope"),
            "GET /version returned 404 with nope, and GET /v1/models returned 404",
        ),
        (
            lambda path: (404, "text/html", b"<h1>No</h1>"),
            "GET /version returned 404 with an HTML page, and GET /v1/models",
        ),
        (
            lambda path: (200, "text/html", b""),
            "GET /version returned 200 with an HTML page, and GET /v1/models returned 200",
        ),
    ],
)
@pytest.mark.parametrize("role", ["render", "engine"])
def test_that_the_server_is_not_vllm_is_the_first_and_only_finding(role: Role, respond: Respond, seen: str) -> None:
    with other_server(respond) as url:
        (only,) = ask(**{role: url}).rows
    assert (only.check, only.verdict) == ("vLLM", "fail")
    assert seen in only.seen
    assert "(Server: BaseHTTP/" in only.seen, "the finding names the server's software"
    assert 'vLLM responds to GET /version with {"version": ...}' in only.seen
    assert only.next_step == f"Correct <{role}>: use the root URL of a vLLM server, without a path."


def test_another_server_with_the_same_api_is_recognized_by_the_owner_of_its_models() -> None:
    """Ollama, LiteLLM and others list models in the same way, and do not have these routes."""

    def respond(path: str) -> tuple[int, str, bytes]:
        if path == "/v1/models":
            return 200, "application/json", b'{"data": [{"id": "llama", "owned_by": "library"}]}'
        return 404, "text/plain", b"404 page not found"

    with other_server(respond) as url:
        first = ask(engine=url).rows[0]
    assert (first.check, first.verdict) == ("vLLM", "warn")
    assert "Its models are owned by 'library', vLLM's by 'vllm'" in first.seen
    assert first.next_step


def test_the_order_on_a_busy_server_is_undecided() -> None:
    body = {"token_ids": [5], "stream": True, "sampling_params": {"max_tokens": 4000, "ignore_eos": True}}
    with run(replace(ENGINE, tokens_per_second=50)) as url, httpx.stream("POST", url + GENERATE_ROUTE, json=body):
        found = ask(engine=url, queue_timeout=0.3)
    assert verdicts(found)[BY_BODY] == verdicts(found)[BY_HEADER] == "unknown"
    assert "The engine has other requests (1 running, 0 waiting)" in row(found, BY_BODY).seen
    assert row(found, GENERATE_ROUTE).verdict == "lost", "this check needs no queue"


def test_no_request_is_left_running() -> None:
    with run(replace(ENGINE, slots=2)) as url:
        ask(engine=url)
        deadline = time.monotonic() + 30
        while 'num_requests_running{engine="0",model_name="simulated"} 0.0' not in httpx.get(f"{url}/metrics").text:
            assert time.monotonic() < deadline


def test_every_request_is_announced_before_it_is_sent() -> None:
    said: list[str] = []
    sent: list[str] = []
    unannounced: list[str] = []

    def respond(path: str) -> tuple[int, str, bytes]:
        sent.append(path)
        if not any(path in line for line in said):
            unannounced.append(path)
        return 404, "text/plain", b""

    for role in ("render", "engine"):
        said.clear()
        with other_server(respond) as url:
            settings = DoctorSettings(render=url) if role == "render" else DoctorSettings(engine=url)
            asyncio.run(examine(settings, said.append))
        assert all(url in line for line in said)
    assert (set(sent), unannounced) == ({"/health", "/version", "/v1/models"}, [])


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        (b"", "without vllm:num_requests_running"),
        (b"vllm:num_requests_running NaN\n", "without vllm:num_requests_running"),
        (
            b'vllm:num_requests_running{engine="0"} 0.0\nvllm:num_requests_running{engine="1"} 0.0\n',
            "leads to 2 engines",
        ),
        (b"vllm:num_requests_running{ 0.0\nvllm:num_requests_running 0 0 0 0\n", "without vllm:num_requests_running"),
    ],
)
def test_unreadable_gauges_leave_the_order_undecided(metrics: bytes, said: str) -> None:
    responses = {
        "/version": (200, b'{"version": "0.32.0"}'),
        "/v1/models": (200, b'{"data": [{"id": "m"}]}'),
        "/metrics": (200, metrics),
        GENERATE_ROUTE: (400, b'{"error": {"message": "  {\'loc\': \'body.sampling_params\'}"}}'),
    }

    def respond(path: str) -> tuple[int, str, bytes]:
        status, body = responses.get(path, (404, b""))
        return status, "application/json", body

    with other_server(respond) as url:
        found = ask(render=url, engine=url)
    assert row(found, BY_HEADER).verdict == "unknown"
    assert said in row(found, BY_HEADER).seen


def test_the_announcement_of_the_order_check_names_its_load() -> None:
    said: list[str] = []
    with run(ENGINE) as url:
        asyncio.run(examine(DoctorSettings(engine=url, max_fill=5), said.append))
    assert f"up to 6 long requests to {GENERATE_ROUTE}" in said[-1]


def test_the_json_report_has_the_rows_of_the_table(fault: Report) -> None:
    document = json.loads(json.dumps(fault.to_json()))
    assert document["exit_status"] == 1
    assert [check["check"] for check in document["checks"]] == [row.check for row in fault.rows]
    chat = next(check for check in document["checks"] if check["check"] == "/v1/chat/completions/render")
    assert chat["evidence"]["header"] == {"status": 200, "priority": 0}
    assert chat["evidence"]["applied"] is None


def test_the_table_fits_80_columns_and_shows_every_check_and_verdict_whole(fault: Report) -> None:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as printed:
        console.print(doctor.table(fault))
    text = printed.get()
    assert text.count("│ lost") == [row.verdict for row in fault.rows].count("lost")
    assert all(f"│ {row.check} " in text for row in fault.rows)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("metrics", "values"),
    [
        ("", []),
        ("g 1\n", [1]),
        ('# TYPE g gauge\ng{a="} 5"} 1e1 1700000000\r\n', [10]),
        ('g{a="1"} 1\nother 2\ng_total 3\ng{a="2"} 4', [1, 4]),
        ("g NaN\n", []),
        ("g +Inf\n", []),
        ("g{ 1\n", []),
        ("<html>g 1</html>", []),
    ],
)
def test_a_gauge_is_read_from_prometheus_text(metrics: str, values: list[float]) -> None:
    assert gauge_values(metrics, "g") == values


# ---- TLS -----------------------------------------------------------------------------------------------------------


@contextmanager
def https_server(folder: Path, client_ca: Path | None = None, **certificate: float) -> Iterator[tuple[str, Path]]:
    """A server with HTTPS that is not vLLM: its URL, and the CA that signed its certificate."""
    authority = Authority()
    cert, key = authority.write(folder / "server", "127.0.0.1", **certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    if client_ca:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(client_ca)
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"https://127.0.0.1:{server.server_port}", authority.write_ca(folder / "ca.crt")
        server.shutdown()


@pytest.mark.parametrize(("days", "verdict"), [(20, "ok"), (13, "warn")])
def test_the_certificate_has_a_row(tmp_path: Path, days: float, verdict: str) -> None:
    with https_server(tmp_path, days=days) as (url, ca):
        found = row(ask(engine=url, ca=str(ca)), "TLS")
    assert found.verdict == verdict
    assert re.fullmatch(r"The certificate is trusted, and valid until 20\d\d-\d\d-\d\d \d\d:\d\d UTC\.", found.seen)


def test_a_certificate_that_is_not_trusted_is_named(tmp_path: Path) -> None:
    with https_server(tmp_path) as (url, _):
        (found,) = ask(engine=url).rows
    assert (found.check, found.verdict) == ("reachable", "fail")
    assert "its certificate is not trusted" in found.seen


def test_a_server_that_requires_a_client_certificate_says_so(tmp_path: Path) -> None:
    clients = Authority("clients")
    cert, key = clients.write(tmp_path / "client", "me")
    with https_server(tmp_path, clients.write_ca(tmp_path / "clients.crt")) as (url, ca):
        without = ask(engine=url, ca=str(ca))
        with_one = ask(engine=url, ca=str(ca), client_cert=str(cert), client_key=str(key))
    (found,) = without.rows
    assert (found.check, found.verdict) == ("TLS", "fail")
    assert found.next_step.startswith("If it requires a client certificate, use <client_cert>.")
    assert row(with_one, "TLS").verdict == "ok"


def test_http_and_https_are_told_apart(tmp_path: Path) -> None:
    with https_server(tmp_path) as (url, _):
        (found,) = ask(engine=url.replace("https:", "http:")).rows
    assert (found.check, found.seen, found.next_step) == (
        "TLS", "The server serves HTTPS.", "Use https:// in <engine>.",
    )  # fmt: skip
    with run(ENGINE) as url:
        (found,) = ask(engine=url.replace("http:", "https:")).rows
    assert found.seen == "The server cannot be reached: it does not use TLS. Use http:// in the URL."


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"ca": "missing"}, "ca: 'missing' cannot be read as certificates in PEM: "),
        ({"ca": "junk"}, "ca: 'junk' cannot be read as certificates in PEM: "),
        ({"client_cert": "junk"}, "client_cert: 'junk' cannot be read as a certificate and its key in PEM: "),
        ({"client_cert": "locked/tls.crt", "client_key": "locked/tls.key"}, "client_cert: 'locked/tls.crt' with "),
        ({"client_key": "junk"}, "client_key: there is no certificate for this key."),
        ({"class_name": "two words"}, "class_name: 'two words' is not a valid class name."),
        ({"class_name": "-10"}, "class_name: '-10' is not a valid class name."),
        ({"headers": (("X-Tenant", "ä"),)}, "headers: the value of X-Tenant is not printable ASCII."),
        ({"headers": (("Content-Length", "3"),)}, "headers: Content-Length is a header that the doctor sets itself."),
        ({"headers": (("X-vLLM-Priority", "3"),)}, "headers: X-vLLM-Priority is a header that the doctor sets itself."),
    ],
)
def test_files_that_cannot_be_used_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "junk").write_text("-----BEGIN CERTIFICATE-----\n")
    (tmp_path / "locked").mkdir()
    write_pair(tmp_path / "locked", password=b"secret")
    with pytest.raises(InvalidField) as raised:
        DoctorSettings(engine="https://engine", **files)
    assert str(raised.value).startswith(said)


def test_a_token_of_the_client_replaces_the_api_key_and_stays_below_the_prefix() -> None:
    seen: list[tuple[str, list[str], str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            seen.append((self.path, self.headers.get_all("authorization") or [], self.headers["x-tenant"]))
            body = {"/llm/version": {"version": "1"}, "/llm/v1/models": {"data": [{"id": "m"}]}}.get(self.path, {})
            text = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        headers = (("Authorization", "Bearer mine"), ("X-Tenant", "batch"))
        ask(render=f"http://127.0.0.1:{server.server_port}/llm", api_key="key", headers=headers)
        server.shutdown()
    below = [(tokens, tenant) for path, tokens, tenant in seen if path.startswith("/llm/")]
    assert below and all(found == (["Bearer mine"], "batch") for found in below)
    assert [found[1:] for found in seen if not found[0].startswith("/llm/")] == [([], None)]


# ---- Metrics -------------------------------------------------------------------------------------------------------


def test_the_report_as_prometheus_metrics(fault: Report) -> None:
    families = {family.name: family for family in text_string_to_metric_families(doctor.exposition(fault))}
    checks = {
        (sample.labels["server"], sample.labels["check"]): (sample.labels["verdict"], sample.value)
        for sample in families["vllm_priority_doctor_check"].samples
    }
    assert checks == {(row.server, row.check): (row.verdict, 1) for row in fault.rows}
    assert families["vllm_priority_doctor_priority_lost"].samples[0].value == 1
    assert time.time() - families["vllm_priority_doctor_last_run_timestamp_seconds"].samples[0].value < 60


def test_the_command_prints_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    from control_plane.cli import main

    with run(RENDER) as url, pytest.raises(SystemExit) as ended:
        main(["doctor", "--render", url, "--prometheus"])
    assert ended.value.code == 1
    assert 'vllm_priority_doctor_check{check="/v1/completions/render",' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json", "--prometheus"], "--json and --prometheus cannot be combined."),
        (["-H", "no header"], "-H: 'no header' is not a valid header. Use NAME: VALUE"),
        (["--class", "two words"], "--class: 'two words' is not a valid class name. Use for example batch."),
    ],
)
def test_a_wrong_use_of_the_options_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    from control_plane.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--engine", "http://127.0.0.1:1", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
