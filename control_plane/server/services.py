"""Reads the Services of a namespace, so that the injector can warn about those that bypass a sidecar."""

import asyncio
import logging
import os
import re
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx
from cryptography import x509

from control_plane.address import Address
from control_plane.errors import InvalidField

_log = logging.getLogger("vllm_priority.control_plane")

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAX_NAMESPACES = 1000


class Services:
    """The Services of a namespace, from the Kubernetes API. They are cached, so that a rollout needs one request.

    `problem` is the reason why the last request failed, or None. Pods are injected without this knowledge too.
    `connected` is whether the API server has accepted a request yet.
    """

    def __init__(self, server: Address, token: Path, ca: Path, cache_seconds: float = 5.0) -> None:
        """Check the account's files. InvalidField where they cannot be read."""
        try:
            token.read_text(encoding="utf-8")
            trusted = _trust(ca)
        except (OSError, ValueError) as error:
            raise InvalidField("read_services", f"the service account's files cannot be read: {error}") from None
        self.problem: str | None = None
        self.connected = False
        self._token = token
        self._cache_seconds = cache_seconds
        self._client = httpx.AsyncClient(base_url=f"https://{server}", verify=trusted, timeout=2, trust_env=False)
        self._requests: dict[str, tuple[float, asyncio.Task[list[Mapping[str, Any]] | None]]] = {}

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> Self:
        """Use the address and the files that Kubernetes gives to a container. InvalidField outside a cluster."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not port.isdigit():
            problem = "KUBERNETES_SERVICE_HOST is not set. Services can be read only inside a cluster."
            raise InvalidField("read_services", problem)
        return cls(Address(host, int(port)), account / "token", account / "ca.crt")

    async def connect(self) -> bool:
        """Send a request that every service account may send, and return whether the API server accepted it."""
        try:
            await self._get("/version")
        except _FAILURES as error:
            self.problem = f"The Kubernetes API cannot be used: {_reason(error)}"
            return False
        self.problem = None
        return True

    async def of(self, namespace: str | None) -> list[Mapping[str, Any]] | None:
        """Return the Services of a namespace, or None if they are not known."""
        if namespace is None or not _NAMESPACE.fullmatch(namespace):
            return None
        now = time.monotonic()
        until, task = self._requests.get(namespace, (0.0, None))
        if task is None or now >= until:
            if len(self._requests) >= _MAX_NAMESPACES:
                self._requests.clear()
            # Reviews that arrive at the same time share one request.
            task = asyncio.ensure_future(self._request(namespace))
            self._requests[namespace] = (now + self._cache_seconds, task)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close the connections to the API server."""
        await self._client.aclose()

    async def _request(self, namespace: str) -> list[Mapping[str, Any]] | None:
        try:
            items = (await self._get(f"/api/v1/namespaces/{namespace}/services"))["items"]
            found: list[Mapping[str, Any]] = [item for item in items if isinstance(item, dict)]
        except _FAILURES as error:
            self.problem = f"The Services of the namespace {namespace} cannot be read: {_reason(error)}"
            return None
        self.problem = None
        return found

    async def _get(self, path: str) -> Any:
        # Kubernetes renews the token, so it is read for each request.
        headers = {"authorization": f"Bearer {self._token.read_text(encoding='utf-8').strip()}"}
        response = await self._client.get(path, headers=headers)
        response.raise_for_status()
        self.connected = True
        return response.json()


_FAILURES = (httpx.HTTPError, OSError, ValueError, KeyError, TypeError)
"""What a request to the API server raises if there is no usable response."""


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"the API server responded with status {error.response.status_code}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _trust(ca: Path) -> ssl.SSLContext:
    """Return a context that trusts the CA as Kubernetes' own clients do.

    Since Python 3.13, the default context verifies strictly (RFC 5280): it rejects a CA without the keyUsage extension.
    Some clusters have such a CA, and clients in Go accept it.
    """
    context = ssl.create_default_context(cafile=str(ca))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    for certificate in x509.load_pem_x509_certificates(ca.read_bytes()):
        try:
            certificate.extensions.get_extension_for_class(x509.KeyUsage)
        except x509.ExtensionNotFound:
            _log.warning("%s: the cluster's CA has no keyUsage extension. It is accepted, as by other clients.", ca)
    return context
