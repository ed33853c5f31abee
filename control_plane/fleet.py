"""Who has what: the sidecars that polled this replica, and whether each has the policy it should have.

Only for people to look at: no answer to a sidecar depends on it. Each replica knows those that poll it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from control_plane.xds import Answer, Asker, Snapshot

Standing = Literal["up_to_date", "behind", "refused", "unknown"]
STANDINGS: tuple[Standing, ...] = ("up_to_date", "behind", "refused", "unknown")
"""up_to_date; behind: will get the new version at its next poll; refused: it got the version and came back without it;
unknown: it asks for a role or a policy that there is not."""


@dataclass(slots=True)
class _Sidecar:
    asker: Asker
    version: str
    first_seen: float
    last_seen: float
    sent: str = ""
    refused: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """One sidecar, for the page and the API. Times in seconds since the epoch."""

    node_id: str
    type: str
    role: str
    policy: str | None
    labels: dict[str, str]
    version: str
    wanted: str
    standing: Standing
    error: str
    first_seen: float
    last_seen: float


class Fleet:
    """The sidecars that polled. Past `limit` the longest silent is forgotten, as is each after `expiry` seconds."""

    def __init__(self, limit: int = 20_000, expiry: float = 900.0) -> None:
        self._limit = limit
        self._expiry = expiry
        # In the order of their last poll, the longest silent first.
        self._sidecars: dict[tuple[str, str, str], _Sidecar] = {}

    def seen(self, asker: Asker, version: str, answer: Answer, now: float | None = None) -> None:
        """Note a poll: who asked, with which version, and what it was answered."""
        now = time.time() if now is None else now
        key = asker.node_id, asker.kind, asker.role
        sidecar = self._sidecars.pop(key, None)
        if sidecar is None:
            sidecar = _Sidecar(asker, version, now, now)
            while len(self._sidecars) >= self._limit:
                del self._sidecars[next(iter(self._sidecars))]
        self._sidecars[key] = sidecar
        if answer.state == "found":
            # Envoy's REST client says nothing of a configuration it refused: it asks again with the version it had.
            again = sidecar.sent == answer.version and sidecar.version == version
            sidecar.refused = answer.version if again or asker.error else ""
            sidecar.sent = answer.version
        else:
            sidecar.sent = sidecar.refused = ""
        sidecar.asker, sidecar.version, sidecar.error, sidecar.last_seen = asker, version, asker.error, now

    def forget_silent(self, now: float | None = None) -> None:
        """Drop those that have not polled for the expiry time."""
        oldest = (time.time() if now is None else now) - self._expiry
        while self._sidecars and next(iter(self._sidecars.values())).last_seen < oldest:
            del self._sidecars[next(iter(self._sidecars))]

    def standings(self, snapshot: Snapshot) -> Iterator[tuple[_Sidecar, str, Standing]]:
        """Each sidecar, the one that polled last first, with the version it should have and how it stands."""
        for sidecar in reversed(list(self._sidecars.values())):
            current = snapshot.current(sidecar.asker)
            standing: Standing
            if current.state != "found":
                standing = "unknown"
            elif current.version == sidecar.version:
                standing = "up_to_date"
            else:
                standing = "refused" if sidecar.refused == current.version else "behind"
            yield sidecar, current.version, standing

    def reports(
        self, snapshot: Snapshot, standing: Standing | None = None, limit: int = 500, offset: int = 0
    ) -> tuple[dict[str, int], list[Report]]:
        """How many there are of each standing, and `limit` of those asked for, past the first `offset`."""
        counts: dict[str, int] = dict.fromkeys(STANDINGS, 0)
        found: list[Report] = []
        for sidecar, wanted, stands in self.standings(snapshot):
            counts[stands] += 1
            if standing in (None, stands):
                offset -= 1
                if offset < 0 and len(found) < limit:
                    found.append(_report(sidecar, wanted, stands))
        return counts, found


def _report(sidecar: _Sidecar, wanted: str, standing: Standing) -> Report:
    asker = sidecar.asker
    question = asker.question
    error = sidecar.error or asker.reason
    if standing == "refused" and not error:
        error = "asked again with the version it had, after it was sent the wanted one: its own log says why"
    return Report(
        node_id=asker.node_id,
        type=asker.kind,
        role=asker.role,
        policy=question.policy_name if question else None,
        labels=dict(question.labels) if question else {},
        version=sidecar.version,
        wanted=wanted,
        standing=standing,
        error=error,
        first_seen=sidecar.first_seen,
        last_seen=sidecar.last_seen,
    )
