"""The order of the queue: does the engine serve an urgent request before one that arrived earlier?

One round works like this. Long requests fill all slots of the engine. Then an ordinary request with priority 0 is
sent, and an urgent one behind it. Once both wait, one slot is freed, and whichever starts was first in the queue. It
keeps the slot, so the other one cannot start, and a slow client cannot confuse their order.

Each step waits until the gauges show the previous one, never for a time: a busy machine makes it slower, not wrong.
"""

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import httpx

from control_plane.doctor.report import Verdict
from control_plane.doctor.responses import gauge_values, json_content, member, status_and_error
from control_plane.doctor.server import LOOK_AT_LOG, Server
from control_plane.vllm import GENERATE_ROUTE

_POLICY, _BY_BODY, _BY_HEADER = "scheduling policy", "order, by the body", "order, by the header"
_USE_PRIORITY_POLICY = "Restart vllm serve with --scheduling-policy priority."


class _UndecidedError(Exception):
    """The order cannot be determined. The text says why, and `next_step` what to do."""

    def __init__(self, seen: str, next_step: str) -> None:
        super().__init__(seen)
        self.next_step = next_step


@dataclass(frozen=True)
class _Order:
    """The result of one round: who started first, what the sidecar reported, and how many slots were filled."""

    urgent_first: bool
    report: str | None
    slots: int


async def check_queue_order(server: Server, tokens: list[int]) -> None:
    """Add the rows about the scheduling policy and the order.

    Args:
        server: An engine that can generate.
        tokens: The token ids of a prompt.
    """
    await _QueueOrder(server, tokens).check()


