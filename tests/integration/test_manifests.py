"""Envoy accepts the configuration inside the injected example."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.build_manifests import injected_example

from .kubelet import environment, expand


def sidecars(node: Any) -> Iterator[dict[str, Any]]:
    """The containers that run Envoy."""
    if isinstance(node, dict):
        if "--config-yaml" in node.get("args", ()):
            yield node
        for value in node.values():
            yield from sidecars(value)
    elif isinstance(node, list):
        for item in node:
            yield from sidecars(item)


def test_envoy_accepts_the_configuration_of_the_injected_example(envoy: Path) -> None:
    found = [sidecar for document in yaml.safe_load_all(injected_example()) for sidecar in sidecars(document)]
    assert len(found) == 2
    for sidecar in found:
        command = [str(envoy), "--mode", "validate", *expand(sidecar["args"], {"POD_NAME": "m", "POD_NAMESPACE": "ml"})]
        done = subprocess.run(command, env=environment(sidecar), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
