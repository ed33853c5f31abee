"""What `vllm-priority watch` makes of metrics."""

import asyncio
import io
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from rich.console import Console

from control_plane import watch as module
from control_plane.cli import main
from control_plane.errors import InvalidField
from control_plane.simulator import SimulatorSettings, run
from control_plane.watch import Source, WatchSettings, lines, median, parse, reading, tables

ALIVE = 'envoy_http_lua_vllm_priority_executions{envoy_http_conn_manager_prefix="vllm_priority"} 3'
OWN = ("envoy_vllm_priority_",)


def requests(number: float, outcome: str = "inserted", route: str = "/r") -> str:
    return (
        f'envoy_vllm_priority_requests{{route="{route}",outcome="{outcome}",source="",class="",priority=""}} {number}'
    )


def first_bytes(priority: str, *buckets: tuple[str, int]) -> str:
    return "\n".join(
        f'envoy_vllm_priority_time_to_first_byte_bucket{{class="",priority="{priority}",le="{bound}"}} {number}'
        for bound, number in buckets
    )


def sidecar(*readings: tuple[float, str]) -> Source:
    source = Source("sidecar", "http://sidecar")
    for when, text in readings:
        source.add(when, parse(text, OWN))
    return source


def rates(*sources: Source) -> dict[tuple[str, str], float | None]:
    return {(row["route"], row["outcome"]): row["per_second"] for row in reading(list(sources), 0)["requests"]}


def test_only_the_samples_with_the_prefix_are_parsed() -> None:
    text = f"# TYPE envoy_vllm_priority_requests counter\n{requests(4)}\nenvoy_server_live{{}} 1\nnonsense\n"
    labels = (("class", ""), ("outcome", "inserted"), ("priority", ""), ("route", "/r"), ("source", ""))
    assert parse(text, OWN) == {("envoy_vllm_priority_requests", labels): 4}


def test_the_first_reading_has_totals_and_no_rate() -> None:
    (row,) = reading([sidecar((0, requests(7)))], 0)["requests"]
    assert row == {"route": "/r", "outcome": "inserted", "total": 7, "per_second": None}


def test_a_rate_is_the_difference_by_the_time_between_two_readings() -> None:
    assert rates(sidecar((0, requests(7)), (4, requests(17)))) == {("/r", "inserted"): 2.5}


def test_rates_of_several_sidecars_are_added() -> None:
    one, other = sidecar((0, requests(0)), (2, requests(4))), sidecar((0, requests(5)), (4, requests(9)))
    assert rates(one, other) == {("/r", "inserted"): 3}


def test_a_counter_that_appears_counts_from_0() -> None:
    found = rates(sidecar((0, requests(7)), (2, requests(7) + "\n" + requests(1, "invalid"))))
    assert found == {("/r", "inserted"): 0, ("/r", "invalid"): 0.5}


def test_after_a_restart_everything_counts_from_0() -> None:
    before = requests(100) + "\n" + requests(1, "invalid")
    after = requests(6) + "\n" + requests(3, "invalid")  # this one has grown beyond what it was
    assert rates(sidecar((0, before), (2, after))) == {("/r", "inserted"): 3, ("/r", "invalid"): 1.5}


def test_a_restart_is_seen_by_a_counter_that_is_gone() -> None:
    before = requests(1) + "\n" + requests(1, "invalid")
    assert rates(sidecar((0, before), (2, requests(4)))) == {("/r", "inserted"): 2}


def test_a_gap_is_bridged_by_the_next_reading() -> None:
    source = sidecar((0, requests(10)))
    source.error = "the connection was refused"
    assert rates(source) == {}
    source.error = ""
    source.add(10, parse(requests(30), OWN))
    assert rates(source) == {("/r", "inserted"): 2}


@pytest.mark.parametrize(
    ("buckets", "middle"),
    [
        ([], None),
        ([(10, 0), (float("inf"), 0)], None),
        ([(10, 4), (20, 4), (float("inf"), 4)], 5),
        ([(10, 0), (20, 4), (float("inf"), 4)], 15),
        ([(10, 1), (20, 1), (float("inf"), 4)], 20),  # above the last bound, as Prometheus has it
        ([(10, 0), (10, 0), (20, 1), (20, 3), (float("inf"), 1), (float("inf"), 3)], 15),
    ],
)
def test_a_median_is_interpolated_in_its_bucket(buckets: list[tuple[float, float]], middle: float | None) -> None:
    assert median(buckets) == middle


