"""TLS for the webhook, from a certificate and a key that are replaced in place while it serves."""

import ssl
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from cryptography import x509

from control_plane.errors import BadInput


class Certificate:
    """A certificate and its key, in PEM. New connections get what the files held when they were last looked at."""

    def __init__(self, cert: Path, key: Path) -> None:
        """BadInput where the files hold no certificate and its key. An expired one is served, and `problem` says so."""
        self.cert = cert
        self.key = key
        self._unusable: str | None = None
        self._content = self._read()
        self._current, self._leaf = self._load()
        # What is handed to the listener, once: each handshake then moves to the current context, as a whole. Loading a
        # new pair into a live context would leave it with a certificate and another's key in between.
        self.context = self._current
        self.context.sni_callback = self._use_current

    def reload(self) -> bool | None:
        """Look at the files: True where a new pair was loaded, False where it was refused, None where none came."""
        try:
            content = self._read()
            if content == self._content:
                return None
            current, leaf = self._load()
        except BadInput as error:
            again = self._unusable == str(error)
            self._unusable, self._content = str(error), b""
            return None if again else False
        self._content, self._current, self._leaf, self._unusable = content, current, leaf, None
        return True

    @property
    def expires(self) -> datetime:
        """End of the validity of the certificate that is served."""
        return self._leaf.not_valid_after_utc

    @property
    def problem(self) -> str | None:
        """What is wrong, in one line; None where nothing is."""
        now, begins, ends = datetime.now(UTC), self._leaf.not_valid_before_utc, self.expires
        problems = [self._unusable] if self._unusable else []
        if now > ends:
            problems.append(f"{self.cert}: the certificate expired on {ends:%Y-%m-%d %H:%M} UTC; next: renew it there")
        elif now < begins:
            problems.append(f"{self.cert}: the certificate is not valid before {begins:%Y-%m-%d %H:%M} UTC")
        elif self._unusable:
            problems.append(f"the last good certificate is served, until {ends:%Y-%m-%d %H:%M} UTC")
        return "; ".join(problems) or None

    def _use_current(self, connection: ssl.SSLSocket | ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        connection.context = self._current

    def _read(self) -> bytes:
        digest = sha256()
        for path in (self.cert, self.key):
            try:
                digest.update(path.read_bytes())
            except OSError as error:
                raise BadInput(f"{path}: cannot be read: {error.strerror}; allowed: a PEM file") from None
        return digest.digest()

    def _load(self) -> tuple[ssl.SSLContext, x509.Certificate]:
        try:
            leaf = x509.load_pem_x509_certificates(self.cert.read_bytes())[0]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "no certificate in PEM"
            raise BadInput(f"{self.cert}: cannot be read: {reason}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without a password of its own, OpenSSL would ask the terminal for the one of an encrypted key.
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            reason = (
                "not the key of the certificate" if "MISMATCH" in str(error) else "no key in PEM without a password"
            )
            raise BadInput(f"{self.key}: cannot be used: {reason}") from None
        return context, leaf
