"""Waits for what another process does."""

import time
from collections.abc import Callable

from .upstream import WAIT


def until(condition: Callable[[], object], what: str, seconds: float = 3 * WAIT) -> None:
    """Wait for a condition; `what` it is goes into the failure."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"timed out while waiting for {what}"
        time.sleep(0.02)
