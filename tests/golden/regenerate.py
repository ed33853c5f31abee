"""Write every generated file of this repository: `make golden` runs `python -m tests.golden.regenerate`."""

from tests.golden import chart, example, targets
from tools.regenerate import GeneratedFile, shipped_files


def golden_files() -> list[GeneratedFile]:
    """Return the shipped files and the golden files of the tests."""
    return [
        # Before the chart's manifests: one of them holds the dashboard.
        *shipped_files(),
        *(GeneratedFile(path, produce) for path, produce in chart.golden_files().items()),
        *(GeneratedFile(path, produce) for path, produce in example.golden_files().items()),
        *(GeneratedFile(path, produce) for path, produce in targets.golden_files().items()),
    ]


if __name__ == "__main__":
    for golden in golden_files():
        print(f"{'written  ' if golden.write() else 'unchanged'}  {golden.path}")
