"""A pod that stops loses no request: Envoy and uvicorn run as the injected pod says, and end as a kubelet ends them."""

import contextlib
import http.client
import json
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.injector.admission import mutate
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.model import Policies

from .kubelet import environment, expand
from .test_health_listener import free_ports
from .test_takeover import container

CLIENTS, STREAMS = 8, 3
CHUNKS = 90
"""How many chunks a stream has, one each tenth of a second. It ends well after vLLM's 5 seconds of preStop."""
GRACE_SECONDS = 15

APP = """
import asyncio, os

async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"x-pod", os.environ["POD"].encode())]
    if scope["path"] == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(int(os.environ["CHUNKS"])):
            await send({"type": "http.response.body", "body": b"chunk %03d\\n" % number, "more_body": True})
            await asyncio.sleep(0.1)
        await send({"type": "http.response.body"})
    else:
        await asyncio.sleep(0.02)
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, (b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
"""


class Pods:
    """An injected pod that will stop, and the one that takes its place. New connections follow the Service."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, envoy: Path, folder: Path, *, native: bool) -> None:
        self.native = native
        app, listen, health, admin, other = free_ports(5)
        (folder / "app.py").write_text(APP)
        self.server, self.health = self._uvicorn(folder, app, "old"), health
        self._uvicorn(folder, other, "new")
        self.manifest = _injected(app, listen, native=native)
        self.sidecar = container(self.manifest, "vllm-priority")
        args = expand(self.sidecar["args"], {"POD_NAME": "m-1", "POD_NAMESPACE": "ml"})
        # Other tests use the sidecar's usual ports at the same time.
        args[1] = args[1].replace("'port_value': 19002", f"'port_value': {health}")
        args[1] = args[1].replace("'port_value': 19001", f"'port_value': {admin}")
        with (folder / "envoy.log").open("wb") as log:
            self.envoy = subprocess.Popen([envoy, *args], env=environment(self.sidecar), stdout=log, stderr=log)
        self.processes.append(self.envoy)
        self.target, self.replacement = listen, other
        for port, path in ((health, "/ready"), (other, "/")):
            _wait_until_ok(f"http://127.0.0.1:{port}{path}")

    def _uvicorn(self, folder: Path, port: int, name: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "uvicorn", "app:app", "--port", str(port), "--log-level", "error"]
        process = subprocess.Popen(command, cwd=folder, env={"POD": name, "CHUNKS": str(CHUNKS)})
        self.processes.append(process)
        return process

    def stop(self) -> None:
        """Stop the pod as a kubelet does: all hooks at once, then SIGTERM, in a native sidecar's case after the app."""
        ended = threading.Event()

        def stop_app() -> None:
            _run_hook(container(self.manifest, "vllm"), None)
            self.server.send_signal(signal.SIGTERM)
            self.server.wait(GRACE_SECONDS)
            ended.set()

        def stop_sidecar() -> None:
            _run_hook(self.sidecar, self.health)
            if self.native:
                ended.wait(2 * GRACE_SECONDS)
            self.envoy.send_signal(signal.SIGTERM)
            self.envoy.wait(GRACE_SECONDS)

        threads = [threading.Thread(target=stop_app), threading.Thread(target=stop_sidecar)]
        for thread in threads:
            thread.start()
        time.sleep(1)  # It takes a moment until a load balancer knows that the pod is stopping.
        self.target = self.replacement
        for thread in threads:
            thread.join()
        assert self.server.poll() is not None and self.envoy.poll() is not None

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def _injected(app: int, listen: int, *, native: bool) -> Any:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": "m-1",
            "annotations": {
                "vllm-priority.io/role": "engine",
                "vllm-priority.io/listen-port": str(listen),
                "vllm-priority.io/native": str(native).lower(),
            },
        },
        "spec": {
            "terminationGracePeriodSeconds": GRACE_SECONDS,
            "containers": [
                {
                    "name": "vllm",
                    "image": "vllm/vllm-openai",
                    "command": ["vllm", "serve", "tiny", "--port", str(app)],
                    "ports": [{"name": "http", "containerPort": app}],
                }
            ],
        },
    }
    return mutate(pod, Policies(), InjectorSettings(kubernetes_version="1.35", concurrency=1)).pod


def _run_hook(container: Any, port: int | None) -> None:
    """A container's preStop hook. The kubelet sets no timeout for a hook but the grace period."""
    hook = container.get("lifecycle", {}).get("preStop", {})
    if "sleep" in hook:
        time.sleep(hook["sleep"]["seconds"])
    elif "httpGet" in hook:
        assert hook["httpGet"]["port"] == 19002
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{hook['httpGet']['path']}", timeout=GRACE_SECONDS) as got:
            assert got.status == 200


def _wait_until_ok(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"{url} never responded with 200")


class Client:
    """A client that keeps its connection, and that does not use one which the server has closed, as pools do."""

    def __init__(self, pods: Pods, seen: Counter[str]) -> None:
        self.pods, self.seen = pods, seen
        self.connection: http.client.HTTPConnection | None = None

    def request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        try:
            if self.connection and self.connection.sock and select.select([self.connection.sock], [], [], 0)[0]:
                self.connection.close()
                self.connection = None
            if self.connection is None or self.connection.sock is None:
                self.connection = http.client.HTTPConnection("127.0.0.1", self.pods.target, timeout=60)
            self.connection.request(method, path, body, {"content-type": "application/json", "x-vllm-priority": "5"})
            response = self.connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.seen[f"lost: {type(error).__name__}"] += 1
            self.connection = None
            time.sleep(0.05)
            return b""
        if response.status == 200:
            self.seen[f"served by {response.headers['x-pod']}"] += 1
        else:
            self.seen[f"lost: {response.status} {data!r}"] += 1
            time.sleep(0.05)
        return data


BODY = json.dumps({"token_ids": [1, 2], "sampling_params": {}}).encode()


@pytest.fixture(params=["native", "plain"])
def pods(request: pytest.FixtureRequest, envoy: Path, tmp_path: Path) -> Iterator[Pods]:
    running = Pods()
    try:
        running.start(envoy, tmp_path, native=request.param == "native")
        yield running
    finally:
        running.close()


def test_a_pod_that_stops_loses_no_request(pods: Pods) -> None:
    """Clients that are busy, clients that are idle while vLLM stops, and streams that outlast its preStop hook."""
    seen, streams, stopped = Counter[str](), [], threading.Event()

    def busy() -> None:
        client = Client(pods, seen)
        while not stopped.is_set():
            client.request("POST", "/inference/v1/generate", BODY)

    def idle() -> None:
        client = Client(pods, seen)
        client.request("POST", "/inference/v1/generate", BODY)
        time.sleep(8)
        client.request("POST", "/inference/v1/generate", BODY)

    def stream() -> None:
        streams.append(Client(pods, seen).request("GET", "/stream"))

    threads = [threading.Thread(target=kind) for kind in (*[busy] * CLIENTS, idle, idle, *[stream] * STREAMS)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    try:
        pods.stop()
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    whole = b"".join(b"chunk %03d\n" % number for number in range(CHUNKS))
    assert [name for name in seen if name.startswith("lost")] == [], seen
    assert streams == [whole] * STREAMS
    assert seen["served by old"] > CLIENTS and seen["served by new"] > CLIENTS, "the test shows nothing"
