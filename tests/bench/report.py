"""Results -> the tables, and whether the bars are reached. The bars are data: a missed one is printed, not raised."""

import math
import re
import shutil
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load import quartiles

Results = dict[str, Any]

OURS, BASE = "c", "b"


BARS = {
    "100B": 0.85,
    "4KB": 0.85,
    "29KB": 0.85,
    "200KB": 0.45,
    "170KB-short": 0.45,
    "200KB-tools": 0.40,
    "400KB": 0.65,
    "1MB": 0.75,
    "16MB": 0.75,
}
"""What the requests/s of OURS must reach, as a share of those of BASE, wherever the filter edits the body."""

EDITED_CASES = ("insert", "replace-front", "replace-middle", "replace-end")
UNTOUCHED_CASES = ("no-header", "other-route")

FRESH_SPREAD = 0.10
"""The fastest of several fresh processes of the filter may exceed the slowest by this share."""


def table(results: Results) -> str:
    """All tables, in Markdown."""
    machine = results["machine"]
    parts = [
        f"{machine['cpu']}, {machine['cores']} cores ({machine['pinned']}), Linux {machine['kernel']}, "
        f"Envoy {machine['envoy']}, {machine['date']}, commit {machine['commit']}, "
        f"load average {machine['load_before']:.1f} before and {machine['load_after']:.1f} after. "
        f"The run took {results['seconds'] / 60:.1f} minutes."
    ]
    if results["quick"]:
        parts.append("**A quick run: one round of three bodies. Not for quoting.**")
    writers: dict[str, Callable[[Results], list[str]]] = {
        "throughput": lambda results: [
            _bars(results),
            _spreads(results),
            _by_cpu(results),
            _ahead(results),
            _rates(results),
            _cpu(results),
        ],
        "latency": lambda results: [_latency(results)],
        "fresh": lambda results: [_fresh(results)],
        "probe": lambda results: [_right(results)],
        "growth": lambda results: [_growth(results)],
    }
    for part, write in writers.items():
        if results.get(part):
            parts += write(results)
    return "\n\n".join(part for part in parts if part) + "\n"


def publish(folder: Path, docs: Path) -> None:
    """Put table.md between the markers of performance.md, and the picture into images/."""
    page = docs / "performance.md"
    text = page.read_text()
    picture = "![Throughput, and time and memory against size, of seven ways](images/bench.svg)"
    block = f"<!-- bench -->\n{picture}\n\n{(folder / 'table.md').read_text()}<!-- /bench -->"
    page.write_text(re.sub(r"<!-- bench -->.*?<!-- /bench -->", lambda _: block, text, flags=re.S))
    (docs / "images").mkdir(exist_ok=True)
    shutil.copy(folder / "bench.svg", docs / "images" / "bench.svg")


@dataclass(frozen=True)
class Ratio:
    """Requests/s of one contender over another's: of the medians, and of each round that both had."""

    medians: float
    rounds: list[float]


def ratio(results: Results, one: str, other: str, case: str, body: str) -> Ratio | None:
    """Requests/s of `one` over `other`; None where one of them was not run, or got no answer."""
    first, second = _row(results, one, case, body), _row(results, other, case, body)
    if first is None or second is None:
        return None
    # Where one has more rounds than the other, only the common ones are compared: the machine was the same then.
    # A round in which the other got no answer at all is nothing to compare with.
    by_round = [dict(zip(row["rounds"], row["rate"], strict=True)) for row in (first, second)]
    pairs = [(rate, by_round[1][number]) for number, rate in by_round[0].items() if by_round[1].get(number)]
    if not pairs:
        return None
    medians = [statistics.median(rates) for rates in zip(*pairs, strict=True)]
    return Ratio(medians[0] / medians[1], [rate / base for rate, base in pairs])


def cpu_ratio(results: Results, one: str, other: str, case: str, body: str) -> float | None:
    """CPU a request of `other` over `one`: the ratio of rates, were CPU all that counts."""
    first, second = _row(results, one, case, body), _row(results, other, case, body)
    if first is None or second is None:
        return None
    return float(statistics.median(second["cpu_us"]) / statistics.median(first["cpu_us"]))


def _row(results: Results, letter: str, case: str, body: str) -> dict[str, Any] | None:
    wanted = (letter, case, body)
    return next((row for row in results["throughput"] if (row["contender"], row["case"], row["body"]) == wanted), None)


def _markdown(title: str, head: list[str], rows: list[list[str]], note: str = "") -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return f"### {title}\n\n" + (f"{note}\n\n" if note else "") + "\n".join(lines)


def _names(results: Results) -> dict[str, str]:
    return {letter: f"({letter}) {entry['name']}" for letter, entry in results["contenders"].items()}


def _mark(results: Results, letter: str, body: str) -> str:
    """What follows a figure whose result is wrong."""
    seen = results.get("probe", {}).get(letter, {}).get(body, {})
    return " ✗" if results["contenders"][letter]["edits"] and seen.get("faults") else ""


