"""The real helm on the chart: what it renders, and what it says of values that are wrong."""

import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tools.fetch_tools import fetch

CHART = Path(__file__).resolve().parent.parent / "deploy" / "chart"
RELEASE, NAMESPACE = "vllm-priority", "priority-system"

# The oldest and the newest version that kubernetes-validate knows.
KUBERNETES_VERSIONS = ("1.33", "1.37")


class HelmError(Exception):
    """helm refused; the message is what it wrote."""


@cache
def binary() -> Path:
    """The pinned helm, fetched where it is missing."""
    return fetch(["helm"])[0]


def helm(*arguments: str | Path) -> str:
    """What helm wrote on stdout; HelmError with its stderr where it fails."""
    done = subprocess.run([binary(), *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise HelmError((done.stderr or done.stdout).strip())
    return done.stdout


def template(values: Mapping[str, Any] | None = None, flags: Sequence[str] = (), chart: Path = CHART) -> str:
    """The chart's manifests as text, rendered with these values on top of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values or {}, file)
        file.flush()
        return helm("template", RELEASE, chart, "--namespace", NAMESPACE, "--values", file.name, *flags)


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest."""
    return [document for document in yaml.safe_load_all(text) if document]


def find(objects: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The objects of one kind."""
    return [document for document in objects if document["kind"] == kind]


def _only_certificates(folder: str, names: list[str]) -> list[str]:
    kept = ("_", "certificates.yaml")
    return [name for name in names if not name.startswith(kept)] if folder.endswith("templates") else []


def with_secret(secret: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    """The chart's certificate as an upgrade renders it where the cluster has this Secret: `lookup` finds it."""

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            kinds = [{"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get"], "singularName": ""}]
            owner = {"meta.helm.sh/release-name": RELEASE, "meta.helm.sh/release-namespace": NAMESPACE}
            metadata = {**secret["metadata"], "annotations": {**secret["metadata"]["annotations"], **owner}}
            known = {
                "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.0"},
                "/api": {"kind": "APIVersions", "versions": ["v1"]},
                "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
                "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": kinds},
                f"/api/v1/namespaces/{metadata['namespace']}/secrets/{metadata['name']}": {
                    **secret,
                    "metadata": metadata,
                },
            }
            body = json.dumps(known.get(path, {"kind": "Status", "status": "Failure", "code": 404})).encode()
            self.send_response(200 if path in known else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        api = f"http://127.0.0.1:{server.server_address[1]}"
        with tempfile.TemporaryDirectory() as folder:
            # Only the template of the Secret: for the other kinds, helm would want to know more of the API.
            chart = Path(shutil.copytree(CHART, f"{folder}/chart", ignore=_only_certificates))
            flags = ("--dry-run=server", f"--kube-apiserver={api}", "--disable-openapi-validation")
            return template(values, flags, chart)
    finally:
        server.shutdown()
        server.server_close()
