"""The samples of the console and their charts."""

import json
import re
from pathlib import Path

import pytest

from control_plane.policy.load import parse_policies
from control_plane.server.console.timeline import HEIGHT, MAX_SAMPLES, WIDTH, Timeline, _rounded_up
from control_plane.server.discovery_request import RequestDecoder
from control_plane.server.fleet import Fleet
from control_plane.server.injections import InjectionCount, Injections
from control_plane.server.policy_file import PolicyFile
from control_plane.server.xds import Snapshot


class Replica:
    """What the timeline of one replica looks at."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "policy.yaml"
        self.file.write_text("default: 1\n")
        self.policy, self.fleet, self.injections = PolicyFile(self.file), Fleet(), Injections()
        self.timeline = Timeline(self.policy, self.fleet, self.injections)

    def poll(self, node: str, *, accepts: bool) -> None:
        body = {"node": {"id": node, "metadata": {"role": "render"}}}
        client, _ = RequestDecoder().decode("extension_configs", json.dumps(body).encode())
        response = self.policy.snapshot.respond(client, "")
        self.fleet.record(client, response.version if accepts else "", response)


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    return Replica(tmp_path)


def test_samples_count_sidecars_by_status_and_injections_since_the_last_sample(replica: Replica) -> None:
    replica.timeline.sample(1000)
    replica.poll("one", accepts=True)
    replica.poll("two", accepts=False)
    replica.injections.counts[InjectionCount("ml", "injected", "")] = 3
    replica.timeline.sample(1015)
    replica.injections.counts[InjectionCount("ml", "injected", "")] = 4
    replica.timeline.sample(1030)
    assert [sample.sidecars["SYNCED"] for sample in replica.timeline.samples] == [0, 1, 1]
    assert [sample.sidecars["STALE"] for sample in replica.timeline.samples] == [0, 1, 1]
    assert [sample.injections["injected"] for sample in replica.timeline.samples] == [0, 3, 1]


def test_a_chart_is_bounded_and_within_its_frame(replica: Replica) -> None:
    for number in range(120):
        replica.poll(f"pod-{number}", accepts=number % 2 == 0)
    for number in range(2 * MAX_SAMPLES):
        replica.timeline.sample(1000 + 15 * number)
    chart = replica.timeline.sidecars()
    assert chart.lines["SYNCED"].count(",") == MAX_SAMPLES
    points = [tuple(map(float, point.split(","))) for line in chart.lines.values() for point in line.split()]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    assert [tick.text for tick in chart.up] == ["0", "30", "60"]
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", tick.text) for tick in chart.across)


def test_a_chart_without_samples_has_empty_lines(replica: Replica) -> None:
    assert set(replica.timeline.sidecars().lines.values()) == {""}


def test_a_new_policy_is_marked(replica: Replica) -> None:
    replica.timeline.sample(replica.policy.loaded - 100)
    replica.file.write_text("default: 2\n")
    assert replica.policy.reload()
    replica.file.write_text("default: [\n")
    assert replica.policy.reload() is False
    replica.timeline.sample(replica.policy.loaded + 100)
    assert len(replica.timeline.sidecars().events) == 2, "the start and the new policy, not the rejected one"


@pytest.mark.parametrize(("value", "top"), [(0, 2), (1, 2), (3, 4), (99, 100), (101, 120), (10_000, 10_000)])
def test_the_scale_ends_at_a_round_number(value: int, top: int) -> None:
    assert _rounded_up(value) == top


def test_the_status_is_that_of_the_policy_in_force(replica: Replica) -> None:
    replica.poll("one", accepts=True)
    replica.policy.snapshot = Snapshot(parse_policies("default: 3"))
    replica.timeline.sample(1000)
    assert replica.timeline.samples[0].sidecars["STALE"] == 1
