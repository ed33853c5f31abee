"""TLS as Envoy is told of it: which servers a sidecar trusts, and how it serves its clients."""

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from control_plane.errors import InvalidField

_TLS = "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3"
_TLS_1_2 = {"tls_minimum_protocol_version": "TLSv1_2"}


@dataclass(frozen=True)
class ServerTrust:
    """How a sidecar verifies a server that it connects to over TLS.

    ca: the certificates that may have signed the server's, in PEM. None: the server's certificate is not verified.
    server_name: the DNS name or IP address that the certificate must have, also sent as SNI if it is a DNS name.
    """

    ca: str | None
    server_name: str


def read_ca(path: str, field: str) -> str:
    """Return the certificates of a PEM file. InvalidField, which names `field`, if it has none.

    A file may have several: during a rotation, the old and the new CA.
    """
    try:
        text = Path(path).read_text(encoding="ascii")
        certificates = x509.load_pem_x509_certificates(text.encode())
    except OSError as error:
        raise InvalidField(field, f"{path}: cannot be read: {error.strerror}. Use a file in PEM format.") from None
    except ValueError:
        raise InvalidField(field, f"{path}: not a certificate in PEM format. Use the file of the CA.") from None
    # Only the certificates: a file may contain comments, and it must not contain a key.
    return "".join(certificate.public_bytes(Encoding.PEM).decode() for certificate in certificates)


def to_server(trust: ServerTrust) -> dict[str, Any]:
    """Return the transport socket of a cluster whose server has TLS."""
    common: dict[str, Any] = {"tls_params": _TLS_1_2}
    is_address = _is_address(trust.server_name)
    if trust.ca is not None:
        matcher = {"san_type": "IP_ADDRESS" if is_address else "DNS", "matcher": {"exact": trust.server_name}}
        common["validation_context"] = {
            "trusted_ca": {"inline_string": trust.ca},
            "match_typed_subject_alt_names": [matcher],
        }
    context: dict[str, Any] = {"@type": f"{_TLS}.UpstreamTlsContext", "common_tls_context": common}
    if not is_address:  # RFC 6066, 3: SNI is a DNS name, never an address.
        context["sni"] = trust.server_name
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


@dataclass(frozen=True)
class ListenerTls:
    """How a sidecar serves TLS: the paths of the files with its secrets.

    certificate: of a file with `certificate_secret` or `certificate_files_secret`. client_ca: of one with
    `client_ca_secret`, which clients' certificates are verified by. None: clients need no certificate.
    """

    certificate: str
    client_ca: str | None


def certificate_secret(chain: str, key: str) -> dict[str, Any]:
    """Return what Envoy reads of a listener's certificate. It reads it again when the file is replaced by a rename.

    Args:
        chain: the certificate and its chain, in PEM.
        key: the path of its key, which is not copied.
    """
    return _secret("tls_certificate", {"certificate_chain": {"inline_string": chain}, "private_key": {"filename": key}})


def certificate_files_secret(chain: str, key: str, folder: str) -> dict[str, Any]:
    """Return what Envoy reads of a listener's certificate that other processes keep up to date.

    Args:
        chain: the path of the certificate and its chain.
        key: the path of its key.
        folder: Envoy reads both files again when something is moved into this folder, as the kubelet does to volumes
            (`watched_directory` in Envoy's `TlsCertificate`).
    """
    certificate = {"certificate_chain": {"filename": chain}, "private_key": {"filename": key}}
    return _secret("tls_certificate", {**certificate, "watched_directory": {"path": folder}})


def client_ca_secret(ca: str) -> dict[str, Any]:
    """Return what Envoy reads of the CA of a listener's clients, in PEM."""
    return _secret("validation_context", {"trusted_ca": {"inline_string": ca}})


def _secret(kind: str, content: dict[str, Any]) -> dict[str, Any]:
    # Envoy expects one secret in each file.
    return {"resources": [{"@type": f"{_TLS}.Secret", "name": kind, kind: content}]}


def from_clients(tls: ListenerTls) -> dict[str, Any]:
    """Return the transport socket of a listener whose clients have TLS."""

    def secret(kind: str, path: str) -> dict[str, Any]:
        return {"name": kind, "sds_config": {"path_config_source": {"path": path}, "resource_api_version": "V3"}}

    common: dict[str, Any] = {
        "tls_params": _TLS_1_2,
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificate_sds_secret_configs": [secret("tls_certificate", tls.certificate)],
    }
    if tls.client_ca:
        common["validation_context_sds_secret_config"] = secret("validation_context", tls.client_ca)
    context = {
        "@type": f"{_TLS}.DownstreamTlsContext",
        "common_tls_context": common,
        "require_client_certificate": tls.client_ca is not None,
    }
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
