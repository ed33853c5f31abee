"""deploy/compose/run-pair.sh with real sidecars, and with servers that stop as soon as they are told to."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import RENDER
from .test_run import ROOT, free_address
from .upstream import WAIT

SCRIPT = ROOT / "deploy" / "compose" / "run-pair.sh"

# What takes the place of `vllm`. It reports whether the sidecar in front of it was still there at its end.
SERVER = """\
import os, signal, socket, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port = sys.argv[sys.argv.index("--port") + 1]

def stop(*_):
    try:
        socket.create_connection(("127.0.0.1", int(PORTS["1" + port])), 1)
        said = "the sidecar still listens"
    except ConnectionRefusedError:
        said = "the sidecar has gone"
    open(FOLDER + "/" + port, "w").write(said)
    os._exit(0)

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        time.sleep(2)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    def log_message(self, *_):
        pass

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
ThreadingHTTPServer(("127.0.0.1", int(PORTS[port])), Handler).serve_forever()
"""

SIDECAR = """\
import os, sys

words = sys.argv[1:]
for at, word in enumerate(words):
    host, _, port = word.rpartition(":")
    if port in PORTS:
        words[at] = f"{host}:{PORTS[port]}"
admin = "127.0.0.1:" + PORTS["admin " + words[words.index("--role") + 1]]
command = [sys.executable, "-m", "control_plane.cli", *words, "--admin", admin, "--concurrency", "1"]
os.execv(sys.executable, [*command, "--access-log", "/dev/null"])
"""


@pytest.fixture
def ports(envoy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Puts both programs on the PATH, on ports of their own. Returns the script's ports -> those."""
    names = ("8000", "8001", "18000", "18001", "admin render", "admin engine")
    found = {name: str(free_address().port) for name in names}
    for name, source in (("vllm", SERVER), ("vllm-priority", SIDECAR)):
        program = tmp_path / name
        program.write_text(f"#!{sys.executable}\nPORTS = {json.dumps(found)}\nFOLDER = {str(tmp_path)!r}\n{source}")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("ENVOY", str(envoy))
    return found


def _as_in_a_terminal() -> None:
    """Take SIGINT again: tests that a shell started in the background ignore it, and a script cannot trap it then."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def script(ports: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(["sh", SCRIPT], stderr=log, start_new_session=True, preexec_fn=_as_in_a_terminal)
    try:
        end = time.monotonic() + 6 * WAIT
        while (tmp_path / "log").read_text().count("listens on") < 2 or not all(
            accepts(ports[name]) for name in ("8000", "8001")
        ):
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.05)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            time.sleep(0.5)
            process.terminate()
            process.wait(6 * WAIT)


def accepts(port: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(port)), WAIT).close()
    except OSError:
        return False
    return True


def post(port: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=3 * WAIT)
    try:
        connection.request("POST", RENDER, b"{}", {"Content-Type": "application/json"})
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def test_ctrl_c_lets_the_sidecars_drain_before_the_servers_stop(
    script: subprocess.Popen[bytes], ports: dict[str, str], tmp_path: Path
) -> None:
    statuses: list[int] = []
    until = time.monotonic() + 4

    def client(port: str) -> None:
        while time.monotonic() < until:
            statuses.append(post(port))

    with ThreadPoolExecutor(16) as pool:
        for number in range(16):
            pool.submit(client, ports[("18000", "18001")[number % 2]])
        time.sleep(1)
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    assert len(statuses) >= 32
    assert set(statuses) == {200}
    assert script.wait(6 * WAIT) == 130
    assert {(tmp_path / port).read_text() for port in ("8000", "8001")} == {"the sidecar has gone"}
    assert not any(accepts(port) for port in ports.values())


def test_a_second_ctrl_c_ends_the_drain(script: subprocess.Popen[bytes], ports: dict[str, str], tmp_path: Path) -> None:
    client = threading.Thread(target=post, args=[ports["18000"]])
    client.start()
    os.killpg(script.pid, signal.SIGINT)
    end = time.monotonic() + 6 * WAIT
    while (tmp_path / "log").read_text().count("Draining") < 2:
        assert time.monotonic() < end, (tmp_path / "log").read_text()
        time.sleep(0.05)
    os.killpg(script.pid, signal.SIGINT)
    client.join()
    assert script.wait(6 * WAIT) == 130
    assert not any(accepts(port) for port in ports.values())
