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


@dataclass(frozen=True)
class Bar:
    """At least `ratio` times the requests/s of contender `against`, in these cases, on this body."""

    cases: tuple[str, ...]
    body: str
    ratio: float
    against: str = BASE


_WITH_HEADER = ("insert", "replace-front", "replace-middle", "replace-end")
_UNTOUCHED = ("no-header", "other-route")

BARS: tuple[Bar, ...] = (
    Bar(_WITH_HEADER, "100B", 0.85),
    Bar(_WITH_HEADER, "4KB", 0.85),
    Bar(_WITH_HEADER, "29KB", 0.85),
    Bar(_WITH_HEADER, "200KB", 0.45),
    Bar(_WITH_HEADER, "170KB-short", 0.45),
    Bar(_WITH_HEADER, "200KB-tools", 0.40),
    Bar(_WITH_HEADER, "400KB", 0.65),
    Bar(_WITH_HEADER, "1MB", 0.75),
    Bar(_WITH_HEADER, "16MB", 0.75),
    *(Bar(_UNTOUCHED, body, 0.99) for body in ("100B", "4KB", "29KB", "200KB", "400KB", "1MB", "16MB")),
    *(Bar(("insert",), body, 1.0, other) for body in ("100B", "4KB") for other in "defg"),
    *(
        Bar(("insert",), body, 5.0, other)
        for body in ("29KB", "200KB", "170KB-short", "200KB-tools", "400KB", "1MB", "16MB")
        for other in "defg"
    ),
)

FLAT_BYTES = 8 * 2**20
"""Peak memory counts as flat where 64 MiB take at most this much more than 1 MiB."""

FIRST_BYTE_MS = 5.0

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
        "first-byte": lambda results: [_first_byte(results)],
    }
    for part, write in writers.items():
        if results.get(part):
            parts += write(results)
    return "\n\n".join(part for part in parts if part) + "\n"


def publish(folder: Path, docs: Path) -> None:
    """Put table.md between the markers of performance.md, and the picture into images/."""
    page = docs / "performance.md"
    text = page.read_text()
    picture = "![Throughput, time and memory against size, and first byte, of seven ways](images/bench.svg)"
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


def _against_bars(results: Results, title: str, note: str, bars: bool, cell: Callable[[Bar, str], str]) -> str:
    """One row a body, one column a case that was run, each group of cases behind the column of its bar."""
    groups = {
        cases: {bar.body: bar for bar in BARS if bar.against == BASE and bar.cases == cases}
        for cases in dict.fromkeys(bar.cases for bar in BARS if bar.against == BASE)
    }
    run = {row["case"] for row in results["throughput"]}
    head = ["body"]
    for cases in groups:
        names = [case.replace("-", " ") for case in cases if case in run]
        head += ["bar", *names] if bars and names else names
    rows = []
    for body in results["bodies"]:
        line = [body]
        for cases, by_body in groups.items():
            cells = [cell(by_body[body], case) if body in by_body else "" for case in cases if case in run]
            line += [f"{by_body[body].ratio:.2f}" if body in by_body else "", *cells] if bars and cells else cells
        if any(ratio(results, OURS, BASE, case, body) for case in run):
            rows.append(line)
    return _markdown(title, head, rows, note) if rows else ""


def _bars(results: Results) -> str:
    def cell(bar: Bar, case: str) -> str:
        found = ratio(results, OURS, BASE, case, bar.body)
        return "" if found is None else f"{found.medians:.2f} {'✓' if found.medians >= bar.ratio else '✗'}"

    note = (
        "Requests/s of vllm-priority over those of a Lua filter that only reads the header, on the same Envoy, each "
        "the median of its rounds. ✓: the bar is reached. ✗: it is not."
    )
    return _against_bars(results, "Against the bars", note, True, cell)


def _spreads(results: Results) -> str:
    def cell(bar: Bar, case: str) -> str:
        found = ratio(results, OURS, BASE, case, bar.body)
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
    return _against_bars(results, "Against the bars, round by round", note, False, cell)


