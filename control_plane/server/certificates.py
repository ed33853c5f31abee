"""TLS for the webhook, with a certificate and a key that can be replaced while the control plane runs."""

import ssl
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

from cryptography import x509

from control_plane.errors import BadInput


class Certificate:
    """A certificate and its key, in PEM. New connections use the last valid pair that the files held."""

    def __init__(self, cert: Path, key: Path) -> None:
        """Load both files. BadInput where they are not a certificate and its key.

        An expired certificate is served too, and `problem` reports it.
        """
        self.cert = cert
        self.key = key
        self._unusable: str | None = None
        self._content = self._read()
        self._current, self._leaf = self._load()
        # The listener keeps this context, and each handshake switches to the current one. Loading a new pair into a
        # context in use would leave it for a moment with a certificate and the key of another one.
        self.context = self._current
        self.context.sni_callback = self._use_current

    def reload(self) -> bool | None:
        """Read the files again: True if a new pair was loaded, False if it was rejected, None if nothing changed."""
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
        """The end of the served certificate's validity."""
        return self._leaf.not_valid_after_utc

    @property
    def problem(self) -> str | None:
        """The problem with the certificate or its files in one line, or None."""
        now, begins, ends = datetime.now(UTC), self._leaf.not_valid_before_utc, self.expires
        problems = [self._unusable] if self._unusable else []
        if now > ends:
            problems.append(f"{self.cert}: the certificate expired on {ends:%Y-%m-%d %H:%M} UTC. Renew it.")
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
                raise BadInput(f"{path}: cannot be read: {error.strerror}. Use a file in PEM format.") from None
        return digest.digest()

    def _load(self) -> tuple[ssl.SSLContext, x509.Certificate]:
        try:
            leaf = x509.load_pem_x509_certificates(self.cert.read_bytes())[0]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not a certificate in PEM format"
            raise BadInput(f"{self.cert}: cannot be read: {reason}") from None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without this password, OpenSSL would ask for the one of an encrypted key on the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except (OSError, ValueError) as error:
            mismatch = "MISMATCH" in str(error)
            reason = "not the key of the certificate" if mismatch else "not a key in PEM format without a password"
            raise BadInput(f"{self.key}: cannot be used: {reason}") from None
        return context, leaf
