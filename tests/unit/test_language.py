"""What people read is plain English.

Each of the phrases below was found in this repository, and readers stumbled over it.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "deploy/chart/values.yaml",
    ROOT / "deploy/chart/templates/NOTES.txt",
]

PHRASES = {
    r"(?<!there )(?<!There )\b(is|are) no (?!longer\b|more\b)": "is not a valid X",
    r"\ballowed: ": "must be one of: a, b",
    r"\bnext: ": "Use ..., or Set ...",
    r"\bas (it|they) came\b": "unchanged",
    r"\banew\b": "again",
    r"\b[Rr]efus(e|es|ed|al)\b": "reject",
    r"\b[Aa]nswer(s|ed)?\b": "response, respond",
    r"\b[Aa]skers?\b": "client",
    r"\blet the pods\b": "restart the pods",
    r"\bstands? (in|on|at) ": "is in, is at",
    r"\b(has|have|is|are) to be\b": "must be",
    r"\bwithout a word\b": "silently",
    r"\bEnvoy of our own\b": "managed Envoy",
}
"""A pattern, and what to write instead."""

# Code, and tables that a benchmark has printed.
NOT_PROSE = re.compile(r"```.*?```|`[^`\n]*`|<!-- bench -->.*?<!-- /bench -->", re.DOTALL)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_page_has_a_phrase_that_readers_stumble_over(file: Path) -> None:
    text = NOT_PROSE.sub(lambda code: re.sub(r"\S", "x", code[0]), file.read_text(encoding="utf-8"))
    found = [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {match[0]!r}. Better: {better}"
        for pattern, better in PHRASES.items()
        for match in re.finditer(pattern, text)
    ]
    assert not found, "\n".join(found)
