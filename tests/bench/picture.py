"""results.json -> bench.svg and bench.png. `python picture.py RESULTS FOLDER`, with the Python that has matplotlib."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "vllm-priority"  # the same results give the same file

import matplotlib.pyplot as plt  # noqa: E402 (the backend is chosen first)

# Okabe and Ito's colours, which colour-blind readers can tell apart; ours is the strong one.
COLOURS = {
    "a": "#b0b0b0",
    "b": "#707070",
    "c": "#0072b2",
    "d": "#e69f00",
    "e": "#cc79a7",
    "f": "#009e73",
    "g": "#d55e00",
}


def main(results_file: str, folder: str) -> None:
    """Draw what is there: throughput, time against size, memory against size."""
    results = json.loads(Path(results_file).read_text())
    panels = [
        (part, draw)
        for part, draw in (
            ("throughput", _throughput),
            ("growth", _time),
            ("growth", _memory),
        )
        if results.get(part)
    ]
    if not panels:
        panels = [("probe", _nothing)]
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6.4 * columns, 4.4 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (_, draw) in zip(axes.flat, panels, strict=False):
        draw(axis, results)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_axisbelow(True)
    handles = [
        matplotlib.patches.Patch(color=COLOURS[key], label=_label(results, key)) for key in results["contenders"]
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    machine = results["machine"]
    note = f"{machine['cpu']}, one worker, Envoy {machine['envoy']}, {machine['date']}. ✗: the result is wrong."
    if results["quick"]:
        note = "A QUICK RUN, not for quoting. " + note
    figure.supxlabel(note, fontsize=8, color="#555555")
    figure.savefig(Path(folder) / "bench.svg", metadata={"Date": None})
    figure.savefig(Path(folder) / "bench.png", dpi=150)


def _label(results: dict[str, Any], letter: str) -> str:
    entry = results["contenders"][letter]
    probes = results.get("probe", {}).get(letter, {})
    wrong = entry["edits"] and any(seen["faults"] for seen in probes.values() if isinstance(seen, dict))
    return f"({letter}) {entry['name']}{' ✗' if wrong else ''}"


def _style(letter: str) -> dict[str, Any]:
    return {"color": COLOURS[letter], "linewidth": 2.6 if letter == "c" else 1.4, "zorder": 3 if letter == "c" else 2}


def _throughput(axis: Any, results: dict[str, Any]) -> None:
    rows = {
        (r["contender"], r["body"]): statistics.median(r["rate"])
        for r in results["throughput"]
        if r["case"] == "insert"
    }
    axis.set_title("Throughput, the header's priority inserted")
    names = [name for name in results["bodies"] if any(body == name for _, body in rows)]
    ratios = [rate / rows["b", name] for (_, name), rate in rows.items() if rate and rows.get(("b", name))]
    if not ratios:
        _say(axis, "no responses of header-only Lua to compare with")
        return
    letters = [letter for letter in results["contenders"] if letter not in "b"]
    width = 0.8 / max(1, len(letters))
    for index, letter in enumerate(letters):
        bars = [
            (place + (index - (len(letters) - 1) / 2) * width, rows[letter, name] / rows["b", name])
            for place, name in enumerate(names)
            if rows.get((letter, name)) and rows.get(("b", name))
        ]
        axis.bar([x for x, _ in bars], [y for _, y in bars], width, color=COLOURS[letter])
    axis.axhline(1, color=COLOURS["b"], linewidth=1, linestyle="--")
    axis.set_yscale("log")
    axis.set_ylim(0.7 * min(ratios), 2)
    ticks = [tick for tick in (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1) if tick >= axis.get_ylim()[0]]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_yticks([], minor=True)
    axis.set_xticks(range(len(names)), [name.replace("-", "\n") for name in names])
    axis.set_ylabel("requests/s, header-only Lua = 1")
    axis.grid(axis="y", color="#dddddd")


def _against_size(axis: Any, results: dict[str, Any], key: str, scale: float) -> bool:
    """Whether there was anything to draw."""
    lines = {
        letter: [(point["bytes"], point[key] * scale) for point in points if point["status"] == 200]
        for letter, points in results["growth"].items()
    }
    if not any(lines.values()):
        _say(axis, "all were refused")
        return False
    for letter, kept in lines.items():
        if kept:
            axis.plot(*zip(*kept, strict=True), marker=".", **_style(letter))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    sizes = [
        (2**10, "1 KiB"),
        (2**14, "16 KiB"),
        (2**18, "256 KiB"),
        (2**20, "1 MiB"),
        (2**22, "4 MiB"),
        (2**26, "64 MiB"),
    ]
    largest = max(point["bytes"] for points in results["growth"].values() for point in points)
    sizes = [(size, name) for size, name in sizes if size <= largest * 1.2]
    axis.set_xticks([size for size, _ in sizes], [name for _, name in sizes])
    axis.grid(color="#dddddd")
    axis.set_xlabel("body")
    return True


def _time(axis: Any, results: dict[str, Any]) -> None:
    axis.set_title("Time against size")
    if not _against_size(axis, results, "seconds", 1e3):
        return
    axis.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.set_ylabel("ms a request, one connection")


def _memory(axis: Any, results: dict[str, Any]) -> None:
    axis.set_title("Memory against size")
    if not _against_size(axis, results, "peak_bytes", 2**-20):
        return
    axis.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    low, high = axis.get_ylim()
    axis.set_yticks([tick for tick in (32, 64, 128, 256, 512, 1024, 2048) if low <= tick <= high])
    axis.set_ylabel("peak resident MiB")


def _say(axis: Any, text: str) -> None:
    """That text in place of a panel's lines or bars."""
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes, color="#555555")
    axis.set_xticks([])
    axis.set_yticks([])


def _nothing(axis: Any, results: dict[str, Any]) -> None:
    axis.set_title("nothing was measured that has a picture")


if __name__ == "__main__":
    main(*sys.argv[1:3])
