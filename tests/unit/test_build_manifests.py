"""The manifests of a release are what the commands write that the documentation names."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from control_plane.cli import cli
from tools.build_manifests import manifests

FILES = dict(manifests())


@pytest.mark.parametrize("role", ["render", "engine"])
@pytest.mark.parametrize("target", ["istio", "istio-waypoint", "envoy-gateway"])
def test_a_manifest_is_what_config_writes(target: str, role: str) -> None:
    written = CliRunner().invoke(cli, ["config", "--role", role, "--target", target]).stdout
    text = FILES[f"{target}-{role}.yaml"]
    assert list(yaml.safe_load_all(text)) == list(yaml.safe_load_all(written))
    assert f"vllm-priority config --role {role} --target {target}" in text


def test_the_injected_example_is_what_inject_writes() -> None:
    example = Path(__file__).parents[2] / "deploy" / "examples" / "scale-out" / "scale-out.yaml"
    written = CliRunner().invoke(cli, ["inject", "-f", str(example)]).stdout
    assert list(yaml.safe_load_all(FILES["scale-out-injected.yaml"])) == list(yaml.safe_load_all(written))
