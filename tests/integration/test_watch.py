"""`vllm-priority watch` on real sidecars in front of the recording upstream."""

import json
import os
import subprocess
import sys
import time

from .conftest import GENERATE, RENDER, SidecarFactory
from .upstream import RecordingUpstream
from .wire import call, priority


def test_watch_shows_what_became_of_priorities(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    front = sidecar("engine", "{classes: {batch: 50}, default: 1}", fresh=True)
    call(front.address, RENDER, b"{}", priority("batch"))
    command = [sys.executable, "-m", "control_plane.cli", "watch", "--sidecar", f"http://{front.admin}",
               "--sidecar", "http://127.0.0.1:1", "--interval", "0.3", "--json"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout
            first = json.loads(process.stdout.readline())
            assert [source["error"] for source in first["sidecars"]] == [None, "the connection was refused"]
            for value in ("batch", "batch", "-3", "high"):
                call(front.address, GENERATE, b"{}", priority(value))
            until = time.monotonic() + 20  # Envoy merges histograms every 5 seconds
            totals: dict[tuple[str, str], int] = {}
            counted = 0.0
            times: dict[str, object] = {}
            while not (counted and times) and time.monotonic() < until:
                found = json.loads(process.stdout.readline())
                totals = {(row["route"], row["outcome"]): row["total"] for row in found["requests"]}
                counted += sum(row["per_second"] or 0 for row in found["requests"])
                times = found["time_to_first_byte_ms"]["priority"]
        finally:
            process.terminate()
    assert totals == {(RENDER, "inserted"): 1, (GENERATE, "inserted"): 3, (GENERATE, "invalid"): 1}
    assert counted > 0
    assert set(times) == {"-10 to -1", "11 to 100"}
    assert "batch" in found["time_to_first_byte_ms"]["class"]
