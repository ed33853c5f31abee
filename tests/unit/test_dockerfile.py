"""The Dockerfile, as far as it can be judged without a container engine. tests/image carries its steps out."""

import subprocess
import sys
from pathlib import Path

from tests.image.dockerfile import ROOT, Step, stages

BUILD, FINAL = stages((ROOT / "Dockerfile").read_text())


def of(stage: list[Step], instruction: str) -> list[str]:
    return [step.text for step in stage if step.instruction == instruction]


def test_hadolint_has_nothing_to_say() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_runs_as_a_numbered_user_that_is_not_root() -> None:
    (user,) = of(FINAL, "USER")
    assert all(number.isdigit() and int(number) > 0 for number in user.split(":"))


def test_nothing_is_installed_but_by_its_hash() -> None:
    installs = [part for text in of(BUILD, "RUN") for part in text.split("&&") if " pip" in part and "install" in part]
    assert installs
    for install in installs:
        assert "--no-deps" in install
        assert "--require-hashes" in install or "dist/*.whl" in install


def test_it_needs_no_shell_at_run_time() -> None:
    assert not of(FINAL, "RUN")
    assert all(text.startswith("[") for text in of(FINAL, "ENTRYPOINT") + of(FINAL, "CMD"))


def test_what_it_copies_is_let_through_and_there() -> None:
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for text in of(BUILD, "COPY"):
        for source in text.split()[:-1]:
            assert source in let_through
            assert (ROOT / source).exists()
