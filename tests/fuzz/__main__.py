"""`make fuzz`: many generated and mutated documents through the filter, on all cores.

It prints what fails as cases to paste into tests/fuzz/cases.py, and exits with 1 then.
"""

import argparse
import os
import secrets
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from .campaign import Failure, report, search

BATCH, WAVE = 250, 1000
"""Documents of one job, and those that one process checks before the results are looked at."""
ENOUGH = 2000
"""Violations after which a run ends."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--documents", type=int, default=20_000, help="how many to check (default: 20000)")
    parser.add_argument("--seconds", type=float, help="check for this long instead of a number of documents")
    parser.add_argument("--seed", type=int, help="repeat a run (default: another seed each time)")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one for each core)"
    )
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else secrets.randbelow(10**9)
    print(f"seed {seed}, {options.workers} processes", flush=True)
    began = time.monotonic()
    until = began + options.seconds if options.seconds else None
    last = sys.maxsize if until else options.documents
    count, start = 0, 0
    failures: list[Failure] = []
    with ProcessPoolExecutor(options.workers) as pool:
        while start < last and (until is None or time.monotonic() < until) and len(failures) < ENOUGH:
            end = min(start + options.workers * WAVE, last)
            jobs = [(seed, first, min(first + BATCH, end), until) for first in range(start, end, BATCH)]
            for checked, found in pool.map(_batch, jobs):
                count += checked
                failures += found
            start = end
    print(f"{count} documents in {time.monotonic() - began:.0f} s, {len(failures)} violations", flush=True)
    for kind in sorted({failure.kind for failure in failures}):
        of_kind = [failure for failure in failures if failure.kind == kind]
        print(f"\n{kind}: {len(of_kind)}, for example\n{report(seed, of_kind)}", flush=True)
    return 1 if failures else 0


def _batch(job: tuple[int, int, int, float | None]) -> tuple[int, list[Failure]]:
    seed, start, end, until = job
    return search(seed, range(start, end), until=until)


if __name__ == "__main__":
    sys.exit(main())
