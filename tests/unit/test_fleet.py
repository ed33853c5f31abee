"""Who has what, from polls alone."""

import json

import pytest

from control_plane.fleet import Fleet, Report
from control_plane.policy import parse_policies
from control_plane.xds import Askers, Snapshot


class Replica:
    """One replica's memory of its sidecars, and its policy."""

    def __init__(self, **bounds: float) -> None:
        self.fleet = Fleet(**bounds)  # type: ignore[arg-type]
        self.askers = Askers()
        self.change(1)

    def change(self, default: int) -> None:
        self.snapshot = Snapshot(parse_policies(f"default: {default}"))

    def poll(
        self, version: str = "", node: str = "pod-1", role: str = "render", now: float = 0.0, error: str = ""
    ) -> str:
        """The version the sidecar ends up with if it takes what it is sent."""
        body = {"node": {"id": node, "metadata": {"role": role}}, "error_detail": {"message": error}}
        asker, _ = self.askers.read("extension_configs", json.dumps(body).encode())
        answer = self.snapshot.answer(asker, version)
        self.fleet.seen(asker, version, answer, now)
        return answer.version or version

    def only(self) -> Report:
        [report] = self.fleet.reports(self.snapshot)[1]
        return report


def test_a_sidecar_is_behind_until_it_comes_back_with_what_it_was_sent() -> None:
    replica = Replica()
    version = replica.poll()
    assert replica.only().standing == "behind"
    replica.poll(version)
    assert (replica.only().standing, replica.only().version) == ("up_to_date", version)


def test_a_change_of_policy_puts_a_sidecar_behind_before_its_next_poll() -> None:
    replica = Replica()
    replica.poll(replica.poll())
    replica.change(2)
    assert replica.only().standing == "behind"
    replica.poll(replica.poll(replica.only().version))
    assert replica.only().standing == "up_to_date"


def test_a_sidecar_that_comes_back_with_the_old_version_refused_the_new_one() -> None:
    replica = Replica()
    old = replica.poll()
    replica.poll(old)
    replica.change(2)
    replica.poll(old)
    assert replica.only().standing == "behind"
    replica.poll(old)
    assert replica.only().standing == "refused"
    assert "its own log says why" in replica.only().error


def test_a_refusal_ends_when_the_policy_is_mended() -> None:
    replica = Replica()
    old = replica.poll()
    replica.change(2)
    for _ in range(3):
        replica.poll(old)
    replica.change(3)
    assert replica.only().standing == "behind"
    replica.poll(replica.poll(old))
    assert replica.only().standing == "up_to_date"


def test_what_a_sidecar_says_of_its_refusal_is_reported() -> None:
    replica = Replica()
    replica.poll(error="script load error: unexpected symbol")
    assert (replica.only().standing, replica.only().error) == ("refused", "script load error: unexpected symbol")


def test_a_sidecar_of_an_unknown_role_is_shown_with_the_reason() -> None:
    replica = Replica()
    replica.poll(role="router")
    assert replica.only().standing == "unknown"
    assert "allowed: render, engine" in replica.only().error


def test_the_longest_silent_is_forgotten_first() -> None:
    replica = Replica(limit=2)
    for node in ("a", "b", "a", "c"):
        replica.poll(node=node)
    assert [report.node_id for report in replica.fleet.reports(replica.snapshot)[1]] == ["c", "a"]


def test_a_silent_sidecar_expires() -> None:
    replica = Replica(expiry=900.0)
    replica.poll(node="gone", now=0.0)
    replica.poll(node="here", now=800.0)
    replica.fleet.forget_silent(now=1000.0)
    assert replica.only().node_id == "here"


@pytest.mark.parametrize(("limit", "offset", "nodes"), [(2, 0, ["c", "b"]), (2, 2, ["a"]), (5, 3, [])])
def test_reports_come_in_pages_and_counts_are_of_all(limit: int, offset: int, nodes: list[str]) -> None:
    replica = Replica()
    for node in "abc":
        replica.poll(node=node)
    counts, reports = replica.fleet.reports(replica.snapshot, "behind", limit, offset)
    assert [report.node_id for report in reports] == nodes
    assert counts == {"up_to_date": 0, "behind": 3, "refused": 0, "unknown": 0}
