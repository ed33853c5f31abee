"""Envoy accepts the configuration inside the injected example."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tools.build_manifests import injected_example


def envoy_configs(node: Any) -> Iterator[str]:
    """The texts that stand after --config-yaml, as Envoy is given them: Kubernetes writes $$ for $."""
    if isinstance(node, dict):
        for value in node.values():
            yield from envoy_configs(value)
    elif isinstance(node, list):
        for before, item in zip([None, *node], node, strict=False):
            if before == "--config-yaml":
                yield item.replace("$$", "$")
            else:
                yield from envoy_configs(item)


def test_envoy_accepts_the_configuration_of_the_injected_example(envoy: Path, tmp_path: Path) -> None:
    configs = [c for document in yaml.safe_load_all(injected_example()) for c in envoy_configs(document)]
    assert len(configs) == 2
    for number, config in enumerate(configs):
        json.loads(config)
        file = tmp_path / f"{number}.yaml"
        file.write_text(config, encoding="utf-8")
        done = subprocess.run([envoy, "--mode", "validate", "-c", file], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
