"""Every file of this repository that is made from something else, and how.

    python -m tests.golden.regenerate            writes them (`make golden`)
    python -m tests.golden.regenerate --check    exit status 1 where one differs from what would be written

Files ending in .yaml and .json are compared as parsed, others as text. To add one, add a row to `golden_files`.
"""

import difflib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.golden import chart, dashboard, examples, targets

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Golden:
    """A file, as a path from the root of the repository, and the function that gives its whole text."""

    path: str
    produce: Callable[[], str]

    def difference(self) -> str:
        """What the file has and would lose (-), and what it would get (+); empty where it is as it should be."""
        file = ROOT / self.path
        if not file.is_file():
            return f"{self.path} is missing"
        old, new = file.read_text(encoding="utf-8"), self.produce()
        if _parsed(self.path, old) == _parsed(self.path, new):
            return ""
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), self.path, "made anew", lineterm="", n=2)
        return "\n".join(lines)

    def write(self) -> bool:
        """Writes the file unless it is as it should be; whether it did."""
        if not self.difference():
            return False
        file = ROOT / self.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.produce(), encoding="utf-8")
        return True


def golden_files() -> list[Golden]:
    """The table."""
    return [
        # Before the chart's: its ConfigMap holds the dashboard.
        Golden("deploy/chart/files/dashboard.json", dashboard.dashboard),
        Golden("deploy/examples/scale-out/written-out.yaml", examples.written_out),
        *(Golden(path, produce) for path, produce in chart.golden_files().items()),
        *(Golden(path, produce) for path, produce in targets.golden_files().items()),
    ]


def main() -> int:
    """Writes, or checks, all of them."""
    if sys.argv[1:] == ["--check"]:
        differences = [text for golden in golden_files() if (text := golden.difference())]
        print("\n".join(differences) or f"{len(golden_files())} golden files are as they should be")
        return int(bool(differences))
    if sys.argv[1:]:
        print(f"regenerate: {sys.argv[1]!r} is unknown; allowed: --check", file=sys.stderr)
        return 2
    for golden in golden_files():
        print(f"{'written ' if golden.write() else 'the same'}  {golden.path}")
    return 0


def _parsed(path: str, text: str) -> Any:
    if path.endswith(".json"):
        return json.loads(text)
    if path.endswith((".yaml", ".yml")):
        return list(yaml.safe_load_all(text))
    return text


if __name__ == "__main__":
    sys.exit(main())
