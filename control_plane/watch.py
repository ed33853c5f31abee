"""What becomes of priorities, live: the metrics of sidecars, engines and the control plane, read every few seconds."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from control_plane.doctor.responses import failure_reason
from control_plane.errors import InvalidField

Kind = Literal["sidecar", "engine", "control_plane"]
Series = tuple[str, tuple[tuple[str, str], ...]]
"""The name of a sample and its labels, sorted."""
Samples = Mapping[Series, float]

_GAUGES = "vllm:num_requests_"
_PATHS: Mapping[Kind, str] = {
    "sidecar": "/stats/prometheus",
    "engine": "/metrics",
    "control_plane": "/api/sidecars?limit=1",
}
_PREFIXES: Mapping[Kind, tuple[str, ...]] = {
    "sidecar": ("envoy_vllm_priority_", "envoy_http_lua_vllm_priority_"),
    "engine": (_GAUGES, "vllm:request_queue_time_seconds", "vllm:time_to_first_token_seconds"),
    "control_plane": (),
}
_REQUESTS = "envoy_vllm_priority_requests"
_FIRST_BYTE = "envoy_vllm_priority_time_to_first_byte"

TIMES_SECONDS = 30.0
"""A sidecar's times are medians over so long, because Envoy updates its histograms only every 5 seconds."""

_PRIORITIES = ("below -100", "-100 to -11", "-10 to -1", "0", "1 to 10", "11 to 100", "above 100")
"""The ranges of priorities in lua/priority.lua, most urgent first."""


@dataclass(frozen=True)
class WatchSettings:
    """What to read, and how often.

    Args:
        sidecar: The URLs at which sidecars serve their metrics. At least one URL of any kind is required.
        engine: The root URLs of engines.
        control_plane: The root URL of the control plane, or None.
        interval: The time between two readings, in seconds.
        count: The number of readings, or None for no end.

    Raises:
        InvalidField: A value is not valid.
    """

    sidecar: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    control_plane: str | None = None
    interval: float = 2.0
    count: int | None = None

    def __post_init__(self) -> None:
        if not self.urls:
            raise InvalidField("sidecar", "there is nothing to watch. Use a URL, for example http://127.0.0.1:19000.")
        for kind, url in self.urls:
            try:
                parts = urlsplit(url)
                valid = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0 and httpx.URL(url)
            except (ValueError, httpx.InvalidURL):
                valid = False
            if not valid or parts.query or parts.fragment:
                raise InvalidField(kind, f"{url!r} is not a valid URL. Use a root URL, for example {_EXAMPLES[kind]}.")

    @property
    def urls(self) -> list[tuple[Kind, str]]:
        """All URLs, each with what is there."""
        own: list[tuple[Kind, str]] = [("control_plane", self.control_plane)] if self.control_plane is not None else []
        return [*(("sidecar", url) for url in self.sidecar), *(("engine", url) for url in self.engine), *own]


_EXAMPLES: Mapping[Kind, str] = {
    "sidecar": "http://127.0.0.1:19000",
    "engine": "http://127.0.0.1:8001",
    "control_plane": "http://127.0.0.1:8080",
}


def parse(text: str, prefixes: tuple[str, ...]) -> dict[Series, float]:
    """Return the samples whose names begin with one of the prefixes, from Prometheus' text format.

    Raises:
        ValueError: The text is not in this format.
    """
    lines = "\n".join(line for line in text.splitlines() if line.startswith(prefixes))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(lines + "\n")
        for sample in family.samples
    }


