"""The parser of the report header reads what the filter writes, and nothing else."""

import pytest

from control_plane.explain import explain
from control_plane.policy.model import Policy
from control_plane.report_header import SidecarReport, parse_report


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-10; source=header; outcome=inserted", SidecarReport("inserted", -10, "header")),
        ("2; source=header; outcome=replaced; clamped", SidecarReport("replaced", 2, "header", ("clamped",))),
        ("-9223372036854775808; source=default; outcome=inserted", SidecarReport("inserted", -(2**63), "default")),
        ("none; outcome=absent", SidecarReport("absent")),
        (" none ;outcome=absent ", SidecarReport("absent")),
    ],
)
def test_a_report_is_parsed_into_its_parts(text: str, expected: SidecarReport) -> None:
    assert parse_report(text) == expected


@pytest.mark.parametrize(
    "text", [None, "", "none", "5", "99; forged", "x; outcome=inserted", "5; outcome=", "1.5; outcome=a"]
)
def test_a_text_that_is_not_a_report_is_not_parsed(text: str | None) -> None:
    assert parse_report(text) is None


@pytest.mark.parametrize("value", ["5", "-0", "9223372036854775807", "high", None])
def test_every_report_of_the_filter_is_parsed(value: str | None) -> None:
    headers = [("content-type", "application/json")]
    headers += [("x-vllm-priority", value)] if value is not None else []
    found = explain(Policy(), "engine", "/inference/v1/generate", headers, [b"{}"])
    assert parse_report(found.report) is not None, found.report