def _against_bars(results: Results, title: str, note: str, cell: Callable[[str, str], str], bars: bool = False) -> str:
    """One row a body, one column a case that was run. `bars`: the column before the edited cases has the bar."""
    run = {row["case"] for row in results["throughput"]}
    edited, untouched = ([case for case in cases if case in run] for cases in (EDITED_CASES, UNTOUCHED_CASES))
    head = ["body", *(["bar"] if bars else []), *(case.replace("-", " ") for case in (*edited, *untouched))]
    rows = [
        [body, *([f"{BARS[body]:.2f}"] if bars else []), *(cell(body, case) for case in (*edited, *untouched))]
        for body in results["bodies"]
        if any(ratio(results, OURS, BASE, case, body) for case in run)
    ]
    return _markdown(title, head, rows, note) if rows else ""


def _bars(results: Results) -> str:
    def cell(body: str, case: str) -> str:
        found = ratio(results, OURS, BASE, case, body)
        if found is None or case in UNTOUCHED_CASES:
            return "" if found is None else f"{found.medians:.2f}"
        return f"{found.medians:.2f} {'✓' if found.medians >= BARS[body] else '✗'}"

    note = (
        "Requests/s of vllm-priority over those of a Lua filter that only reads the header, on the same Envoy, each "
        "the median of its rounds. ✓: the bar is reached. ✗: it is not. Where the filter edits no body, there is "
        "no bar."
    )
    return _against_bars(results, "Against the bars", note, cell, bars=True)


def _spreads(results: Results) -> str:
    def cell(body: str, case: str) -> str:
        found = ratio(results, OURS, BASE, case, body)
        if found is None:
            return ""
        low, middle, high = quartiles(found.rounds)
        # One round has no spread, and its ratio is in the table above.
        return f"{middle:.2f} ({low:.2f} to {high:.2f}), {len(found.rounds)}" if len(found.rounds) > 1 else "one round"

    note = (
        "The same ratios by round, which neither a slow nor a fast minute of the machine can move: their median, their "
        "quartiles in brackets, and how many rounds there were."
    )
    if all(len(row["rounds"]) < 2 for row in results["throughput"] if row["contender"] == OURS):
        return ""
    return _against_bars(results, "Against the bars, round by round", note, cell)


def _by_cpu(results: Results) -> str:
    def cell(body: str, case: str) -> str:
        found, ours = cpu_ratio(results, OURS, BASE, case, body), _row(results, OURS, case, body)
        return "" if found is None or ours is None else f"{found:.2f}, {statistics.median(ours['busy']):.0%}"

    note = (
        "The same ratios from CPU time a request, which does not count what others took; then how much of the proxy's "
        "core vllm-priority used. Well under 100% the machine was shared, or the load was the limit."
    )
    return _against_bars(results, "Against the bars, by CPU time", note, cell)


def _ahead(results: Results) -> str:
    others = [letter for letter in results["contenders"] if letter in "defg"]
    if OURS not in results["contenders"] or not others:
        return ""
    rows = []
    for body in results["bodies"]:
        cells = []
        for other in others:
            found = ratio(results, OURS, other, "insert", body)
            refused = results.get("probe", {}).get(other, {}).get(body, {}).get("status", 200) != 200
            if refused or found is None:
                cells.append("refused" if refused else "")
            else:
                cells.append(f"{found.medians:.{1 if found.medians >= 2 else 2}f}")
        if any(cells):
            rows.append([body, *cells])
    names = _names(results)
    note = "Requests/s of vllm-priority over those of the others, header inserted."
    return _markdown("Times as fast as the others", ["body", *(names[o] for o in others)], rows, note)


def _per_contender(results: Results, title: str, note: str, cell: Callable[[str, str, str], str]) -> str:
    """One row a body, in a group a case, one column a contender."""
    names = _names(results)
    keys = dict.fromkeys((row["case"], row["body"]) for row in results["throughput"])
    rows = []
    for case in dict.fromkeys(case for case, _ in keys):
        rows.append([f"**{case.replace('-', ' ')}**", *("" for _ in names)])
        bodies = [body for body in results["bodies"] if (case, body) in keys]
        rows += [[body, *(cell(letter, case, body) for letter in names)] for body in bodies]
    return _markdown(title, ["case, body", *names.values()], rows, note)


def _rates(results: Results) -> str:
    def cell(letter: str, case: str, body: str) -> str:
        row = _row(results, letter, case, body)
        if row is None:
            return ""
        low, middle, high = quartiles(row["rate"])
        spread = f" ±{(high - low) / middle / 2:.0%}" if len(row["rate"]) > 1 and middle else ""
        failed = f", {row['errors']} errors" if row["errors"] else ""
        return f"{_figure(middle)}{spread}{_mark(results, letter, body)}{failed}"

    note = (
        "Medians; ± half the distance of the quartiles, none where there was one round. "
        "✗: the result is wrong (see below)."
    )
    return _per_contender(results, "Requests/s", note, cell)


