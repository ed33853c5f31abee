"""Writes Events about injections, on the objects that own the pods, so that `kubectl describe` shows them.

The controller that creates a pod drops the webhook's warnings. No admission waits for an Event or fails because of one.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from control_plane.injector.admission import AdmissionRequest, Mutation, Owner
from control_plane.injector.pod import ascii_line
from control_plane.kubernetes_api import FAILURES, ApiAccess, reason
from control_plane.server.bounded_cache import BoundedCache

_log = logging.getLogger("vllm_priority.control_plane")

REPEAT_SECONDS = 600.0
"""An owner gets an Event with the same reason only once within this time, however many pods it creates."""
_SPACING_SECONDS = 0.1
"""Time between two Events, so that a large rollout does not load the API server."""
_MAX_WAITING = 200
"""Events beyond so many that wait to be written are dropped: the log and the metrics have them."""
_MAX_OWNERS = 10_000
_TIMEOUT_SECONDS = 5
_COMPONENT = "vllm-priority"


class Events:
    """Events that wait to be written, and those that were written lately.

    `problem` is the reason why the last Event could not be written, or None.
    """

    def __init__(self, api: ApiAccess, spacing_seconds: float = _SPACING_SECONDS) -> None:
        self.problem: str | None = None
        self._client = api.client(_TIMEOUT_SECONDS)
        self._spacing_seconds = spacing_seconds
        self._waiting: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue(_MAX_WAITING)
        self._written: BoundedCache[tuple[str, str], float] = BoundedCache(_MAX_OWNERS)

    def offer(self, request: AdmissionRequest, mutation: Mutation) -> None:
        """Let what happened to a pod become Events of its owner, if it has one. It returns at once."""
        owner = request.pod.owner if request.pod else None
        if owner is None:
            return
        now = time.monotonic()
        for kind, code, message in _facts(mutation):
            if self._waiting.full():
                return
            if now - self._written.get((owner.uid, code), -REPEAT_SECONDS) >= REPEAT_SECONDS:
                self._written.add((owner.uid, code), now)
                self._waiting.put_nowait((request.namespace, _event(request.namespace, owner, kind, code, message)))

    async def run(self) -> None:
        """Write the Events, until it is cancelled."""
        while True:
            namespace, event = await self._waiting.get()
            try:
                response = await self._client.post(f"/api/v1/namespaces/{namespace}/events", json=event)
                response.raise_for_status()
                self.problem = None
            except FAILURES as error:
                problem = f"Events cannot be written: {reason(error)}"
                if problem != self.problem:
                    _log.error("%s", problem)
                self.problem = problem
            await asyncio.sleep(self._spacing_seconds)

    async def close(self) -> None:
        """Close the connections to the API server."""
        await self._client.aclose()


def _facts(mutation: Mutation) -> Iterator[tuple[str, str, str]]:
    """The type, the reason and the message of each Event."""
    if mutation.reason is None:
        yield "Normal", "SidecarInjected", mutation.detail
        for warning in mutation.warnings:
            yield "Warning", warning.code, warning.message
    elif mutation.rejected or mutation.warnings:
        yield "Warning", mutation.reason.code, mutation.detail


def _event(namespace: str, owner: Owner, kind: str, code: str, message: str) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{owner.name[:200]}.{secrets.token_hex(8)}", "namespace": namespace},
        "involvedObject": {**owner.model_dump(exclude={"controller"}), "namespace": namespace},
        "type": kind,
        "reason": code,
        "message": ascii_line(message),
        "source": {"component": _COMPONENT},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
