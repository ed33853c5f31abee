"""Mode swap for real: Envoy and a server run as the injected pod says, and clients use the port that vLLM had."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.injector.admission import mutate
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.model import Policies

from .kubelet import environment, expand
from .test_health_listener import free_ports
from .test_takeover import container, find_port, probe_port

VLLM = """#!{python}
# Stands for vLLM: it takes the port from its command line as vLLM does, and says what it got.
import argparse, http.server, json

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        text = json.dumps({{"body": body, "path": self.path}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_GET = do_POST = answer
    def log_message(self, *_):
        pass

parser = argparse.ArgumentParser()
parser.add_argument("verb", choices=["serve"])
parser.add_argument("model")
parser.add_argument("--config")
parser.add_argument("--port", type=int, default=8000)
http.server.ThreadingHTTPServer(("127.0.0.1", parser.parse_args().port), Handler).serve_forever()
"""

SCRIPT = """set -eu
# vllm serve tiny --port 1
echo "vllm serve is about to start" >&2
if [ -n "$MODEL" ]; then
  exec env NAME=x vllm serve "$MODEL" \\
    --port=${PORT} 2>&1
fi
"""
ENV = [{"name": "MODEL", "value": "tiny"}, {"name": "PORT", "value": "{port}"}]

COMMANDS: dict[str, dict[str, Any]] = {
    "words": {"command": ["vllm", "serve", "tiny", "--port", "{port}"]},
    "the entry point's arguments": {"image": "vllm/vllm-openai", "args": ["tiny", "--port=$(PORT)"], "env": ENV},
    "a shell line": {"command": ["sh", "-c", "sleep 0 && vllm serve tiny --port {port} 2>&1 | cat"]},
    "a script": {"command": ["/bin/sh", "-c"], "args": [SCRIPT], "env": ENV},
    "parameters of a shell": {"command": ["sh", "-c", 'exec vllm serve "$@"', "sh"], "args": ["tiny", "--port={port}"]},
    "a port that only the manifest names": {
        "command": ["sh", "-c", "exec vllm serve tiny --config c.yaml"],
        "readinessProbe": {"httpGet": {"path": "/health", "port": "api"}},
    },
}  # fmt: skip


class Pod:
    """An injected pod whose containers run as processes. `port` is the one that vLLM had before."""

    def __init__(self, envoy: Path, folder: Path, changes: dict[str, Any], **spec: Any) -> None:
        self.port, vllm, health, admin = free_ports(4)
        changed = json.loads(json.dumps(changes).replace("{port}", str(self.port)))
        app = {"name": "vllm", "image": "x/y", "ports": [{"name": "api", "containerPort": self.port}], **changed}
        metadata = {"name": "m-1", "annotations": {"vllm-priority.io/role": "engine"}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [app], **spec}}
        mutation = mutate(pod, Policies(), InjectorSettings(kubernetes_version="1.35", concurrency=1))
        # Other tests use the usual ports at the same time.
        text = json.dumps(mutation.pod)
        for usual, free in ((18001, vllm), (19001, admin), (19002, health)):
            text = text.replace(str(usual), str(free))
        self.manifest, self.vllm_port, self.health = json.loads(text), vllm, health
        self.sidecar, self.app = container(self.manifest, "vllm-priority"), container(self.manifest, "vllm")
        self._envoy, self._folder = envoy, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        program = folder / "vllm"
        program.write_text(VLLM.format(python=sys.executable))
        program.chmod(0o755)

    def run_sidecar(self) -> None:
        args = expand(self.sidecar["args"], {"POD_NAME": "m-1", "POD_NAMESPACE": "ml"})
        with (self._folder / "envoy.log").open("wb") as log:
            self._start([str(self._envoy), *args], environment(self.sidecar), log)

    def run_vllm(self) -> None:
        variables = {entry["name"]: entry["value"] for entry in self.app.get("env", ())}
        command = self.app.get("command") or ["vllm", "serve"]
        words = expand([*command, *self.app.get("args", ())], variables)
        with (self._folder / "vllm.log").open("wb") as log:
            self._start(words, {**variables, "PATH": f"{self._folder}:{os.environ['PATH']}"}, log)

    def _start(self, words: list[str], env: dict[str, str], log: Any) -> None:
        started = subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
        self._processes.append(started)

    def close(self) -> None:
        for process in self._processes:
            os.killpg(process.pid, 9)
            process.wait()


@pytest.fixture
def new_pod(envoy: Path, tmp_path: Path) -> Iterator[Callable[[dict[str, Any]], Pod]]:
    pods: list[Pod] = []

    def new(changes: dict[str, Any]) -> Pod:
        pods.append(Pod(envoy, tmp_path, changes))
        return pods[-1]

    yield new
    for pod in pods:
        pod.close()


def status(port: int, path: str) -> int:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).status_code
    except httpx.TransportError:
        return 0


def wait_for(port: int, path: str, expected: int) -> None:
    deadline = time.monotonic() + 60
    while (seen := status(port, path)) != expected:
        assert time.monotonic() < deadline, f"port {port}, {path}: {seen}, and not {expected}"
        time.sleep(0.1)


@pytest.mark.parametrize("form", COMMANDS)
def test_the_port_that_vllm_had_leads_to_the_sidecar_and_vllm_follows_its_command(
    new_pod: Callable[[dict[str, Any]], Pod], form: str
) -> None:
    pod = new_pod(COMMANDS[form])
    assert find_port(pod.manifest, "api") == pod.port == find_port(pod.manifest, pod.port)
    pod.run_sidecar()  # A native sidecar starts first.
    wait_for(pod.health, "/ready", 503)
    assert status(pod.port, "/health") == 503, "the sidecar has the port, and vLLM does not listen yet"
    pod.run_vllm()
    wait_for(pod.health, "/ready", 200)
    response = httpx.post(
        f"http://127.0.0.1:{pod.port}/inference/v1/generate",
        json={"token_ids": [1]},
        headers={"x-vllm-priority": "-7"},
        trust_env=False,
    )
    assert json.loads(response.json()["body"]) == {"token_ids": [1], "priority": -7}
    direct = httpx.post(f"http://127.0.0.1:{pod.vllm_port}/inference/v1/generate", json={}, trust_env=False)
    assert json.loads(direct.json()["body"]) == {}, "vLLM's own port has no sidecar"
    if probe := pod.app.get("readinessProbe"):
        assert probe_port(pod.app, probe) == pod.vllm_port
        assert status(pod.vllm_port, "/health") == 200
