"""What the handlers of one simulated server share: its limits, its scheduler and its metrics."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass

from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from control_plane.simulator.errors import VllmError
from control_plane.simulator.protocol import SamplingParams
from control_plane.simulator.scheduler import Slots
from control_plane.simulator.settings import SimulatorSettings
from control_plane.simulator.tokens import REPLY_TOKENS, random_id, reply_tokens


@dataclass(frozen=True)
class Job:
    """What to generate: `choices` times `tokens` tokens, after a prompt of `prompt` tokens."""

    request_id: str
    prompt: int
    tokens: int
    choices: int
    finish: str
    priority: int

    @property
    def reply(self) -> list[int]:
        """The token ids of each choice."""
        return reply_tokens(self.tokens, ends=self.finish == "stop")


class SimulatedServer:
    """The state of one simulated server."""

    def __init__(self, settings: SimulatorSettings) -> None:
        """Create the scheduler and, for an engine, the metrics."""
        self.settings = settings
        self.slots = Slots(settings.slots, settings.scheduling == "priority")
        self.registry = CollectorRegistry()
        if settings.kind == "engine":
            self._register_metrics()

    def _register_metrics(self) -> None:
        """Register the metrics that show the queue. Source: vllm/v1/metrics/loggers.py."""
        names, labels = ["engine", "model_name"], ("0", self.settings.model)
        gauges: tuple[tuple[str, str, Callable[[], int]], ...] = (
            ("running", "Number of requests in model execution batches.", lambda: self.slots.running),
            ("waiting", "Number of requests waiting to be processed.", lambda: self.slots.waiting),
        )
        for name, text, read in gauges:
            gauge = Gauge(f"vllm:num_requests_{name}", text, names, registry=self.registry)
            gauge.labels(*labels).set_function(read)
        preempted = Counter("vllm:num_preemptions", "Cumulative number of preemption.", names, registry=self.registry)
        preempted.labels(*labels)
        queued = Histogram("vllm:request_queue_time_seconds", "Time in WAITING phase.", names, registry=self.registry)
        self._queue_time = queued.labels(*labels)
        text = "Histogram of time to first token in seconds."
        first = Histogram("vllm:time_to_first_token_seconds", text, names, registry=self.registry)
        self._time_to_first_token = first.labels(*labels)

    def check_model(self, name: str | None) -> None:
        """Raise vLLM's 404 if this is not the served model; None stands for the served one."""
        if name is not None and name != self.settings.model:
            message = f"The model `{name}` does not exist. Valid aliases: {self.settings.model}."
            raise VllmError(message, "NotFoundError", 404, "model")

    def token_limit(self, requested: int | None, prompt: int) -> int:
        """Return how many tokens may be generated after a prompt of `prompt` tokens.

        Raises:
            VllmError: The prompt exceeds the context, or `requested` is below 1.
        """
        left = self.settings.max_model_len - prompt
        if left < 0:
            longest = self.settings.max_model_len
            raise VllmError(f"Input length ({prompt}) exceeds model's maximum context length ({longest}).")
        if requested is not None and requested < 1:
            message = f"max_tokens must be at least 1, got {requested}. (parameter=max_tokens, value={requested})"
            raise VllmError(message, param="max_tokens")
        return left if requested is None else min(left, requested)

    def job(self, request_id: str, prompt: int, params: SamplingParams, priority: int) -> Job:
        """Return the job for a prompt of `prompt` tokens, or raise VllmError if the limits do not allow it."""
        if params.n > self.settings.slots:
            message = f"sampling_params.n must be at most the server's max_num_seqs ({self.settings.slots})"
            raise VllmError(f"{message}, got {params.n}.")
        tokens = self.token_limit(params.max_tokens, prompt)
        ends = not params.ignore_eos and tokens >= REPLY_TOKENS
        finish = "stop" if ends else "length"
        return Job(request_id, prompt, REPLY_TOKENS if ends else tokens, params.n, finish, priority)

    async def steps(self, job: Job) -> AsyncGenerator[tuple[int, bool], None]:
        """Yield (token id, whether it is the last one), at the server's speed, once the job has a slot."""
        arrived = time.monotonic()
        async with self.slots.slot(job.priority):
            self._queue_time.observe(time.monotonic() - arrived)
            reply = job.reply
            for index, token in enumerate(reply, 1):
                await asyncio.sleep(1 / self.settings.tokens_per_second)
                if index == 1:
                    self._time_to_first_token.observe(time.monotonic() - arrived)
                yield token, index == len(reply)

    async def all_steps(self, job: Job) -> list[int]:
        """Return all token ids of the job."""
        return [token async for token, _ in self.steps(job)]


def base_id(request: Request, default: str | None = None) -> str:
    """Return the id that vLLM derives the request id from: X-Request-Id, the default, or a random one."""
    return request.headers.get("x-request-id") or default or random_id()


async def until_disconnect(request: Request, work: Awaitable[list[int]]) -> list[int]:
    """Return the result of `work`, or an empty list as soon as the client disconnects, as vLLM aborts the request."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else []
    finally:
        task.cancel()
        left.cancel()