def test_times_are_of_the_last_30_seconds_and_rates_of_the_last_reading() -> None:
    source = sidecar(
        *((second, first_bytes("0", ("10", 8), ("20", 8), ("+Inf", 8))) for second in range(0, 60, 5)),
        (60, first_bytes("0", ("10", 8), ("20", 18), ("+Inf", 18))),
        (65, first_bytes("0", ("10", 8), ("20", 18), ("+Inf", 18))),
    )
    assert reading([source], 0)["time_to_first_byte_ms"]["priority"] == {"0": 15}
    for second in (70, 80, 90, 100):
        source.add(second, source.samples)
    assert reading([source], 0)["time_to_first_byte_ms"]["priority"] == {}


def test_urgent_priorities_are_listed_first() -> None:
    names = ["1 to 10", "-10 to -1", "above 100", "below -100", "0", "11 to 100", "-100 to -11"]
    text = "\n".join(first_bytes(name, ("10", 2), ("+Inf", 2)) for name in names)
    empty = "\n".join(first_bytes(name, ("10", 0), ("+Inf", 0)) for name in names)
    shown = "\n".join(lines(reading([sidecar((0, empty), (1, text))], 0)))
    found = re.findall(r"first byte, priority (.*?):", shown)
    assert found == ["below -100", "-100 to -11", "-10 to -1", "0", "1 to 10", "11 to 100", "above 100"]


class Pages(ThreadingHTTPServer):
    """Serves fixed texts by path, or 404."""

    def __init__(self, pages: dict[str, str]) -> None:
        self.pages = pages
        super().__init__(("127.0.0.1", 0), Page)
        self.url = f"http://127.0.0.1:{self.server_port}"


class Page(BaseHTTPRequestHandler):
    server: Pages

    def do_GET(self) -> None:
        text = self.server.pages.get(self.path)
        self.send_response(404 if text is None else 200)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def pages() -> Iterator[Pages]:
    server = Pages({})
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def watched(**settings: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    asyncio.run(module.watch(WatchSettings(**{"interval": 0.1, "count": 1} | settings), found.append))
    return found


def test_what_is_there_and_what_is_not_is_one_reading(pages: Pages) -> None:
    pages.pages["/stats/prometheus"] = f"{ALIVE}\n{requests(2)}\n"
    pages.pages["/api/sidecars?limit=1"] = json.dumps({"SYNCED": 2, "STALE": 1, "ERROR": 0, "UNKNOWN": 0})
    found = watched(
        sidecar=(pages.url, "http://127.0.0.1:1"), engine=(pages.url,), control_plane=pages.url + "/", count=3
    )
    assert len(found) == 3
    for one in found:
        assert [sidecar["error"] for sidecar in one["sidecars"]] == [None, "the connection was refused"]
        assert [row["total"] for row in one["requests"]] == [2]
        assert one["engines"][0]["error"] == "/metrics responds with status 404"
        assert one["control_plane"]["sidecars"] == {"SYNCED": 2, "STALE": 1, "ERROR": 0, "UNKNOWN": 0}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "envoy_server_live{} 1\n",
        'envoy_http_lua_vllm_priority_executions{envoy_http_conn_manager_prefix="outbound"} 3\n',
        f"{ALIVE}\nenvoy_vllm_priority_requests{{ 1\n",
    ],
)
def test_metrics_of_another_server_are_an_error(pages: Pages, text: str) -> None:
    pages.pages |= {"/stats/prometheus": text, "/metrics": text, "/api/sidecars?limit=1": text}
    (found,) = watched(sidecar=(pages.url,), engine=(pages.url,), control_plane=pages.url)
    errors = [found["sidecars"][0]["error"], found["engines"][0]["error"], found["control_plane"]["error"]]
    assert all(error.endswith("does not have the metrics of this kind of server") for error in errors)


def test_an_engine_shows_its_queue() -> None:
    with run(SimulatorSettings(kind="engine")) as url:
        (found,) = watched(engine=(url,))
    assert found["engines"] == [
        {"url": url, "error": None, "running": 0, "waiting": 0, "queue_seconds": None,
         "time_to_first_token_seconds": None}
    ]  # fmt: skip


