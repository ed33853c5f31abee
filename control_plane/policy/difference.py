"""What changes for requests if one policy file replaces another."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from control_plane.policy.model import Policies, Policy

NOT_SET = "not set"

MAX_LINES = 1000
"""The longest policy whose texts are compared in order."""

_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class PolicyChange(NamedTuple):
    """A value that differs. policy: the name of the policy. A value that a file does not have is NOT_SET."""

    policy: str
    key: str
    old: Any
    new: Any


def policy_changes(old: Policies, new: Policies) -> list[PolicyChange]:
    """Return the values of `new` that differ from those of `old`, with defaults, in the order of the files."""
    before, after = (dict(_values(policies)) for policies in (old, new))
    keys = [*before, *(key for key in after if key not in before)]
    pairs = [(key, before.get(key, NOT_SET), after.get(key, NOT_SET)) for key in keys]
    return [PolicyChange(*key, was, becomes) for key, was, becomes in pairs if was != becomes]


def policy_yaml(policies: Policies, name: str) -> str:
    """Return one of the policies as YAML, with defaults.

    A named one begins with its position, because the first policy whose selector matches applies.
    """
    for position, entry in enumerate(policies.named, start=1):
        if entry.name == name:
            return _yaml(entry.policy, position, dict(entry.selector))
    return _yaml(policies.default)


def unified_difference(old: Policies, new: Policies, max_chars: int) -> str:
    """Return the unified difference of all policies, as YAML with defaults, cut after `max_chars`.

    Of a policy with more than MAX_LINES lines, it has the lines that only one of the two texts has, because the time to
    compare texts grows with the square of their length.
    """
    text = ""
    before, after = (_by_name(policies) for policies in (old, new))
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            text += _difference(name, before.get(name), after.get(name))
            if len(text) > max_chars:
                return f"{text[:max_chars]}\n(cut)\n"
    return text


def _by_name(policies: Policies) -> dict[str, tuple[Any, ...]]:
    named = {
        entry.name: (entry.policy, position, dict(entry.selector))
        for position, entry in enumerate(policies.named, start=1)
    }
    return {"default": (policies.default,), **named}


def _yaml(policy: Policy, position: int | None = None, selector: dict[str, str] | None = None) -> str:
    head = "" if position is None else f"# Position in the file: {position}\n"
    content = {} if selector is None else {"selector": selector}
    return head + yaml.dump(
        {**content, **policy.model_dump(mode="json")}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000
    )


def _difference(name: str, before: tuple[Any, ...] | None, after: tuple[Any, ...] | None) -> str:
    old, new = (_yaml(*entry).splitlines(keepends=True) if entry else [] for entry in (before, after))
    head = f"--- {name} before\n", f"+++ {name} after\n"
    if max(len(old), len(new)) <= MAX_LINES:
        return "".join((*head, *list(difflib.unified_diff(old, new))[2:])) if old != new else ""
    known, lines = set(old), set(new)
    changed = [f"-{line}" for line in old if line not in lines] + [f"+{line}" for line in new if line not in known]
    return "".join((*head, *changed)) if changed else ""


def _values(policies: Policies) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, policy in policies.by_name.items():
        yield from (((name, key), value) for key, value in _flat("", policy.model_dump(mode="json")))
    for position, entry in enumerate(policies.named, start=1):
        # The first policy whose selector matches applies, so the position counts.
        yield (entry.name, "position"), position
        yield from (((entry.name, key), value) for key, value in _flat("selector", dict(entry.selector)))


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    else:
        yield path, value
