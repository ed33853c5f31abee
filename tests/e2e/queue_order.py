"""The order in which three requests finish on an engine with one slot, steered by its queue gauges."""

import contextlib
import http.client
import re
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

GENERATE = "/inference/v1/generate"
LONG = (500, 1500, 4000)
"""Tokens of A. It has to outlast the queueing of B and C; where a busy machine makes it too short, a longer one."""

SHORT = 30
"""Tokens of B and C, which so finish well apart."""

GIVE_UP_SECONDS = 120


def generate_request(tokens: int, **members: Any) -> dict[str, Any]:
    """A GenerateRequest whose answer has exactly `tokens` tokens."""
    return {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": tokens, "ignore_eos": True}, **members}


def finish_order(
    url: str,
    c_headers: Mapping[str, str] | None = None,
    c_members: Mapping[str, Any] | None = None,
    *,
    path: str = GENERATE,
    c_body: Mapping[str, Any] | None = None,
) -> str:
    """`"ABC"` where C waited for its turn and `"ACB"` where it went first.

    A takes the engine's one slot, B names no priority, C comes last: with these headers, on this path, and with
    `c_body`, or else a short request with these members. Each is sent once the gauges in /metrics show the one before
    it in its place.
    """
    body = c_body if c_body is not None else generate_request(SHORT, **(c_members or {}))
    for tokens in LONG:
        order = _finish_order(url, generate_request(tokens), (path, body, c_headers or {}))
        if order is not None:
            return order
    raise AssertionError(f"A finished before C was queued, even with {LONG[-1]} tokens")


def _finish_order(
    url: str, a_body: Mapping[str, Any], c: tuple[str, Mapping[str, Any], Mapping[str, str]]
) -> str | None:
    """None where A finished too early for the order to prove anything."""
    finished: list[str] = []
    failed: list[str] = []

    def send(name: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        try:
            answer = httpx.post(url + path, json=body, headers=dict(headers), timeout=GIVE_UP_SECONDS, trust_env=False)
            finished.append(name)
            if answer.status_code != 200:
                failed.append(f"{name}: {answer.status_code} {answer.text}")
        except httpx.HTTPError as error:
            failed.append(f"{name}: {error!r}")

    wait_for_gauges(url, running=0, waiting=0)
    threads: list[threading.Thread] = []
    too_early = False
    for request in (("A", GENERATE, a_body, {}), ("B", GENERATE, generate_request(SHORT), {}), ("C", *c)):
        thread = threading.Thread(target=send, args=request)
        thread.start()
        queued = wait_for_gauges(url, running=1, waiting=len(threads), unless=finished)
        threads.append(thread)
        if not queued:
            too_early = True
            break
    for thread in threads:
        thread.join(GIVE_UP_SECONDS)
    assert not failed, failed
    return None if too_early else "".join(finished)


def wait_for_gauges(url: str, *, running: int, waiting: int, unless: Sequence[str] = ()) -> bool:
    """True once /metrics shows these numbers of requests, False where `unless` has grown by then.

    AssertionError where it does not come to either.
    """
    deadline = time.monotonic() + GIVE_UP_SECONDS
    seen = None
    while time.monotonic() < deadline:
        seen = metrics(url, "vllm:num_requests_running", "vllm:num_requests_waiting")
        if unless:
            return False
        if seen == (running, waiting):
            return True
        time.sleep(0.02)
    raise AssertionError(f"(running, waiting) stayed {seen}, not {(running, waiting)}")


def gauge(url: str, name: str) -> float:
    """The sum of a metric's samples in /metrics."""
    return metrics(url, name)[0]


def metrics(url: str, *names: str) -> tuple[float, ...]:
    """The sum of the samples of each, all from one answer."""
    # Polled many times a second: httpx would read the system's certificates each time.
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    sums = []
    for name in names:
        samples = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        assert samples, f"{name} is not in {url}/metrics"
        sums.append(sum(map(float, samples)))
    return tuple(sums)
