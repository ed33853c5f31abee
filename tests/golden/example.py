"""The injected example, as a short text to review: Envoy's configuration, 80 KB a line, is left out of it."""

import re
from collections.abc import Callable, Mapping

from tools.build_manifests import injected_example


def golden_files() -> Mapping[str, Callable[[], str]]:
    """Path from the repository's root -> the function that returns its text."""
    return {"tests/golden/scale-out-injected.yaml": _shortened}


def _shortened() -> str:
    return re.sub(
        r"(?m)(- --config-yaml\n +- ).*$", r"\1Envoy's configuration (left out of this file)", injected_example()
    )
