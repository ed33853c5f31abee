"""What a request's cost in Lua is made of: instructions of Envoy's process a request, by valgrind's callgrind.

    python tests/bench/instructions.py
    python tests/bench/instructions.py --bodies 29KB --only header-only,ours
    python tests/bench/instructions.py --bodies 200KB-tools --only header-only,ours --replace end --requests 100

It counts and does not time, so other work on the machine does not show in it. The steps are a ladder: each is the one
before and one thing more that a filter cannot do without if it edits the body, counts, logs and answers with a header;
the last is ours, so what is left over is the reading of value, route and JSON. System calls are not in the count: of a
whole request, which they are part of, the shares are smaller. Prints Markdown.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

import bodies
import configs
from load import require
from processes import BenchError, Config, Process, chosen, find_envoy, free_port, start_envoy

_HEADERS = "".join(
    f'headers:get("{name}") ' for name in (":path", ":method", "content-length", "content-encoding", "content-type")
)
_REPORT = '"5; source=header; outcome=inserted"'
_NOTE = f'handle:streamInfo():dynamicMetadata():set("vllm_priority", "report", {_REPORT}) '
_ANSWERS = "the response header from it, by Envoy"

LADDER: tuple[tuple[str, str], ...] = (
    ("header-only", ""),
    ("five more headers read", _HEADERS),
    ("the header removed", 'headers:remove("x-vllm-priority") '),
    ("the body held until it is complete", "local body = handle:body() "),
    ("its bytes read", "local bytes = body:getBytes(0, body:length()) "),
    ("its bytes written", "body:setBytes(bytes) "),
    ("a counter", 'handle:stats():counter("inserted"):inc() '),
    ("an entry of metadata for the access log and the response", _NOTE),
    (_ANSWERS, ""),
)
"""What a step adds to the script; the last adds nothing there."""


_OURS = ("ours", _NO_HEADER := "ours without the header")
STEPS = (*(name for name, _ in LADDER), *_OURS)


def script(step: str) -> str:
    """The header-only filter and all steps up to this one."""
    request = ""
    for name, more in LADDER:
        request += more
        if name == step:
            break
    return (
        "function envoy_on_request(handle) local headers = handle:headers() "
        f'local value = headers:get("x-vllm-priority") {request}end'
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", default="100B,29KB", help=f"comma-separated, of: {', '.join(bodies.NAMES)}")
    parser.add_argument("--replace", choices=bodies.PLACES, help="the body already has a priority, there")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--only", help=f"comma-separated, of: {', '.join(STEPS)}")
    parser.add_argument("--envoy", help="path of the Envoy to run")
    options = parser.parse_args(arguments)
    try:
        steps = chosen("--only", options.only, STEPS)
        names = chosen("--bodies", options.bodies, bodies.NAMES)
        require("valgrind", "valgrind")
        require("h2load", "nghttp2-client")
        _run(steps, names, options.replace, options.requests, find_envoy(options.envoy))
    except BenchError as error:
        print(f"instructions: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(steps: list[str], names: list[str], replace: bodies.Place | None, requests: int, binary: str) -> None:
    with tempfile.TemporaryDirectory(prefix="instructions-") as folder, ThreadPoolExecutor(len(names)) as pool:
        counts: dict[str, list[float]] = {name: [] for name in names}
        print(f"| thousand instructions a request | {' | '.join(f'{name} | more' for name in names)} |")
        print(f"|---|{'---:|' * 2 * len(names)}")
        for step in steps:
            ways = [pool.submit(_step, step, name, replace, requests, binary, Path(folder)) for name in names]
            cells = []
            for name, way in zip(names, ways, strict=True):
                counts[name].append(way.result())
                more = counts[name][-1] - counts[name][-2] if len(counts[name]) > 1 else 0.0
                cells += [f"{counts[name][-1] / 1e3:.1f}", f"{more / 1e3:+.1f}"]
            print(f"| {step} | {' | '.join(cells)} |", flush=True)


def _step(step: str, name: str, replace: bodies.Place | None, requests: int, binary: str, parent: Path) -> float:
    body = bodies.body(name)
    with tempfile.TemporaryDirectory(dir=parent) as at:
        folder = Path(at)
        data = folder / "body"
        data.write_bytes(body.with_priority(replace) if replace else body.data)
        drain_port, port = free_port(), free_port()
        config = configs.product()
        if step not in _OURS:
            own = configs.lua_filter(script(step))
            own["typed_config"]["clear_route_cache"] = False  # as ours has it; on, each changed header costs a routing
            config = configs.with_filter(config, [own], answers=step == _ANSWERS)
        with start_envoy(binary, configs.drain(drain_port, free_port()), "drain", drain_port, folder, None):
            config = configs.placed(config, port, drain_port)
            return _count(binary, config, port, body.route, data, step != _NO_HEADER, requests, folder)


def _count(
    binary: str,
    config: Config,
    port: int,
    route: str,
    data: Path,
    with_header: bool,
    requests: int,
    folder: Path,
) -> float:
    """Instructions a request, of one Envoy that has been warmed up."""
    path = folder / "counted.json"
    path.write_text(json.dumps(config))
    command = [
        "valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder / 'callgrind.out'}",
        "--smc-check=all", binary, "-c", str(path), "--use-dynamic-base-id", "--concurrency", "1", "-l", "error",
    ]  # fmt: skip
    log = folder / "valgrind.log"
    with Process(command, log) as envoy:
        envoy.wait_for_port(port, 180)

        def load(count: int) -> None:
            url = f"http://127.0.0.1:{port}{route}"
            headers = ["-H", "content-type: application/json", *(["-H", f"{bodies.HEADER}: 5"] if with_header else [])]
            run = subprocess.run(
                ["h2load", "--h1", "-n", str(count), "-c", "1", "-d", str(data), *headers, url],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if f"{count} succeeded" not in run.stdout:
                raise BenchError(f"h2load: {run.stdout.strip().splitlines()[-1:]}")

        load(300)  # the JIT compiles what is hot
        _instrument(envoy.pid, "on")
        load(requests)
        _instrument(envoy.pid, "off")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        found = re.search(r"Collected : (\d+)", log.read_text(errors="replace"))
        if found:
            return int(found[1]) / requests
        time.sleep(0.2)
    raise BenchError(f"valgrind gave no count: {log.read_text(errors='replace')[-300:]}")


def _instrument(process: int, switch: str) -> None:
    run = subprocess.run(["callgrind_control", "-i", switch, str(process)], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise BenchError(f"callgrind_control: {run.stderr.strip() or run.stdout.strip()}")


if __name__ == "__main__":
    sys.exit(main())
