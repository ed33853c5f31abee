"""The Dockerfile, read and carried out without a container engine: each stage's paths under a folder of its own."""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Step:
    """One instruction: RUN, COPY, ... and what follows it, with continued lines joined."""

    instruction: str
    text: str


def stages(dockerfile: str) -> list[list[Step]]:
    """The steps from each FROM to the next; what stands before the first is left out."""
    joined = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", dockerfile))
    steps = [Step(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]
    found: list[list[Step]] = []
    for step in steps:
        if step.instruction == "FROM":
            found.append([step])
        elif found:
            found[-1].append(step)
    return found


def carry_out(steps: list[Step], root: Path, python: Path, absolute: tuple[str, ...]) -> Mapping[str, str]:
    """Runs a stage's COPY and RUN steps, and gives its environment.

    root: stands for / in every path that starts with one of `absolute`. python: the base image's.
    """
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "python").symlink_to(python)
    environment = {"PATH": f"{root}/bin:/usr/bin:/bin", "HOME": str(root), **_of_pip()}
    folder = root
    for step in steps:
        text = _moved(step.text, root, absolute)
        if step.instruction == "ARG" and "=" in text:
            name, value = text.split("=", 1)
            environment[name] = value
        elif step.instruction == "ENV":
            for pair in shlex.split(text):
                name, value = pair.split("=", 1)
                environment[name] = re.sub(r"\$\{?(\w+)\}?", lambda found: environment.get(found[1], ""), value)
        elif step.instruction == "WORKDIR":
            folder = Path(text.strip())
            folder.mkdir(parents=True, exist_ok=True)
        elif step.instruction == "COPY":
            *sources, target = text.split()
            for source in sources:
                _copy(ROOT / source, folder / target)
        elif step.instruction == "RUN":
            done = subprocess.run(["/bin/sh", "-ec", text], cwd=folder, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f"RUN {text}\n{done.stdout}\n{done.stderr}"
    return environment


def _of_pip() -> dict[str, str]:
    """Where this machine's pip finds packages."""
    return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.endswith("_proxy")}


def _moved(text: str, root: Path, absolute: tuple[str, ...]) -> str:
    return re.sub(rf"(?<![\w.-])(?={'|'.join(map(re.escape, absolute))})", str(root), text)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
