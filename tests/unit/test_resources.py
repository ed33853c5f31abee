"""Kubernetes' quantities, as k8s.io/apimachinery's own tests have them, and resource requirements."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.errors import InvalidField
from control_plane.injector.resources import (
    DEFAULT_RESOURCES,
    Quantity,
    are_guaranteed,
    guaranteed,
    parse_resources,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", "0"),
        ("1", "1"),
        (2, "2"),
        (0.5, "0.5"),
        ("+1", "1"),
        ("-5", "-5"),
        ("1.", "1"),
        (".5", "0.5"),
        (" 1 ", "1"),
        ("100n", "0.0000001"),
        ("100u", "0.0001"),
        ("500m", "0.5"),
        ("1k", "1000"),
        ("2M", "2000000"),
        ("1.5G", "1500000000"),
        ("1T", "1000000000000"),
        ("1P", "1000000000000000"),
        ("1E", "1000000000000000000"),
        ("1Ki", "1024"),
        ("1Mi", "1048576"),
        ("1.5Gi", "1610612736"),
        ("1Ti", "1099511627776"),
        ("1Pi", "1125899906842624"),
        ("1Ei", "1152921504606846976"),
        ("1e3", "1000"),
        ("1E3", "1000"),
        ("1.5e+3", "1500"),
        ("1e-3", "0.001"),
        ("0.1n", "0.000000001"),
        ("1.0000000001", "1.000000001"),
    ],
)
def test_a_quantity_is_parsed_as_kubernetes_parses_it(text: str | float, value: str) -> None:
    assert Quantity.parse(text).value == Decimal(value)


@pytest.mark.parametrize(
    "text",
    ["", " ", ".", "+", "m", "1K", "1ki", "1mi", "1KI", "1 Ki", "1Kim", "1e", "1e1.5", "1e3k", "1,5", "1_0", "0x1",
     "e3", "--1", "many", "١", "nan", "inf", "1e100", "1" * 201, True],
)  # fmt: skip
def test_what_is_not_a_quantity_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a valid quantity"):
        Quantity.parse(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [("1000m", "1"), (2, "2"), ("2.0", 2), ("1Gi", "1024Mi"), ("1e3", "1k"), ("0.5", "500m"), ("1024", "1Ki")],
)
def test_quantities_of_the_same_amount_are_equal(one: str | float, other: str | float) -> None:
    assert Quantity.parse(one) == Quantity.parse(other)


@pytest.mark.parametrize(("less", "more"), [("1G", "1Gi"), ("1E", "1Ei"), ("999m", "1"), ("-1", "0"), ("9", "10")])
def test_quantities_are_ordered_by_amount(less: str, more: str) -> None:
    assert Quantity.parse(less) < Quantity.parse(more)


@given(st.integers(0, 10**18), st.sampled_from(["", "m", "k", "Ki", "M", "Mi", "G", "Gi"]))
def test_more_of_the_same_unit_is_more(number: int, unit: str) -> None:
    assert Quantity.parse(f"{number}{unit}") < Quantity.parse(f"{number + 1}{unit}")


@pytest.mark.parametrize(
    ("requests", "limits", "expected"),
    [
        ({}, {"cpu": "4", "memory": "8Gi"}, True),
        ({"cpu": "1000m", "memory": "1024Mi"}, {"cpu": "1", "memory": "1Gi"}, True),
        ({"cpu": 2, "memory": "1Gi"}, {"cpu": "2", "memory": "1Gi"}, True),
        ({"cpu": "1"}, {"cpu": 1.0, "memory": "1Gi"}, True),
        ({"cpu": "999m"}, {"cpu": "1", "memory": "1Gi"}, False),
        ({"cpu": "1"}, {"cpu": "1"}, False),
        ({"cpu": "1", "memory": "1Gi"}, {}, False),
        ({}, {"cpu": "0", "memory": "1Gi"}, False),
        ({}, {"cpu": "lots", "memory": "1Gi"}, False),
    ],
)
def test_guaranteed_compares_quantities(
    requests: dict[str, str | int | float], limits: dict[str, str | int | float], expected: bool
) -> None:
    assert are_guaranteed(requests, limits) is expected


@pytest.mark.parametrize("text", ["{}", '{"limits": {"cpu": "2"}}', '{"requests": {"memory": "1Gi"}}'])
def test_guaranteed_resources_are_guaranteed(text: str) -> None:
    made = guaranteed(parse_resources(text))
    assert are_guaranteed(made["requests"], made["limits"])
    assert guaranteed(DEFAULT_RESOURCES)["limits"] == {"cpu": "100m", "memory": "1280Mi"}


def test_bare_numbers_are_quantities_with_the_digits_that_were_written() -> None:
    text = '{"requests": {"cpu": 0.50, "nvidia.com/gpu": 1}, "limits": {"cpu": 1e0, "memory": 2000000000}}'
    assert parse_resources(text) == {
        "requests": {"cpu": "0.50", "nvidia.com/gpu": "1"},
        "limits": {"cpu": "1e0", "memory": "2000000000"},
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "malformed JSON ''. Use JSON, for example"),
        ("[" * 100_000, "malformed JSON"),
        ("[]", "'[]' is not a valid ResourceRequirements. Use JSON, for example"),
        ("5", "is not a valid ResourceRequirements"),
        ('{"claims": []}', "is not a valid ResourceRequirements"),
        ('{"limits": null}', "is not a valid ResourceRequirements"),
        ('{"limits": {"cpu": true}}', "is not a valid ResourceRequirements"),
        ('{"limits": {"cpu": null}}', "is not a valid ResourceRequirements"),
        ('{"limits": {"cpu": NaN}}', "is not a valid ResourceRequirements"),
        ('{"limits": {"cpu": -1}}', "is not a valid ResourceRequirements"),
        ('{"limits": {"memory": "1K"}}', "is not a valid ResourceRequirements"),
        ('{"limits": {"": 1}}', "is not a valid ResourceRequirements"),
        ('{"requests": {"cpu": 2}, "limits": {"cpu": "1999m"}}', "requests.cpu 2 is above limits.cpu 1999m."),
    ],
)
def test_invalid_resources_name_the_field_and_the_problem(text: str, problem: str) -> None:
    with pytest.raises(InvalidField) as caught:
        parse_resources(text)
    assert caught.value.field == "resources"
    assert caught.value.problem.startswith(problem) or problem in caught.value.problem
    assert "\n" not in str(caught.value)
