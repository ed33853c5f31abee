"""The sidecars that poll this replica, and whether each has the configuration that it should have.

This is only for people to look at: no response to a sidecar depends on it.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from control_plane.server.discovery_request import MAX_REMEMBERED_BYTES, DiscoveryClient, shown
from control_plane.server.xds import DiscoveryResponse, Snapshot

ConfigStatus = Literal["SYNCED", "STALE", "ERROR", "UNKNOWN"]
CONFIG_STATUSES: tuple[ConfigStatus, ...] = ("SYNCED", "STALE", "ERROR", "UNKNOWN")
"""The statuses, with the words of Envoy's ConfigStatus (envoy.service.status.v3):

SYNCED    the sidecar has the version that it should have
STALE     the sidecar has not confirmed that version yet
ERROR     the sidecar was sent that version and rejected it
UNKNOWN   the sidecar requests a role or a policy that does not exist
"""

MAX_PAGE_BYTES = 2**20
"""About how large one page of the list of sidecars may become."""


@dataclass(slots=True)
class Sidecar:
    """What the polls of one sidecar have shown. Times are in seconds since the epoch."""

    client: DiscoveryClient
    version: str
    first_seen: float
    last_seen: float
    sent: str = ""
    """The version in the last response, or the empty string if that response had no resources."""
    rejected: str = ""
    """The version that the sidecar rejected, or the empty string."""


class SidecarStatus(NamedTuple):
    """One sidecar in GET /api/sidecars. Times are in seconds since the epoch."""

    node_id: str
    type: str
    role: str
    policy: str | None
    labels: dict[str, str]
    version: str
    expected_version: str
    status: ConfigStatus
    error: str
    restart_for: tuple[str, ...]
    """The keys of its policy that have no effect until it is restarted."""
    first_seen: float
    last_seen: float


class Fleet:
    """The sidecars that poll this replica.

    Beyond `limit` sidecars, and beyond `max_bytes` of what they sent, the one that has been silent longest is
    forgotten, and so is each one that has been silent for `expiry_seconds`. The default is at least six polls, so that
    the sidecars of deleted pods do not stay STALE.
    """

    def __init__(
        self, limit: int = 20_000, expiry_seconds: float = 60.0, max_bytes: int = MAX_REMEMBERED_BYTES
    ) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._bytes = 0
        self._expiry_seconds = expiry_seconds
        # Ordered by the time of the last poll, oldest first.
        self._sidecars: dict[tuple[str, str, str], Sidecar] = {}

    def record(
        self, client: DiscoveryClient, version: str, response: DiscoveryResponse, now: float | None = None
    ) -> None:
        """Record a poll: the client, the version that it has, and the response that it gets."""
        now = time.time() if now is None else now
        key = client.node_id, client.type_name, client.role
        sidecar = self._sidecars.pop(key, None)
        if sidecar is None:
            sidecar = Sidecar(client, version, now, now)
        else:
            self._bytes -= sidecar.client.size
        self._bytes += client.size
        while self._sidecars and (len(self._sidecars) >= self._limit or self._bytes > self._max_bytes):
            self._forget_oldest()
        self._sidecars[key] = sidecar
        if response.state == "found":
            # Envoy's REST client does not report that it rejected a configuration. It polls again with its old version.
            polls_again = sidecar.sent == response.version and sidecar.version == version
            sidecar.rejected = response.version if polls_again or client.error else ""
            sidecar.sent = response.version
        else:
            sidecar.sent = sidecar.rejected = ""
        sidecar.client, sidecar.version, sidecar.last_seen = client, version, now

    def forget_silent(self, now: float | None = None) -> None:
        """Forget the sidecars that have been silent for longer than the expiry time."""
        oldest = (time.time() if now is None else now) - self._expiry_seconds
        while self._sidecars and next(iter(self._sidecars.values())).last_seen < oldest:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._bytes -= self._sidecars.pop(next(iter(self._sidecars))).client.size

    def statuses(self, snapshot: Snapshot) -> Iterator[tuple[Sidecar, DiscoveryResponse, ConfigStatus]]:
        """Yield each sidecar with what it should have and its status, most recent poll first."""
        for sidecar in reversed(list(self._sidecars.values())):
            current = snapshot.current(sidecar.client)
            status: ConfigStatus
            if current.state != "found":
                status = "UNKNOWN"
            elif current.version == sidecar.version:
                status = "SYNCED"
            else:
                status = "ERROR" if sidecar.rejected == current.version else "STALE"
            yield sidecar, current, status

    def report(
        self, snapshot: Snapshot, status: ConfigStatus | None = None, limit: int = 500, offset: int = 0
    ) -> tuple[dict[ConfigStatus, int], list[SidecarStatus]]:
        """Return the number of sidecars by status, and one page of those that have `status` (None: any status).

        A page ends after `limit` sidecars, or as soon as it has MAX_PAGE_BYTES.
        """
        counts: dict[ConfigStatus, int] = dict.fromkeys(CONFIG_STATUSES, 0)
        page: list[SidecarStatus] = []
        size = 0
        for sidecar, expected, found in self.statuses(snapshot):
            counts[found] += 1
            if status in (None, found):
                offset -= 1
                if offset < 0 and len(page) < limit and size < MAX_PAGE_BYTES:
                    size += sidecar.client.size
                    page.append(status_of(sidecar, expected, found))
        return counts, page


def restart_for(sidecar: Sidecar, expected: DiscoveryResponse) -> tuple[str, ...]:
    """Return the keys of the expected policy that need a restart. Envoys that get whole listeners need none."""
    client = sidecar.client
    if expected.policy is None or client.type_name != "extension_configs":
        return ()
    return client.started_with.lacks(expected.policy)


def status_of(sidecar: Sidecar, expected: DiscoveryResponse, status: ConfigStatus) -> SidecarStatus:
    """Return what there is to say about a sidecar, in a form for people."""
    client, key = sidecar.client, sidecar.client.key
    error = client.error or client.reason
    if status == "ERROR" and not error:
        error = "The sidecar was sent the expected version but polled again with its old one. See the sidecar's log."
    if status == "UNKNOWN" and key and not error:
        error = f"No policy has the name {shown(key.policy_name)}."
    return SidecarStatus(
        node_id=client.node_id,
        type=client.type_name,
        role=client.role,
        policy=key.policy_name if key else None,
        labels=dict(key.labels) if key else {},
        version=sidecar.version,
        expected_version=expected.version,
        status=status,
        error=error,
        restart_for=restart_for(sidecar, expected),
        first_seen=sidecar.first_seen,
        last_seen=sidecar.last_seen,
    )
