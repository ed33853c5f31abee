"""What priorities are for: interactive requests beside a batch, straight at the engine and through its sidecar."""

import asyncio

import pytest

from control_plane.latency import Load, measure, sentence

LOAD = Load(batch_clients=16, batch_tokens=60, interactive_tokens=8, interval_seconds=1.0, seconds=25.0)


def test_interactive_requests_overtake_a_batch_through_the_sidecar_only(
    engine_url: str, engine_sidecar_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = asyncio.run(measure(engine_url, LOAD))
    through = asyncio.run(measure(engine_sidecar_url, LOAD))
    with capsys.disabled():
        served = f"{straight.batch_served} batch requests served straight, {through.batch_served} through"
        print(f"\n{sentence(LOAD, straight, through)}\nIn {LOAD.seconds:g} s: {served}.")
    assert through.median < straight.median
    assert through.slowest < straight.median, "even the longest waits only for what runs, not for the queue"
