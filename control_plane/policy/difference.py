"""What changes for requests if one policy file replaces another."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from control_plane.policy.model import Policies, Policy

NOT_SET = "not set"


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
    """Return one of the policies as YAML, with defaults, and with its selector if it has one."""
    policy: Policy = policies.by_name[name]
    content: dict[str, Any] = {}
    for entry in policies.named:
        if entry.name == name:
            content["selector"] = dict(entry.selector)
    return yaml.safe_dump(
        {**content, **policy.model_dump(mode="json")}, sort_keys=False, allow_unicode=True, width=1000
    )


def unified_difference(old: Policies, new: Policies, max_chars: int) -> str:
    """Return the unified difference of all policies, as YAML with defaults.

    It ends after the policy with which it reaches `max_chars`, and is cut there.
    """
    texts: list[str] = []
    size = 0
    for name in dict.fromkeys([*old.by_name, *new.by_name]):
        before, after = (
            policy_yaml(policies, name).splitlines(keepends=True) if name in policies.by_name else []
            for policies in (old, new)
        )
        if before != after:
            text = "".join(difflib.unified_diff(before, after, f"{name} before", f"{name} after"))
            texts.append(text)
            size += len(text)
            if size > max_chars:
                break
    text = "".join(texts)
    return text if len(text) <= max_chars else f"{text[:max_chars]}\n(cut)\n"


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
