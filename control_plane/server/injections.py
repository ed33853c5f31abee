"""What the webhook did to pods: a log line for each, a counter, and the most recent ones for people to look at."""

import logging
import time
from collections import Counter, deque
from typing import Any, Literal, NamedTuple

from control_plane.injector.admission import AdmissionRequest, Mutation
from control_plane.injector.pod import ascii_line
from control_plane.server.events import Events

_log = logging.getLogger("vllm_priority.control_plane")

MAX_NAMESPACES = 500
"""Namespaces beyond so many are counted as `other`, so that the metric has a bounded number of time series."""
_MAX_RECENT = 200

InjectionResult = Literal["injected", "skipped", "rejected", "warned"]
INJECTION_RESULTS: tuple[InjectionResult, ...] = ("injected", "skipped", "rejected", "warned")
"""What is counted:

injected  a pod got the sidecar
skipped   a pod started without one; the reason says why
rejected  a pod was not created, because it asks for something that cannot be done
warned    a warning about a pod that got the sidecar; the reason is its code
"""


class InjectionCount(NamedTuple):
    """A number of pods, or of warnings. The reason is empty for `injected`."""

    namespace: str
    result: InjectionResult
    reason: str


class Injections:
    """The injections of this replica. Dry runs, and thus those of `helm test`, do not count."""

    def __init__(self, events: Events | None = None) -> None:
        self.counts: Counter[InjectionCount] = Counter()
        self._events = events
        self._namespaces: set[str] = set()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_MAX_RECENT)

    def record(self, request: AdmissionRequest, mutation: Mutation) -> None:
        """Record what happened to the pod of a request."""
        if request.pod is None or request.dry_run:
            return
        result: InjectionResult = "rejected" if mutation.rejected else "skipped" if mutation.reason else "injected"
        self._count(request.namespace, result, mutation.reason.code if mutation.reason else "")
        if result == "injected":
            for warning in mutation.warnings:
                self._count(request.namespace, "warned", warning.code)
        owner = request.pod.owner
        entry = {
            "time": time.time(),
            "namespace": request.namespace,
            "pod": request.pod.name,
            "owner": f"{owner.kind}/{owner.name}" if owner else None,
            "result": result,
            "reason": mutation.reason.code if mutation.reason else None,
            "detail": ascii_line(mutation.detail),
            "warnings": [{"code": w.code, "message": ascii_line(w.message)} for w in mutation.warnings],
        }
        self._recent.appendleft(entry)
        level = logging.WARNING if mutation.rejected or mutation.warnings else logging.INFO
        _log.log(level, "Pod %s: %s", ascii_line(f"{request.namespace}/{request.pod.name}"), entry["detail"])
        if self._events:
            self._events.offer(request, mutation)

    def report(self) -> dict[str, Any]:
        """Return the counts, and the most recent injections, newest first."""
        return {
            "counts": [{**key._asdict(), "count": count} for key, count in sorted(self.counts.items())],
            "recent": list(self._recent),
        }

    def _count(self, namespace: str, result: InjectionResult, reason: str) -> None:
        if namespace not in self._namespaces:
            if len(self._namespaces) >= MAX_NAMESPACES:
                namespace = "other"
            else:
                self._namespaces.add(namespace)
        self.counts[InjectionCount(namespace, result, reason)] += 1
