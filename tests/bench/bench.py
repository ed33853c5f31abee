"""The benchmark: what the filter costs, beside what people would use instead. `make bench` runs it.

    python tests/bench/bench.py                              everything, about 15 minutes
    python tests/bench/bench.py --quick                      under 2 minutes; do not quote its figures
    python tests/bench/bench.py --only b,c,29KB,throughput   contenders by letter, bodies and parts by name
    python tests/bench/bench.py --only c,200KB-tools,fresh   five fresh processes on one body

Parts: probe (is the result right), growth (time and memory against size), latency (at a fixed rate), fresh
(by how much fresh processes of the filter differ), throughput. Writes results.json, table.md, bench.svg and bench.png
to the output folder; see docs/performance.md.
"""

import argparse
import hashlib
import json
import math
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bodies
import configs
import report
from bodies import HEADER
from contenders import CONTENDERS, Bench, Contender, Running
from load import Request, Slice, require, run_h2load, run_singly, run_wrk, write_script
from processes import BenchError, Cores, Process, find_envoy, free_port, start_envoy
from recorder import Client, Recorder, faults, trapped

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]

PARTS = ("probe", "growth", "latency", "fresh", "throughput")
QUICK_PARTS = ("probe", "growth", "latency", "throughput")
PRIORITY = 5
JSON = {"content-type": "application/json"}
WITH_HEADER = {**JSON, HEADER: str(PRIORITY)}

CONNECTIONS = {"16MB": 4}
"""Open connections of the closed-loop load; 8 where a body is not named."""

STRETCH_SECONDS = {"16MB": 1.5}
"""One stretch of load on (a), (b) and (c): long beside the requests that its end cuts off. 0.5 where not named."""

SHORT_STRETCH, LONG_STRETCH = 0.5, 1.0
"""Seconds of one stretch otherwise: a turn that comes back soon says more than one that takes long."""

LONG_ABOVE = 0.005
"""Seconds a request, on one connection, from which (d) to (g) get the long stretch."""

SINGLY_ABOVE = 0.05
"""From which they get one request at a time: with eight at once, a stretch would see few of them end, or none."""

RATES = {
    "100B": 200,
    "4KB": 200,
    "29KB": 50,
    "200KB": 10,
    "170KB-short": 10,
    "200KB-tools": 10,
    "400KB": 10,
    "1MB": 10,
    "16MB": 1,
}
"""Requests a second in the latency part, the same for all contenders; one that cannot keep up is marked."""

LATENCY_SECONDS = {"16MB": 4}
"""2 where a body is not named."""

ROUNDS = 9
"""Of the throughput part. What takes part in fewer takes part in every second, third or so."""

FRESH_PROCESSES, FRESH_ROUNDS, FRESH_CASE = 5, 3, "replace-end"
"""The fresh part: how many processes of the filter for each body, the rounds of each, and the case.

LuaJIT chooses its traces anew in each process. A member at the end of the body makes the filter scan all of it, so this
case depends on those traces the most.
"""

FRESH_STRETCH = {"16MB": 1.0}
"""Seconds of one round of the fresh part; 0.5 where a body is not named."""

SIZES = tuple(2**power for power in (10, 12, 14, 16, 18, 20, 22, 24, 26))
"""Body sizes of the growth part: 1 KiB to 64 MiB."""


@dataclass(frozen=True)
class Case:
    """One request that is measured: a body and what is done with the header."""

    name: str
    body: str
    letters: str
    """The contenders it is for."""

    def rounds(self, letter: str) -> int:
        """How many rounds the contender gets, of ROUNDS: most where a ratio is held against a bar, and close to it.

        The bars are of (b) and (c), and on the smallest bodies (d) and (e) are near. (a) is a line to compare with, the
        others are several times apart, and to those that encode a body again, or only pass it on, the case is one.
        """
        if letter in "bc":
            return {"insert": ROUNDS, "no-header": 7, "other-route": 3}.get(self.name, 5)
        if letter in "de" and self.name == "insert" and self.body in {"100B", "4KB"}:
            return ROUNDS
        return 3 if self.name == "insert" else 1

    def request(self) -> Request:
        body = bodies.body(self.body)
        if self.name == "no-header":
            return Request(body.route, body.data, JSON)
        if self.name == "other-route":
            return Request(bodies.OTHER_ROUTE, body.data, WITH_HEADER)
        for place in bodies.PLACES:
            if self.name == f"replace-{place}":
                return Request(body.route, body.with_priority(place), WITH_HEADER)
        return Request(body.route, body.data, WITH_HEADER)


