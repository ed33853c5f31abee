"""The webhook's certificate: it is loaded at the start, and can be replaced while the control plane runs."""

import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID

from control_plane.errors import BadInput
from control_plane.server.certificates import Certificate
from tests.pem import write_pair


def served_name(context: ssl.SSLContext, server_hostname: str | None) -> str:
    """Return the common name of the certificate that a client gets in a handshake."""
    ours, theirs = socket.socketpair()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE

    def accept() -> None:
        with context.wrap_socket(theirs, server_side=True) as wrapped:
            wrapped.recv(1)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    with client.wrap_socket(ours, server_hostname=server_hostname) as wrapped:
        der = wrapped.getpeercert(binary_form=True)
        wrapped.sendall(b"x")
    thread.join(10)
    assert der is not None
    return str(x509.load_der_x509_certificate(der).subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


@pytest.mark.parametrize("server_hostname", ["injector.ml.svc", None])
def test_new_connections_get_the_new_certificate_from_the_same_context(
    tmp_path: Path, server_hostname: str | None
) -> None:
    certificate = Certificate(*write_pair(tmp_path, "old"))
    context = certificate.context
    assert served_name(context, server_hostname) == "old"
    write_pair(tmp_path, "new")
    assert certificate.reload() is True
    assert certificate.reload() is None
    assert served_name(context, server_hostname) == "new"


def test_a_pair_that_does_not_match_is_rejected_and_the_last_valid_one_stays_in_use(tmp_path: Path) -> None:
    certificate = Certificate(*write_pair(tmp_path, "old"))
    other = tmp_path / "other"
    other.mkdir()
    write_pair(other, "new")[0].replace(tmp_path / "tls.crt")
    assert certificate.reload() is False
    assert certificate.reload() is None, "the same problem is not reported again"
    assert "tls.key: cannot be used: not the key of the certificate" in str(certificate.problem)
    assert served_name(certificate.context, "x") == "old"
    (other / "tls.key").replace(tmp_path / "tls.key")
    assert certificate.reload() is True
    assert certificate.problem is None


@pytest.mark.parametrize("broken", ["missing", "empty"])
def test_an_unreadable_certificate_is_reported_and_the_last_valid_one_stays_in_use(tmp_path: Path, broken: str) -> None:
    certificate = Certificate(*write_pair(tmp_path, "old"))
    if broken == "missing":
        certificate.cert.unlink()
    else:
        certificate.cert.write_bytes(b"")
    assert certificate.reload() is False
    assert f"{certificate.cert}: cannot be read" in str(certificate.problem)
    assert served_name(certificate.context, "x") == "old"


def test_an_expired_certificate_is_reported(tmp_path: Path) -> None:
    assert "the certificate expired on" in str(Certificate(*write_pair(tmp_path, days=-1)).problem)


@pytest.mark.parametrize("wrong", ["no file", "no PEM", "another key", "encrypted key"])
def test_a_pair_that_is_not_valid_at_the_start_is_rejected_with_one_line(tmp_path: Path, wrong: str) -> None:
    cert, key = write_pair(tmp_path, password=b"secret" if wrong == "encrypted key" else None)
    if wrong == "no file":
        cert.unlink()
    elif wrong == "no PEM":
        cert.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    elif wrong == "another key":
        (tmp_path / "other").mkdir()
        write_pair(tmp_path / "other")[1].replace(key)
    with pytest.raises(BadInput) as error:
        Certificate(cert, key)
    assert str(error.value).startswith(f"{key if 'key' in wrong else cert}: cannot be ")
    assert "\n" not in str(error.value)
