"""What changes if one policy replaces another, as `vllm-priority validate --against` prints it."""

import json
from pathlib import Path

import pytest

from control_plane.cli import main
from control_plane.policy.difference import MAX_LINES, NOT_SET, policy_changes, unified_difference
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


def unified(old: str, new: str, max_chars: int = 4000) -> list[str]:
    return unified_difference(parse_policies(old), parse_policies(new), max_chars).splitlines()


A, B = "{name: a, selector: {x: y}, policy: {}}", "{name: b, selector: {x: y}, policy: {default: 2}}"


def test_the_unified_difference_has_the_lines_of_the_policies_that_changed() -> None:
    lines = unified(f"{{default: 1, policies: [{A}]}}", f"{{default: 3, policies: [{A}, {B}]}}")
    assert lines[:3] == ["--- default before", "+++ default after", "@@ -4,7 +4,7 @@"]
    assert ["-default: 1", "+default: 3"] == [line for line in lines[3:] if line[:8] in ("-default", "+default")][:2]
    assert "--- a before" in lines, "it has the default of the whole file"
    assert "+# Position in the file: 2" in lines


def test_the_unified_difference_shows_another_order() -> None:
    lines = unified(f"policies: [{A}, {B}]", f"policies: [{B}, {A}]")
    assert [line for line in lines if line.startswith(("-#", "+#"))] == [
        "-# Position in the file: 1",
        "+# Position in the file: 2",
        "-# Position in the file: 2",
        "+# Position in the file: 1",
    ]


def test_the_unified_difference_is_empty_for_another_way_to_write_the_same() -> None:
    assert unified("# a comment\ndefault: 1", "{default: 1, keep_header: false}") == []


def test_the_difference_of_a_large_policy_has_the_lines_that_changed() -> None:
    old, new = (
        json.dumps({"classes": {f"c{number}": number for number in range(MAX_LINES + extra)}}) for extra in (0, 2)
    )
    assert unified(old, new) == ["--- default before", "+++ default after", "+  c1000: 1000", "+  c1001: 1001"]


def test_the_unified_difference_is_cut() -> None:
    assert unified("default: 1", "default: 2", 30) == ["--- default before", "+++ default", "(cut)"]
