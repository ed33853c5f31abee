"""What changes for requests if one policy file replaces another."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from control_plane.policy.model import Policies

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
