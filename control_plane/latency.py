"""How long interactive requests take beside a batch: the figure for which people set priorities.

The same load is sent to an engine directly and through its sidecar. All priorities are set by the header, on
/inference/v1/generate.
"""

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import httpx

from control_plane.vllm import GENERATE_ROUTE, PRIORITY_HEADER

INTERACTIVE_PRIORITY, BATCH_PRIORITY = -10, 10


@dataclass(frozen=True)
class Load:
    """The load. Each batch client sends its next request when the last one has ended."""

    batch_clients: int = 8
    batch_tokens: int = 120
    interactive_tokens: int = 8
    interval_seconds: float = 0.4
    """An interactive request is sent this often, whether or not earlier ones have ended."""
    seconds: float = 6.0
    """How long requests are sent. Those that were sent are waited for."""


@dataclass(frozen=True)
class Sample:
    """One interactive request: when it was sent, after the start, and how long it took, in seconds."""

    sent: float
    seconds: float


@dataclass(frozen=True)
class Latency:
    """What became of a load."""

    interactive: tuple[Sample, ...]
    batch_served: int
    """Batch requests that ended while the load was sent."""

    @property
    def median(self) -> float:
        """The median time of an interactive request, in seconds."""
        return statistics.median(sample.seconds for sample in self.interactive)

    @property
    def slowest(self) -> float:
        """The longest time of an interactive request, in seconds."""
        return max(sample.seconds for sample in self.interactive)

    def to_json(self) -> dict[str, Any]:
        """Return the figures and the samples for a machine."""
        return {
            "interactive_median_seconds": self.median,
            "interactive_slowest_seconds": self.slowest,
            "batch_served": self.batch_served,
            "interactive": [asdict(sample) for sample in self.interactive],
        }


def sentence(load: Load, straight: Latency, through: Latency) -> str:
    """Return the result in one sentence, on two lines."""
    return (
        f"Beside {load.batch_clients} batch clients, the median interactive request takes {straight.median:.2f} s"
        f" straight at vLLM\nand {through.median:.2f} s through the sidecar."
    )


async def measure(url: str, load: Load, *, timeout_seconds: float = 120.0) -> Latency:
    """Send the load to an engine, or to its sidecar, and wait for all responses.

    Raises:
        httpx.HTTPError: a request fails, or a response is not 200.
    """
    started = time.monotonic()
    end = started + load.seconds
    ended: list[float] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_seconds, limits=limits, trust_env=False) as client:

        async def send(priority: int, tokens: int) -> Sample:
            sent = time.monotonic()
            response = await client.post(
                GENERATE_ROUTE,
                json={"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": tokens, "ignore_eos": True}},
                headers={PRIORITY_HEADER: str(priority)},
            )
            response.raise_for_status()
            return Sample(sent - started, time.monotonic() - sent)

        async def batch() -> None:
            while time.monotonic() < end:
                await send(BATCH_PRIORITY, load.batch_tokens)
                ended.append(time.monotonic())

        async with asyncio.TaskGroup() as group:
            for _ in range(load.batch_clients):
                group.create_task(batch())
            interactive = []
            while (now := time.monotonic()) < end:
                interactive.append(group.create_task(send(INTERACTIVE_PRIORITY, load.interactive_tokens)))
                await asyncio.sleep(max(0.0, min(now + load.interval_seconds, end) - time.monotonic()))
    samples = tuple(task.result() for task in interactive)
    return Latency(samples, sum(moment <= end for moment in ended))
