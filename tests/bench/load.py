"""Load on one address: wrk for throughput, h2load for latency at a fixed rate, one socket for single requests."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from processes import BenchError, Process, pinned


@dataclass(frozen=True)
class Request:
    """One POST, sent again and again."""

    route: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Slice:
    """What one stretch of load gave. `cpu` is the proxy's CPU seconds a request, `busy` its share of one core."""

    requests: int
    seconds: float
    errors: int
    cpu: float
    busy: float

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


def run_wrk(script: Path, port: int, connections: int, seconds: int, core: str | None, watched: list[Process]) -> Slice:
    """One stretch of closed-loop load. `watched` are the processes whose CPU time counts as the proxy's."""
    wrk = require("wrk", "wrk")
    command = [wrk, "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "60s", "-s", str(script)]
    before = sum(process.cpu_seconds() for process in watched)
    run = subprocess.run(
        pinned(core, [*command, f"http://127.0.0.1:{port}"]), capture_output=True, text=True, timeout=seconds + 120
    )
    used = sum(process.cpu_seconds() for process in watched) - before
    line = next((line for line in run.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise BenchError(f"wrk gave no result: {(run.stderr or run.stdout).strip()[-300:]}")
    requests, microseconds, errors = (int(field) for field in line.split()[1:])
    elapsed = microseconds / 1e6
    return Slice(requests, elapsed, errors, used / max(1, requests), used / elapsed)
