"""Two Envoy configs against each other, in turns, on one body: the quick answer while tuning.

    python tests/bench/ab.py --a header-only --b ours --body 29KB
    python tests/bench/ab.py --a old.lua --b new.lua --body 4KB --rounds 15

A and B are `none`, `header-only`, `ours`, a .lua script (put where our filter stands), or an Envoy bootstrap.
The body is a name (see --help) or a file. Each round loads A, then B (the next round B, then A); each round gives one
ratio B/A, and the answer is the median of those: a disturbance that lasts longer than a round hits both sides alike.
CPU/request is steadier than requests/s on a busy machine: it does not count the time others took.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import bodies
import configs
from load import Request, Slice, quartiles, run_wrk, write_script
from processes import BenchError, Cores, find_envoy


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--a", required=True, metavar="CONFIG")
    parser.add_argument("--b", required=True, metavar="CONFIG")
    parser.add_argument("--body", default="29KB", help=f"a file, or one of {', '.join(bodies.NAMES)}")
    parser.add_argument("--replace", choices=bodies.PLACES, help="the body already has a priority, there")
    parser.add_argument("--route", help="path of the request; default: the body's, or the chat render route for a file")
    parser.add_argument("--header", default="5", help="value of X-Vllm-Priority; empty: no such header")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=1, help="of each stretch of load")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--envoy", help="path of the Envoy to run")
    options = parser.parse_args(arguments)
    try:
        return compare(options)
    except BenchError as error:
        print(f"ab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def compare(options: argparse.Namespace) -> int:
    """Run it and print it."""
    request = _request(options)
    binary, cores = find_envoy(options.envoy), Cores()
    with tempfile.TemporaryDirectory(prefix="ab-") as name:
        folder = Path(name)
        script = write_script(request, folder, "request")
        with configs.side_by_side(binary, {"A": options.a, "B": options.b}, cores, folder) as (drain, proxies):
            print(f"{cores}; {len(request.body):,} bytes to {request.route}, {options.connections} connections")
            rounds: list[dict[str, Slice]] = []
            for number in range(options.rounds + 1):
                turn = {}
                for side in ("AB", "BA")[number % 2]:
                    proxy, port = proxies[side]
                    turn[side] = run_wrk(
                        script, port, options.connections, options.seconds, cores.load, [proxy], [drain]
                    )
                    if not proxy.running:
                        raise BenchError(f"Envoy {side} ended: {proxy.log.read_text()[-300:]}")
                if number:  # the first warms both up: connections, the JIT, the heap
                    rounds.append(turn)
                    print(f"\r{number}/{options.rounds}", end="", file=sys.stderr, flush=True)
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    _print(options, rounds)
    return 0


def _request(options: argparse.Namespace) -> Request:
    if options.body in bodies.NAMES:
        body = bodies.body(options.body)
    elif Path(options.body).is_file():
        body = bodies.Body(options.body, "/v1/chat/completions/render", Path(options.body).read_bytes(), options.body)
    else:
        raise BenchError(f"--body {options.body}: no such file; allowed: a file, or {', '.join(bodies.NAMES)}")
    headers = {"content-type": "application/json"}
    if options.header:
        headers[bodies.HEADER] = options.header
    data = body.with_priority(options.replace) if options.replace else body.data
    return Request(options.route or body.route, data, headers)


def _print(options: argparse.Namespace, rounds: list[dict[str, Slice]]) -> None:
    print(f"{'':2} {'config':24} {'req/s':>9} {'CPU us/req':>11} {'core busy':>10} {'load busy':>10} {'errors':>7}")
    for side, named in (("A", options.a), ("B", options.b)):
        turns = [turn[side] for turn in rounds]
        rate, cpu, busy, load_busy = (
            statistics.median(getattr(turn, key) for turn in turns) for key in ("rate", "cpu", "busy", "load_busy")
        )
        errors = sum(turn.errors for turn in turns)
        print(f"{side:2} {named[-24:]:24} {rate:9,.0f} {cpu * 1e6:11,.1f} {busy:10.0%} {load_busy:10.0%} {errors:7,}")
    for what, ratios in (
        ("requests/s, B/A", [turn["B"].rate / max(1e-9, turn["A"].rate) for turn in rounds]),
        ("as CPU/request, A/B", [turn["A"].cpu / max(1e-12, turn["B"].cpu) for turn in rounds]),
    ):
        low, middle, high = quartiles(ratios)
        print(f"{what:22} {middle:.3f}  (half of the {len(ratios)} rounds within {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    sys.exit(main())
