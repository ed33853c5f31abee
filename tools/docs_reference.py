"""The generated parts of the documentation: tables that are made from the real objects when the site is built.

A page marks the place of such a part. Between the two comments stands what readers of the repository see instead:

    <!-- generated: chart_values -->
    See deploy/chart/values.yaml.
    <!-- /generated -->
"""

import re
from collections.abc import Callable, Iterable, Sequence

from tools import build_values

_PLACE = re.compile(r"<!-- generated: (\w+) -->\n.*?<!-- /generated -->\n", re.DOTALL)


def fill_in(markdown: str) -> str:
    """Replace each marked place of a page by the part that it names.

    Raises:
        KeyError: a place names a part that does not exist.
    """
    return _PLACE.sub(lambda match: PARTS[match[1]]() + "\n", markdown)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def chart_values() -> str:
    """Return the table of the chart's values."""
    return table(("value", "default", "meaning"), build_values.documented_values())


PARTS: dict[str, Callable[[], str]] = {
    "chart_values": chart_values,
}
"""Name of a part -> the function that returns its Markdown."""
