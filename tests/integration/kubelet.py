"""What the kubelet does to a container's manifest before the container starts."""

import re


def expand(args: list[str], env: dict[str, str]) -> list[str]:
    """Expand arguments as the kubelet does: $(NAME) where NAME is known; $$ is a literal $."""
    return [re.sub(r"\$(\$|\(([^)]*)\))", lambda m: "$" if m[1] == "$" else env.get(m[2], m[0]), arg) for arg in args]
