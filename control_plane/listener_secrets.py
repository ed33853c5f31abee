"""The certificate, the key and the client CA of a sidecar's listener: checked, handed to Envoy, and followed."""

import json
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from control_plane.errors import InvalidField
from control_plane.tls import ListenerTls, certificate_secret, client_ca_secret, read_ca

_CERTIFICATE, _CLIENT_CA = "certificate.json", "client_ca.json"


@dataclass(frozen=True)
class ListenerFiles:
    """The files of the certificate, of its key, and of the CA of clients' certificates."""

    cert: Path
    key: Path
    client_ca: str | None


class ListenerSecrets:
    """Writes what Envoy reads of the files, and writes it again when they change in any way.

    Envoy itself would notice only files that are replaced by a rename, and would take a certificate and a key that do
    not belong together.
    """

    def __init__(self, files: ListenerFiles, folder: Path) -> None:
        """Write the first secrets into `folder`. InvalidField if a file is not valid."""
        self._files = files
        self._folder = folder
        self._problem = ""
        self._written: dict[str, str] = {}
        self._write(self._read())

    @property
    def tls(self) -> ListenerTls:
        """What the listener needs to know."""
        certificate, client_ca = (str(self._folder / name) for name in (_CERTIFICATE, _CLIENT_CA))
        return ListenerTls(certificate, client_ca if self._files.client_ca is not None else None)

    def look(self) -> str | None:
        """Follow a change of the files. Return what there is to say about it, in one line."""
        try:
            secrets = self._read()
        except InvalidField as error:
            said, self._problem = self._problem, error.problem
            return None if said == self._problem else f"{error.problem} The listener keeps its last certificate."
        self._problem = ""
        if secrets == self._written:
            return None
        self._write(secrets)
        return f"loaded the certificate {self._files.cert}" + (
            f" and the CA {ca}" if (ca := self._files.client_ca) else ""
        )

    def _read(self) -> dict[str, str]:
        files = self._files
        try:
            chain = files.cert.read_text(encoding="ascii")
            x509.load_pem_x509_certificates(chain.encode())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not a certificate in PEM format"
            raise InvalidField("tls_cert", f"{files.cert}: cannot be used: {reason}.") from None
        try:
            # Without this password, OpenSSL would ask for the one of an encrypted key on the terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(files.cert, files.key, password=lambda: "")
        except (OSError, ValueError) as error:
            mismatch = "MISMATCH" in str(error)
            reason = "not the key of the certificate" if mismatch else "not a key in PEM format without a password"
            raise InvalidField("tls_key", f"{files.key}: cannot be used: {reason}.") from None
        secrets = {_CERTIFICATE: json.dumps(certificate_secret(chain, str(files.key.absolute())))}
        if files.client_ca is not None:
            secrets[_CLIENT_CA] = json.dumps(client_ca_secret(read_ca(files.client_ca, "client_ca")))
        return secrets

    def _write(self, secrets: dict[str, str]) -> None:
        for name, text in secrets.items():
            if self._written.get(name) != text:
                new = self._folder / f".{name}"
                new.write_text(text)
                new.rename(self._folder / name)
        self._written = secrets
