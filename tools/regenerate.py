"""The shipped files that are generated from something else and committed.

`make golden` writes them, together with the golden files of the tests. To add one, add a row to `shipped_files`.
"""

import difflib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tools import build_dashboard, build_values, docs_reference

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class GeneratedFile:
    """A file, as a path from the root of the repository, and the function that returns its whole text.

    Files that end in .yaml or .json are compared as parsed, others as text.
    """

    path: str
    produce: Callable[[], str]

    def difference(self) -> str:
        """Return a diff from the file to what it should be, or an empty string if the file is up to date."""
        file = ROOT / self.path
        if not file.is_file():
            return f"{self.path} is missing"
        old, new = file.read_text(encoding="utf-8"), self.produce()
        if _parsed(self.path, old) == _parsed(self.path, new):
            return ""
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), self.path, "regenerated", lineterm="", n=2)
        return "\n".join(lines)

    def write(self) -> bool:
        """Write the file if it is not up to date, and return whether it was written."""
        if not self.difference():
            return False
        file = ROOT / self.path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.produce(), encoding="utf-8")
        return True


def shipped_files() -> list[GeneratedFile]:
    """Return the table of shipped files."""
    return [
        GeneratedFile("deploy/chart/files/dashboard.json", build_dashboard.dashboard),
        GeneratedFile("deploy/chart/values.schema.json", build_values.values_schema_text),
        *(GeneratedFile(path, produce) for path, produce in docs_reference.pages().items()),
    ]


def _parsed(path: str, text: str) -> Any:
    if path.endswith(".json"):
        return json.loads(text)
    if path.endswith(".yaml"):
        return list(yaml.safe_load_all(text))
    return text
