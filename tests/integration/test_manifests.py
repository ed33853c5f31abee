"""Every Envoy configuration inside a manifest of this repository is one that Envoy takes."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
MANIFESTS = sorted(
    file
    for folder in ("deploy", "tests/golden")
    for file in (ROOT / folder).rglob("*.yaml")
    if "--config-yaml" in file.read_text(encoding="utf-8")
)


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


def test_there_are_manifests_with_an_envoy_in_them() -> None:
    assert MANIFESTS


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_envoy_takes_the_configuration(envoy: Path, manifest: Path, tmp_path: Path) -> None:
    configs = [
        c for document in yaml.safe_load_all(manifest.read_text(encoding="utf-8")) for c in envoy_configs(document)
    ]
    assert configs
    for number, config in enumerate(configs):
        json.loads(config)
        file = tmp_path / f"{number}.yaml"
        file.write_text(config, encoding="utf-8")
        done = subprocess.run([envoy, "--mode", "validate", "-c", file], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
