"""Services, read over real TLS from a server that responds like the Kubernetes API."""

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
from cryptography.x509.oid import NameOID

from control_plane.errors import BadInput
from control_plane.server.services import Services

ITEMS = [{"metadata": {"name": "llm"}, "spec": {"selector": {"app": "x"}, "ports": [{"port": 8000}]}}]


class Api(http.server.ThreadingHTTPServer):
    """The part of the Kubernetes API that is used here."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str | None]] = []
        self.status, self.body = 200, json.dumps({"kind": "ServiceList", "items": ITEMS})


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("authorization")))
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    def log_message(self, *_: Any) -> None:
        pass


def write_certificate(folder: Path) -> None:
    """Write a CA without the keyUsage extension as ca.crt, and a certificate for 127.0.0.1 with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    ca = certificate(ca_name).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    leaf = certificate(x509.Name([])).add_extension(address, critical=True)
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    pem = serialization.Encoding.PEM
    for name, builder in (("ca.crt", ca), ("tls.crt", leaf.add_extension(issued_by, critical=False))):
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.issuer_name(ca_name).public_key(key.public_key()).add_extension(identifier, critical=False)
        (folder / name).write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key").write_bytes(private)


def certificate(subject: x509.Name) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """The folder of a service account."""
    write_certificate(tmp_path)
    (tmp_path / "token").write_text("secret-1\n")
    return tmp_path


@pytest.fixture
def api(account: Path) -> Iterator[Api]:
    """A running API."""
    server = Api()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(account / "tls.crt", account / "key")
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


def test_services_are_read_with_the_token_of_the_service_account(api: Api, account: Path) -> None:
    async def ask() -> Any:
        services = reader(api, account)
        return await services.of("ml"), services.problem

    assert asyncio.run(ask()) == (ITEMS, None)
    assert api.requests == [("/api/v1/namespaces/ml/services", "Bearer secret-1")]


def test_concurrent_calls_share_one_request(api: Api, account: Path) -> None:
    async def ask() -> Any:
        services = reader(api, account)
        return await asyncio.gather(*(services.of("ml") for _ in range(16)))

    assert asyncio.run(ask()) == [ITEMS] * 16
    assert len(api.requests) == 1


def test_a_renewed_token_is_used(api: Api, account: Path) -> None:
    async def ask() -> None:
        services = reader(api, account)
        await services.of("ml")
        (account / "token").write_text("secret-2")
        await services.of("other")

    asyncio.run(ask())
    assert [token for _, token in api.requests] == ["Bearer secret-1", "Bearer secret-2"]


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (403, "{}", "the API server responded with status 403"),
        (200, "no json", "JSONDecodeError"),
        (200, "[]", "TypeError"),
        (200, '{"items": 3}', "TypeError"),
    ],
)
def test_a_response_that_cannot_be_used_is_reported(
    api: Api, account: Path, status: int, body: str, problem: str
) -> None:
    api.status, api.body = status, body

    async def ask() -> Any:
        services = reader(api, account)
        return await services.of("ml"), services.problem

    found, reported = asyncio.run(ask())
    assert found is None
    assert str(reported).startswith(f"The Services of the namespace ml cannot be read: {problem}")


def test_a_ca_without_key_usage_is_accepted_and_logged(
    api: Api, account: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = ssl.create_default_context

    def create_strict(*arguments: Any, **options: Any) -> ssl.SSLContext:
        """Create a context as Python 3.13 does."""
        context = create(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create_strict)

    async def ask() -> Any:
        services = reader(api, account)
        return await services.of("ml"), services.problem

    assert asyncio.run(ask()) == (ITEMS, None)
    assert "has no keyUsage extension" in caplog.text


@pytest.mark.parametrize(("status", "connected"), [(200, True), (401, False)])
def test_a_connection_is_reported(api: Api, account: Path, status: int, connected: bool) -> None:
    api.status = status

    async def connect() -> tuple[bool, bool, str | None]:
        services = reader(api, account)
        return await services.connect(), services.connected, services.problem

    problem = None if connected else "The Kubernetes API cannot be used: the API server responded with status 401"
    assert asyncio.run(connect()) == (connected, connected, problem)
    assert api.requests == [("/version", "Bearer secret-1")]


@pytest.mark.parametrize("namespace", [None, "", "../../secrets", "a b", "A", "x" * 64])
def test_a_name_that_is_not_a_valid_namespace_is_never_requested(
    api: Api, account: Path, namespace: str | None
) -> None:
    async def ask() -> Any:
        return await reader(api, account).of(namespace)

    assert asyncio.run(ask()) is None
    assert api.requests == []


def test_services_cannot_be_read_outside_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="only inside a cluster"):
        Services.in_cluster({}, tmp_path)
    with pytest.raises(BadInput, match="cannot be read"):
        Services.in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
