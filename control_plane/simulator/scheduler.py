"""The order in which requests run: a fixed number of slots, and a queue in front of them."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Slots:
    """The scheduler's slots and its queue.

    A running request is never evicted in favour of a waiting one. Source: vllm/v1/core/sched/request_queue.py.
    """

    def __init__(self, count: int, by_priority: bool) -> None:
        """Create free slots.

        Args:
            count: The number of requests that run at the same time; the others wait.
            by_priority: Order the queue by (priority, arrival) if true, and by arrival alone otherwise.
        """
        self.running = 0
        self._count = count
        self._by_priority = by_priority
        self._arrivals = itertools.count()
        self._queue: list[tuple[int, int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """The number of requests in the queue."""
        return sum(not turn.done() for _, _, turn in self._queue)

    @asynccontextmanager
    async def slot(self, priority: int) -> AsyncIterator[None]:
        """Wait for a slot, hold it during the block, and free it. A request that is cancelled leaves the queue."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (priority if self._by_priority else 0, next(self._arrivals), turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.running -= 1
            turn.cancel()
            self._admit()

    def _admit(self) -> None:
        while self._queue and (self._queue[0][2].done() or self.running < self._count):
            turn = heapq.heappop(self._queue)[2]
            if not turn.done():
                self.running += 1
                turn.set_result(None)
