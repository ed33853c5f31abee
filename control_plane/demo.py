"""The fault and its cure, side by side, on one machine and without a GPU.

Two simulated vLLM servers; the doctor asks them straight, then through two sidecars: the same servers, the same
questions.
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

from control_plane.doctor import STYLES, DoctorSettings, Report, Row, examine
from control_plane.policy import Policy, Role
from control_plane.render import Address, Placement, bootstrap
from control_plane.sidecar import Sidecar, envoy_version
from control_plane.simulator import SimulatorSettings, run

_HOST = "127.0.0.1"

# Checks of the servers that do not depend on what stands in front of them.
_SAME_EITHER_WAY = frozenset({"reachable", "version", "model", "scale-out", "scheduling policy"})


def run_demo(envoy: Path, *, as_json: bool = False, console: Console | None = None) -> int:
    """Prints both halves on `console` (default: stdout) and progress on stderr; 0 where the sidecars cure the fault.

    As JSON: {exit_status, conclusion, straight, through_sidecar}, the last two as the doctor's. BadInput where
    `envoy` is no Envoy, EnvoyError where it does not start.
    """
    version = envoy_version(envoy)
    say = _progress()
    with ExitStack() as parts:
        say("starting two simulated vLLM servers: a render server, and an engine with one slot")
        servers: dict[Role, str] = {
            "render": parts.enter_context(run(SimulatorSettings(kind="render"))),
            "engine": parts.enter_context(run(SimulatorSettings(kind="engine"))),
        }
        say(f"starting a sidecar in front of each: Envoy {version}")
        logs = Path(parts.enter_context(TemporaryDirectory(prefix="vllm-priority-demo-")))
        sidecars: dict[Role, str] = {}
        for role, url in servers.items():
            placement = _placement(role, url, logs)
            parts.enter_context(Sidecar(bootstrap(Policy(), placement), envoy))
            sidecars[role] = f"http://{placement.listen}"
        say("asking the servers straight: the fault")
        fault = _examine(servers)
        say("asking them through the sidecars: the cure")
        cure = _examine(sidecars)
    sentence, status = conclusion(fault, cure)
    say("done")
    if as_json:
        halves = {"straight": fault.to_json(), "through_sidecar": cure.to_json()}
        print(json.dumps({"exit_status": status, "conclusion": sentence, **halves}))
        return status
    shown = console or Console()
    shown.print(side_by_side(fault, cure))
    shown.print(Text(sentence), soft_wrap=True)
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
    """Ports that were free a moment ago, all different."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((_HOST, 0))
        return [Address(_HOST, each.getsockname()[1]) for each in sockets]


def _examine(urls: Mapping[Role, str]) -> Report:
    return asyncio.run(examine(DoctorSettings(render=urls["render"], engine=urls["engine"])))


def side_by_side(fault: Report, cure: Report) -> Table:
    """One row a check: straight at the server, and through the sidecar."""
    table = Table(title="X-Vllm-Priority: -10, straight at vLLM and through the sidecar", show_lines=True)
    for title in ("check", "straight", "through the sidecar"):
        table.add_column(title, overflow="fold")
    cured = {(row.server, row.check): row for row in cure.rows}
    for row in fault.rows:
        if row.check in _SAME_EITHER_WAY and row.verdict == "ok":
            continue
        table.add_row(Text(f"{row.server}: {row.check}"), _cell(row), _cell(cured.pop((row.server, row.check), None)))
    for row in cured.values():
        if row.verdict != "ok":
            table.add_row(Text(f"{row.server}: {row.check}"), Text("-"), _cell(row))
    return table


def _cell(row: Row | None) -> Text:
    if row is None:
        return Text("-")
    return Text.assemble((row.verdict, STYLES[row.verdict]), f"\n{row.seen}")


def conclusion(fault: Report, cure: Report) -> tuple[str, int]:
    """What was shown and what to do next; 1 where it was not shown."""
    lost = [row for row in fault.rows if row.verdict == "lost"]
    if not lost:
        return f"The demo shows no fault, so it proves nothing. Straight: {fault.summary}", 1
    decided = {(row.server, row.check) for row in cure.rows if row.verdict == "ok"}
    missed = [row.check for row in lost if (row.server, row.check) not in decided]
    if missed or cure.exit_status:
        return f"The sidecars do not cure it: {', '.join(missed) or cure.summary}", 1
    return (
        f"Straight at vLLM the header was lost in {len(lost)} checks, through the sidecar in none. Next, see your own "
        "servers: vllm-priority doctor --render URL --engine URL; then put a sidecar in front of each: "
        "vllm-priority run --role render --upstream HOST:PORT --listen HOST:PORT"
    ), 0
