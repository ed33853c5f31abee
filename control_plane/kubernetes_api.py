"""How to reach the API server of Kubernetes, and what a container of a pod uses for that."""

import logging
import os
import ssl
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography import x509

from control_plane.address import Address
from control_plane.errors import BadInput

_log = logging.getLogger("vllm_priority.control_plane")

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

FAILURES = (httpx.HTTPError, OSError, ValueError, KeyError, TypeError)
"""What a request to the API server raises if there is no usable response."""


@dataclass(frozen=True)
class ApiAccess:
    """How to reach an API server.

    url: its root. tls: whom to trust, and the client's certificate if it has one. token: returns the bearer token of
    the next request, or None for a client without one.
    """

    url: str
    tls: ssl.SSLContext
    token: Callable[[], str | None]

    def client(self, timeout_seconds: float) -> httpx.AsyncClient:
        """Return an HTTP client for this API server."""
        return httpx.AsyncClient(
            base_url=self.url, verify=self.tls, auth=_Token(self.token), timeout=timeout_seconds, trust_env=False
        )


class _Token(httpx.Auth):
    def __init__(self, token: Callable[[], str | None]) -> None:
        self._token = token

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        if (token := self._token()) is not None:
            request.headers["authorization"] = f"Bearer {token}"
        yield request


def in_cluster(environment: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> ApiAccess:
    """Return the access that Kubernetes gives to a container by its environment and its service account's files.

    Raises:
        BadInput: this is not a container of a cluster, or the files cannot be read.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not port.isdigit():
        raise BadInput("KUBERNETES_SERVICE_HOST is not set. The Kubernetes API can be used only inside a cluster.")

    def token() -> str:
        # Kubernetes renews the token, so it is read for each request.
        return (account / "token").read_text(encoding="utf-8").strip()

    try:
        token()
        return ApiAccess(f"https://{Address(host, int(port))}", trust((account / "ca.crt").read_text("utf-8")), token)
    except (OSError, ValueError) as error:
        raise BadInput(f"the service account's files cannot be read: {error}") from None


def trust(ca: str | None) -> ssl.SSLContext:
    """Return a context that trusts a CA, in PEM, as Kubernetes' own clients do. None: the CAs of the system.

    Since Python 3.13, the default context verifies strictly (RFC 5280): it rejects a CA without the keyUsage extension.
    Some clusters have such a CA, and clients in Go accept it.
    """
    context = ssl.create_default_context(cadata=ca)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    for certificate in x509.load_pem_x509_certificates(ca.encode()) if ca is not None else ():
        try:
            certificate.extensions.get_extension_for_class(x509.KeyUsage)
        except x509.ExtensionNotFound:
            _log.warning("The cluster's CA has no keyUsage extension. It is accepted, as by other clients.")
    return context


def reason(error: Exception) -> str:
    """Return what one of FAILURES says, in one line."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"the API server responded with status {error.response.status_code}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