@dataclass
class Source:
    """One URL that is read, and what was read there."""

    kind: Kind
    url: str
    error: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    """The control plane's sidecars by status."""
    history: deque[tuple[float, Samples]] = field(default_factory=deque)
    """Time (of time.monotonic) and samples, oldest first. It is kept while the source does not respond."""

    def add(self, now: float, samples: Samples) -> None:
        """Add what was read. If a counter fell, the process has restarted, and everything is counted from 0."""
        if self.history and _restarted(self.history[-1][1], samples):
            before = self.history[-1][0]
            self.history.clear()
            self.history.append((before, {}))
        self.history.append((now, samples))
        # The oldest reading is the one before the period: the differences from it span the whole period.
        while len(self.history) > 2 and self.history[1][0] <= now - TIMES_SECONDS:
            self.history.popleft()

    @property
    def samples(self) -> Samples:
        """What was read last, and nothing if that failed."""
        return self.history[-1][1] if self.history and not self.error else {}

    def growth(self, seconds: float = 0.0) -> tuple[float, Samples]:
        """Return how much the samples grew since the reading `seconds` ago (0: the last one), and in what time."""
        if len(self.history) < 2 or self.error:
            return 0.0, {}
        then, before = self.history[0] if seconds else self.history[-2]
        now, after = self.history[-1]
        return now - then, {series: value - before.get(series, 0) for series, value in after.items()}

    def gauge(self, name: str) -> float | None:
        """Return the sum of a gauge, or None if it is not there."""
        found = [value for (sample, _), value in self.samples.items() if sample == name]
        return sum(found) if found else None


def _restarted(before: Samples, after: Samples) -> bool:
    counters = (series for series in before if not series[0].startswith(_GAUGES))
    return any(after.get(series, 0) < before[series] for series in counters)


def median(samples: Iterable[tuple[float, float]]) -> float | None:
    """Return the median of a histogram, interpolated within its bucket as Prometheus does, or None if it is empty.

    Args:
        samples: The upper bound of each bucket, and the number of values up to it. A bound may occur repeatedly: the
            numbers are added.
    """
    buckets: dict[float, float] = {}
    for bound, number in samples:
        buckets[bound] = buckets.get(bound, 0) + number
    half = buckets.get(float("inf"), 0) / 2
    if not half > 0:
        return None
    low = below = 0.0
    for bound, number in sorted(buckets.items()):
        if number >= half:
            return low if bound == float("inf") else low + (bound - low) * (half - below) / (number - below)
        low, below = bound, number
    return None


def _buckets(growth: Samples, histogram: str) -> Iterator[tuple[dict[str, str], tuple[float, float]]]:
    for (name, labels), number in growth.items():
        if name == f"{histogram}_bucket":
            known = dict(labels)
            yield known, (float(known["le"]), number)


def _medians(sources: list[Source], label: str) -> dict[str, float]:
    """Return the median time to the first byte, in milliseconds, by a label."""
    groups: dict[str, list[tuple[float, float]]] = {}
    for source in sources:
        for labels, bucket in _buckets(source.growth(TIMES_SECONDS)[1], _FIRST_BYTE):
            groups.setdefault(labels.get(label, ""), []).append(bucket)
    found = ((value, median(buckets)) for value, buckets in sorted(groups.items()))
    return {value: middle for value, middle in found if middle is not None}


def _requests(sources: list[Source]) -> list[dict[str, Any]]:
    totals: dict[tuple[str, str], float] = {}
    rates: dict[tuple[str, str], float] = {}
    compared = False
    for source in sources:
        seconds, growth = source.growth()
        compared |= seconds > 0
        for series, value in source.samples.items():
            if series[0] == _REQUESTS:
                labels = dict(series[1])
                key = labels.get("route", ""), labels.get("outcome", "")
                totals[key] = totals.get(key, 0) + value
                rates[key] = rates.get(key, 0) + (growth[series] / seconds if seconds else 0)
    return [
        {"route": route, "outcome": outcome, "total": int(total),
         "per_second": rates[route, outcome] if compared else None}
        for (route, outcome), total in sorted(totals.items())
    ]  # fmt: skip


