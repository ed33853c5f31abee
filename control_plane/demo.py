"""The demo shows the fault and its cure side by side, on one machine and without a GPU.

It starts two simulated vLLM servers. The doctor examines them directly, and then through two sidecars. Then interactive
requests are sent beside a batch, on both ways.
"""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table
from rich.text import Text

from control_plane.address import Address
from control_plane.doctor import STYLES, DoctorSettings, Report, Row, examine
from control_plane.doctor.report import SERVER_NAMES
from control_plane.errors import InvalidField
from control_plane.latency import Latency, Load, measure, sentence
from control_plane.latency_picture import picture
from control_plane.policy.model import Policy
from control_plane.proxy import Sidecar, envoy_version
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import Placement
from control_plane.simulator import SimulatorSettings, run
from control_plane.vllm import Role

_HOST = "127.0.0.1"

# Checks of the server itself, whose result does not depend on a sidecar.
_SAME_EITHER_WAY = frozenset({"reachable", "version", "model", "scale-out", "scheduling policy"})


def run_demo(
    envoy: Path,
    *,
    as_json: bool = False,
    console: Console | None = None,
    picture_file: Path | None = None,
    load: Load | None = None,
) -> int:
    """Run the demo. Print the result on `console` and the progress on standard error.

    Args:
        envoy: The Envoy to run as a sidecar.
        as_json: Print {exit_status, conclusion, straight, through_sidecar, latency} on standard output instead of the
            table. `straight` and `through_sidecar` are the doctor's reports.
        console: Where to print the table; None is standard output.
        picture_file: Where to write a picture of the latencies, as an SVG. None: nowhere.
        load: What is sent to measure latencies. None: the default.

    Returns:
        The exit status: 0 if the servers lose a priority and the sidecars cure it, else 1.

    Raises:
        BadInput: `envoy` is not an Envoy.
        InvalidField: the picture cannot be written.
        EnvoyError: Envoy does not start.
    """
    version = envoy_version(envoy)
    load = load or Load()
    say = _progress()
    with ExitStack() as parts:
        say("Starting two simulated vLLM servers: a render server, and an engine with one slot.")
        servers: dict[Role, str] = {
            "render": parts.enter_context(run(SimulatorSettings(kind="render"))),
            "engine": parts.enter_context(run(SimulatorSettings(kind="engine"))),
        }
        say(f"Starting a sidecar in front of each (Envoy {version}).")
        logs = Path(parts.enter_context(TemporaryDirectory(prefix="vllm-priority-demo-")))
        sidecars: dict[Role, str] = {}
        for role, url in servers.items():
            placement = _placement(role, url, logs)
            parts.enter_context(Sidecar(bootstrap(Policy(), placement), envoy))
            sidecars[role] = f"http://{placement.listen}"
        say("Examining the servers directly, which shows the fault.")
        fault = _examine(servers)
        say("Examining them through the sidecars, which shows the cure.")
        cure = _examine(sidecars)
        load_text = f"{load.batch_clients} batch clients and an interactive request every {load.interval_seconds:g} s"
        say(f"Sending {load_text} straight to the engine, for {load.seconds:g} s.")
        straight = asyncio.run(measure(servers["engine"], load))
        say("Sending the same through the sidecar.")
        through = asyncio.run(measure(sidecars["engine"], load))
    text, status = conclusion(fault, cure, sentence(load, straight, through), faster=through.median < straight.median)
    if picture_file:
        _write(picture_file, picture(load, straight, through))
        say(f"Wrote a picture of the latencies to {picture_file}.")
    say("Done.")
    if as_json:
        halves = {"straight": fault.to_json(), "through_sidecar": cure.to_json()}
        latency = {"straight": straight.to_json(), "through_sidecar": through.to_json()}
        print(json.dumps({"exit_status": status, "conclusion": text, **halves, "latency": latency}))
        return status
    shown = console or Console()
    table = side_by_side(fault, cure)
    add_latency(table, straight, through)
    shown.print(table)
    shown.print(Text(text), soft_wrap=True)
    return status


def _progress() -> Callable[[str], None]:
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"demo {time.monotonic() - started:4.1f} s: {line}", file=sys.stderr, flush=True)

    return say


