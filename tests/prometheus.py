"""Prometheus' own programs, as Debian's package `prometheus` has them."""

import os
import shutil

import pytest


def program(name: str) -> str:
    """The path of prometheus or promtool. Without it the test is skipped, with the reason; with CI=true it fails."""
    found = shutil.which(name)
    if found is None:
        reason = f"{name} is missing. Install it, on Debian: apt-get install prometheus"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found
