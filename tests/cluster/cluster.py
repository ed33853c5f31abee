"""The cluster that KUBECONFIG names, by real kubectl and helm, and a control plane where the cluster can run none."""

import base64
import contextlib
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tests.helm import CHART
from tools.fetch_tools import fetch

_T = TypeVar("_T")

PATIENCE = float(os.environ.get("PATIENCE", "120"))
"""Seconds to wait for what a cluster does in its own time."""


class CommandError(Exception):
    """kubectl or helm refused; the message is what it wrote."""


def eventually(what: str, probe: Callable[[], _T | None], patience: float = PATIENCE) -> _T:
    """The first value of `probe` that is not None and not false; fails after `patience` seconds."""
    deadline = time.monotonic() + patience
    while True:
        found = probe()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"not within {patience:g} s: {what}")
        time.sleep(0.5)


@dataclass
class Cluster:
    """A cluster, and the namespaces that the story makes and takes away again.

    nodes: whether it has one that is ready: else pods are made and never run. image: the control plane's, for
    a cluster that has nodes. unchecked: what could not be checked here, and why, for the summary.
    """

    image: str | None
    nodes: bool
    version: tuple[int, int]
    unchecked: list[str] = field(default_factory=list)

    @classmethod
    def connect(cls) -> "Cluster":
        """The cluster of KUBECONFIG. The tests stop with a line where there is none."""
        fetch(["helm", "kubectl"])
        if not os.environ.get("KUBECONFIG"):
            pytest.exit("KUBECONFIG names no cluster. Run: KUBECONFIG=~/.kube/config make test-cluster", 2)
        try:
            version = json.loads(run("kubectl", "version", "-o", "json"))["serverVersion"]
            nodes = json.loads(run("kubectl", "get", "nodes", "-o", "json"))["items"]
        except CommandError as error:
            pytest.exit(f"the cluster of KUBECONFIG does not answer: {str(error).splitlines()[-1]}", 2)
        ready = [n for n in nodes if {"type": "Ready", "status": "True"}.items() <= _ready(n).items()]
        major, minor = re.findall(r"\d+", version["gitVersion"])[:2]
        return cls(os.environ.get("IMAGE"), bool(ready), (int(major), int(minor)))

    @property
    def runs_pods(self) -> bool:
        """Whether the chart's own pods can be waited for."""
        return self.nodes and self.image is not None

    def kubectl(self, *arguments: str, stdin: Any = None) -> str:
        """What kubectl wrote. stdin: an object, given as JSON."""
        return run("kubectl", *arguments, stdin=None if stdin is None else json.dumps(stdin))

    def get(self, *arguments: str) -> Any:
        """An object, or a list's items; None where it is not there."""
        found = self.kubectl("get", *arguments, "-o", "json", "--ignore-not-found")
        if not found:
            return None
        parsed = json.loads(found)
        return parsed["items"] if parsed["kind"] == "List" else parsed

    def warnings(self, *arguments: str, stdin: Any) -> list[str]:
        """The warnings that kubectl prints. stdin: an object, given as JSON."""
        (program,) = fetch(["kubectl"])
        done = subprocess.run(
            [program, *arguments], input=json.dumps(stdin), capture_output=True, text=True, timeout=PATIENCE
        )
        if done.returncode:
            raise CommandError(done.stderr.strip())
        return [line for line in done.stderr.splitlines() if line.startswith("Warning: ")]

    def dry_run(self, thing: Mapping[str, Any], namespace: str) -> Any:
        """The object as the API server would have kept it, admission included."""
        return json.loads(
            self.kubectl("create", "--dry-run=server", "-n", namespace, "-o", "json", "-f", "-", stdin=thing)
        )


def _ready(node: Mapping[str, Any]) -> dict[str, Any]:
    return next((c for c in node.get("status", {}).get("conditions", ()) if c["type"] == "Ready"), {})


def run(tool: str, *arguments: str, stdin: str | None = None) -> str:
    """What the tool wrote on stdout; CommandError with its stderr where it fails."""
    (program,) = fetch([tool])
    done = subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True, timeout=PATIENCE + 300)
    if done.returncode:
        raise CommandError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