class _QueueOrder:
    """The rounds on one engine."""

    def __init__(self, server: Server, tokens: list[int]) -> None:
        self._server, self._tokens = server, tokens
        self._settings = server.settings
        self._policy: str | None = None
        self._slots: int | None = None

    async def check(self) -> None:
        """Run a round with the priority in the body, then one with the priority in the header, and add the rows."""
        server, priority = self._server, self._server.priority
        await self._read_server_info()
        if self._policy == "fcfs":
            self._add_fcfs("according to /server_info")
            return
        known = "The scheduling policy is priority, according to /server_info." if self._policy else ""
        try:
            by_body = await self._round(in_body=True)
        except _UndecidedError as reason:
            verdict: Verdict = "ok" if known else "unknown"
            seen = known or f"/server_info does not show the scheduling policy. {reason}"
            server.add(_POLICY, verdict, seen, "" if known else reason.next_step)
            server.add(_BY_BODY, "unknown", str(reason), reason.next_step)
            server.add(_BY_HEADER, "unknown", str(reason), reason.next_step)
            return
        if not by_body.urgent_first:
            if not known:
                self._add_fcfs("because a priority in the body did not change the order")
                return
            server.add(_POLICY, "ok", known, policy=self._policy)
            seen = f"The request with priority 0 started before the urgent one with {priority} in the body."
            next_step = "Something in front of the engine removes the body's priority. Examine the engine itself."
            server.add(_BY_BODY, "lost", seen, next_step, brief="urgent last")
            return
        seen = known or "The scheduling policy is priority, as the order shows."
        server.add(_POLICY, "ok", seen, policy="priority", slots=by_body.slots)
        seen = f"The urgent request with {priority} in the body started before the earlier one with priority 0."
        server.add(_BY_BODY, "ok", seen, brief="urgent first")
        try:
            by_header = await self._round(in_body=False)
        except _UndecidedError as reason:
            server.add(_BY_HEADER, "unknown", str(reason), reason.next_step)
            return
        said = server.reported(by_header.report)
        if by_header.urgent_first:
            seen = f"The urgent request with {priority} in the header started before the earlier one with priority 0."
            server.add(_BY_HEADER, "ok", f"{seen}{said}", brief="urgent first", applied=by_header.report)
        else:
            seen = f"The request with priority 0 started before the urgent one with {priority} in the header."
            next_step = server.advice_for_lost_header(by_header.report)
            server.add(
                _BY_HEADER, "lost", f"{seen}{said}", next_step, brief="urgent last", applied=by_header.report
            )  # fmt: skip

    def _add_fcfs(self, why: str) -> None:
        seen = f"The scheduling policy is fcfs (first come, first served), {why}. The engine ignores every priority."
        self._server.add(_POLICY, "lost", seen, _USE_PRIORITY_POLICY, brief="fcfs", policy="fcfs")
        seen = "Under fcfs, the order does not show whether the header counts."
        self._server.add(_BY_HEADER, "unknown", seen, _USE_PRIORITY_POLICY)

    async def _read_server_info(self) -> None:
        """Read the policy and the slots from /server_info, which exists if VLLM_SERVER_DEV_MODE=1 is set."""
        try:
            response = await self._server.client.get("/server_info", params={"config_format": "json"})
        except httpx.HTTPError:
            return
        scheduler = member(member(json_content(response), "vllm_config"), "scheduler_config")
        policy, slots = member(scheduler, "policy"), member(scheduler, "max_num_seqs")
        self._policy = policy if isinstance(policy, str) else None
        self._slots = slots if isinstance(slots, int) else None

    # -- one round

    async def _round(self, in_body: bool) -> _Order:
        """Run one round with the urgent priority in the body or in the header.

        Raises:
            _UndecidedError: The order would prove nothing.
        """
        if self._slots is not None and self._slots > self._settings.max_fill:
            raise self._too_many_slots(f"The engine has {self._slots} slots, according to /server_info")
        held: list[_HeldRequest] = []
        try:
            await self._wait_until_idle()
            return await self._observe(held, in_body)
        except httpx.HTTPError as error:
            raise _UndecidedError(f"A request failed: {self._server.reason(error)}.", LOOK_AT_LOG) from None
        finally:
            for request in held:
                await request.abort()

    async def _observe(self, held: "list[_HeldRequest]", in_body: bool) -> _Order:
        slots = await self._fill_slots(held)
        # The ordinary request names 0 itself, so that the default of a sidecar's policy does not apply to it.
        ordinary = self._send(held, {"priority": 0}, {})
        await self._wait_for_gauges(slots, 1, "the ordinary request waits", held)
        if in_body:
            urgent = self._send(held, {"priority": self._server.priority}, {})
        else:
            urgent = self._send(held, {}, {self._settings.header: str(self._server.priority)})
        await self._wait_for_gauges(slots, 2, "the urgent request waits, too", held)
        await held[0].abort()
        deadline = time.monotonic() + self._settings.queue_timeout
        while not (ordinary.started or urgent.started):
            for request in (ordinary, urgent):
                request.raise_if_ended()
            if time.monotonic() > deadline:
                raise _UndecidedError("Neither waiting request started after a slot was freed.", LOOK_AT_LOG)
            await asyncio.sleep(self._settings.poll)
        if ordinary.started and urgent.started:
            seen = "Both waiting requests started at the same time, so more than one slot was free."
            raise _UndecidedError(seen, self._use_one_slot)
        return _Order(urgent.started, urgent.report, slots)

    async def _fill_slots(self, held: "list[_HeldRequest]") -> int:
        """Send long requests until one waits, and abort that one. Return how many run."""
        for count in range(1, self._settings.max_fill + 2):
            self._send(held, {}, {})
            running, waiting = await self._wait_for_total(count, held)
            if waiting == 0:
                continue
            if waiting > 1 or running != count - 1:
                raise self._other_requests(running, waiting)
            await held.pop().abort()
            await self._wait_for_gauges(count - 1, 0, "the request that waited was aborted", held)
            return count - 1
        raise self._too_many_slots(f"The engine has more than {self._settings.max_fill} slots")

    @property
    def _use_one_slot(self) -> str:
        return f"Raise {self._server.spell('max_fill')}, or test a copy that was started with --max-num-seqs 1."

    def _too_many_slots(self, seen: str) -> _UndecidedError:
        return _UndecidedError(f"{seen}, so no request waits and the order proves nothing.", self._use_one_slot)

    def _other_requests(self, running: int, waiting: int) -> _UndecidedError:
        seen = f"The engine has other requests ({running} running, {waiting} waiting), so the order proves nothing."
        return _UndecidedError(seen, "Examine the engine again while nobody else uses it.")

    async def _wait_until_idle(self) -> None:
        """Wait until the engine has no requests.

        Raises:
            _UndecidedError: Other requests stay in the queue, or the gauges cannot be read.
        """
        deadline = time.monotonic() + min(3.0, self._settings.queue_timeout)
        while True:
            running, waiting = await self._read_gauges()
            if running == waiting == 0:
                return
            if time.monotonic() > deadline:
                raise self._other_requests(running, waiting)
            await asyncio.sleep(self._settings.poll)

    async def _wait_for_total(self, total: int, held: "list[_HeldRequest]") -> tuple[int, int]:
        """Wait until `total` requests have arrived and return how many are (running, waiting)."""
        deadline = time.monotonic() + self._settings.queue_timeout
        while True:
            running, waiting = await self._read_gauges()
            if running + waiting == total and running > 0:
                return running, waiting
            self._raise_if_pointless(held, deadline, (running, waiting), total, "the long requests arrived")
            await asyncio.sleep(self._settings.poll)

    async def _wait_for_gauges(self, running: int, waiting: int, step: str, held: "list[_HeldRequest]") -> None:
        """Wait until the gauges show exactly these numbers."""
        deadline = time.monotonic() + self._settings.queue_timeout
        while (seen := await self._read_gauges()) != (running, waiting):
            self._raise_if_pointless(held, deadline, seen, running + waiting, step)
            await asyncio.sleep(self._settings.poll)

    def _raise_if_pointless(
        self, held: "list[_HeldRequest]", deadline: float, seen: tuple[int, int], total: int, step: str
    ) -> None:
        """Raise _UndecidedError if waiting on does not help: a request ended, or the time is up."""
        for request in held:
            request.raise_if_ended()
        if time.monotonic() > deadline:
            if sum(seen) > total:
                raise self._other_requests(*seen)
            text = f"The gauges never showed that {step}: they show {seen[0]} running and {seen[1]} waiting."
            next_step = "Examine the engine itself: behind a load balancer, the gauges may belong to another engine."
            raise _UndecidedError(text, next_step)

    async def _read_gauges(self) -> tuple[int, int]:
        """Read how many requests are (running, waiting) from /metrics."""
        response = await self._server.client.get("/metrics")
        counts = []
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            values = gauge_values(response.text, name)
            if not values:
                seen = f"GET /metrics returned {response.status_code} without {name}."
                next_step = f"Use {self._server.spell('engine')} with the URL of the engine itself, with its /metrics."
                raise _UndecidedError(seen, next_step)
            if len(values) > 1:
                seen = f"This URL leads to {len(values)} engines with a queue each, so the order proves nothing."
                raise _UndecidedError(seen, "Test a copy that was started with --data-parallel-size 1.")
            counts.append(int(values[0]))
        return counts[0], counts[1]

    def _send(self, held: "list[_HeldRequest]", members: dict[str, Any], headers: dict[str, str]) -> "_HeldRequest":
        """Send a request that runs as long as the context allows, and append it to `held`."""
        longest = self._server.max_model_len or 2048
        params = {"max_tokens": max(longest - len(self._tokens), 1), "ignore_eos": True, "temperature": 0}
        body = {
            "model": self._server.model, "token_ids": self._tokens, "stream": True, "sampling_params": params,
            **members,
        }  # fmt: skip
        held.append(_HeldRequest(self._server, body, headers, self._use_one_slot))
        return held[-1]


