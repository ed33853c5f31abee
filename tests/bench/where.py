"""Where a request's CPU time goes, kernel and all: samples of Envoy under load, by `perf`, as Markdown.

    python tests/bench/where.py                                  the header-only filter and ours, four bodies
    python tests/bench/where.py --configs none,ours --bodies 16MB

Microseconds a request: the CPU time that the scheduler counted, shared out by samples of the CPU clock (no hardware
counters are needed). The configs take turns. Envoy's own symbols are stripped, so its functions, LuaJIT's interpreter
and the collector are one row; what a body costs stands in the copies of kernel and libc.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import bodies
import configs
from load import Request, require, run_wrk, write_script
from processes import BenchError, Cores, chosen, find_envoy

KINDS: tuple[tuple[str, str, str], ...] = (
    ("kernel: bytes in and out of sockets", "kernel", "_copy_to_iter|_copy_from_iter|copy_user|rep_movs"),
    ("kernel: all else", "kernel", ""),
    ("libc: memmove, bytes copied", "libc", "memmove|memcpy"),
    ("libc: memchr, the scan", "libc", "memchr"),
    ("libc: memcmp, a string that Lua has already", "libc", "memcmp"),
    ("libc: all else", "libc", ""),
    ("Lua that the JIT compiled", "[jit]", ""),
    ("Envoy, with LuaJIT's interpreter and collector", "", ""),
)
"""What a sample is counted as: the first whose parts are in its object's and its symbol's name."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--configs", default="header-only,ours", help="comma-separated; none, header-only, ours, or files"
    )
    parser.add_argument(
        "--bodies", default="100B,29KB,400KB,1MB", help=f"comma-separated, of: {', '.join(bodies.NAMES)}"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=int, default=2, help="of each stretch of load")
    parser.add_argument("--envoy", help="path of the Envoy to run")
    options = parser.parse_args(arguments)
    try:
        names = chosen("--bodies", options.bodies, bodies.NAMES)
        require("perf", "linux-perf")
        columns = {
            f"{name}, {config}": shares
            for name in names
            for config, shares in _sampled(name, options.configs.split(","), options).items()
        }
    except BenchError as error:
        print(f"where: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"| µs of CPU a request | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for kind, _, _ in KINDS:
        print(f"| {kind} | {' | '.join(f'{shares[kind]:.0f}' for shares in columns.values())} |")
    print(f"| all | {' | '.join(f'{sum(shares.values()):.0f}' for shares in columns.values())} |")
    return 0


def _sampled(name: str, named: Sequence[str], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """config -> kind -> microseconds a request, medians of the rounds."""
    binary, cores, body = find_envoy(options.envoy), Cores(), bodies.body(name)
    rounds: dict[str, list[dict[str, float]]] = {config: [] for config in named}
    with tempfile.TemporaryDirectory(prefix="where-") as at:
        folder = Path(at)
        data = folder / "perf.data"
        headers = {"content-type": "application/json", bodies.HEADER: "5"}
        script = write_script(Request(body.route, body.data, headers), folder, "request")
        with configs.side_by_side(binary, {config: config for config in named}, cores, folder) as (drain, proxies):
            for number in range(options.rounds + 1):
                print(f"\r\033[K{name}: round {number} of {options.rounds}", end="", file=sys.stderr, flush=True)
                for config in named if number % 2 else named[::-1]:
                    proxy, port = proxies[config]
                    command = f"perf record -q -F 1999 -e cpu-clock -o {data} -p {proxy.pid}".split()
                    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as perf:
                        stretch = run_wrk(script, port, 8, options.seconds, cores.load, [proxy], [drain])
                        perf.terminate()
                        _, said = perf.communicate()
                    if number:  # the first warms up
                        rounds[config].append(_shares(data, stretch.cpu * 1e6, said.decode(errors="replace")))
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    return {
        config: {kind: statistics.median(each[kind] for each in found) for kind, _, _ in KINDS}
        for config, found in rounds.items()
    }


def _kind(symbol: str) -> str:
    return next(
        kind for kind, place, parts in KINDS if place in symbol and any(part in symbol for part in parts.split("|"))
    )


def _shares(data: Path, whole: float, said: str) -> dict[str, float]:
    """`whole` shared out over the kinds, by the samples in a perf.data file."""
    command = ["perf", "report", "-i", str(data), "--no-children", "-g", "none", "-F", "sample,dso,symbol", "--stdio"]
    report = subprocess.run(command, capture_output=True, text=True, check=False)
    counts: Counter[str] = Counter()
    for line in report.stdout.splitlines():
        samples, _, rest = line.strip().partition(" ")
        if samples.isdigit():
            counts[_kind(rest.lower())] += int(samples)
    if not counts:
        raise BenchError(f"perf gave no samples: {(said or report.stderr).strip()[-200:]}")
    return {kind: whole * counts[kind] / counts.total() for kind, _, _ in KINDS}


if __name__ == "__main__":
    sys.exit(main())
