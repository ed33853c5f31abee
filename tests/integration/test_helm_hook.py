"""What `helm test` of real Helm, 3 and 4, prints, with a server that responds like the Kubernetes API."""

import base64
import gzip
import http.server
import json
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tests.helm import NAMESPACE, RELEASE, documents, find, template
from tests.kubernetes_api import write_certificate
from tools.fetch_tools import fetch

LOG = "FAILED  the control plane is ready (http://vllm-priority:8080): connection refused"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"
PATCH_OF_PODS = {
    "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
    "responses": {"200": {"description": "OK"}},
    "x-kubernetes-action": "patch",
    "x-kubernetes-group-version-kind": {"group": "", "version": "v1", "kind": "Pod"},
}
FIXED: dict[str, Any] = {
    "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [
            {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": ["get", "create"]}
        ],
    },
    "/openapi/v3": {"paths": {"api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}},
    "/openapi/v3/api/v1": {
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "1"},
        "paths": {"/api/v1/namespaces/{namespace}/pods/{name}": {"patch": PATCH_OF_PODS}},
    },
}


class Cluster(http.server.ThreadingHTTPServer):
    """A cluster with one release. Its pods end as soon as they are created, in the phase `phase`."""

    daemon_threads = True

    def __init__(self, secret: dict[str, Any], phase: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.secret = secret
        self.phase = phase
        self.pods: dict[str, dict[str, Any]] = {}
        self.stopped = threading.Event()

    def add(self, pod: dict[str, Any]) -> dict[str, Any]:
        metadata = {**pod["metadata"], "uid": "1", "resourceVersion": "5"}
        self.pods[metadata["name"]] = {**pod, "metadata": metadata, "status": {"phase": self.phase}}
        return self.pods[metadata["name"]]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Cluster
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name, _, part = url.path.removeprefix(f"{PODS}/").partition("/")
        if url.path in FIXED:
            self._respond(FIXED[url.path])
        elif url.path == SECRETS:
            self._respond({"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": [self.server.secret]})
        elif url.path == PODS and "watch" in parse_qs(url.query):
            self._watch()
        elif url.path == PODS:
            metadata = {"resourceVersion": "5"}
            pods = list(self.server.pods.values())
            self._respond({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": pods})
        elif name in self.server.pods:
            self._respond(f"{LOG}\n" if part == "log" else self.server.pods[name])
        else:
            self._not_found()

    def do_POST(self) -> None:
        self._respond(self.server.add(json.loads(self._body())), 201)

    def do_PUT(self) -> None:
        self._body()
        self._respond(self.server.secret)

    def do_DELETE(self) -> None:
        self._body()
        pod = self.server.pods.pop(self.path.partition("?")[0].rpartition("/")[2], None)
        self._respond(pod) if pod else self._not_found()

    def _watch(self) -> None:
        """Send the pods that exist, and then that these are all."""
        ended = {"resourceVersion": "5", "annotations": {"k8s.io/initial-events-end": "true"}}
        events = [("ADDED", pod) for pod in self.server.pods.values()]
        events.append(("BOOKMARK", {"kind": "Pod", "apiVersion": "v1", "metadata": ended}))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close")
        self.end_headers()
        for kind, thing in events:
            self.wfile.write((json.dumps({"type": kind, "object": thing}) + "\n").encode())
        self.wfile.flush()
        self.server.stopped.wait(60)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def _not_found(self) -> None:
        self._respond({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}, 404)

    def _respond(self, content: Any, status: int = 200) -> None:
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain" if isinstance(content, str) else "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """The chart's test, in a release. The parameter is the phase in which the test's pod ends."""
    (pod,) = find(documents(template()), "Pod")
    annotations = pod["metadata"]["annotations"]
    hook = {
        "name": pod["metadata"]["name"], "kind": "Pod", "path": "test.yaml", "manifest": yaml.safe_dump(pod),
        "events": ["test"], "delete_policies": annotations["helm.sh/hook-delete-policy"].split(","),
        "output_log_policies": annotations["helm.sh/hook-output-log-policy"].split(","),
    }  # fmt: skip
    chart = {"metadata": {"name": RELEASE, "version": "1.0.0", "apiVersion": "v2"}}
    release = {
        "name": RELEASE, "namespace": NAMESPACE, "version": 1, "info": {"status": "deployed"}, "chart": chart,
        "manifest": "", "hooks": [hook],
    }  # fmt: skip
    packed = base64.b64encode(base64.b64encode(gzip.compress(json.dumps(release).encode()))).decode()
    labels = {"name": RELEASE, "owner": "helm", "status": "deployed", "version": "1"}
    secret = {
        "apiVersion": "v1", "kind": "Secret", "type": "helm.sh/release.v1", "data": {"release": packed},
        "metadata": {"name": f"sh.helm.release.v1.{RELEASE}.v1", "namespace": NAMESPACE, "labels": labels},
    }  # fmt: skip
    write_certificate(tmp_path)
    server = Cluster(secret, request.param)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls.crt", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.stopped.set()
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.mark.parametrize("helm", ["helm3", "helm"])
@pytest.mark.parametrize(("cluster", "status"), [("Failed", 1), ("Succeeded", 0)], indirect=["cluster"])
def test_helm_test_prints_the_log_of_its_pod(cluster: Cluster, tmp_path: Path, helm: str, status: int) -> None:
    (program,) = fetch([helm])
    for _ in range(2):  # The second test replaces the pod of the first.
        done = subprocess.run(
            [
                program, "test", RELEASE, f"--namespace={NAMESPACE}", "--logs", "--timeout=60s",
                f"--kube-apiserver=https://127.0.0.1:{cluster.server_address[1]}",
                f"--kube-ca-file={tmp_path / 'ca.crt'}", "--kube-token=secret",
            ],
            env={**os.environ, "KUBECONFIG": str(tmp_path / "none")}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == status, done.stderr
        assert LOG in done.stdout
        assert list(cluster.pods) == [f"{RELEASE}-test"], "kubectl logs shows it until the next test"