def test_the_times_of_an_engine_are_of_the_last_reading() -> None:
    def metrics(number: int) -> dict[module.Series, float]:
        text = "vllm:num_requests_running 1\nvllm:num_requests_waiting 4\n"
        for name in ("request_queue_time_seconds", "time_to_first_token_seconds"):
            text += f'vllm:{name}_bucket{{le="1"}} {number}\nvllm:{name}_bucket{{le="+Inf"}} {number}\n'
        return parse(text, ("vllm:",))

    engine = Source("engine", "http://engine")
    engine.add(0, metrics(3))
    engine.add(2, metrics(5))
    (found,) = reading([engine], 0)["engines"]
    assert (found["running"], found["waiting"]) == (1, 4)
    assert found["queue_seconds"] == found["time_to_first_token_seconds"] == 0.5
    engine.add(4, metrics(5))
    assert reading([engine], 0)["engines"][0]["queue_seconds"] is None


def test_a_terminal_gets_tables_and_no_color_if_the_user_wants_none(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.pages["/stats/prometheus"] = f"{ALIVE}\n{requests(2, route='[bold]x')}\n"
    for no_color in ("", "1"):
        monkeypatch.setenv("NO_COLOR", no_color)
        monkeypatch.setenv("TERM", "xterm-256color")
        screen = io.StringIO()
        settings = WatchSettings(sidecar=(pages.url, "http://127.0.0.1:1"), count=1)
        module.run_watch(settings, console=Console(file=screen, force_terminal=True, width=80))
        assert "[bold]x" in screen.getvalue()  # what is read is no markup
        assert "sidecar http://127.0.0.1:1: the connection was refused" in screen.getvalue()
        assert ("\x1b[1;31m" in screen.getvalue()) == (not no_color)


def test_tables_fit_80_columns() -> None:
    empty, full = (first_bytes("-100 to -11", ("10", n), ("+Inf", n)) for n in (0, 2))
    routes = requests(1234567, "unsupported_media_type", "/v1/chat/completions/render")
    source = sidecar((0, empty), (1, f"{full}\n{routes}"))
    screen = Console(file=io.StringIO(), width=80, record=True)
    screen.print(tables(reading([source, Source("engine", "http://engine.vllm.svc.cluster.local:8000")], 0)))
    text = screen.export_text()
    assert "/v1/chat/completions/render" in text
    assert "unsupported_media_type" in text
    assert "median time to first byte" in text
    assert max(map(len, text.splitlines())) <= 80


def test_json_is_one_object_a_line(pages: Pages, capsys: pytest.CaptureFixture[str]) -> None:
    pages.pages["/stats/prometheus"] = f"{ALIVE}\n{requests(2)}\n"
    with pytest.raises(SystemExit) as ended:
        main(["watch", "--sidecar", pages.url, "--interval", "0.1", "--count", "2", "--json"])
    assert ended.value.code == 0
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first["requests"][0]["per_second"] is None
    assert second["requests"][0]["per_second"] == 0


def test_where_it_is_no_terminal_there_are_plain_lines(pages: Pages, capsys: pytest.CaptureFixture[str]) -> None:
    pages.pages["/stats/prometheus"] = f"{ALIVE}\n{requests(2)}\n"
    with pytest.raises(SystemExit):
        main(["watch", "--sidecar", pages.url, "--count", "1"])
    out = capsys.readouterr().out
    assert re.fullmatch(r"\d\d:\d\d:\d\d requests /r inserted: -, 2 in all\n", out), out


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "sidecar: there is nothing to watch. Use a URL, for example http://127.0.0.1:19000."),
        ({"engine": ("x:8000",)}, "engine: 'x:8000' is not a valid URL. Use a root URL, for example"),
        ({"control_plane": "http://"}, "control_plane: 'http://' is not a valid URL."),
        ({"sidecar": ("http://a:99999",)}, "sidecar: 'http://a:99999' is not a valid URL."),
        ({"sidecar": ("http://a/?x",)}, "sidecar: 'http://a/?x' is not a valid URL."),
    ],
)
def test_what_cannot_be_watched_is_an_error(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidField, match="^" + re.escape(problem)):
        WatchSettings(**settings)
