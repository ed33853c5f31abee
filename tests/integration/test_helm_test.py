"""The script that `helm test` runs in the cluster, with the chart's certificate and a real control plane."""

import base64
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from control_plane.address import Address
from tests.helm import CHART, documents, find, template
from tests.pem import Authority

from .test_control_plane import ControlPlane, free_port


@dataclass
class Installed:
    """A control plane with the certificate and the policy of the chart."""

    base: str
    plain: str
    inject: str
    ca: str


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder, port = tmp_path_factory.mktemp("installed"), free_port()
    url = f"https://127.0.0.1:{port}/inject"
    objects = documents(template({"webhook": {"url": url}, "policy": {"default": 3}}))
    data = {name: base64.b64decode(text) for name, text in find(objects, "Secret")[0]["data"].items()}
    for name in ("tls.crt", "tls.key"):
        (folder / name).write_bytes(data[name])
    (config,) = find(objects, "ConfigMap")
    (folder / "policy.yaml").write_text(config["data"]["policy.yaml"])
    tls: dict[str, Any] = {
        "tls_listen": Address("127.0.0.1", port),
        "tls_cert": folder / "tls.crt",
        "tls_key": folder / "tls.key",
    }
    with ControlPlane(folder / "policy.yaml", **tls) as control_plane:
        yield Installed(f"https://127.0.0.1:{port}", str(control_plane.address), url, data["ca.crt"].decode())


ANY_CA = Authority().pem


def helm_test(base: str, inject: str | None, ca: str) -> subprocess.CompletedProcess[str]:
    environment = {"CONTROL_PLANE_URL": base, "CA_BUNDLE": ca, "NODE_ID": "ml/helm-test", "PATH": "/usr/bin:/bin"}
    if inject:
        environment |= {"INJECT_URL": inject}
    # The pod passes the script to Python as an argument too.
    command = [sys.executable, "-c", (CHART / "files" / "connection_test.py").read_text()]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_it_passes_with_a_working_control_plane(installed: Installed) -> None:
    done = helm_test(installed.base, installed.inject, installed.ca)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ok", "ok", "ok"]
    assert httpx.get(f"http://{installed.plain}/api/sidecars", trust_env=False).json()["total"] == 0


def test_without_a_webhook_it_does_not_test_the_injection(installed: Installed) -> None:
    done = helm_test(installed.base, None, installed.ca)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)


def test_it_fails_if_another_ca_signed_the_certificate(installed: Installed) -> None:
    other = base64.b64decode(find(documents(template()), "Secret")[0]["data"]["ca.crt"]).decode()
    done = helm_test(installed.base, installed.inject, other)
    assert done.returncode == 1
    assert done.stdout.count("FAILED  ") == 3
    assert "CERTIFICATE_VERIFY_FAILED" in done.stdout


def test_it_fails_with_a_message_if_the_control_plane_does_not_respond() -> None:
    done = helm_test(f"https://127.0.0.1:{free_port()}", None, ANY_CA)
    assert done.returncode == 1
    assert done.stdout.count("FAILED") == 2
    assert "Traceback" not in done.stdout + done.stderr
