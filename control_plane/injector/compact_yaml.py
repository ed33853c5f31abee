"""YAML in as few bytes as possible: what stands in a value repeatedly is written once, and referred to by an alias.

Each copy of a pod has the whole configuration as an argument: in etcd, in watches, in the output of `kubectl get`.
Envoy reads anchors and aliases (YAML 1.2, section 7.1) and single-quoted strings, which JSON in a pod need not escape.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_WORTH_AN_ALIAS = 16
"""Characters of JSON from which on a repeated value is shorter as an alias."""


def members(values: Mapping[str, Any]) -> list[str]:
    """Return each member of a mapping as YAML. Together they are one document: aliases refer across members."""
    writer = _Writer(values)
    return [f"{_text(key)}: {writer.write(value)}" for key, value in values.items()]


class _Writer:
    def __init__(self, whole: Any) -> None:
        self._found: Counter[str] = Counter()
        self._anchors: dict[str, str] = {}
        self._count(whole)

    def _count(self, value: Any) -> None:
        key = json.dumps(value)
        if len(key) >= _WORTH_AN_ALIAS:
            self._found[key] += 1
            if self._found[key] > 1:
                return  # its parts are written once, with its first copy
        for part in _parts(value):
            self._count(part)

    def write(self, value: Any) -> str:
        key = json.dumps(value)
        if key in self._anchors:
            return f"*{self._anchors[key]} "  # the blank ends the name of the anchor
        mark = ""
        if self._found[key] > 1:
            self._anchors[key] = str(len(self._anchors))
            mark = f"&{self._anchors[key]} "
        if isinstance(value, Mapping):
            return mark + "{" + ",".join(f"{_text(name)}: {self.write(part)}" for name, part in value.items()) + "}"
        if isinstance(value, Sequence) and not isinstance(value, str):
            return mark + "[" + ",".join(map(self.write, value)) + "]"
        return mark + (_text(value) if isinstance(value, str) else key)


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _text(value: str) -> str:
    """A string in single quotes, where it needs no escapes; otherwise as in JSON, which YAML reads, too."""
    text = json.dumps(value)
    return text if "\\" in text or "'" in text else f"'{value}'"
