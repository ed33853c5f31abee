"""One translator of pydantic's errors, for all that a user can write: policies, pods and discovery requests."""

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError


def problems(
    model: type[BaseModel],
    error: ValidationError,
    prefix: str = "",
    extra_keys: Sequence[str] = (),
    whole: str = "policy",
) -> str:
    """Describe what pydantic found wrong, in one line.

    Args:
        model: the model that was validated.
        error: what pydantic raised.
        prefix: put before each key's path, for a model that is part of a larger document.
        extra_keys: keys that the document may have at its top besides the model's own.
        whole: what the document is called where it is wrong as a whole.

    Returns:
        `key.path: 'x' is not valid. Use ...` for each problem, as sentences.
    """
    found: list[str] = []
    wrong: dict[str, str] = {}
    uses: dict[str, list[str]] = {}
    for item in error.errors():
        kind, context = item["type"], item.get("ctx", {})
        path = _key_path(item["loc"], prefix, whole)
        if kind == "value_error":
            found.append(f"{prefix}{context['error']}")
        elif kind in {"extra_forbidden", "invalid_key"}:
            if kind == "invalid_key":  # The key is not a string, so pydantic's path for it looks like a list index.
                path = _key_path(item["loc"][:-1], prefix, whole, end=shown(item["input"]))
            known = ", ".join(_keys_at(model, item["loc"][:-1], extra_keys))
            found.append(f"{path}: this key is unknown. It must be one of: {known}.")
        elif kind == "missing":
            found.append(f"{path}: this key is required.")
        else:
            wrong[path] = shown(item["input"])
            uses.setdefault(path, []).append(_use(kind, context, item["msg"]))
    # If an item of a list is wrong, pydantic also reports that the list is not the union's other member: drop that.
    wrong = {path: value for path, value in wrong.items() if not any(other.startswith(f"{path}[") for other in wrong)}
    found += [f"{path}: {wrong[path]} is not valid. Use {' or '.join(uses[path])}." for path in wrong]
    if len(found) > _MOST_PROBLEMS:
        found[_MOST_PROBLEMS:] = [f"There are {len(found) - _MOST_PROBLEMS} more problems."]
    return " ".join(found)


# The most problems that one message names. A file with more of them is most likely not a policy at all.
_MOST_PROBLEMS = 5


# pydantic adds the name of a union's member to an error's path. It is not a key of the document.
_UNION_MEMBER = re.compile(r"constrained-|literal\[|tuple\[|\[key\]")


# Keys that are shown as they are. Others are quoted, so that a message stays on one line.
_PLAIN_KEY = re.compile(r"[\w.-]{1,63}")


def _key_path(location: tuple[int | str, ...], prefix: str, whole: str, end: str = "") -> str:
    parts = []
    for index, part in enumerate(location):
        if index and isinstance(part, str) and _UNION_MEMBER.match(part):
            continue
        if isinstance(part, int):
            parts.append(f"[{part}]")
        else:
            parts.append(f".{part if _PLAIN_KEY.fullmatch(part) else shown(part)}")
    path = "".join([*parts, f".{end}" if end else ""])
    return prefix + path.removeprefix(".") or whole


def _keys_at(model: type[BaseModel], location: tuple[Any, ...], extra_keys: Sequence[str]) -> list[str]:
    current = model
    for part in location:
        field = current.model_fields.get(part) if isinstance(part, str) else None
        if field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            current = field.annotation
    return [*current.model_fields, *(extra_keys if current is model else ())]


_KINDS = {
    "bool_type": "true or false",
    "int_type": "an integer",
    "string_type": "a string",
    "string_unicode": "a string",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
}
# Keyed by the beginning of the pattern.
_PATTERNS = {
    r"^[\x20": "printable ASCII characters",
    r"^[\x21": "printable ASCII characters without spaces",
    "^(/": "a path that starts with / and does not end with /, for example /llm",
    "^/": "a path that starts with / and has no query, % or space, for example /v1/score",
    "^[A": "a name of at most 63 letters, digits and . _ - that starts with a letter, for example batch",
    "^[a-z0-9!": "a header name, for example x-priority",
    "^[a-z0-9](": "a name of at most 63 lower-case letters, digits and -, with a letter or digit at both ends, for"
    " example night",
}


def _use(kind: str, context: Mapping[str, Any], message: str) -> str:
    if kind == "literal_error":
        return str(context["expected"])
    if kind in {"greater_than_equal", "less_than_equal"}:
        return f"{'at least' if kind.startswith('greater') else 'at most'} {context.get('ge', context.get('le'))}"
    if kind == "string_pattern_mismatch":
        pattern = str(context["pattern"])
        return next(
            (text for start, text in _PATTERNS.items() if pattern.startswith(start)), f"another text ({message})"
        )
    if kind == "too_short":
        return f"at least {context['min_length']}"
    if kind in {"string_too_long", "too_long"}:
        return f"at most {context['max_length']} characters"
    return _KINDS.get(kind, f"another value ({message})")


# The depth is bounded too: YAML aliases allow a few lines to stand for a value that would not fit into memory.
class _Repr(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to format an integer of more than 4300 digits.
        return super().repr_int(x, level) if x.bit_length() < 1024 else f"an integer of {x.bit_length()} bits"


_REPR = _Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 2, 60, 60, 60


def shown(value: object) -> str:
    """Return `value` as a message shows it: one line of at most 60 characters."""
    text = _REPR.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def one_line(text: str) -> str:
    """Return `text` as one line of at most 200 characters."""
    text = " ".join(text.split())
    return text if len(text) <= 200 else text[:197] + "..."
