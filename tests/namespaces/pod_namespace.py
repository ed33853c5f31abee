"""A pod in small: a network namespace, its containers run with the commands, arguments and users of the manifest."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.integration.kubelet import environment, expand

POD_ADDRESS, CLIENT_ADDRESS = "192.0.2.1", "192.0.2.2"
POD_ADDRESS_6, CLIENT_ADDRESS_6 = "fd00::1", "fd00::2"

# Debian packages of the programs that the tests call.
_PACKAGES = {"ip": "iproute2", "nft": "nftables", "setpriv": "util-linux", "unshare": "util-linux"}

# Answers every request with what it saw of it; `peer` tells Envoy (or loopback) from a client.
_APP = """
import http.server, json, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        text = json.dumps({"body": body, "header": self.headers.get("x-vllm-priority"), "peer": self.client_address[0]})
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    do_GET = do_POST = answer
    def log_message(self, *_):
        pass
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
    def server_bind(self):
        self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()
Server(("::", int(sys.argv[1])), Handler).serve_forever()
"""

_CLIENT = """
import http.client, json, sys
host, port, method, path, headers, body = json.loads(sys.argv[1])
connection = http.client.HTTPConnection(host, port, timeout=10)
try:
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    print(json.dumps([answer.status, answer.read().decode(), dict(answer.getheaders())]))
except OSError as error:
    print(json.dumps([0, str(error), {}]))
"""


def require_namespaces(*programs: str) -> None:
    """Skip the test, with the reason, where a network namespace cannot be made. With CI=true it fails instead."""
    if reason := _what_is_missing("ip", "setpriv", "unshare", *programs):
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


def _what_is_missing(*programs: str) -> str | None:
    if os.geteuid() != 0:
        return "Only root can make network namespaces. Run `make test-namespaces` as root."
    missing = sorted({program for program in programs if shutil.which(program) is None})
    if missing:
        packages = sorted({_PACKAGES[program] for program in missing})
        return f"{', '.join(missing)} not found. Install with: apt-get install {' '.join(packages)}"
    name = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"This machine does not allow network namespaces. `ip netns add` says: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return None


class PodNamespace:
    """A network namespace for a pod and one for a client, joined by a cable; a context manager."""

    def __init__(self, pod: Any, envoy: Path) -> None:
        self.pod, self._envoy = pod, envoy
        mark = f"{os.getpid()}-{time.monotonic_ns() % 10**6}"
        self._inside, self._outside = f"pod-{mark}", f"client-{mark}"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folder = Path(tempfile.mkdtemp(prefix="pod-namespace-"))
        self._folder.chmod(0o755)
        self.log: list[str] = []

    def __enter__(self) -> Self:
        try:
            for name in (self._inside, self._outside):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run(
                "ip", "-n", self._inside, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", self._outside
            )
            for name, four, six in (
                (self._inside, POD_ADDRESS, POD_ADDRESS_6),
                (self._outside, CLIENT_ADDRESS, CLIENT_ADDRESS_6),
            ):
                _run("ip", "-n", name, "address", "add", f"{four}/24", "dev", "eth0")
                _run("ip", "-n", name, "address", "add", f"{six}/64", "dev", "eth0", "nodad")
                _run("ip", "-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def _remove(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for name in (self._inside, self._outside):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def run_app(self, port: int) -> None:
        """Start the server that stands for vLLM."""
        self._start([sys.executable, "-c", _APP, str(port)])
        self._until(lambda: self.ask("GET", "/", port=port, inside=True)[0] == 200, "the app does not listen")

    def run_init(self, name: str) -> None:
        """Run an init container to its end, as the manifest has it."""
        container = next(c for c in self.pod["spec"]["initContainers"] if c["name"] == name)
        context = container["securityContext"]
        added = ",".join(f"+{cap.lower()}" for cap in context["capabilities"].get("add", ()))
        user = ["setpriv", f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}", "--clear-groups",
                f"--bounding-set=-all,{added}", "--no-new-privs"]  # fmt: skip
        _run("ip", "netns", "exec", self._inside, *user, *container["command"])

    def run_sidecar(self) -> None:
        """Start Envoy with the sidecar's arguments, as its user, on a root that is read-only where it says so."""
        spec = self.pod["spec"]
        container = next(
            c for c in (*spec["containers"], *spec.get("initContainers", ())) if c["name"] == "vllm-priority"
        )
        context = container["securityContext"]
        binary = self._folder / "envoy"
        shutil.copyfile(self._envoy, binary)
        binary.chmod(0o755)
        readable, writable = os.pipe()
        os.fchown(writable, context["runAsUser"], -1)  # as runc does, so that /dev/stdout can be opened
        assert context["readOnlyRootFilesystem"] is True
        read_only = ["unshare", "--mount", "sh", "-c", 'mount -o remount,bind,ro / && exec "$@"', "sh"]
        user = ["setpriv", f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}", "--clear-groups",
                "--bounding-set=-all", "--no-new-privs"]  # fmt: skip
        args = expand(container["args"], {"POD_NAME": "m-1", "POD_NAMESPACE": "ml"})
        self._start([*read_only, *user, str(binary), *args], output=writable, env=environment(container))
        os.close(writable)
        threading.Thread(target=self._read, args=(readable,), daemon=True).start()
        self._ready = container["readinessProbe"]["httpGet"]
        self._until(lambda: self.readiness() != 0, "Envoy does not listen")

    def readiness(self) -> int:
        """Status of the sidecar's readiness probe, asked from outside as a kubelet does; 0 for no answer."""
        return self.ask("GET", self._ready["path"], port=self._ready["port"])[0]

    def until_ready(self) -> None:
        """Wait until the readiness probe passes."""
        self._until(lambda: self.readiness() == 200, "the sidecar is not ready")

    def ask(
        self,
        method: str,
        path: str,
        *,
        port: int,
        body: str = "",
        headers: dict[str, str] | None = None,
        inside: bool = False,
        host: str | None = None,
    ) -> tuple[int, str, dict[str, str]]:
        """One request from the client's namespace, or from inside the pod: (status, body, headers); 0 for no answer."""
        namespace, address = (self._inside, "127.0.0.1") if inside else (self._outside, POD_ADDRESS)
        request = json.dumps([host or address, port, method, path, headers or {}, body])
        done = _run("ip", "netns", "exec", namespace, sys.executable, "-c", _CLIENT, request)
        status, text, answered = json.loads(done)
        return status, text, {key.lower(): value for key, value in answered.items()}

    def rules(self) -> str:
        """nft's rules in the pod."""
        return _run("ip", "netns", "exec", self._inside, "nft", "list", "ruleset")

    def _start(self, command: list[str], output: int = subprocess.DEVNULL, env: dict[str, str] | None = None) -> None:
        self._processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", self._inside, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        )

    def _read(self, readable: int) -> None:
        with open(readable, encoding="utf-8", errors="replace") as stream:  # noqa: PTH123 (a descriptor)
            self.log += stream

    def _until(self, holds: Any, otherwise: str) -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            assert all(process.poll() is None for process in self._processes), f"{otherwise}: {''.join(self.log)}"
            with contextlib.suppress(subprocess.CalledProcessError):
                if holds():
                    return
            time.sleep(0.05)
        raise AssertionError(f"{otherwise}: {''.join(self.log)}")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)[:300]}: {done.stderr}"
    return done.stdout