def reading(sources: list[Source], when: float) -> dict[str, Any]:
    """Return what the sources show, as JSON values. What is not known is null, for example a rate at first.

    Args:
        sources: The sources, each of which was read.
        when: The time of the reading, in seconds since the epoch.
    """
    by_kind: dict[Kind, list[Source]] = {kind: [s for s in sources if s.kind == kind] for kind in _PATHS}
    sidecars = by_kind["sidecar"]
    engines = []
    for engine in by_kind["engine"]:
        growth = engine.growth()[1]
        times = {
            name: median(bucket for _, bucket in _buckets(growth, f"vllm:{metric}"))
            for name, metric in (
                ("queue_seconds", "request_queue_time_seconds"),
                ("time_to_first_token_seconds", "time_to_first_token_seconds"),
            )
        }
        gauges = {name: engine.gauge(_GAUGES + name) for name in ("running", "waiting")}
        engines.append({"url": engine.url, "error": engine.error or None, **gauges, **times})
    return {
        "time": when,
        "sidecars": [{"url": sidecar.url, "error": sidecar.error or None} for sidecar in sidecars],
        "requests": _requests(sidecars),
        "time_to_first_byte_ms": {label: _medians(sidecars, label) for label in ("priority", "class")},
        "engines": engines,
        "control_plane": next(
            ({"url": s.url, "error": s.error or None, "sidecars": s.counts or None} for s in by_kind["control_plane"]),
            None,
        ),
    }


def _identifies(kind: Kind, series: Series) -> bool:
    """Return whether only this kind of server has this series. Proxies that are not ours count otherwise."""
    name, labels = series
    if kind == "engine":
        return name.startswith(_GAUGES)
    return ("envoy_http_conn_manager_prefix", "vllm_priority") in labels


async def _read(source: Source, client: httpx.AsyncClient, timeout: float) -> None:
    """Read a source. A failure becomes its `error`."""
    source.counts = {}
    try:
        response = await client.get(source.url.rstrip("/") + _PATHS[source.kind])
        if response.status_code != 200:
            source.error = f"{_PATHS[source.kind]} responds with status {response.status_code}"
            return
        if source.kind == "control_plane":
            found = response.json()
            source.counts = {status: int(found[status]) for status in ("SYNCED", "STALE", "ERROR", "UNKNOWN")}
        else:
            samples = parse(response.text, _PREFIXES[source.kind])
            if not any(_identifies(source.kind, series) for series in samples):
                raise ValueError
            source.add(time.monotonic(), samples)
        source.error = ""
    except (httpx.HTTPError, OSError) as error:
        source.error = failure_reason(error, timeout)
    except (ValueError, KeyError, TypeError):
        source.error = f"{_PATHS[source.kind]} does not have the metrics of this kind of server"


async def watch(settings: WatchSettings, show: Callable[[dict[str, Any]], None]) -> None:
    """Read everything every `settings.interval` seconds, and pass each reading to `show`."""
    sources = [Source(kind, url) for kind, url in settings.urls]
    timeout = min(max(settings.interval, 1.0), 5.0)
    # Metrics are read where they are: a proxy of the environment often cannot reach them.
    async with httpx.AsyncClient(timeout=timeout, trust_env=False) as client:
        done = 0
        while True:
            began = time.monotonic()
            await asyncio.gather(*(_read(source, client, timeout) for source in sources))
            show(reading(sources, time.time()))
            done += 1
            if done == settings.count:
                return
            await asyncio.sleep(max(0.0, settings.interval - (time.monotonic() - began)))


def run_watch(settings: WatchSettings, *, as_json: bool = False, console: Console | None = None) -> None:
    """Watch and print: a live table on a terminal, lines of text elsewhere, or one JSON object for each reading.

    Args:
        settings: What to read, and how often.
        as_json: Print JSON.
        console: Where to print; None is standard output.
    """
    shown = console or Console()
    live: AbstractContextManager[Any] = nullcontext()
    if as_json:
        show = lambda found: print(json.dumps(found), flush=True)  # noqa: E731
    elif shown.is_terminal:
        live = screen = Live(console=shown, auto_refresh=False)
        show = lambda found: screen.update(tables(found), refresh=True)  # noqa: E731
    else:
        show = lambda found: print("\n".join(lines(found)), file=shown.file, flush=True)  # noqa: E731
    with live:
        asyncio.run(watch(settings, show))


