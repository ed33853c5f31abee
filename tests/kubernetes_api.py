"""A server that responds like the Kubernetes API, over real TLS with a certificate of a CA of its own."""

import http.server
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Api(http.server.ThreadingHTTPServer):
    """The part of the Kubernetes API that is used here.

    requests: path and authorization of each request. posted: path and body of each POST. responses: path -> the
    object that a GET of it returns; for other paths, `status` and `body`.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str | None]] = []
        self.posted: list[tuple[str, Any]] = []
        self.responses: dict[str, Any] = {}
        self.status, self.body = 200, "{}"

    @property
    def port(self) -> int:
        return int(self.server_address[1])


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers.get("authorization")))
        found = self.server.responses.get(self.path)
        self._respond(*((200, json.dumps(found)) if found is not None else (self.server.status, self.server.body)))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.requests.append((self.path, self.headers.get("authorization")))
        self.server.posted.append((self.path, json.loads(body)))
        self._respond(201 if self.server.status == 200 else self.server.status, body.decode())

    def _respond(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running_api(folder: Path, client_ca: Path | None = None) -> Iterator[Api]:
    """A running API with the certificate that `write_certificate` wrote into the folder.

    client_ca: the CA of the clients' certificates, which are then required.
    """
    server = Api()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "key")
    if client_ca:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def write_certificate(folder: Path) -> None:
    """Write a CA without the keyUsage extension as ca.crt, and a certificate for 127.0.0.1 with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    ca = _certificate(ca_name).add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    leaf = _certificate(x509.Name([])).add_extension(address, critical=True)
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    pem = serialization.Encoding.PEM
    for name, builder in (("ca.crt", ca), ("tls.crt", leaf.add_extension(issued_by, critical=False))):
        identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        builder = builder.issuer_name(ca_name).public_key(key.public_key()).add_extension(identifier, critical=False)
        (folder / name).write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key").write_bytes(private)


def _certificate(subject: x509.Name) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
    )
