"""The status of the sidecars, as their polls show it."""

import json

import pytest

from control_plane.policy.load import parse_policies
from control_plane.render.bootstrap import node_metadata
from control_plane.render.placement import Placement
from control_plane.server.discovery_request import RequestDecoder
from control_plane.server.fleet import Fleet, SidecarStatus
from control_plane.server.xds import Snapshot


def labelled(number: int) -> dict[str, str]:
    """As many labels, and as large ones, as a poll may have."""
    return {f"{number}-{index}-".ljust(253, "a") + "/" + "b" * 63: "c" * 63 for index in range(64)}


class Replica:
    """One replica's memory of its sidecars, and its policy."""

    def __init__(self, **bounds: float) -> None:
        self.fleet = Fleet(**bounds)  # type: ignore[arg-type]
        self.decoder = RequestDecoder()
        self.change(1)

    def change(self, default: int) -> None:
        self.snapshot = Snapshot(parse_policies(f"default: {default}"))

    def poll(
        self,
        version: str = "",
        node: str = "pod-1",
        role: str = "render",
        now: float = 0.0,
        error: str = "",
        **metadata: object,
    ) -> str:
        """Poll, and return the version that the sidecar has if it accepts the response."""
        body = {"node": {"id": node, "metadata": {"role": role, **metadata}}, "error_detail": {"message": error}}
        client, _ = self.decoder.decode("extension_configs", json.dumps(body).encode())
        response = self.snapshot.respond(client, version)
        self.fleet.record(client, version, response, now)
        return response.version or version

    def only(self) -> SidecarStatus:
        [sidecar] = self.fleet.report(self.snapshot)[1]
        return sidecar


def test_a_sidecar_is_stale_until_it_polls_with_the_version_that_it_was_sent() -> None:
    replica = Replica()
    version = replica.poll()
    assert replica.only().status == "STALE"
    replica.poll(version)
    assert (replica.only().status, replica.only().version) == ("SYNCED", version)


def test_a_policy_change_makes_a_sidecar_stale_before_its_next_poll() -> None:
    replica = Replica()
    replica.poll(replica.poll())
    replica.change(2)
    assert replica.only().status == "STALE"
    replica.poll(replica.poll(replica.only().version))
    assert replica.only().status == "SYNCED"


def test_a_sidecar_that_polls_again_with_its_old_version_has_rejected_the_new_one() -> None:
    replica = Replica()
    old = replica.poll()
    replica.poll(old)
    replica.change(2)
    replica.poll(old)
    assert replica.only().status == "STALE"
    replica.poll(old)
    assert replica.only().status == "ERROR"
    assert "See the sidecar's log." in replica.only().error


@pytest.mark.parametrize(
    ("started_with", "policy", "keys"),
    [
        ("{}", "ordinary: enforce", ("ordinary",)),
        ("ordinary: enforce", "ordinary: enforce", ()),
        ("ordinary: enforce", "{}", ()),
        ("{}", "routes: {root_path: /llm}", ("routes.root_path",)),
        ("routes: {root_path: /a}", "routes: {root_path: /llm}", ("routes.root_path",)),
        ("routes: {root_path: /llm}", "{}", ()),
        ("{}", "limits: {max_body_bytes: 99}", ()),
        ("limits: {max_body_bytes: 99}", "{}", ("limits.max_body_bytes",)),
        ("{}", "limits: {max_body_bytes: null}", ("limits.max_body_bytes",)),
        ("limits: {max_body_bytes: null}", "{}", ()),
    ],
)
def test_a_sidecar_needs_a_restart_for_what_its_own_configuration_lacks(
    started_with: str, policy: str, keys: tuple[str, ...]
) -> None:
    replica = Replica()
    metadata = node_metadata(parse_policies(started_with).default, Placement.default("render"))
    replica.poll(**json.loads(json.dumps(metadata)))
    replica.snapshot = Snapshot(parse_policies(policy))
    assert replica.only().restart_for == keys


def test_the_error_ends_when_the_policy_changes_again() -> None:
    replica = Replica()
    old = replica.poll()
    replica.change(2)
    for _ in range(3):
        replica.poll(old)
    replica.change(3)
    assert replica.only().status == "STALE"
    replica.poll(replica.poll(old))
    assert replica.only().status == "SYNCED"


def test_the_error_that_a_sidecar_sends_is_reported() -> None:
    replica = Replica()
    replica.poll(error="script load error: unexpected symbol")
    assert (replica.only().status, replica.only().error) == ("ERROR", "script load error: unexpected symbol")


def test_a_sidecar_with_an_unknown_role_is_reported_with_the_reason() -> None:
    replica = Replica()
    replica.poll(role="router")
    assert replica.only().status == "UNKNOWN"
    assert "Use render or engine." in replica.only().error


def test_the_sidecar_that_has_been_silent_longest_is_forgotten_first() -> None:
    replica = Replica(limit=2)
    for node in ("a", "b", "a", "c"):
        replica.poll(node=node)
    assert [sidecar.node_id for sidecar in replica.fleet.report(replica.snapshot)[1]] == ["c", "a"]


def test_a_sidecar_of_a_deleted_pod_is_forgotten_after_a_minute() -> None:
    replica = Replica()
    replica.poll(node="gone", now=0.0)
    replica.poll(node="here", now=55.0)
    replica.fleet.forget_silent(now=61.0)
    assert replica.only().node_id == "here"


@pytest.mark.parametrize(("limit", "offset", "nodes"), [(2, 0, ["c", "b"]), (2, 2, ["a"]), (5, 3, [])])
def test_a_page_holds_some_sidecars_and_the_counts_are_of_all(limit: int, offset: int, nodes: list[str]) -> None:
    replica = Replica()
    for node in "abc":
        replica.poll(node=node)
    counts, page = replica.fleet.report(replica.snapshot, "STALE", limit, offset)
    assert [sidecar.node_id for sidecar in page] == nodes
    assert counts == {"SYNCED": 0, "STALE": 3, "ERROR": 0, "UNKNOWN": 0}


def test_what_is_remembered_is_bounded_in_bytes_and_the_latest_polls_stay() -> None:
    replica = Replica(max_bytes=1_000_000)
    for number in range(300):
        replica.poll(node=f"pod-{number}", labels=labelled(number))
    counts, _ = replica.fleet.report(replica.snapshot)
    assert 10 < sum(counts.values()) < 50
    assert replica.fleet.report(replica.snapshot)[1][0].node_id == "pod-299"
    for number in range(100):
        replica.poll(node=f"small-{number}")
    for _ in range(3):
        replica.poll(node="pod-299", labels=labelled(299))
    assert sum(replica.fleet.report(replica.snapshot)[0].values()) > 100, "what was forgotten is not counted again"


def test_a_page_is_bounded_in_bytes() -> None:
    replica = Replica()
    for number in range(200):
        replica.poll(node=f"pod-{number}", labels=labelled(number))
    seen: list[str] = []
    while len(seen) < 200:
        page = replica.fleet.report(replica.snapshot, limit=2000, offset=len(seen))[1]
        assert 0 < len(json.dumps(page)) < 2 * 2**20
        seen += [sidecar.node_id for sidecar in page]
    assert sorted(seen) == sorted(f"pod-{number}" for number in range(200))
