"""Generated files are up to date; `make golden` writes them."""

import pytest

from tests.golden import targets
from tests.golden.regenerate import golden_files
from tools.regenerate import ROOT, GeneratedFile


@pytest.mark.parametrize("golden", golden_files(), ids=lambda golden: golden.path)
def test_a_generated_file_is_up_to_date(golden: GeneratedFile) -> None:
    assert not golden.difference(), f"run `make golden` and look at what changed:\n{golden.difference()}"


def test_no_golden_file_is_left_over() -> None:
    known = {golden.path for golden in golden_files()} | set(targets.INPUTS)
    left = [
        str(file.relative_to(ROOT))
        for file in (ROOT / "tests" / "golden").rglob("*")
        if file.suffix in {".yaml", ".json"} and str(file.relative_to(ROOT)) not in known
    ]
    assert not left
