"""Services, read over real TLS from a server that answers as Kubernetes' API does."""

import asyncio
import http.server
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from control_plane.errors import BadInput
from control_plane.services import Services

ITEMS = [{"metadata": {"name": "llm"}, "spec": {"selector": {"app": "x"}, "ports": [{"port": 8000}]}}]


class Api(http.server.ThreadingHTTPServer):
    """Kubernetes' API, as far as it is asked here."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str | None]] = []
        self.status, self.answer = 200, json.dumps({"kind": "ServiceList", "items": ITEMS})


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("authorization")))
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer.encode())

    def log_message(self, *_: Any) -> None:
        pass


def write_certificate(folder: Path) -> None:
    """A certificate for 127.0.0.1 that vouches for itself, as ca.crt, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([]), datetime.now(UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "ca.crt").write_bytes(cert.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key").write_bytes(private)


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """A service account's folder."""
    write_certificate(tmp_path)
    (tmp_path / "token").write_text("secret-1\n")
    return tmp_path


@pytest.fixture
def api(account: Path) -> Iterator[Api]:
    """A running API."""
    server = Api()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / "ca.crt", account / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def reader(api: Api, account: Path) -> Services:
    port = str(api.server_address[1])
    return Services.in_cluster({"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}, account)


def test_the_services_of_a_namespace_are_read_with_the_accounts_token(api, account):
    async def ask() -> Any:
        services = reader(api, account)
        return await services.of("ml"), services.problem

    assert asyncio.run(ask()) == (ITEMS, None)
    assert api.asked == [("/api/v1/namespaces/ml/services", "Bearer secret-1")]


def test_many_who_ask_at_once_share_one_question(api, account):
    async def ask() -> Any:
        services = reader(api, account)
        return await asyncio.gather(*(services.of("ml") for _ in range(16)))

    assert asyncio.run(ask()) == [ITEMS] * 16
    assert len(api.asked) == 1


def test_a_renewed_token_is_used(api, account):
    async def ask() -> None:
        services = reader(api, account)
        await services.of("ml")
        (account / "token").write_text("secret-2")
        await services.of("other")

    asyncio.run(ask())
    assert [token for _, token in api.asked] == ["Bearer secret-1", "Bearer secret-2"]


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (403, "{}", "services of ml: Kubernetes answers 403"),
        (200, "no json", "services of ml: JSONDecodeError"),
        (200, "[]", "services of ml: TypeError"),
        (200, '{"items": 3}', "services of ml: TypeError"),
    ],
)
def test_an_answer_of_no_use_is_not_known_and_said(api, account, status, answer, said):
    api.status, api.answer = status, answer

    async def ask() -> Any:
        services = reader(api, account)
        return await services.of("ml"), services.problem

    found, problem = asyncio.run(ask())
    assert found is None
    assert str(problem).startswith(said)


@pytest.mark.parametrize("namespace", [None, "", "../../secrets", "a b", "A", "x" * 64])
def test_what_is_no_namespace_is_never_asked_for(api, account, namespace):
    async def ask() -> Any:
        return await reader(api, account).of(namespace)

    assert asyncio.run(ask()) is None
    assert api.asked == []


def test_outside_a_cluster_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="inside a cluster only"):
        Services.in_cluster({}, tmp_path)
    with pytest.raises(BadInput, match="cannot be read"):
        Services.in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
