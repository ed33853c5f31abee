"""The image's steps, carried out on this machine: what they leave runs by itself, and twice is the same twice.

Not in `make test`: it downloads what the lock names.
"""

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.image.dockerfile import ROOT, carry_out, stages

BUILD, _ = stages((ROOT / "Dockerfile").read_text())
MOVED = ("/opt/", "/src")


def base_python() -> Path:
    return Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("image") / "root"
    carry_out(BUILD, root, base_python(), MOVED)
    return root


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment: Mapping[str, str] = {"PATH": f"{root}/opt/vllm-priority/bin", "HOME": "/nonexistent"}
    command = [str(root / "opt" / "vllm-priority" / "bin" / "vllm-priority"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=120)


def test_the_program_runs_on_what_the_steps_left(built: Path) -> None:
    done = run(built, "version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("vllm-priority 0.")


def test_it_holds_its_templates_and_its_lua(built: Path) -> None:
    done = run(built, "config", "--role", "render", "--target", "bootstrap")
    assert done.returncode == 0, done.stderr
    assert "vllm_priority" in done.stdout


def test_nothing_is_compiled_at_run_time(built: Path) -> None:
    def compiled() -> set[Path]:
        return set((built / "opt" / "vllm-priority").rglob("*.pyc"))

    before = compiled()
    assert run(built, "version").returncode == 0
    assert compiled() == before


def test_the_chart_s_hook_finds_its_python(built: Path) -> None:
    environment = {"PATH": f"{built}/opt/vllm-priority/bin"}
    subprocess.run(["python", "-c", "import time; time.sleep(0)"], env=environment, check=True, timeout=60)


def test_there_is_no_pip_in_it(built: Path) -> None:
    assert not list((built / "opt" / "vllm-priority").rglob("pip"))


def test_the_same_sources_give_the_same_wheel(built: Path, tmp_path: Path) -> None:
    hatchling = [str(built / "opt" / "build" / "bin" / "python"), "-m", "hatchling", "build", "--target", "wheel"]
    environment = {"SOURCE_DATE_EPOCH": "315532800", "PATH": "/usr/bin:/bin"}
    subprocess.run(
        [*hatchling, "--directory", str(tmp_path)], cwd=built / "src", env=environment, check=True, timeout=120
    )
    first, second = (next(folder.glob("*.whl")) for folder in (built / "src" / "dist", tmp_path))
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()
