"""Reads Services where the control plane may, so that the injector can tell which of them pass a sidecar by."""

import asyncio
import os
import re
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import httpx

from control_plane.errors import BadInput
from control_plane.render import Address

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MOST_NAMESPACES = 1000


class Services:
    """The Services of a namespace, by Kubernetes' API; kept for `keep_seconds`, so that a rollout asks once.

    `problem` says why the last question had no answer; None where it had one. Pods are injected all the same.
    """

    def __init__(self, server: Address, token: Path, ca: Path, keep_seconds: float = 5.0) -> None:
        """BadInput where the account's files cannot be read. The token is read anew each time: Kubernetes renews it."""
        try:
            token.read_text(encoding="utf-8")
            trusted = ssl.create_default_context(cafile=str(ca))
        except (OSError, ValueError) as error:
            raise BadInput(f"services: the account's files cannot be read: {error}") from None
        self.problem: str | None = None
        self._token = token
        self._keep_seconds = keep_seconds
        self._client = httpx.AsyncClient(base_url=f"https://{server}", verify=trusted, timeout=2, trust_env=False)
        self._asked: dict[str, tuple[float, asyncio.Task[list[Mapping[str, Any]] | None]]] = {}

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> Self:
        """By what Kubernetes gives each container that has a service account; BadInput where this is none."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not port.isdigit():
            raise BadInput("services: no KUBERNETES_SERVICE_HOST here; allowed: inside a cluster only")
        return cls(Address(host, int(port)), account / "token", account / "ca.crt")

    async def of(self, namespace: str | None) -> list[Mapping[str, Any]] | None:
        """The Services of that namespace; None where they are not known."""
        if namespace is None or not _NAMESPACE.fullmatch(namespace):
            return None
        now = time.monotonic()
        until, task = self._asked.get(namespace, (0.0, None))
        if task is None or now >= until:
            if len(self._asked) >= _MOST_NAMESPACES:
                self._asked.clear()
            # All who ask at the same time share one question.
            task = asyncio.ensure_future(self._ask(namespace))
            self._asked[namespace] = (now + self._keep_seconds, task)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _ask(self, namespace: str) -> list[Mapping[str, Any]] | None:
        try:
            headers = {"authorization": f"Bearer {self._token.read_text(encoding='utf-8').strip()}"}
            answer = await self._client.get(f"/api/v1/namespaces/{namespace}/services", headers=headers)
            answer.raise_for_status()
            items = answer.json()["items"]
            found: list[Mapping[str, Any]] = [item for item in items if isinstance(item, dict)]
        except httpx.HTTPStatusError as error:
            self.problem = f"services of {namespace}: Kubernetes answers {error.response.status_code}"
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            self.problem = f"services of {namespace}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        else:
            self.problem = None
            return found
        return None
