"""The real helm on the chart: what it renders, and what it says of values that are wrong."""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tools.fetch_tools import fetch

CHART = Path(__file__).resolve().parent.parent / "deploy" / "chart"
RELEASE, NAMESPACE = "vllm-priority", "priority-system"

# The oldest and the newest version that kubernetes-validate knows.
KUBERNETES_VERSIONS = ("1.33", "1.37")


class HelmError(Exception):
    """helm refused; the message is what it wrote."""


@cache
def binary() -> Path:
    """The pinned helm, fetched where it is missing."""
    return fetch(["helm"])[0]


def helm(*arguments: str | Path) -> str:
    """What helm wrote on stdout; HelmError with its stderr where it fails."""
    done = subprocess.run([binary(), *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise HelmError((done.stderr or done.stdout).strip())
    return done.stdout


def template(values: Mapping[str, Any] | None = None, flags: Sequence[str] = (), chart: Path = CHART) -> str:
    """The chart's manifests as text, rendered with these values on top of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(values or {}, file)
        file.flush()
        return helm("template", RELEASE, chart, "--namespace", NAMESPACE, "--values", file.name, *flags)


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest."""
    return [document for document in yaml.safe_load_all(text) if document]


def find(objects: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """The objects of one kind."""
    return [document for document in objects if document["kind"] == kind]
