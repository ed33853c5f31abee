"""The commands that run or ask a real Envoy: `vllm-priority run`, `config --check`, `make envoy-config`."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from control_plane.address import Address

from .conftest import RENDER
from .upstream import WAIT, Connection, RecordingUpstream, Request, response
from .wire import Http1

ROOT = Path(__file__).parents[2]
JSON = (b"Content-Type", b"application/json")
FIVE = (b"X-Vllm-Priority", b"5")


def free_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Address("127.0.0.1", server.getsockname()[1])


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "control_plane.cli", *arguments]


class Running:
    """One `vllm-priority run`, from the start to its end."""

    def __init__(self, envoy: Path, folder: Path, upstream: Address, *extra: str) -> None:
        self.listen, self.admin, self.upstream = free_address(), free_address(), upstream
        self.log = folder / "stderr"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command(
                    "run", "--role", "render", "--upstream", str(upstream), "--listen", str(self.listen),
                    "--admin", str(self.admin), "--envoy", str(envoy), "--concurrency", "1",
                    "--access-log", str(folder / "access.log"), *extra,
                ),
                stdout=subprocess.PIPE, stderr=log, cwd=ROOT,
            )  # fmt: skip

    def said(self, words: str) -> str:
        """What it has said on stderr, once `words` are there."""
        until = time.monotonic() + 3 * WAIT
        while words not in (text := self.log.read_text()):
            assert time.monotonic() < until, f"never said {words!r}: {text!r}"
            assert self.process.poll() is None or words in self.log.read_text(), text
            time.sleep(0.02)
        return text

    def ended(self) -> int:
        return self.process.wait(2 * WAIT)

    def envoys(self) -> list[int]:
        """Process ids of its children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(child) for child in children.split()]

    def stop(self) -> None:
        children = self.envoys() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        assert self.process.stdout
        self.process.stdout.close()


@pytest.fixture
def run(envoy: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(upstream: Address, *extra: str) -> Running:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Running(envoy, folder, upstream, *extra))
        return started[-1]

    yield start
    for each in started:
        each.stop()


