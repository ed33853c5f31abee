"""The published schemas of Istio's and Gateway API's kinds, by the validators that npm packages make of their CRDs.

They are fetched into .cache/tools/crds once. Nothing is published for Envoy Gateway's own kinds.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tools.fetch_tools import TOOLS, FetchError, node, npm

# The CRDs of Istio 1.29.2, and those of Gateway API 1.0.0: what the oldest takes, later ones take too.
_PACKAGES = ("@kubernetes-models/istio@3.0.1", "@kubernetes-models/gateway-api@0.5.1")

_MODULES: Mapping[tuple[str, str], str] = {
    ("networking.istio.io/v1alpha3", "EnvoyFilter"): "@kubernetes-models/istio",
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): "@kubernetes-models/gateway-api",
}

# One document a line in, the list of what is wrong with it a line out.
_PROGRAM = """
const lines = require("readline").createInterface({ input: process.stdin });
lines.on("line", async (line) => {
  const [packageName, document] = JSON.parse(line);
  const found = [];
  try {
    const module = await import(`${packageName}/${document.apiVersion}/${document.kind}`);
    new module[document.kind](document).validate();
  } catch (error) {
    found.push(...(error.errors ?? [error]).map((each) => `${each.instancePath ?? ""} ${each.message}`));
  }
  console.log(JSON.stringify(found));
});
"""


def problems(document: Mapping[str, Any]) -> list[str]:
    """What the schema of the document's kind says against it."""
    package = _MODULES[document["apiVersion"], document["kind"]]
    node_process = _node()
    assert node_process.stdin and node_process.stdout
    node_process.stdin.write(json.dumps([package, document]) + "\n")
    node_process.stdin.flush()
    answer = node_process.stdout.readline()
    assert answer, f"node ended with {node_process.wait(10)}"
    found: list[str] = json.loads(answer)
    return found


@cache
def _node() -> subprocess.Popen[str]:
    """Kept for the run: it starts slower than it checks. It ends when its input does, with this process."""
    command = [*node(), "-e", _PROGRAM]
    return subprocess.Popen(command, cwd=_installed(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@cache
def _installed() -> Path:
    """The folder whose node_modules holds the packages."""
    folder = TOOLS.parent / "crds"
    stamp = folder / ".from"
    if stamp.is_file() and stamp.read_text() == "\n".join(_PACKAGES):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        command = [*npm(), "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", *_PACKAGES]
        (Path(made) / "package.json").write_text("{}")
        done = subprocess.run(command, cwd=made, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise FetchError(f"npm install {' '.join(_PACKAGES)} failed: {(done.stderr or done.stdout).strip()[:300]}")
        (Path(made) / ".from").write_text("\n".join(_PACKAGES))
        shutil.rmtree(folder, ignore_errors=True)
        # Moved into place whole: a second run at the same time never sees half of it.
        Path(made).rename(folder)
        Path(made).mkdir()
    return folder
