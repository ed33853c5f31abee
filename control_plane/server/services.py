"""Reads the Services of a namespace, so that the injector can warn about those that bypass a sidecar."""

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any

from control_plane import strict_json
from control_plane.kubernetes_api import FAILURES, ApiAccess, reason

_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_MAX_NAMESPACES = 1000
_TIMEOUT_SECONDS = 2


class Services:
    """The Services of a namespace, from the Kubernetes API. They are cached, so that a rollout needs one request.

    `problem` is the reason why the last request failed, or None. Pods are injected without this knowledge too.
    """

    def __init__(self, api: ApiAccess, cache_seconds: float = 5.0) -> None:
        self.problem: str | None = None
        self.connected = False
        self._cache_seconds = cache_seconds
        self._client = api.client(_TIMEOUT_SECONDS)
        self._requests: dict[str, tuple[float, asyncio.Task[list[Mapping[str, Any]] | None]]] = {}

    async def connect(self) -> bool:
        """Send a request that every service account may send, and return whether the API server accepted it."""
        try:
            await self._get("/version")
        except FAILURES as error:
            self.problem = f"The Kubernetes API cannot be used: {reason(error)}"
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
        except FAILURES as error:
            self.problem = f"The Services of the namespace {namespace} cannot be read: {reason(error)}"
            return None
        self.problem = None
        return found

    async def _get(self, path: str) -> Any:
        response = await self._client.get(path)
        response.raise_for_status()
        self.connected = True
        return strict_json.loads(response.content)
