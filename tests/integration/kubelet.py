"""What the kubelet does to a container's manifest before the container starts."""

import re
from collections.abc import Mapping
from typing import Any


def expand(args: list[str], env: Mapping[str, str]) -> list[str]:
    """Expand arguments as the kubelet does: $(NAME) where NAME is known; $$ is a literal $."""
    return [re.sub(r"\$(\$|\(([^)]*)\))", lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), arg) for arg in args]


def environment(container: Mapping[str, Any]) -> dict[str, str]:
    """The container's variables that have a value, expanded as arguments are."""
    return {entry["name"]: expand([entry["value"]], {})[0] for entry in container["env"] if "value" in entry}