def _cpu(results: Results) -> str:
    def cell(letter: str, case: str, body: str) -> str:
        row = _row(results, letter, case, body)
        return "" if row is None else f"{_figure(statistics.median(row['cpu_us']))}{_mark(results, letter, body)}"

    note = "Of the proxy and, for (f), of the process beside it."
    return _per_contender(results, "CPU a request, µs", note, cell)


def _fresh(results: Results) -> str:
    rows = []
    for body, processes in results["fresh"].items():
        line = [body]
        for key in ("rate", "cpu_us"):
            medians = sorted(statistics.median(process[key]) for process in processes)
            apart = _apart(medians)
            rounds = statistics.median(_apart(process[key]) for process in processes)
            within = f"{apart:.0%} {'✓' if apart <= FRESH_SPREAD else '✗'}"
            line += [", ".join(map(_figure, medians)), within if apart < math.inf else "no response ✗"]
            line.append(f"{rounds:.0%}" if rounds < math.inf else "")
        rows.append(line)
    count = len(next(iter(results["fresh"].values())))
    note = (
        f"{count} fresh processes of vllm-priority for each body, which has a priority at its end: the median of each "
        "process, and by how much the highest of these exceeds the lowest. "
        f"✓: by {FRESH_SPREAD:.0%} at most. *Rounds*: by how much the highest round of one process exceeds its lowest "
        "(median of the processes). That difference comes from the machine: where it is large, CPU time says more "
        "about the processes than requests/s."
    )
    head = ["body", "requests/s", "apart", "rounds", "CPU a request, µs", "apart", "rounds"]
    return _markdown("Fresh processes", head, rows, note)


def _apart(values: Sequence[float]) -> float:
    """By how much the highest value exceeds the lowest, as a share of the lowest."""
    return max(values) / min(values) - 1 if min(values) > 0 else math.inf


def _latency(results: Results) -> str:
    names = _names(results)
    rows = []
    for body in dict.fromkeys(row["body"] for row in results["latency"]):
        line = [f"{body} at {results['rates'][body]}/s"]
        for letter in names:
            found = next((r for r in results["latency"] if (r["contender"], r["body"]) == (letter, body)), None)
            if found is None:
                line.append("")
            elif found["p50_ms"] is None:
                line.append("none ended")
            else:
                late = "" if found["answers"] >= 0.9 * found["expected"] else " (cannot keep up)"
                mark = _mark(results, letter, body)
                line.append(f"{found['p50_ms']:.2f} / {found['p99_ms']:.2f}{mark}{late}")
        rows.append(line)
    note = "p50 / p99 in ms at a fixed rate, the same for all. With fewer than 100 responses, p99 is the slowest."
    return _markdown("Latency", ["body", *names.values()], rows, note)


def _right(results: Results) -> str:
    names = _names(results)
    rows = []
    for body in results["bodies"]:
        line = [body]
        for letter, entry in results["contenders"].items():
            seen = results["probe"].get(letter, {}).get(body)
            if seen is None:
                line.append("")
            elif not entry["edits"]:
                line.append("no edit" if seen["status"] == 200 else "refused")
            else:
                line.append("RIGHT" if not seen["faults"] else "WRONG: " + ", ".join(seen["faults"]))
        if any(line[1:]):
            rows.append(line)
    note = (
        "One request each, with 9007199254740993, 1.0, [], {} and an order of its own in it; what a recording upstream "
        "received."
    )
    return _markdown("Right or wrong", ["body", *names.values()], rows, note)


def _growth(results: Results) -> str:
    names = _names(results)
    sizes = [point["bytes"] for point in next(iter(results["growth"].values()))]
    blocks = []
    for title, key, scale, unit in (
        ("Time a request, one connection, ms", "seconds", 1e3, "{:.2f}"),
        ("Peak memory, MiB", "peak_bytes", 2**-20, "{:.0f}"),
    ):
        rows = []
        for index, size in enumerate(sizes):
            line = [_size(size)]
            for letter in names:
                value = results["growth"].get(letter, [{}] * len(sizes))[index].get(key)
                line.append("refused" if value is None else unit.format(value * scale))
            rows.append(line)
        blocks.append(_markdown(title, ["body, base64 images", *names.values()], rows))
    ours = {_size(point["bytes"]): point["peak_bytes"] for point in results["growth"].get(OURS, [])}
    if {"1 MiB", "64 MiB"} <= set(ours):
        more = (ours["64 MiB"] - ours["1 MiB"]) / 2**20
        blocks.append(
            f"vllm-priority holds the body until it is complete. From 1 MiB to 64 MiB its peak rises by {more:.1f} "
            f"MiB: {more / 63:.2f} bytes for each byte of the body."
        )
    return "\n\n".join(blocks)


def _size(size: int) -> str:
    for step, unit in ((2**20, "MiB"), (2**10, "KiB")):
        if size > 0.7 * step:
            return f"{round(size / step)} {unit}"
    return f"{size} B"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
