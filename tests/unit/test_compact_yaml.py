"""The compact YAML of a pod's configuration means what was written, to every reader, and is shorter than JSON."""

import json
from typing import Any

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from control_plane.injector.compact_yaml import members

_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40)
_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXT | st.sampled_from(["it's", '"', "\\", "a: b", "#", "&0", "*0 "]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=20,
)


def document(values: dict[str, Any]) -> str:
    return "{" + ",".join(members(values)) + "}"


@given(st.dictionaries(_TEXT, _VALUE, max_size=4))
@example({"a": {"x": "a long text that repeats"}, "b": {"x": "a long text that repeats"}, "c": [["y" * 20] * 3] * 2})
@example({"it's": "no", "1": "2", "true": "null", "~": "0x1", "a": "1e3"})
def test_it_is_read_as_what_was_written(values: dict[str, Any]) -> None:
    assert yaml.safe_load(document(values)) == values


def test_what_repeats_is_written_once() -> None:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "upstream", "timeout": "0s"}}
    text = document({"routes": [route] * 10})
    assert text.count("upstream") == 1
    assert len(text) < len(json.dumps([route] * 3))


def test_types_stay_what_they_were() -> None:
    values = {"text": "1", "number": 1, "yes": "yes", "truth": True, "nothing": None, "empty": "", "float": 0.5}
    assert yaml.safe_load(document(values)) == values
