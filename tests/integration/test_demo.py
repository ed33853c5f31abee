"""The doctor and the demo through real Envoys: they show the cure, and what a policy does to a priority."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from control_plane.address import Address
from control_plane.demo import run_demo
from control_plane.doctor import DoctorSettings, Report, Row, examine
from control_plane.errors import BadInput
from control_plane.latency import Load, measure
from control_plane.simulator import SimulatorSettings, run
from control_plane.vllm import GENERATE_ROUTE, RENDER_ROUTES

from .conftest import SidecarFactory

CHAT = RENDER_ROUTES[0]
LOAD = Load(seconds=2)


@pytest.fixture(scope="module")
def render_server() -> Iterator[Address]:
    with run(SimulatorSettings(kind="render")) as url:
        yield address_of(url)


def address_of(url: str) -> Address:
    return Address.parse(url.removeprefix("http://"), "url")


def ask(**settings: Any) -> Report:
    return asyncio.run(examine(DoctorSettings(**settings)))


def row(report: Report, check: str) -> Row:
    (found,) = [row for row in report.rows if row.check == check]
    return found


def test_the_demo_shows_the_fault_and_its_cure(envoy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(width=80)
    with console.capture() as printed:
        assert run_demo(envoy, console=console, load=LOAD, picture_file=tmp_path / "new" / "latency.svg") == 0
    text = printed.get()
    assert "through the sidecar, it is lost in none" in text
    table = {line.split()[1]: line for line in text.splitlines() if line.startswith("│ /")}
    assert set(table) == {*RENDER_ROUTES, GENERATE_ROUTE}, "every route is shown whole"
    for route in RENDER_ROUTES:
        assert "│ lost: priority 0 " in table[route]
        assert "│ ok: priority -10 " in table[route]
    assert "│ lost: not in the body │ ok: in the body " in table[GENERATE_ROUTE]
    assert max(len(line) for line in text.splitlines() if line[:1] in "┏┃┡│├└") <= 80
    progress = capsys.readouterr().err.splitlines()
    assert [line for line in progress if "the fault" in line or "the cure" in line]
    assert all(line.startswith("demo ") for line in progress)
    root = ElementTree.parse(tmp_path / "new" / "latency.svg").getroot()
    dots = [dot.get("class") for dot in root.iter("{http://www.w3.org/2000/svg}circle")]
    assert dots.count("straight") >= 4 <= dots.count("through")
    assert "median time" in text


def test_straight_at_the_engine_an_interactive_request_waits_for_the_whole_queue() -> None:
    with run(SimulatorSettings()) as engine:
        straight = asyncio.run(measure(engine, LOAD))
    assert straight.median > 4 * LOAD.batch_tokens / SimulatorSettings.tokens_per_second
    assert straight.batch_served > 0


def test_a_picture_that_cannot_be_written_is_one_error(envoy: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match=r"picture: .*/file/x\.svg: cannot be written: "):
        run_demo(envoy, load=LOAD, picture_file=tmp_path / "file" / "x.svg")


def test_the_demo_prints_the_same_as_json(envoy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(envoy, as_json=True, load=LOAD) == 0
    shown = json.loads(capsys.readouterr().out)
    medians = [shown["latency"][half]["interactive_median_seconds"] for half in ("straight", "through_sidecar")]
    assert medians[0] > medians[1]
    assert [shown[half]["exit_status"] for half in ("straight", "through_sidecar")] == [1, 0]
    assert shown["exit_status"] == 0


def test_through_sidecars_no_priority_is_lost(sidecar: SidecarFactory, render_server: Address) -> None:
    with run(SimulatorSettings()) as engine:
        render = sidecar("render", to=render_server, fresh=True)
        front = sidecar("engine", to=address_of(engine), fresh=True)
        found = ask(render=f"http://{render.address}", engine=f"http://{front.address}")
    assert {row.verdict for row in found.rows} == {"ok"}, found.to_json()
    assert found.exit_status == 0
    assert row(found, "order, by the header").evidence["applied"] == "-10; source=header; outcome=inserted"
    assert row(found, "/v1/messages/render").evidence["applied"] == "-10; source=header; outcome=response_edited"


@pytest.mark.parametrize(
    ("policy", "verdict", "said"),
    [
        ("range: {min: -5, max: 5, outside: clamp}", "ok", " -5 with -10 in the header"),
        ("engine: sglang", "ok", " 10 with -10 in the header"),
        ("default: 4", "ok", " 4 without a priority"),
        ("range: {min: -5}", "warn", "missing (status 400: "),
        ("report_header: null", "ok", " -10 with -10 in the header"),
        ("header: x-other", "lost", " 0 with -10 in the header"),
    ],
)
def test_the_verdict_takes_the_sidecars_policy_into_account(
    sidecar: SidecarFactory, render_server: Address, policy: str, verdict: str, said: str
) -> None:
    front = sidecar("render", policy, to=render_server, fresh=True)
    found = row(ask(render=f"http://{front.address}"), CHAT)
    assert (found.verdict, said in found.seen) == (verdict, True), found


def test_a_default_is_not_mistaken_for_the_headers_priority(sidecar: SidecarFactory, render_server: Address) -> None:
    front = sidecar("render", "{header: x-other, default: 4}", to=render_server, fresh=True)
    found = row(ask(render=f"http://{front.address}"), CHAT)
    assert "The sidecar saw no priority header." in found.next_step
    assert "It applied the policy's default." in found.next_step


def test_fcfs_is_recognized_although_the_header_reaches_the_body(sidecar: SidecarFactory) -> None:
    with run(SimulatorSettings(scheduling="fcfs")) as engine:
        front = sidecar("engine", to=address_of(engine), fresh=True)
        found = ask(engine=f"http://{front.address}")
    assert row(found, GENERATE_ROUTE).verdict == "ok"
    assert row(found, "scheduling policy").verdict == "lost"


def test_a_dead_server_behind_a_sidecar_is_recognized(sidecar: SidecarFactory) -> None:
    with run(SimulatorSettings(kind="render")) as url:
        dead = address_of(url)
    found = ask(render=f"http://{sidecar('render', to=dead, fresh=True).address}")
    assert "vLLM behind it did not" in row(found, "reachable").next_step


@pytest.mark.parametrize(
    ("policy", "verdict", "said"),
    [
        ("classes: {urgent: -20}", "ok", "The rendered priority is -20 with urgent in the header."),
        (
            "{classes: {urgent: -20}, report_header: null}",
            "ok",
            "The rendered priority is -20 with urgent in the header.",
        ),
        ("classes: {batch: 20}", "warn", "The rendered priority is missing (status 400: "),
        ("header: x-other", "lost", "The rendered priority is 0 with urgent in the header."),
    ],
)
def test_a_class_arrives_as_its_number(
    sidecar: SidecarFactory, render_server: Address, policy: str, verdict: str, said: str
) -> None:
    front = sidecar("render", policy, to=render_server, fresh=True)
    found = row(ask(render=f"http://{front.address}", class_name="urgent"), "class urgent")
    assert (found.verdict, said in found.seen) == (verdict, True), found


def test_a_class_is_lost_without_a_sidecar(render_server: Address) -> None:
    found = row(ask(render=f"http://{render_server}", class_name="urgent"), "class urgent")
    assert (found.verdict, found.see) == ("lost", "docs/troubleshooting.md#the-sidecar-does-not-report")


def test_the_doctor_can_examine_as_one_tenant(sidecar: SidecarFactory, render_server: Address) -> None:
    policy = "tenants: {header: x-tenant, rules: {batch: {range: {min: 0, outside: clamp}}}}"
    front = sidecar("render", policy, to=render_server, fresh=True)
    as_tenant = ask(render=f"http://{front.address}", headers=(("X-Tenant", "batch"),))
    assert " 0 with -10 in the header" in row(as_tenant, CHAT).seen
    assert " -10 with -10 in the header" in row(ask(render=f"http://{front.address}"), CHAT).seen


@pytest.mark.parametrize(("policy", "verdict"), [("{}", "lost"), ("routes: {root_path: /llm}", "ok")])
def test_a_prefix_that_the_sidecar_does_not_edit_is_named(sidecar: SidecarFactory, policy: str, verdict: str) -> None:
    with run(SimulatorSettings(kind="render", root_path="/llm")) as url:
        front = sidecar("render", policy, to=address_of(url), fresh=True)
        found = ask(render=f"http://{front.address}/llm")
    assert row(found, CHAT).verdict == verdict
    assert row(found, "prefix").verdict == verdict
    if verdict == "lost":
        assert (
            row(found, "prefix").next_step == "If one sidecar serves both, set routes.root_path to /llm in its policy."
        )


def test_a_prefix_of_a_server_without_a_sidecar_is_no_finding() -> None:
    with run(SimulatorSettings(kind="render", root_path="/llm")) as url:
        found = ask(render=f"{url}/llm")
    assert [row.check for row in found.rows if row.check == "prefix"] == []
    assert row(found, CHAT).verdict == "lost"
