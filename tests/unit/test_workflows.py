"""What the workflows run is a target of the Makefile, which also runs without GitHub. `make lint` runs actionlint."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_every_make_target_of_a_workflow_exists(workflow: Path) -> None:
    named = [name for step in steps(workflow) for name in re.findall(r"\bmake ([a-z0-9-]+)", step.get("run", ""))]
    assert named
    assert set(named) <= TARGETS


def test_pre_commit_runs_a_target_that_exists() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert {hook["entry"].removeprefix("make ") for hook in repository["hooks"]} <= TARGETS


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)


@pytest.mark.parametrize(("tag", "status"), [("v{version}", 0), ("{version}", 2), ("v0.0.0", 2), ("", 2)])
def test_a_release_needs_a_tag_that_names_the_version(tag: str, status: int) -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version
    command = ["make", "check-tag", f"TAG={tag.format(version=version[1])}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert ("Use TAG=v" in done.stderr) == (status != 0)
