"""The wheel, built and used away from the checkout: its templates and its Lua are inside."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def names(folder: str) -> set[str]:
    return {path.name for path in (ROOT / folder).iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh virtual environment with the wheel alone; its dependencies are borrowed from this one."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", where, str(wheel)],
        check=True, capture_output=True,
    )  # fmt: skip
    return python


def run(python: Path, *arguments: str) -> str:
    # PYTHONPATH does not read .pth files, so the checkout that is installed in this environment is not found.
    borrowed = sysconfig.get_path("purelib")
    done = subprocess.run(
        [python, "-m", "control_plane.cli", *arguments],
        cwd=python.parent, env={"PATH": os.environ["PATH"], "PYTHONPATH": borrowed},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_templates_and_lua_and_nothing_else(wheel: Path) -> None:
    files = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("envoy", "lua"):
        assert {f"control_plane/{folder}/{name}" for name in names(folder)} <= files
    for folder in ("control_plane/server/console/templates", "control_plane/server/console/static"):
        assert {f"{folder}/{name}" for name in names(folder)} <= files
    assert "control_plane/py.typed" in files
    tops = {name.partition("/")[0] for name in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"control_plane"}


def test_the_installed_package_is_not_the_checkout(installed: Path) -> None:
    borrowed = sysconfig.get_path("purelib")
    where = subprocess.run(
        [installed, "-c", "import control_plane; print(control_plane.__file__)"],
        cwd=installed.parent, env={"PYTHONPATH": borrowed}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert str(ROOT) not in where


def test_version(installed: Path) -> None:
    assert run(installed, "version").startswith("vllm-priority 0.")


@pytest.mark.parametrize("target", ["bootstrap", "xds", "istio", "istio-waypoint", "envoy-gateway"])
def test_config_is_the_same_as_from_the_checkout(installed: Path, target: str) -> None:
    arguments = ["config", "--role", "engine", "--target", target]
    here = subprocess.run(
        [sys.executable, "-m", "control_plane.cli", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert run(installed, *arguments) == here


def test_explain_runs_the_lua_of_the_wheel(installed: Path) -> None:
    out = run(installed, "explain", "--path", "/inference/v1/generate", "-H", "X-Vllm-Priority: 5", "--json")
    assert json.loads(out)["body"].rstrip() == '{"priority":5}'
