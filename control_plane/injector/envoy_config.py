"""The sidecar's whole Envoy configuration, as one argument of its container: no ConfigMap has to be kept in step.

The text of its scripts is an environment variable, so that the pod has it once and not for each filter.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from control_plane.injector.compact_yaml import members
from control_plane.injector.reasons import NotInjectedError, Reason
from control_plane.policy.model import Policy
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import Placement

MAX_ARGUMENT_BYTES = 128 * 1024 - 1
"""Linux accepts no longer argument: MAX_ARG_STRLEN is 32 pages, with the final NUL (execve(2))."""


def container_argument(policy: Policy, placement: Placement, labels: Mapping[str, str]) -> str:
    """Return the bootstrap as YAML, escaped for a container's arguments.

    Raises:
        NotInjectedError: it does not fit into one argument.
    """
    # Pods differ in their labels, which are part of the node: all else is rendered once, and memoized.
    node, others = _rendered(_Source(policy.as_json + repr(placement), policy, placement))
    node = {**node, "metadata": {**node["metadata"], "labels": dict(labels)}}
    argument = verbatim("{" + ",".join([f"'node': {json.dumps(node, separators=(',', ':'))}", *others]) + "}")
    size = len(argument.encode())
    if size > MAX_ARGUMENT_BYTES:
        raise NotInjectedError(
            Reason.CONFIGURATION_TOO_LARGE,
            f"the sidecar's configuration has {size} bytes, and at most {MAX_ARGUMENT_BYTES} are possible."
            " Use fewer labels, or fewer routes or classes in the policy.",
        )
    return argument


def verbatim(text: str) -> str:
    """Return `text` as a container's argument or variable: there Kubernetes replaces $(NAME), and $$ stands for $."""
    return text.replace("$", "$$")


@dataclass(frozen=True)
class _Source:
    """What a configuration is made of. Policies contain mappings, which cannot be hashed, so `key` stands for all."""

    key: str
    policy: Policy = field(compare=False)
    placement: Placement = field(compare=False)


@lru_cache(maxsize=128)
def _rendered(source: _Source) -> tuple[Mapping[str, Any], list[str]]:
    """The bootstrap's node, and its other members as YAML."""
    config = bootstrap(source.policy, source.placement)
    node = config.pop("node")
    return node, members(config)
