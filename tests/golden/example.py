"""The injected example, as a short text to review: what is long, Envoy's configuration and its Lua, is left out."""

import re
from collections.abc import Callable, Mapping

from tools.build_manifests import injected_example


def golden_files() -> Mapping[str, Callable[[], str]]:
    """Path from the repository's root -> the function that returns its text."""
    return {"tests/golden/scale-out-injected.yaml": _shortened}


def _shortened() -> str:
    text = re.sub(
        r"(?m)(- --config-yaml\n +- ).*$", r"\1Envoy's configuration (left out of this file)", injected_example()
    )
    return re.sub(r"(?m)(- name: VLLM_PRIORITY_LUA\n +value: ).*$", r"\1the Lua (left out of this file)", text)