class Held:
    """An upstream handler that answers once it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, request: Request, connection: Connection) -> None:
        connection.read_body(request)
        assert self.go.wait(3 * WAIT)
        connection.send(response(b'{"late":true}'))


def post(to: Address) -> tuple[int, bytes, str | None]:
    with Http1(to) as client:
        answer = client.post(RENDER, [JSON, FIVE], b'{"a":1}')
    return answer.status, answer.body, answer.applied


def test_run_says_what_it_does_and_moves_the_priority(run: Callable[..., Running], upstream: RecordingUpstream) -> None:
    running = run(upstream.address)
    said = running.said("listens on")
    assert f"The render sidecar listens on {running.listen}, forwards to {upstream.address}, and accepts " in said
    assert said.rstrip().endswith(f" has its admin listener on {running.admin}.")
    assert len(said.splitlines()) == 1
    assert post(running.listen) == (200, b'{"ok":true}', "5; source=header; outcome=inserted")
    assert upstream.only.json() == {"a": 1, "priority": 5}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_in_flight_is_finished_before_the_end(
    number: signal.Signals, run: Callable[..., Running], upstream: RecordingUpstream
) -> None:
    upstream.handler = held = Held()
    running = run(upstream.address)
    running.said("listens on")
    answers: list[tuple[int, bytes, str | None]] = []
    client = threading.Thread(target=lambda: answers.append(post(running.listen)))
    client.start()
    assert upstream.wait(1)[0].complete.wait(WAIT)
    running.process.send_signal(number)
    running.said("Draining for at most 30 s")
    assert running.process.poll() is None
    held.go.set()
    client.join(2 * WAIT)
    assert answers == [(200, b'{"late":true}', "5; source=header; outcome=inserted")]
    assert running.ended() == 0
    with pytest.raises(ConnectionRefusedError):
        post(running.listen)


def test_the_drain_ends_when_its_time_is_over(run: Callable[..., Running], upstream: RecordingUpstream) -> None:
    upstream.handler = held = Held()
    running = run(upstream.address, "--drain-seconds", "0.2")
    running.said("listens on")
    client = threading.Thread(target=_ignored, args=(running.listen,))
    client.start()
    upstream.wait(1)
    running.process.send_signal(signal.SIGTERM)
    assert running.ended() == 0
    held.go.set()
    client.join(WAIT)


def _ignored(to: Address) -> None:
    with contextlib.suppress(Exception):
        post(to)


def test_a_second_signal_ends_it_at_once(run: Callable[..., Running], upstream: RecordingUpstream) -> None:
    upstream.handler = held = Held()
    running = run(upstream.address, "--drain-seconds", "3600")
    running.said("listens on")
    (envoy,) = running.envoys()
    client = threading.Thread(target=_ignored, args=(running.listen,))
    client.start()
    assert upstream.wait(1)[0].complete.wait(WAIT)
    running.process.send_signal(signal.SIGTERM)
    running.said("Draining for at most 3600 s")
    running.process.send_signal(signal.SIGTERM)
    assert running.ended() == 0
    assert "Traceback" not in running.log.read_text()
    assert not Path(f"/proc/{envoy}").exists(), "Envoy outlived it"
    held.go.set()
    client.join(WAIT)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_it_goes_on_after_a_signal_that_is_not_to_end_it(
    number: signal.Signals, run: Callable[..., Running], upstream: RecordingUpstream
) -> None:
    running = run(upstream.address)
    running.said("listens on")
    running.process.send_signal(number)
    # A signal that ended it would have by the time that this one, sent after it, has.
    assert post(running.listen)[0] == 200
    running.process.send_signal(signal.SIGTERM)
    running.said("Draining")
    assert running.ended() == 0


@pytest.mark.parametrize(
    ("told", "number"), [("run", signal.SIGUSR1), ("run", signal.SIGHUP), ("envoy", signal.SIGUSR1)]
)
def test_the_access_log_is_reopened_so_that_it_can_be_rotated(
    told: str, number: signal.Signals, run: Callable[..., Running], upstream: RecordingUpstream
) -> None:
    running = run(upstream.address)
    running.said("listens on")
    (envoy,) = running.envoys()
    log = running.log.parent / "access.log"
    rotated = log.with_suffix(".1")
    assert post(running.listen)[0] == 200
    logged(log, 1)

    log.rename(rotated)
    os.kill(running.process.pid if told == "run" else envoy, number)
    until = time.monotonic() + 3 * WAIT
    while not log.exists():
        assert time.monotonic() < until, "it still holds the file that was renamed"
        time.sleep(0.02)
    assert post(running.listen)[0] == 200
    logged(log, 1)
    logged(rotated, 1)
    assert running.envoys() == [envoy], "the same Envoy: no connection was lost"


def logged(log: Path, lines: int) -> None:
    """Waits until so many whole lines stand in the log: Envoy writes it every second."""
    until = time.monotonic() + 3 * WAIT
    while (text := log.read_text()).count("\n") < lines:
        assert time.monotonic() < until, text
        time.sleep(0.02)
    assert [json.loads(line)["status"] for line in text.splitlines()] == [200] * lines


def test_it_ends_when_its_envoy_does_and_says_so(run: Callable[..., Running], upstream: RecordingUpstream) -> None:
    running = run(upstream.address)
    running.said("listens on")
    (envoy,) = running.envoys()
    os.kill(envoy, signal.SIGKILL)
    assert running.ended() == 1
    assert running.log.read_text().splitlines()[-1].startswith("vllm-priority: Envoy ended with status -9")


def test_a_dead_upstream_is_said_and_answered_with_503(run: Callable[..., Running]) -> None:
    running = run(nobody := free_address())
    said = running.said("listens on")
    assert said.startswith(f"vllm-priority: vLLM does not respond on {nobody} yet (Connection refused). Requests")
    assert len(said.splitlines()) == 2
    assert post(running.listen)[0] == 503


def refusal(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.returncode, done.stderr


# Status 2 is final for a service manager. A port that is in use, or an address that is not there, may come right.
# Nothing answers on the upstream in these: what prevents a start is said first, and alone.
@pytest.mark.parametrize("what", ["--listen", "--admin"])
def test_a_port_in_use_ends_it_with_the_status_that_is_not_final(what: str, envoy: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        addresses = {"--listen": str(free_address()), "--admin": str(free_address())} | {what: taken}
        status, said = refusal(
            "run", "--role", "render", "--upstream", str(free_address()), "--envoy", str(envoy),
            *(word for pair in addresses.items() for word in pair),
        )  # fmt: skip
    assert (status, said) == (
        1,
        f"vllm-priority: {what}: cannot listen on {taken}: Address already in use. Use a free port of this machine.\n",
    )


def test_another_run_on_the_same_port_is_refused(
    run: Callable[..., Running], envoy: Path, upstream: RecordingUpstream
) -> None:
    running = run(upstream.address)
    running.said("listens on")
    status, said = refusal(
        "run", "--role", "render", "--upstream", str(upstream.address), "--envoy", str(envoy),
        "--listen", str(running.listen), "--admin", str(free_address()),
    )  # fmt: skip
    assert status == 1
    assert f"--listen: cannot listen on {running.listen}: Address already in use" in said


@pytest.mark.parametrize(
    ("status", "extra", "message"),
    [
        (1, ("--access-log", "/none/log"), "--access-log: '/none/log' cannot be written: No such file or directory"),
        (
            1,
            ("--listen", "192.0.2.1:18000"),
            "--listen: cannot listen on 192.0.2.1:18000: Cannot assign requested address",
        ),
        (1, ("--envoy", "killed"), "--version was killed by signal 9. Try again."),
        (2, ("--policy", "/none/policy.yaml"), "/none/policy.yaml: there is no such file. Use "),
        (2, ("--envoy", "true"), "is not an Envoy: it does not print a version of one."),
    ],
)
def test_what_cannot_run_is_refused_before_envoy_starts(
    status: int, extra: tuple[str, str], message: str, envoy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found, said = refusal(
        "run", "--role", "render", "--upstream", str(free_address()), "--envoy", str(envoy),
        "--listen", str(free_address()), "--admin", str(free_address()), *extra,
    )  # fmt: skip
    assert found == status
    assert message in said


@pytest.mark.parametrize("role", ["render", "engine"])
@pytest.mark.parametrize(
    "extra", [[], ["--control-plane", "http://control-plane.example:8080"], ["--listen", "[::]:18000"]]
)
def test_config_check_has_envoy_accept_it(role: str, extra: list[str], envoy: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(
            "config", "--role", role, "--target", "bootstrap", "--check", "--envoy", str(envoy),
            "--access-log", str(tmp_path / "log"), *extra,
        ),
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0
    assert "neither encrypted nor authenticated" in done.stderr if "--control-plane" in extra else done.stderr == ""
    assert yaml.safe_load(done.stdout)["static_resources"]["listeners"]


def test_config_check_tells_envoys_own_reason(envoy: Path, tmp_path: Path) -> None:
    status, said = refusal(
        "config", "--role", "render", "--target", "bootstrap", "--check", "--envoy", str(envoy),
        "--access-log", "/nowhere/log", "-o", str(tmp_path / "out.yaml"),
    )  # fmt: skip
    assert status == 1
    assert "Envoy rejects the configuration: " in said
    assert "unable to open file '/nowhere/log': No such file or directory" in said
    assert not (tmp_path / "out.yaml").exists()


def test_what_make_envoy_config_writes_can_be_read_by_another_user_and_holds_the_policy(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("classes: {batch: 10}\n")
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    done = subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), "-o", "setup", "envoy-config", "POLICY=policy.yaml"],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, umask=0o077,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = tmp_path / "build" / "envoy"
    assert {file.name: file.stat().st_mode & 0o777 for file in (written, *written.iterdir())} == {
        "envoy": 0o755, "render.yaml": 0o644, "engine.yaml": 0o644, "policy.yaml": 0o644,
    }  # fmt: skip
    assert (written / "policy.yaml").read_text() == "classes: {batch: 10}\n"


@pytest.mark.parametrize(("role", "number"), [("render", 0), ("engine", 1)])
def test_what_make_envoy_config_writes_fits_the_compose_file(role: str, number: int, tmp_path: Path) -> None:
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    make = ["make", "-f", str(ROOT / "Makefile"), "-o", "setup", "envoy-config"]
    subprocess.run(make, capture_output=True, timeout=120, check=True, cwd=tmp_path)
    services = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())["services"]
    resources = yaml.safe_load((tmp_path / "build" / "envoy" / f"{role}.yaml").read_text())["static_resources"]
    addresses = {
        cluster["name"]: cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
        for cluster in resources["clusters"]
        if cluster["name"] in {"upstream", "control_plane"}
    }
    assert {name: tuple(address["socket_address"].values())[:2] for name, address in addresses.items()} == {
        "upstream": (role, 8000 + number), "control_plane": ("control-plane", 8080),
    }  # fmt: skip
    assert f"--port={8000 + number}" in services[role]["command"]
    assert "0.0.0.0:8080" in services["control-plane"]["command"]
    listeners = [listener["address"]["socket_address"]["port_value"] for listener in resources["listeners"]]
    assert listeners == [int(port.rpartition(":")[2]) for port in services[f"{role}-sidecar"]["ports"]]
