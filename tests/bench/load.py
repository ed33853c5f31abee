"""Load on one address: wrk for throughput, h2load for latency at a fixed rate, one socket for single requests."""

import json
import math
import resource
import shutil
import signal
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from processes import BenchError, Process, pinned
from recorder import Client


@dataclass(frozen=True)
class Request:
    """One POST, sent again and again."""

    route: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Slice:
    """What one stretch of load gave.

    `cpu`: the proxy's CPU seconds a request. `busy`: its share of one core. `load_busy`: that of the load and the
    upstream; where it is near 1 and `busy` is not, the proxy was not what limited the rate.
    """

    requests: int
    seconds: float
    errors: int
    cpu: float
    busy: float
    load_busy: float = 0.0

    @property
    def rate(self) -> float:
        """Requests a second that were answered with 2xx."""
        return max(0, self.requests - self.errors) / self.seconds


def require(command: str, package: str) -> str:
    """Path of a load generator; BenchError names the Debian package that has it."""
    path = shutil.which(command)
    if path is None:
        raise BenchError(f"{command} is missing: apt-get install {package}")
    return path


def write_script(request: Request, folder: Path, name: str) -> Path:
    """A wrk script for this request. It defines no request(), so wrk builds the bytes once."""
    folder.mkdir(parents=True, exist_ok=True)
    body = folder / f"{name}.body"
    body.write_bytes(request.body)
    lines = [
        'wrk.method = "POST"',
        f"wrk.path = {json.dumps(request.route)}",
        f'local file = assert(io.open({json.dumps(str(body))}, "rb"))',
        'wrk.body = file:read("*a")',
        "file:close()",
        *(f"wrk.headers[{json.dumps(key)}] = {json.dumps(value)}" for key, value in request.headers.items()),
        "function done(summary, latency)",
        "  local e = summary.errors",
        "  io.write(string.format('RESULT %d %d %d\\n', summary.requests, summary.duration,",
        "    e.connect + e.read + e.write + e.timeout + e.status))",
        "end",
    ]
    script = folder / f"{name}.lua"
    script.write_text("\n".join(lines) + "\n")
    return script


def run_wrk(
    script: Path,
    port: int,
    connections: int,
    seconds: float,
    core: str | None,
    proxy: list[Process],
    upstream: list[Process],
) -> Slice:
    """One stretch of closed-loop load. `proxy` and `upstream`: the processes whose CPU time counts as theirs.

    wrk knows whole seconds only, but a SIGINT ends it within 0.1 s, with a result of the time it really took: so a
    stretch may be half a second (not less: wrk must have set its handler up).
    """
    wrk, whole = require("wrk", "wrk"), math.ceil(seconds)
    command = [wrk, "-t1", f"-c{connections}", f"-d{whole}s", "--timeout", "60s", "-s", str(script)]
    clock = _Clock(proxy, upstream)
    command = pinned(core, [*command, f"http://127.0.0.1:{port}"])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, error = process.communicate(timeout=seconds if seconds < whole else whole + 120)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            out, error = process.communicate()
    used, others = clock.read()
    line = next((line for line in out.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise BenchError(f"wrk gave no result: {(error or out).strip()[-300:]}")
    requests, microseconds, errors = (int(field) for field in line.split()[1:])
    elapsed = microseconds / 1e6
    return Slice(requests, elapsed, errors, used / max(1, requests), used / elapsed, others / elapsed)


def run_singly(request: Request, port: int, count: int, proxy: list[Process], upstream: list[Process]) -> Slice:
    """The same for requests of seconds each: `count` of them one after another, where wrk would see none end."""
    client = Client(port, timeout=120)
    clock = _Clock(proxy, upstream)
    answers = [client.post(request.route, request.body, request.headers) for _ in range(count)]
    used, others = clock.read()
    client.close()
    elapsed = sum(answer.seconds for answer in answers)
    errors = sum(answer.status != 200 for answer in answers)
    return Slice(count, elapsed, errors, used / count, used / elapsed, others / elapsed)


class _Clock:
    """CPU seconds of the proxy, and of the upstream and the load generator together, since it was made."""

    def __init__(self, proxy: list[Process], upstream: list[Process]) -> None:
        self._proxy, self._upstream = proxy, upstream
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        load = ended.ru_utime + ended.ru_stime
        upstream = sum(process.cpu_seconds() for process in self._upstream)
        return sum(process.cpu_seconds() for process in self._proxy), upstream + load

    def read(self) -> tuple[float, float]:
        """(the proxy's, the others')"""
        now = self._now()
        return now[0] - self._before[0], now[1] - self._before[1]


def run_h2load(request: Request, port: int, rate: int, seconds: int, core: str | None, folder: Path) -> list[float]:
    """Latencies in seconds of the requests that were answered with 200, at `rate` a second in all.

    wrk has no fixed rate; h2load has, and logs each request. Two clients in step, so that requests meet.
    """
    command, clients = require("h2load", "nghttp2-client"), 2 if rate > 1 else 1
    body, log = folder / "latency.body", folder / "latency.log"
    body.write_bytes(request.body)
    log.unlink(missing_ok=True)
    headers = [part for name, value in request.headers.items() for part in ("-H", f"{name}: {value}")]
    run = subprocess.run(
        pinned(
            core,
            [
                command, "--h1", "-t1", f"-c{clients}", f"--rps={rate / clients:g}", f"-D{seconds}", "-d", str(body),
                *headers, f"--log-file={log}", f"http://127.0.0.1:{port}{request.route}",
            ],
        ),
        capture_output=True,
        text=True,
        timeout=seconds + 120,
    )  # fmt: skip
    if not log.exists():
        raise BenchError(f"h2load gave no log: {(run.stderr or run.stdout).strip()[-300:]}")
    lines = (line.split("\t") for line in log.read_text().splitlines())
    return [int(fields[2]) / 1e6 for fields in lines if fields[1] == "200"]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