CASES: tuple[Case, ...] = tuple(
    Case(name, body, letters)
    for name, letters in (
        ("insert", "abcdefg"),
        ("replace-front", "abc"),
        ("replace-middle", "abcdefg"),
        ("replace-end", "abc"),
        ("no-header", "abc"),
        ("other-route", "abc"),
    )
    for body in bodies.NAMES
    # Nothing reads the body in these two cases, so one body of about 200 KB is enough.
    if not (name in {"no-header", "other-route"} and body in {"170KB-short", "200KB-tools"})
)


class Progress:
    """One line on stderr that says what runs, how far it is, and how long it took so far."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._last = ""

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def say(self, part: str, detail: str) -> None:
        line = f"{int(self.seconds) // 60:2d}:{int(self.seconds) % 60:02d}  {part}: {detail}"
        if self._terminal:
            print(f"\r\033[K{line[:110]}", end="", file=sys.stderr, flush=True)
        elif part != self._last:
            print(line, file=sys.stderr, flush=True)
        self._last = part

    def end(self) -> None:
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Plan:
    """What of the benchmark is run."""

    contenders: tuple[Contender, ...]
    cases: tuple[Case, ...]
    parts: tuple[str, ...]
    sizes: tuple[int, ...]
    quick: bool
    minutes: float

    @property
    def body_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(case.body for case in self.cases))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three bodies, one round")
    parser.add_argument("--only", default="", metavar="NAMES", help="letters a-g, body names, parts; comma-separated")
    parser.add_argument(
        "--minutes", type=float, default=15.0, help="after the first round of throughput, nothing starts past this"
    )
    parser.add_argument("--envoy", help="path of the Envoy to run")
    parser.add_argument("--publish", action="store_true", help="also put the figures into docs/")
    parser.add_argument("-o", "--output", type=Path, default=_ROOT / "build" / "bench", metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        plan = make_plan(options)
        require("wrk", "wrk")
        require("h2load", "nghttp2-client")
        run(plan, options)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def make_plan(options: argparse.Namespace) -> Plan:
    """What --quick and --only leave; BenchError for a name that is unknown."""
    letters = {contender.letter for contender in CONTENDERS}
    names = [name for name in options.only.split(",") if name]
    for name in names:
        if name not in letters and name not in bodies.NAMES and name not in PARTS:
            allowed = ", ".join((*sorted(letters), *bodies.NAMES, *PARTS))
            raise BenchError(f"--only: {name!r} is not a valid name. Use one or more of: {allowed}.")
    chosen = {name for name in names if name in letters} or letters
    wanted = [name for name in names if name in bodies.NAMES]
    if not wanted:
        wanted = ["100B", "29KB", "1MB"] if options.quick else list(bodies.NAMES)
    cases = [case for case in CASES if case.body in wanted]
    if options.quick:
        cases = [case for case in cases if case.name in {"insert", "replace-middle", "no-header"}]
    return Plan(
        contenders=tuple(c for c in CONTENDERS if c.letter in chosen),
        cases=tuple(cases),
        parts=tuple(part for part in PARTS if part in names) or (QUICK_PARTS if options.quick else PARTS),
        sizes=tuple(size for size in SIZES if size <= 2**22) if options.quick else SIZES,
        quick=options.quick,
        minutes=options.minutes,
    )


def run(plan: Plan, options: argparse.Namespace) -> None:
    """Run the plan, write the files, print the table."""
    progress, cores = Progress(), Cores()
    folder: Path = options.output
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    python = own_python(progress)
    if cores.load is not None:  # this process is part of the load
        os.sched_setaffinity(0, {int(cores.load)})
    bench = Bench(find_envoy(options.envoy), configs.product(), python, cores, work)
    results: dict[str, Any] = {
        "machine": machine(bench),
        "quick": plan.quick,
        "contenders": {c.letter: {"name": c.name, "edits": c.edits} for c in plan.contenders},
        "bodies": {
            name: {"what": bodies.body(name).what, "bytes": len(bodies.body(name).data)} for name in bodies.NAMES
        },
        "rates": RATES,
    }
    parts = {
        "probe": probe,
        "growth": growth,
        "latency": latency,
        "fresh": fresh,
        "throughput": throughput,
    }
    try:
        for part in plan.parts:
            results[part] = parts[part](plan, bench, progress, results)
    finally:
        progress.end()
    results["seconds"] = round(progress.seconds)
    results["machine"]["load_after"] = os.getloadavg()[0]
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    table = report.table(results)
    (folder / "table.md").write_text(table)
    print(table)
    draw(python, folder)
    print(f"wrote {folder}/results.json, table.md, bench.svg, bench.png in {progress.seconds / 60:.1f} minutes")
    if options.publish:
        report.publish(folder, _ROOT / "docs")
        print("put the table and the picture into docs/performance.md and docs/images/")


def own_python(progress: Progress) -> Path:
    """The Python of .cache/bench, which holds requirements.txt; made at the first run."""
    requirements = _HERE / "requirements.txt"
    folder = _ROOT / ".cache" / "bench"
    python, stamp = folder / "bin" / "python", folder / "requirements.sha256"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    progress.say("set-up", "grpcio, FastAPI and matplotlib into .cache/bench, once: about a minute")
    venv.create(folder, clear=True, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise BenchError(f"pip could not install {requirements.relative_to(_ROOT)}: {reason}")
    stamp.write_text(wanted)
    return python


def machine(bench: Bench) -> dict[str, Any]:
    """What the figures were measured on."""
    info = Path("/proc/cpuinfo").read_text()
    model = next(
        (line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")), "unknown"
    )
    version = subprocess.run([bench.envoy, "--version"], capture_output=True, text=True).stdout
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=_ROOT, capture_output=True, text=True).stdout
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "envoy": found[1] if (found := re.search(r"version: [0-9a-f]+/([^/]+)/", version)) else "of unknown version",
        "commit": commit.strip(),
        "pinned": str(bench.cores),
        "load_before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


@contextmanager
def started(contender: Contender, bench: Bench, upstream: int, part: str) -> Iterator[Running]:
    """The contender, ended afterwards."""
    running = contender.start(bench, upstream, f"{part}-{contender.letter}")
    try:
        yield running
    finally:
        running.close()


@contextmanager
def drain(bench: Bench, part: str) -> Iterator[tuple[int, Process]]:
    """The upstream that reads everything, as (port, process)."""
    port = free_port()
    config = configs.drain(port, free_port())
    with start_envoy(bench.envoy, config, f"{part}-drain", port, bench.folder, bench.cores.upstream) as process:
        yield port, process


def probe(plan: Plan, bench: Bench, progress: Progress, results: dict[str, Any]) -> dict[str, Any]:
    """letter -> body -> what is wrong with what arrived, in words (none: right); one traced request each."""
    found: dict[str, Any] = {}
    with Recorder() as upstream:
        for contender in plan.contenders:
            with started(contender, bench, upstream.port, "probe") as running:
                found[contender.letter] = {}
                for name in plan.body_names:
                    progress.say("probe", f"{contender.name}, {name}")
                    body = bodies.body(name)
                    sent, client = trapped(body.data), Client(running.port)
                    answer = client.post(body.route, sent, WITH_HEADER)
                    client.close()
                    wrong = faults(sent, answer, upstream.take(body.route), PRIORITY)
                    found[contender.letter][name] = {
                        "faults": wrong,
                        "status": answer.status,
                        "seconds": answer.seconds,
                    }
    return found


def growth(plan: Plan, bench: Bench, progress: Progress, results: dict[str, Any]) -> dict[str, Any]:
    """letter -> per size: seconds a request on one connection (median), peak resident bytes so far, status.

    Each contender is a fresh process; sizes go up, so that the peak after one size is what that size took.
    """
    found: dict[str, Any] = {}
    route = bodies.body("1MB").route
    made = [bodies.images(size) for size in plan.sizes]
    with drain(bench, "growth") as (port, _):
        for contender in plan.contenders:
            with started(contender, bench, port, "growth") as running:
                client, points = Client(running.port, timeout=180), []
                for size, body in zip(plan.sizes, made, strict=True):
                    progress.say("growth", f"{contender.name}, {size >> 10:,} KiB")
                    client.post(route, body, WITH_HEADER)
                    taken: list[float] = []
                    status = 200
                    while status == 200 and (sum(taken) < 0.25 and len(taken) < 200 or len(taken) < 2):
                        answer = client.post(route, body, WITH_HEADER)
                        status = answer.status
                        taken.append(answer.seconds)
                    points.append(
                        {
                            "bytes": len(body),
                            "seconds": statistics.median(taken) if status == 200 else None,
                            "requests": len(taken),
                            "peak_bytes": running.peak_memory(),
                            "status": status,
                        }
                    )
                client.close()
            found[contender.letter] = points
    return found


def latency(plan: Plan, bench: Bench, progress: Progress, results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a contender and body: p50 and p99 in ms at RATES, and how many answers they are of."""
    rows: list[dict[str, Any]] = []
    with drain(bench, "latency") as (port, _), all_started(plan, bench, port, "latency") as running:
        for case in (case for case in plan.cases if case.name == "insert"):
            rate, seconds = RATES[case.body], 1 if plan.quick else LATENCY_SECONDS.get(case.body, 2)
            request = case.request()
            for contender in plan.contenders:
                if refused(results, contender, case.body):
                    continue
                progress.say("latency", f"{case.body} at {rate}/s, {contender.name}")
                target = running[contender.letter]
                warm(target, request)
                taken = run_h2load(request, target.port, rate, seconds, bench.cores.load, bench.folder)
                row: dict[str, Any] = {"contender": contender.letter, "body": case.body, "rate": rate}
                row |= {"answers": len(taken), "expected": rate * seconds, "p50_ms": None, "p99_ms": None}
                if taken:
                    taken.sort()
                    row["p50_ms"] = statistics.median(taken) * 1e3
                    row["p99_ms"] = taken[min(len(taken) - 1, int(len(taken) * 0.99))] * 1e3
                rows.append(row)
    return rows


