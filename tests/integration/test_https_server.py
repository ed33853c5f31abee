"""A pod whose vLLM serves HTTPS, for real: Envoy, uvicorn, and a certificate that is renewed as the kubelet does it."""

import ssl
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.pem import Authority

from .test_swap import Pod, wait_for
from .waiting import until

VLLM = """#!{python}
# Stands for vLLM: the same web server, with the same options.
import argparse, json
import uvicorn
from fastapi import FastAPI, Request

app = FastAPI()

@app.post("/{{path:path}}")
async def respond(request: Request):
    return {{"body": await request.json(), "scheme": request.url.scheme}}

parser = argparse.ArgumentParser()
parser.add_argument("verb", choices=["serve"])
parser.add_argument("model")
parser.add_argument("--port", type=int)
parser.add_argument("--ssl-certfile")
parser.add_argument("--ssl-keyfile")
parser.add_argument("--enable-ssl-refresh", action="store_true")
options = parser.parse_args()
uvicorn.run(app, port=options.port, ssl_certfile=options.ssl_certfile, ssl_keyfile=options.ssl_keyfile)
"""

SCRIPT = """eval "vllm serve "tiny" \\
  --port {port} ${{NOT_SET}} \\
  --enable-ssl-refresh \\
  --ssl-certfile {folder}/tls.crt \\
  --ssl-keyfile {folder}/tls.key"
"""


class Volume:
    """A Secret as the kubelet mounts it: its entries are links through `..data`, which it replaces by a rename.

    below: the folder of the files, if the volume's `items` name one.
    """

    def __init__(self, root: Path, below: str, authority: Authority) -> None:
        self.root, self.folder, self._authority, self._versions = root, root / below, authority, 0
        self._below = below
        root.mkdir()
        self.renew()
        for name in [below] if below else ["tls.crt", "tls.key"]:
            (root / name).symlink_to(f"..data/{name}")

    @property
    def certificate(self) -> str:
        return (self.folder / "tls.crt").read_text().strip()

    def renew(self) -> None:
        self._versions += 1
        version = self.root / f"..version_{self._versions}"
        self._authority.write(version / self._below, "127.0.0.1")
        link = self.root / "..data_tmp"
        link.symlink_to(version.name)
        link.rename(self.root / "..data")


@pytest.fixture(params=["", "server"], ids=["the volume's root", "a folder of the volume"])
def volume(request: pytest.FixtureRequest, tmp_path: Path, authority: Authority) -> Volume:
    return Volume(tmp_path / "tls", request.param, authority)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def pod(envoy: Path, tmp_path: Path, volume: Volume) -> Iterator[Pod]:
    script = SCRIPT.format(folder=volume.folder, port="{port}")
    mount = {"name": "tls", "mountPath": str(volume.root)}
    changes = {"command": ["bash", "-c"], "args": [script], "volumeMounts": [mount]}
    pod = Pod(envoy, tmp_path, changes, volumes=[{"name": "tls", "secret": {"secretName": "s"}}])
    (tmp_path / "vllm").write_text(VLLM.format(python=sys.executable))
    # The kubelet writes this file from the annotation.
    file = tmp_path / "certificate.json"
    file.write_text(pod.manifest["metadata"]["annotations"]["vllm-priority.io/certificate"])
    pod.sidecar["args"] = [
        text.replace("/etc/vllm-priority/certificate.json", str(file)) for text in pod.sidecar["args"]
    ]
    try:
        pod.run_vllm()
        pod.run_sidecar()
        yield pod
    finally:
        pod.close()


def client(authority: Authority) -> httpx.Client:
    return httpx.Client(verify=ssl.create_default_context(cadata=authority.pem), trust_env=False, timeout=30)


def post(client: httpx.Client, port: int, priority: str) -> httpx.Response:
    url = f"https://127.0.0.1:{port}/inference/v1/generate"
    return client.post(url, json={"token_ids": [1]}, headers={"x-vllm-priority": priority})


def served_certificate(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port))


def test_clients_of_a_server_with_https_notice_no_difference_but_the_priority(pod: Pod, authority: Authority) -> None:
    wait_for(pod.health, "/ready", 200)
    with client(authority) as verifying:
        response = post(verifying, pod.port, "-7")
        assert response.json() == {"body": {"token_ids": [1], "priority": -7}, "scheme": "https"}
        assert response.headers["x-vllm-priority-applied"] == "-7; source=header; outcome=inserted"
    assert served_certificate(pod.port) == served_certificate(pod.vllm_port)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{pod.port}/health", trust_env=False)


def test_a_renewed_certificate_is_served_and_no_request_is_lost(pod: Pod, volume: Volume, authority: Authority) -> None:
    wait_for(pod.health, "/ready", 200)
    before = served_certificate(pod.port)
    stop = threading.Event()
    wrong: list[str] = []
    sent = [0, 0]

    def load(number: int, *, keeps: bool) -> None:
        kept = client(authority)
        while not stop.is_set():
            try:
                response = post(kept, pod.port, "5")
                if response.status_code != 200 or response.json()["body"]["priority"] != 5:
                    wrong.append(f"{response.status_code} {response.text}")
            except httpx.TransportError as error:
                wrong.append(repr(error))
            sent[number] += 1
            if not keeps:
                kept.close()
                kept = client(authority)
        kept.close()

    def has_sent(number: int, count: int) -> bool:
        return sent[number] >= count

    threads = [threading.Thread(target=load, args=(number,), kwargs={"keeps": not number}) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            at_renewal = list(sent)
            volume.renew()
            until(lambda: served_certificate(pod.port).strip() == volume.certificate, "the new certificate")
            # Each client has begun a request since.
            for number, count in enumerate(at_renewal):
                until(partial(has_sent, number, count + 2), "a request after the renewal")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert before.strip() != volume.certificate
    assert not wrong
