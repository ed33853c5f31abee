"""The list of sidecars for people: filtered, searched, and in pages."""

from collections.abc import Mapping
from typing import NamedTuple

from control_plane.server.fleet import CONFIG_STATUSES, ConfigStatus, Fleet, Sidecar, SidecarStatus, status_of
from control_plane.server.xds import DiscoveryResponse, Snapshot
from control_plane.vllm import ROLES

PAGE_SIZE = 50
MAX_SEARCH = 200
_ORDER = {"ERROR": 0, "UNKNOWN": 1, "STALE": 2, "SYNCED": 3}
"""What needs a person comes first."""


class Filter(NamedTuple):
    """Which sidecars to list. The empty string: any."""

    status: str = ""
    role: str = ""
    search: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "Filter":
        """Return the filter of a query string. What is not a status or a role filters nothing."""
        status, role = query.get("status", ""), query.get("role", "")
        search = query.get("q", "")[:MAX_SEARCH].strip()
        return cls(status if status in CONFIG_STATUSES else "", role if role in ROLES else "", search)


class Page(NamedTuple):
    """One page of the list. `counts` are of all sidecars, `matching` of those that the filter lets through."""

    counts: dict[ConfigStatus, int]
    matching: int
    number: int
    pages: int
    rows: list[SidecarStatus]


def page_of(fleet: Fleet, snapshot: Snapshot, wanted: Filter, number: int) -> Page:
    """Return one page, the first of which is 1. A number that is too large gives the last page."""
    counts: dict[ConfigStatus, int] = dict.fromkeys(CONFIG_STATUSES, 0)
    found: list[tuple[int, str, tuple[Sidecar, DiscoveryResponse, ConfigStatus]]] = []
    search = wanted.search.lower()
    for sidecar, expected, status in fleet.statuses(snapshot):
        counts[status] += 1
        if wanted.status not in ("", status) or wanted.role not in ("", sidecar.client.role):
            continue
        if search and not _matches(sidecar, search):
            continue
        found.append((_ORDER[status], sidecar.client.node_id, (sidecar, expected, status)))
    found.sort(key=lambda entry: entry[:2])
    pages = max(1, -(-len(found) // PAGE_SIZE))
    number = min(max(1, number), pages)
    rows = [status_of(*row) for _, _, row in found[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]]
    return Page(counts, len(found), number, pages, rows)


def _matches(sidecar: Sidecar, search: str) -> bool:
    client = sidecar.client
    texts = [client.node_id, sidecar.version, client.error, client.reason]
    if client.key:
        texts += [client.key.policy_name or "", *(f"{name}={value}" for name, value in client.key.labels)]
    return any(search in text.lower() for text in texts)