def fresh(plan: Plan, bench: Bench, progress: Progress, results: dict[str, Any]) -> dict[str, Any]:
    """body -> a list per fresh process of the filter: requests/s and CPU microseconds a request of its rounds.

    The processes of a body take turns, so that a slow minute of the machine affects all of them.
    """
    ours = next((contender for contender in plan.contenders if contender.letter == report.OURS), None)
    found: dict[str, Any] = {}
    if ours is None:
        return found
    with drain(bench, "fresh") as (port, upstream):
        for name in plan.body_names:
            request = Case(FRESH_CASE, name, report.OURS).request()
            script = write_script(request, bench.folder, f"fresh-{name}")
            seconds = FRESH_STRETCH.get(name, SHORT_STRETCH)
            with ExitStack() as stack:
                running = []
                for number in range(FRESH_PROCESSES):
                    progress.say("fresh", f"{name}, starting process {number + 1}")
                    running.append(stack.enter_context(started(ours, bench, port, f"fresh-{number}")))
                rounds: list[list[Slice]] = [[] for _ in running]
                for turn in range(FRESH_ROUNDS):
                    progress.say("fresh", f"{name}, round {turn + 1}/{FRESH_ROUNDS}")
                    for number, target in list(enumerate(running))[:: -1 if turn % 2 else 1]:
                        measured = run_wrk(
                            script,
                            target.port,
                            CONNECTIONS.get(name, 8),
                            seconds,
                            bench.cores.load,
                            target.processes,
                            [upstream],
                        )
                        rounds[number].append(measured)
            found[name] = [
                {
                    "rate": [one.rate for one in taken],
                    "cpu_us": [one.cpu * 1e6 for one in taken],
                    "errors": sum(one.errors for one in taken),
                }
                for taken in rounds
            ]
    return found


