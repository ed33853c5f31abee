"""Samples of the last hour, and the charts that show them.

They are of what this process knows: the status of its sidecars, its injections, and its policies. What became of
requests only the sidecars know.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from control_plane.server.fleet import CONFIG_STATUSES, Fleet
from control_plane.server.injections import INJECTION_RESULTS, Injections
from control_plane.server.policy_file import PolicyFile

_log = logging.getLogger("vllm_priority.control_plane")

SAMPLE_SECONDS = 15
MAX_SAMPLES = 240
"""One hour."""

WIDTH, HEIGHT = 720, 220
LEFT, BOTTOM = 76, 36
"""Where the axes are: the texts beside them are larger on a small screen."""
_RIGHT, _TOP = 12, 24


class Sample(NamedTuple):
    """What was so at one time, in seconds since the epoch.

    `injections` counts what the webhook did since the sample before.
    """

    time: float
    sidecars: Mapping[str, int]
    injections: Mapping[str, int]


class Tick(NamedTuple):
    """A mark at an axis of a chart, in pixels, and its text."""

    at: float
    text: str


class Chart(NamedTuple):
    """Lines in a frame of WIDTH times HEIGHT pixels. `lines` are the points of each, for an SVG polyline."""

    lines: Mapping[str, str]
    across: list[Tick]
    up: list[Tick]
    events: list[Tick]


class Timeline:
    """The samples of the last hour."""

    def __init__(self, policy: PolicyFile, fleet: Fleet, injections: Injections) -> None:
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._policy = policy
        self._fleet = fleet
        self._injections = injections
        self._injected: Counter[str] = Counter()

    async def run(self) -> None:
        """Take samples for ever."""
        while True:
            try:
                self.sample(time.time())
            except Exception:
                # Whatever went wrong must not end the samples.
                _log.exception("Cannot take a sample for the console.")
            await asyncio.sleep(SAMPLE_SECONDS)

    def sample(self, now: float) -> None:
        """Take one sample."""
        counts: dict[str, int] = dict.fromkeys(CONFIG_STATUSES, 0)
        for _, _, status in self._fleet.statuses(self._policy.snapshot):
            counts[status] += 1
        injected: Counter[str] = Counter()
        for key, count in self._injections.counts.items():
            injected[key.result] += count
        since: dict[str, int] = {result: injected[result] - self._injected[result] for result in INJECTION_RESULTS}
        self._injected = injected
        self.samples.append(Sample(now, counts, since))

    def sidecars(self) -> Chart:
        """Return the chart of the sidecars by status."""
        return self._chart([sample.sidecars for sample in self.samples], CONFIG_STATUSES)

    def injections(self) -> Chart:
        """Return the chart of injections by result."""
        return self._chart([sample.injections for sample in self.samples], INJECTION_RESULTS)

    def _chart(self, values: Sequence[Mapping[str, int]], names: Sequence[str]) -> Chart:
        times = [sample.time for sample in self.samples]
        first, last = (times[0], times[-1]) if times else (0.0, 0.0)
        seconds = max(last - first, 1.0)
        top = _rounded_up(max((value[name] for value in values for name in names), default=0))

        def across(when: float) -> float:
            return round(LEFT + (when - first) / seconds * (WIDTH - LEFT - _RIGHT), 1)

        def up(value: float) -> float:
            return round(HEIGHT - BOTTOM - value / top * (HEIGHT - _TOP - BOTTOM), 1)

        lines = {
            name: " ".join(f"{across(when)},{up(value[name])}" for when, value in zip(times, values, strict=True))
            for name in names
        }
        marks = [first, first + seconds / 2, last] if seconds > 1 else [first]
        return Chart(
            lines,
            [Tick(across(when), time.strftime("%H:%M:%S", time.gmtime(when))) for when in marks],
            [Tick(up(value), str(value)) for value in dict.fromkeys((0, top // 2, top))],
            [
                Tick(across(version.time), "policy")
                for version in list(self._policy.history)
                if first < version.time < last and version.problem is None
            ],
        )


def _rounded_up(value: int) -> int:
    """Return the least even number of two digits, and zeros, that is not smaller."""
    step: int = 10 ** max(0, len(str(value)) - 2) * 2
    return max(2, -(-value // step) * step)
