"""How much memory a sidecar may use: what it was given, what its container was given, or a share of the machine's."""

import os
from pathlib import Path

from control_plane.errors import InvalidField
from control_plane.injector.resources import Quantity

LEAST_BYTES = 128 * 1024**2
"""An idle Envoy with the filter takes about 70 MiB."""

_SHARE = 4
"""Where the machine's memory is the only limit, the sidecar takes one part in so many: vLLM needs the rest."""

# Where cgroup v2 and v1 say what a group may use, below the folder in which they are mounted.
_LIMITS = (("", "memory.max"), ("unified", "memory.max"), ("memory", "memory.limit_in_bytes"))


def parse_limit(text: str, field: str) -> int:
    """Return the bytes that a Kubernetes quantity stands for, such as 1280Mi. InvalidField names `field`."""
    try:
        found = Quantity.parse(text).value
    except ValueError:
        found = None
    if found is None or not LEAST_BYTES <= found < 2**63:
        raise InvalidField(
            field,
            f"{text[:60]!r} is not a valid amount of memory. Use bytes or a Kubernetes quantity of at least"
            " 128Mi, for example 1280Mi.",
        )
    return int(found)


def default_limit(root: Path = Path("/")) -> int:
    """Return the lowest memory limit of this process's control groups in bytes, or a quarter of the machine's memory.

    `root` is the file system to look in. A limit of all the machine's memory, or above, is no limit.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for limit in _group_limits(root) if limit < physical]
    return max(min(limits, default=physical // _SHARE), LEAST_BYTES)


def _group_limits(root: Path) -> list[int]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        # hierarchy:controllers:path; cgroup v2 has no controllers here.
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for folder, name in _LIMITS:
            # In a container the path may be that on the host, which cannot be seen: so its parents count too, up to
            # the mounted folder, which is the container's own group.
            mounted = root / "sys/fs/cgroup" / folder
            group = mounted / path.lstrip("/")
            for place in (group, *group.parents[: len(group.parts) - len(mounted.parts)]):
                try:
                    found.append(int((place / name).read_text()))
                except (OSError, ValueError):
                    continue
    return found