def throughput(plan: Plan, bench: Bench, progress: Progress, results: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a contender and case, each with a list of rounds: requests/s, CPU a request, how busy the cores were."""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    rounds = 1 if plan.quick else ROUNDS
    with drain(bench, "throughput") as (port, upstream), all_started(plan, bench, port, "throughput") as running:
        requests = {case: case.request() for case in plan.cases}
        scripts = {
            case: write_script(request, bench.folder, f"{case.name}-{case.body}") for case, request in requests.items()
        }
        slowness: dict[tuple[str, Case], float] = {}
        for case, request in requests.items():
            for contender in plan.contenders:
                if contender.letter in case.letters and not refused(results, contender, case.body):
                    progress.say("throughput", f"warming up, {case.name} {case.body}, {contender.name}")
                    slowness[contender.letter, case] = warm(running[contender.letter], request)
        for number, case, contenders in turns(plan, rounds):
            if number and progress.seconds > plan.minutes * 60:
                break
            for contender in contenders:
                slow = slowness.get((contender.letter, case))
                if slow is None:
                    continue
                progress.say("throughput", f"round {number + 1}/{rounds}, {case.name} {case.body}, {contender.name}")
                target = running[contender.letter]
                near = contender.letter in "abc"
                if slow > SINGLY_ABOVE and not near:
                    count = max(2, math.ceil(SHORT_STRETCH / slow))
                    measured = run_singly(requests[case], target.port, count, target.processes, [upstream])
                else:
                    connections = CONNECTIONS.get(case.body, 8)
                    seconds = STRETCH_SECONDS.get(case.body, SHORT_STRETCH)
                    seconds = seconds if near or slow < LONG_ABOVE else LONG_STRETCH
                    for longer in (1, 3):  # where hardly any ended, the machine was elsewhere: once more
                        measured = run_wrk(
                            scripts[case],
                            target.port,
                            connections,
                            seconds * longer,
                            bench.cores.load,
                            target.processes,
                            [upstream],
                        )
                        if measured.requests >= connections:
                            break
                key = (contender.letter, case.name, case.body)
                row = rows.setdefault(
                    key,
                    {"contender": key[0], "case": key[1], "body": key[2], "rounds": [], "rate": [], "cpu_us": []}
                    | {"busy": [], "load_busy": [], "errors": 0},
                )
                row["rounds"].append(number)
                row["rate"].append(measured.rate)
                row["cpu_us"].append(measured.cpu * 1e6)
                row["busy"].append(measured.busy)
                row["load_busy"].append(measured.load_busy)
                row["errors"] += measured.errors
    return list(rows.values())


def turns(plan: Plan, rounds: int) -> Iterator[tuple[int, Case, Sequence[Contender]]]:
    """(round, case, the contenders whose turn it is): every one in the first round, then spread over the others.

    The order of the contenders is turned around from one turn of a case to its next.
    """
    forward = dict.fromkeys(plan.cases, True)
    for number in range(rounds):
        for case in plan.cases:
            due = [
                contender
                for contender in plan.contenders
                if contender.letter in case.letters and takes_part(number, case.rounds(contender.letter))
            ]
            if due:
                yield number, case, due if forward[case] else due[::-1]
                forward[case] = not forward[case]


def takes_part(number: int, rounds: int) -> bool:
    """Whether round `number` of ROUNDS is one of the `rounds` that are spread evenly over them, from the first on."""
    return number == 0 or number * rounds // ROUNDS > (number - 1) * rounds // ROUNDS


@contextmanager
def all_started(plan: Plan, bench: Bench, upstream: int, part: str) -> Iterator[dict[str, Running]]:
    """All contenders at once, by letter: an idle one costs nothing, and turns can follow each other closely."""
    running: dict[str, Running] = {}
    try:
        for contender in plan.contenders:
            running[contender.letter] = contender.start(bench, upstream, f"{part}-{contender.letter}")
        yield running
    finally:
        for one in running.values():
            one.close()


def warm(running: Running, request: Request) -> float:
    """A few requests that are not counted: connections, the JIT, the heap. Returns the seconds of the fastest."""
    client, began = Client(running.port), time.monotonic()
    fastest = client.post(request.route, request.body, request.headers).seconds
    for _ in range(20):
        if fastest > 0.4 or time.monotonic() - began > 0.3:
            break
        fastest = min(fastest, client.post(request.route, request.body, request.headers).seconds)
    client.close()
    return fastest


def refused(results: dict[str, Any], contender: Contender, body: str) -> bool:
    """Whether the probe saw no 200 for that body: nothing is left to measure."""
    seen = results.get("probe", {}).get(contender.letter, {}).get(body)
    return seen is not None and seen["status"] != 200


def draw(python: Path, folder: Path) -> None:
    """bench.svg and bench.png of results.json, by the benchmark's own Python, which has matplotlib."""
    command = [str(python), str(_HERE / "picture.py"), str(folder / "results.json"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BenchError(f"the picture was not drawn: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")


if __name__ == "__main__":
    sys.exit(main())
