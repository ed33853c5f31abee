"""What a running sidecar cannot be sent of a policy, because it lies in Envoy's configuration and not in the filter."""

from dataclasses import dataclass
from typing import Any, Self

from control_plane.policy.model import Limits, Policies, Policy

_DEFAULT_LIMIT = Limits().max_body_bytes


@dataclass(frozen=True, slots=True)
class StartedWith:
    """These parts of the policy that a sidecar started with. The defaults are those of the built-in policy."""

    ordinary: str = "pass"
    root_path: str | None = None
    max_body_bytes: int | None = _DEFAULT_LIMIT
    claims: str | None = None
    """What tokens are verified by: `Claims.verifier`."""

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """The parts of a sidecar that starts with this policy."""
        claims = policy.trust.claims if policy.trust else None
        verifier = claims.verifier if claims else None
        return cls(policy.ordinary, policy.routes.root_path, policy.limits.max_body_bytes, verifier)

    def told(self) -> dict[str, Any]:
        """What differs from the defaults, as a sidecar tells it in its node.metadata."""
        default = StartedWith()
        names = ("ordinary", "root_path", "max_body_bytes", "claims")
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}

    def lacks(self, policy: Policy) -> tuple[str, ...]:
        """Return the keys of `policy` that need a restart of a sidecar that started with these parts."""
        root_path, limit = policy.routes.root_path, policy.limits.max_body_bytes
        held, claims = self.max_body_bytes, policy.trust.claims if policy.trust else None
        needed = {
            "ordinary": policy.ordinary == "enforce" and self.ordinary != "enforce",
            "routes.root_path": root_path is not None and root_path != self.root_path,
            # The filter enforces a lower limit itself.
            "limits.max_body_bytes": held is not None and (limit is None or limit > held),
            "trust.claims": claims is not None and claims.verifier != self.claims,
        }
        return tuple(key for key, needs in needed.items() if needs)


RESTART_KEYS = ("ordinary", "routes.root_path", "limits.max_body_bytes", "trust.claims")
"""The keys that `StartedWith.lacks` can return."""


def needing_restart(old: Policies, new: Policies) -> dict[str, tuple[str, ...]]:
    """Return the keys that running sidecars need a restart for if `new` replaces `old`, by the name of the policy.

    A policy whose name is new is compared with the default policy, which its sidecars had until then, unless they had
    another one.
    """
    before = old.by_name
    found = {name: StartedWith.of(before.get(name, old.default)).lacks(policy) for name, policy in new.by_name.items()}
    return {name: keys for name, keys in found.items() if keys}


def listed(keys: tuple[str, ...]) -> str:
    """Return the keys as a part of a sentence."""
    return " and ".join(filter(None, (", ".join(keys[:-1]), keys[-1])))
