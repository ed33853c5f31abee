"""What changes if one policy replaces another, as `vllm-priority validate --against` prints it."""

import json
from pathlib import Path

import pytest

from control_plane.cli import main
from control_plane.policy.difference import NOT_SET, policy_changes
from control_plane.policy.load import parse_policies


def changes(old: str, new: str) -> list[tuple[object, ...]]:
    return [tuple(change) for change in policy_changes(parse_policies(old), parse_policies(new))]


def test_a_key_that_is_left_out_goes_back_to_its_default() -> None:
    assert changes("{classes: {batch: 10}, default: batch, keep_header: true}", "{classes: {batch: 10}}") == [
        ("default", "keep_header", True, False),
        ("default", "default", "batch", None),
    ]


def test_classes_are_compared_one_by_one() -> None:
    assert changes("classes: {a: 1, b: 2, c: 3}", "classes: {a: 1, b: -2, d: 4}") == [
        ("default", "classes.b", 2, -2),
        ("default", "classes.c", 3, NOT_SET),
        ("default", "classes.d", NOT_SET, 4),
    ]


def test_the_order_and_the_selectors_of_named_policies_count() -> None:
    one, two = "{name: one, selector: {team: a}}", "{name: two, selector: {team: b}}"
    assert changes(f"policies: [{one}, {two}]", f"policies: [{two}, {one}]") == [
        ("one", "position", 1, 2),
        ("two", "position", 2, 1),
    ]
    assert changes(f"policies: [{one}]", "policies: [{name: one, selector: {team: c}}]") == [
        ("one", "selector.team", "a", "c")
    ]


def test_a_new_policy_is_shown_with_all_of_its_values() -> None:
    found = changes("{}", "policies: [{name: night, selector: {team: a}, policy: {default: 10}}]")
    assert {change[0] for change in found} == {"night"}
    assert ("night", "default", NOT_SET, 10) in found
    assert ("night", "selector.team", NOT_SET, "a") in found


def test_layout_and_defaults_written_out_are_no_change() -> None:
    assert changes("{}", "# a comment\nkeep_header: false\n") == []


def test_the_command_prints_the_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("{classes: {batch: 10}, default: batch}")
    new.write_text("{classes: {batch: 20}, default: batch}")

    def validate(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["validate", *arguments])
        assert not ended.value.code
        return capsys.readouterr().out

    assert validate("-f", str(new), "--against", str(old)) == f"{new}: valid\ndefault: classes.batch: 10 -> 20\n"
    report = json.loads(validate("-f", str(new), "--against", str(old), "--json"))
    assert report["changes"] == [{"policy": "default", "key": "classes.batch", "old": 10, "new": 20}]
    assert report["restart"] == {}
    new.write_text("{ordinary: enforce, classes: {batch: 10}, default: batch}")
    assert validate("-f", str(new), "--against", str(old)) == (
        f'{new}: valid\ndefault: ordinary: "pass" -> "enforce"\ndefault: running sidecars need a restart for ordinary\n'
    )
    assert json.loads(validate("-f", str(new), "--against", str(old), "--json"))["restart"] == {"default": ["ordinary"]}
    assert "Nothing changes: " in validate("-f", str(new), "--against", str(new))
    assert "changes" not in json.loads(validate("-f", str(new), "--json"))