def _by_cpu(results: Results) -> str:
    def cell(bar: Bar, case: str) -> str:
        found, ours = cpu_ratio(results, OURS, BASE, case, bar.body), _row(results, OURS, case, bar.body)
        return "" if found is None or ours is None else f"{found:.2f}, {statistics.median(ours['busy']):.0%}"

    note = (
        "The same ratios from CPU time a request, which does not count what others took; then how much of the proxy's "
        "core vllm-priority used. Well under 100% the machine was shared, or the load was the limit."
    )
    return _against_bars(results, "Against the bars, by CPU time", note, False, cell)


def _ahead(results: Results) -> str:
    others = [letter for letter in results["contenders"] if letter in "defg"]
    if OURS not in results["contenders"] or not others:
        return ""
    rows = []
    for body in results["bodies"]:
        cells, wanted = [], 0.0
        for other in others:
            bar = next((bar for bar in BARS if bar.body == body and bar.against == other), None)
            found = ratio(results, OURS, other, "insert", body)
            wanted = bar.ratio if bar else wanted
            refused = results.get("probe", {}).get(other, {}).get(body, {}).get("status", 200) != 200
            if refused or found is None:
                cells.append("refused" if refused else "")
                continue
            short = "" if bar is None or found.medians >= bar.ratio else " (short)"
            cells.append(f"{found.medians:.{1 if found.medians >= 2 else 2}f}{short}")
        if any(cells):
            rows.append([body, f"{wanted:.0f}", *cells])
    names = _names(results)
    note = "Requests/s of vllm-priority over those of the others, header inserted; *short*: under the bar."
    return _markdown("Times as fast as the others", ["body", "bar", *(names[o] for o in others)], rows, note)


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
    note = "p50 / p99 in ms at a fixed rate, the same for all. Under 100 answers, p99 is the slowest."
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
    room = ["16MB, the sidecar's limits not raised for it"]
    for letter in names:
        status = results["probe"].get(letter, {}).get("at_default_limit")
        room.append("" if status is None else "accepted" if status == 200 else f"refused: {status or 'no answer'}")
    if any(room[1:]):
        rows.append(room)
    note = (
        "One request each, with 9007199254740993, 1.0, [], {} and an order of its own in it; what a recording upstream "
        "got. Contenders that hold the body have had their limit raised, but in the last row."
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
        more = ours["64 MiB"] - ours["1 MiB"]
        verdict = "flat" if more <= FLAT_BYTES else "NOT flat"
        blocks.append(
            f"vllm-priority from 1 MiB to 64 MiB: {more / 2**20:+.1f} MiB, {verdict} "
            f"(bar: {FLAT_BYTES >> 20} MiB or less)."
        )
    return "\n\n".join(blocks)


def _first_byte(results: Results) -> str:
    names = _names(results)
    rows = []
    for letter, bodies in results["first-byte"].items():
        for body, found in bodies["bodies"].items():
            cells = [
                f"{statistics.median(found[key]):.2f}" if found[key] else "refused"
                for key in ("first_ms", "first_body_ms")
            ]
            times = found["first_body_ms"]
            reached = "" if not times else "yes" if max(times) <= FIRST_BYTE_MS else "no"
            rows.append([names[letter], body, *cells, reached])
    over = next(iter(results["first-byte"].values()))["sent_over_seconds"]
    note = f"Milliseconds after the client's first byte, for a body sent over {over:g} s."
    head = ["contender", "body", "first byte of the request", "first byte of the body", f"within {FIRST_BYTE_MS:g} ms"]
    return _markdown("First byte at the upstream", head, rows, note)


def _size(size: int) -> str:
    for step, unit in ((2**20, "MiB"), (2**10, "KiB")):
        if size > 0.7 * step:
            return f"{round(size / step)} {unit}"
    return f"{size} B"


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
