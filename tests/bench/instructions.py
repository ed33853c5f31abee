"""What a request's cost in Lua is made of: instructions of Envoy's process a request, by valgrind's callgrind.

    python tests/bench/instructions.py
    python tests/bench/instructions.py --body 29KB --only header-only,ours

It counts and does not time, so other work on the machine does not show in it. Each step is the header-only filter and
one thing more; `ours` is all of it. System calls are not in the count: the share of a whole request is smaller.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

import bodies
import configs
from load import require
from processes import BenchError, Process, find_envoy, free_port, start_envoy

_REPORT = '"5; source=header; outcome=inserted"'
_NOTE = f'handle:streamInfo():dynamicMetadata():set("vllm_priority", "report", {_REPORT})'
_GETS = "".join(f'headers:get("{name}") ' for name in (":path", ":method", "content-type", "content-encoding"))
_CHANGES = 'headers:replace("content-length", headers:get("content-length")) headers:remove("x-vllm-priority")'

STEPS: dict[str, tuple[str, str]] = {
    "header-only": ("", ""),
    "four more headers read": (_GETS, ""),
    "a header replaced, one removed": (_CHANGES, ""),
    "the first chunk waited for": ("for chunk in handle:bodyChunks() do break end", ""),
    "its bytes read and written": (
        "for chunk in handle:bodyChunks() do chunk:setBytes(chunk:getBytes(0, chunk:length())) break end",
        "",
    ),
    "the last chunk waited for, too": ("for chunk in handle:bodyChunks() do end", ""),
    "a counter": ('handle:stats():counter("inserted"):inc()', ""),
    "an entry of metadata": (_NOTE, ""),
    "an empty envoy_on_response": ("", "function envoy_on_response(handle) end"),
    "metadata, and the answer's header from it": (
        _NOTE,
        "function envoy_on_response(handle) "
        'local found = handle:streamInfo():dynamicMetadata():get("vllm_priority") '
        'if found then handle:headers():replace("x-vllm-priority-applied", found.report) end end',
    ),
}


def script(step: str) -> str:
    """The header-only filter with one step more."""
    request, response = STEPS[step]
    return (
        "function envoy_on_request(handle) local headers = handle:headers() "
        f'local value = headers:get("x-vllm-priority") {request} end {response}'
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--body", default="100B", choices=bodies.NAMES)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--only", help=f"comma-separated, of: ours, {', '.join(STEPS)}")
    parser.add_argument("--envoy", help="path of the Envoy to run")
    options = parser.parse_args(arguments)
    try:
        names = options.only.split(",") if options.only else [*STEPS, "ours"]
        unknown = [name for name in names if name not in STEPS and name != "ours"]
        if unknown:
            raise BenchError(f"--only {unknown[0]}: unknown; allowed: ours, {', '.join(STEPS)}")
        require("valgrind", "valgrind")
        require("h2load", "nghttp2-client")
        _run(names, options.body, options.requests, find_envoy(options.envoy))
    except BenchError as error:
        print(f"instructions: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run(names: list[str], body_name: str, requests: int, binary: str) -> None:
    body = bodies.body(body_name)
    with tempfile.TemporaryDirectory(prefix="instructions-") as name:
        folder = Path(name)
        data = folder / "body"
        data.write_bytes(body.data)
        drain_port = free_port()
        base = None
        print(f"{'thousand instructions a request, ' + body_name:45} {'all':>8} {'more':>8}")
        with start_envoy(binary, configs.drain(drain_port, free_port()), "drain", drain_port, folder, None):
            for step in names:
                config = configs.product()
                if step != "ours":
                    config = configs.with_filter(config, [configs.lua_filter(script(step))])
                port = free_port()
                count = _count(
                    binary, configs.placed(config, port, drain_port), port, body.route, data, requests, folder
                )
                base = count if base is None else base
                print(f"{step:45} {count / 1e3:8.1f} {(count - base) / 1e3:+8.1f}", flush=True)


def _count(
    binary: str, config: configs.Config, port: int, route: str, data: Path, requests: int, folder: Path
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
            headers = ["-H", "content-type: application/json", "-H", f"{bodies.HEADER}: 5"]
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
