"""The result of an examination: rows with a verdict each, for a person and for a program."""

from dataclasses import dataclass, field
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from control_plane.vllm import Role

Verdict = Literal["ok", "lost", "fail", "warn", "unknown"]

STYLES: dict[Verdict, str] = {
    "ok": "green",
    "lost": "bold red",
    "fail": "bold red",
    "warn": "yellow",
    "unknown": "cyan",
}
"""How a terminal shows each verdict."""

SERVER_NAMES: dict[Role, str] = {"render": "render server", "engine": "engine"}

TROUBLESHOOTING = "docs/troubleshooting.md"
_NO_REPORT = "the-sidecar-does-not-report"
_NOT_APPLIED = "the-sidecar-applied-no-priority"
_NO_EFFECT = "the-priority-is-applied-and-nothing-changes"
_ERRORS = "errors"
TOPICS = (_NO_REPORT, _NOT_APPLIED, _NO_EFFECT, _ERRORS)
"""Sections of the troubleshooting page to which a row can lead."""

_FAILING: frozenset[Verdict] = frozenset({"lost", "fail"})


@dataclass(frozen=True)
class Row:
    """The result of one check.

    Attributes:
        server: The server that was examined.
        check: What was examined: a route, or for example "scheduling policy".
        verdict: The result.
        seen: What was observed, in full sentences.
        next_step: What to do about it, in full sentences; empty if there is nothing to do.
        evidence: The raw values behind the verdict.
        brief: What was observed in two or three words, for a narrow table; empty if there is no short form.
    """

    server: Role
    check: str
    verdict: Verdict
    seen: str
    next_step: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    brief: str = ""

    @property
    def see(self) -> str:
        """The entry of the troubleshooting page about this result, or an empty string."""
        if self.verdict == "ok" or self.check == "TLS":
            return ""
        if self.verdict == "fail" or (self.check.startswith("class ") and self.evidence.get("status") == 400):
            topic = _ERRORS
        elif self.verdict != "lost" or not (
            self.check.startswith(("/", "class ", "prefix")) or self.check.endswith("by the header")
        ):
            topic = _NO_EFFECT
        else:
            report = str(self.evidence.get("applied") or "")
            topic = _NO_REPORT if not report else _NOT_APPLIED if report.startswith("none") else _NO_EFFECT
        return f"{TROUBLESHOOTING}#{topic}"


@dataclass(frozen=True)
class Report:
    """The rows in the order of the checks, and the URLs of the servers."""

    rows: tuple[Row, ...]
    targets: dict[Role, str]

    @property
    def exit_status(self) -> int:
        """1 if a priority is lost or a check fails, else 0."""
        return int(any(row.verdict in _FAILING for row in self.rows))

    @property
    def summary(self) -> str:
        """The result in one or two sentences."""
        lost = [row.check for row in self.rows if row.verdict == "lost"]
        failed = [f"{row.server}: {row.check}" for row in self.rows if row.verdict == "fail"]
        undecided = [row.check for row in self.rows if row.verdict == "unknown"]
        if lost:
            return f"A priority is lost: {'; '.join(lost)}."
        if failed:
            return f"A check fails: {'; '.join(failed)}."
        return "No priority is lost." + (f" These checks are undecided: {'; '.join(undecided)}." if undecided else "")

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values: {exit_status, summary, targets, checks: [...]}."""
        checks = [
            {
                "server": row.server, "check": row.check, "verdict": row.verdict, "seen": row.seen,
                "next_step": row.next_step or None, "see": row.see or None, "evidence": row.evidence,
            }
            for row in self.rows
        ]  # fmt: skip
        return {
            "exit_status": self.exit_status, "summary": self.summary, "targets": dict(self.targets), "checks": checks
        }  # fmt: skip


def table(report: Report) -> Table:
    """Return the report as a table for a terminal of 80 columns or more, one row for each check."""
    shown = Table(show_lines=True, caption=Text(report.summary), caption_justify="left", caption_style="bold")
    widest = max((len(row.check) for row in report.rows), default=0)
    shown.add_column("check", no_wrap=True, min_width=min(widest, 27))
    shown.add_column("verdict", min_width=7)
    shown.add_column("what was seen, and what to do", overflow="fold")
    server = previous = ""
    for row in report.rows:
        if row.server != server:
            server, previous = row.server, ""
            shown.add_row(Text(SERVER_NAMES[row.server], "bold"), "", Text(report.targets.get(row.server, "")))
        what_to_do = "Do the same as above." if row.next_step and row.next_step == previous else row.next_step
        finding = Text(row.seen)
        if what_to_do:
            finding.append(f"\n{what_to_do}", "bold")
        shown.add_row(Text(row.check), Text(row.verdict, STYLES[row.verdict]), finding)
        previous = row.next_step
    return shown


def further_help(report: Report) -> list[str]:
    """Return the entries of the troubleshooting page about all results, each once."""
    return list(dict.fromkeys(row.see for row in report.rows if row.see))