def _number(value: float | None, unit: str = "", factor: float = 1) -> str:
    if value is None:
        return "-"
    number = value * factor
    return f"{number:.0f}{unit}" if number >= 1000 else f"{number:.3g}{unit}"


def _errors(found: Mapping[str, Any]) -> Iterator[str]:
    kinds = (("sidecar", found["sidecars"]), ("engine", found["engines"]), ("control plane", [found["control_plane"]]))
    for kind, sources in kinds:
        for source in sources:
            if source and source["error"]:
                yield f"{kind} {source['url']}: {source['error']}"


def _urgent_first(times: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    order = {name: number for number, name in enumerate(_PRIORITIES)}
    yield from sorted(times.items(), key=lambda item: order.get(item[0], len(order)))


def _clock(found: Mapping[str, Any]) -> str:
    return time.strftime("%H:%M:%S", time.localtime(found["time"]))


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Return a reading as lines of text."""
    clock = _clock(found)
    for error in _errors(found):
        yield f"{clock} {error}"
    for row in found["requests"]:
        rate = _number(row["per_second"], "/s")
        yield f"{clock} requests {row['route'] or '(no route)'} {row['outcome']}: {rate}, {row['total']} in all"
    for label, times in found["time_to_first_byte_ms"].items():
        for value, middle in _urgent_first(times):
            if value:
                yield f"{clock} median time to first byte, {label} {value}: {_number(middle, ' ms')}"
    for engine in found["engines"]:
        if not engine["error"]:
            yield (
                f"{clock} engine {engine['url']}: "
                f"{_number(engine['running'])} running, {_number(engine['waiting'])} waiting, "
                f"median time in queue {_number(engine['queue_seconds'], ' ms', 1000)}, "
                f"median time to first token {_number(engine['time_to_first_token_seconds'], ' ms', 1000)}"
            )
    plane = found["control_plane"]
    if plane and plane["sidecars"]:
        yield f"{clock} control plane {plane['url']}: {_statuses(plane['sidecars'])}"


def _statuses(counts: Mapping[str, int]) -> str:
    return "sidecars " + ", ".join(f"{count} {status}" for status, count in counts.items())


def tables(found: Mapping[str, Any]) -> Group:
    """Return a reading as tables for a terminal."""
    parts: list[Table | Text] = [Text(f"{_clock(found)}  Ctrl-C ends.", "dim")]
    parts += [Text(error, "bold red") for error in _errors(found)]
    if found["sidecars"]:
        requests = _table("route", "outcome", "rate", "total")
        for row in found["requests"]:
            rate = _number(row["per_second"], "/s")
            requests.add_row(Text(row["route"] or "(no route)"), Text(row["outcome"]), rate, str(row["total"]))
        if not found["requests"]:
            requests.add_row("no request yet", "", "", "")
        parts.append(requests)
    for label, times in found["time_to_first_byte_ms"].items():
        rows = [(value, middle) for value, middle in _urgent_first(times) if value]
        if rows:
            shown = _table(label, "median time to first byte")
            for value, middle in rows:
                shown.add_row(Text(value), _number(middle, " ms"))
            parts.append(shown)
    if found["engines"]:
        engines = _table("engine", "running", "waiting", "median queue", "median first token")
        for engine in found["engines"]:
            times = (_number(engine[name], " ms", 1000) for name in ("queue_seconds", "time_to_first_token_seconds"))
            engines.add_row(Text(engine["url"]), _number(engine["running"]), _number(engine["waiting"]), *times)
        parts.append(engines)
    if (plane := found["control_plane"]) and plane["sidecars"]:
        parts.append(Text(f"control plane: {_statuses(plane['sidecars'])}"))
    return Group(*parts)


def _table(first: str, *others: str) -> Table:
    shown = Table(box=SIMPLE, pad_edge=False)
    shown.add_column(first, overflow="fold")
    for name in others:
        shown.add_column(name, justify="left" if name == "outcome" else "right")
    return shown
