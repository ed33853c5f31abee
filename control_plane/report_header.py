"""The response header in which a sidecar reports what it did with a priority.

lua/report.lua writes it, for example `-10; source=header; outcome=inserted` or `none; outcome=absent`. The access
log has the same text.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class SidecarReport:
    """A parsed report.

    Attributes:
        outcome: What became of the priority, for example "inserted" or "absent".
        priority: The priority that the sidecar applied, or None if it applied none.
        source: Where the priority came from: "header", "class" or "default"; None if none was applied.
        notes: Remarks about the value, for example ("clamped",).
    """

    outcome: str
    priority: int | None = None
    source: str | None = None
    notes: tuple[str, ...] = ()


def parse_report(text: str | None) -> SidecarReport | None:
    """Parse the value of the report header.

    Args:
        text: The header's value, or None if the response has no such header.

    Returns:
        The report, or None if the text is not a report of a sidecar.
    """
    value, *parts = (part.strip() for part in (text or "").split(";"))
    members = {name: member for name, equals, member in (part.partition("=") for part in parts) if equals}
    outcome = members.get("outcome")
    if not outcome or not re.fullmatch(r"none|-?[0-9]{1,20}", value):
        return None
    priority = None if value == "none" else int(value)
    notes = tuple(part for part in parts if part and "=" not in part)
    return SidecarReport(outcome, priority, members.get("source"), notes)