class _HeldRequest:
    """A long request in flight. It occupies a slot, or a place in the queue, until it is aborted."""

    def __init__(self, server: Server, body: dict[str, Any], headers: dict[str, str], advice: str) -> None:
        self.started = False
        self.report: str | None = None
        self._advice = advice
        # A stream is silent while it waits in the queue.
        patient = httpx.Timeout(server.settings.timeout, read=3 * server.settings.queue_timeout)
        request = server.client.stream("POST", GENERATE_ROUTE, json=body, headers=headers, timeout=patient)
        self._task = asyncio.create_task(self._read(request, server.settings.report_header))

    async def _read(self, request: AbstractAsyncContextManager[httpx.Response], report_header: str) -> None:
        async with request as response:
            self.report = response.headers.get(report_header)
            if response.status_code != 200:
                await response.aread()
                seen = f"POST {GENERATE_ROUTE} returned {status_and_error(response)}."
                raise _UndecidedError(seen, LOOK_AT_LOG)
            async for _ in response.aiter_raw():
                self.started = True

    def raise_if_ended(self) -> None:
        """Raise the reason if the request has ended."""
        if self._task.done():
            self._task.result()
            raise _UndecidedError("A long request ended before the order was visible.", self._advice)

    async def abort(self) -> None:
        """Close the connection, which makes vLLM abort the request."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