@dataclass
class Release:
    """The chart, installed in a namespace of its own."""

    cluster: Cluster
    name: str
    namespace: str
    values: dict[str, str]

    def install(self) -> None:
        """helm install; waits for the pods where the cluster runs them."""
        self._helm("install", "--create-namespace")

    def upgrade(self, *flags: str, **values: str) -> None:
        """helm upgrade with these values (JSON) on top, by their names with __ for each dot."""
        self.values |= {key.replace("__", "."): value for key, value in values.items()}
        self._helm("upgrade", *flags)

    def uninstall(self) -> None:
        run("helm", "uninstall", self.name, "--namespace", self.namespace, "--ignore-not-found", "--wait")

    def _helm(self, verb: str, *flags: str) -> None:
        settings = [f"--set-json={key}={value}" for key, value in self.values.items()]
        wait = ["--wait", f"--timeout={PATIENCE:g}s"] if self.cluster.runs_pods else []
        run("helm", verb, self.name, str(CHART), "--namespace", self.namespace, *settings, *wait, *flags)

    @property
    def secret(self) -> dict[str, str]:
        """The certificate's Secret, decoded."""
        data = self.cluster.get("secret", f"{self.name}-tls", "-n", self.namespace)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    @property
    def webhook(self) -> Any:
        """The webhook of the MutatingWebhookConfiguration."""
        return self.cluster.get("mutatingwebhookconfiguration", self.name)["webhooks"][0]

    @property
    def policy(self) -> str:
        """The policy file in the ConfigMap."""
        found: str = self.cluster.get("configmap", f"{self.name}-policy", "-n", self.namespace)["data"]["policy.yaml"]
        return found

    @property
    def deployment(self) -> Any:
        return self.cluster.get("deployment", self.name, "-n", self.namespace)


@dataclass
class ControlPlane:
    """The control plane of a release: its own pods, or one that runs here with the very arguments that those have."""

    release: Release
    folder: Path
    port: int
    tls_port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Runs it here, on the Secret and the ConfigMap as they are now. In the cluster, it runs already."""
        if self.release.cluster.runs_pods:
            return
        self.follow()
        places = {
            "--policy": str(self.folder / "policy.yaml"),
            "--listen": f"127.0.0.1:{self.port}",
            "--tls-listen": f"127.0.0.1:{self.tls_port}",
            "--tls-cert": str(self.folder / "tls.crt"),
            "--tls-key": str(self.folder / "tls.key"),
            "--control-plane-ca": str(self.folder / "ca.crt"),
        }
        arguments = []
        for argument in self.release.deployment["spec"]["template"]["spec"]["containers"][0]["args"]:
            option, _, value = argument.partition("=")
            if option == "--write-events":
                continue  # Here it has no service account.
            arguments.append(f"{option}={places.get(option, value)}" if value else argument)
        command = [str(Path(sys.executable).parent / "vllm-priority"), *arguments]
        self.process = subprocess.Popen(command, stderr=(self.folder / "log").open("wb"))
        eventually("the control plane answers", self._answers, 30)

    def _answers(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.fail(f"the control plane ended: {(self.folder / 'log').read_text()}")
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/readyz", trust_env=False).status_code == 200
        return False

    def follow(self) -> None:
        """What the kubelet does: the files of a mounted Secret and ConfigMap become what those hold."""
        secret = self.release.secret
        for name, text in {
            **{k: secret[k] for k in ("tls.crt", "tls.key", "ca.crt")},
            "policy.yaml": self.release.policy,
        }.items():
            new = self.folder / f".{name}"
            new.write_text(text)
            new.rename(self.folder / name)

    def stop(self) -> None:
        """Ends it: the process here, or its pods."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(30)
            self.process = None
        elif self.release.cluster.runs_pods:
            names = self.release.name, "-n", self.release.namespace
            self.release.cluster.kubectl("scale", "deployment", *names, "--replicas=0")
            gone = f"app.kubernetes.io/instance={self.release.name},app.kubernetes.io/component=control-plane"
            eventually(
                "the pods are gone",
                lambda: not self.release.cluster.get("pods", "-n", self.release.namespace, "-l", gone),
            )

    def served_certificate(self) -> str:
        """The certificate of the control plane here, in PEM."""
        return ssl.get_server_certificate(("127.0.0.1", self.tls_port), timeout=10).strip()

    def served_version(self, role: str) -> str:
        """version_info of the filter's configuration, as a sidecar of this role would be told."""
        node = {"id": "story", "metadata": {"role": role, "listen": "0.0.0.0:18000", "upstream": "127.0.0.1:8000"}}
        body = {"node": node, "type_url": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig"}
        path = "/v3/discovery:extension_configs"
        if self.process is not None:
            answer = httpx.post(f"http://127.0.0.1:{self.port}{path}", json=body, trust_env=False).json()
            return str(answer["version_info"])
        with self._forwarded() as port:
            return str(httpx.post(f"http://127.0.0.1:{port}{path}", json=body, trust_env=False).json()["version_info"])

    @contextlib.contextmanager
    def _forwarded(self) -> Iterator[int]:
        (kubectl,) = fetch(["kubectl"])
        port = free_port()
        command = [
            str(kubectl),
            "port-forward",
            "-n",
            self.release.namespace,
            f"service/{self.release.name}",
            f"{port}:8080",
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            eventually("the port is forwarded", lambda: _accepts(port), 30)
            yield port
        finally:
            process.terminate()
            process.wait(30)


def free_port() -> int:
    """A TCP port of this machine on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _accepts(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
