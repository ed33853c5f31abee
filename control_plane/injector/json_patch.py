"""JSON Patch (RFC 6902): the difference of two documents, and its application to a document."""

from collections.abc import MutableMapping
from typing import Any

Operation = dict[str, Any]
"""One operation of a patch: `op`, `path`, and `value` unless `op` is remove."""


def json_patch(old: Any, new: Any, path: str = "") -> list[Operation]:
    """Return the operations that turn `old` into `new`. A missing parent is added whole, before its children."""
    if old is new:
        return []
    if isinstance(old, dict) and isinstance(new, dict):
        patch = [{"op": "remove", "path": f"{path}/{_escaped(key)}"} for key in old if key not in new]
        for key, value in new.items():
            at = f"{path}/{_escaped(key)}"
            patch += json_patch(old[key], value, at) if key in old else [{"op": "add", "path": at, "value": value}]
        return patch
    if isinstance(old, list) and isinstance(new, list):
        patch = [
            op for index, pair in enumerate(zip(old, new, strict=False)) for op in json_patch(*pair, f"{path}/{index}")
        ]
        patch += [{"op": "remove", "path": f"{path}/{index}"} for index in range(len(old) - 1, len(new) - 1, -1)]
        return patch + [
            {"op": "add", "path": f"{path}/{index}", "value": new[index]} for index in range(len(old), len(new))
        ]
    return [] if type(old) is type(new) and old == new else [{"op": "replace", "path": path, "value": new}]


def apply_in_place(document: MutableMapping[str, Any], patch: list[Operation]) -> None:
    """Apply a patch of adds and replaces to the document's own nodes, so that the nodes around them stay as they are.

    A YAML library keeps comments and layout in those nodes.
    """
    for operation in patch:
        *parents, last = [_unescaped(part) for part in operation["path"].split("/")[1:]]
        at: Any = document
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at[part]
        key = int(last) if isinstance(at, list) else last
        if operation["op"] == "replace":
            replace_in_place(at, key, operation["value"])
        elif isinstance(key, int):
            at.insert(key, operation["value"])
        else:
            at[key] = operation["value"]


def replace_in_place(at: Any, key: int | str, new: Any) -> None:
    """Replace an entry of a list or mapping by one that the YAML library writes alike: its quotes, its comment."""
    old = at[key]
    if isinstance(new, str) and isinstance(old, str) and type(old) is not str:
        new = type(old)(new)  # Quotes and blocks are types of their own.
        if hasattr(old, "comment"):
            new.comment = old.comment
    at[key] = new
    if hasattr(at, "ca"):
        for token in at.ca.items.get(key) or ():
            if hasattr(token, "column"):  # A comment behind the value stays at the same distance.
                token.column += len(str(new)) - len(str(old))


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _unescaped(part: str) -> str:
    return part.replace("~1", "/").replace("~0", "~")