def _placement(role: Role, upstream: str, logs: Path) -> Placement:
    listen, admin = _free_addresses(2)
    return Placement(
        role, listen, Address.parse(upstream.removeprefix("http://"), "upstream"), admin,
        access_log=str(logs / f"{role}.log"),
    )  # fmt: skip


def _free_addresses(count: int) -> list[Address]:
    """Return addresses with different ports that were free a moment ago."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [Address(_HOST, each.getsockname()[1]) for each in sockets]


def _examine(urls: Mapping[Role, str]) -> Report:
    return asyncio.run(examine(DoctorSettings(render=urls["render"], engine=urls["engine"])))


def side_by_side(fault: Report, cure: Report) -> Table:
    """Return a table with one row for each check: the result without the sidecar, and the one with it.

    It fits a terminal of 80 columns. Checks that succeed either way are left out.
    """
    table = Table(title="What vLLM does with a request that has the header X-Vllm-Priority: -10", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("straight at vLLM", overflow="fold")
    table.add_column("through the sidecar", overflow="fold")
    through = {(row.server, row.check): row for row in cure.rows}
    pairs = [(row, through.pop((row.server, row.check), None)) for row in fault.rows]
    shown: list[tuple[Row, Text, Text]] = [
        (row, _cell(row), _cell(cured))
        for row, cured in pairs
        if row.check not in _SAME_EITHER_WAY or row.verdict != "ok"
    ]
    shown += [(row, Text("-"), _cell(row)) for row in through.values() if row.verdict != "ok"]
    for server in SERVER_NAMES:
        rows = [entry for entry in shown if entry[0].server == server]
        if rows:
            table.add_row(Text(SERVER_NAMES[server], "bold"), "", "")
        for index, (row, straight, cured_cell) in enumerate(rows, 1):
            table.add_row(Text(row.check), straight, cured_cell, end_section=index == len(rows))
    return table


def add_latency(table: Table, straight: Latency, through: Latency) -> None:
    """Add the rows about interactive requests beside a batch to the table."""
    table.add_row(Text("interactive beside a batch", "bold"), "", "")
    table.add_row("median time", f"{straight.median:.2f} s", f"{through.median:.2f} s")
    table.add_row("longest time", f"{straight.slowest:.2f} s", f"{through.slowest:.2f} s")
    table.add_row("batch requests served", str(straight.batch_served), str(through.batch_served))


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidField("picture", f"{path}: cannot be written: {error.strerror}.") from None


def _cell(row: Row | None) -> Text:
    if row is None:
        return Text("-")
    return Text.assemble((row.verdict, STYLES[row.verdict]), f": {row.brief or row.seen}")


def conclusion(fault: Report, cure: Report, latency: str, *, faster: bool) -> tuple[str, int]:
    """Return what the demo shows and what to do next, and the exit status, which is 1 if it shows no cure.

    Args:
        fault: What the doctor found straight at the servers.
        cure: What it found through the sidecars.
        latency: What was measured, as a sentence.
        faster: Whether interactive requests were faster through the sidecar.
    """
    lost = [row for row in fault.rows if row.verdict == "lost"]
    if not lost:
        return f"The demo shows no fault, so it proves nothing. Without the sidecar: {fault.summary}", 1
    decided = {(row.server, row.check) for row in cure.rows if row.verdict == "ok"}
    missed = [row.check for row in lost if (row.server, row.check) not in decided]
    if missed or cure.exit_status:
        return f"The sidecars do not cure it: {', '.join(missed) or cure.summary}", 1
    if not faster:
        return f"The sidecar makes interactive requests no faster. {latency}", 1
    return (
        f"Straight at vLLM, the header is lost in {len(lost)} checks; through the sidecar, it is lost in none.\n"
        f"{latency}\n"
        "Examine your own servers:\n"
        "  vllm-priority doctor --render URL --engine URL\n"
        "Then put a sidecar in front of each:\n"
        "  vllm-priority run --role render --upstream HOST:PORT --listen HOST:PORT\n"
        "  vllm-priority run --role engine --upstream HOST:PORT --listen HOST:PORT"
    ), 0
