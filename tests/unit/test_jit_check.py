"""LuaJIT compiles the loops of the JSON editor, and the check would notice if it did not."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"

BODY = b'{"a": "' + b"x" * 20_000 + b'"}'

# Each of these scripts reads the body byte by byte, which is one turn of a loop for each byte.
LOOP = """
local find = string.find
return function(pieces)
  local s, found = pieces[1], 0
  for i = 1, #s do
    %s
  end
  return "inserted"
end
"""
COMPILED = LOOP % "if s:byte(i) == 34 then found = found + 1 end"
INTERPRETED = LOOP % "local closure = function() return i end found = found + #s + (closure and 1 or 0)"
LEFT_FOR_A_CALL = LOOP % "if find(s, '^[\"]', i) then found = found + 1 end"


@pytest.fixture(scope="module")
def jit_check() -> Iterator[Any]:
    before = list(sys.path)
    sys.path.insert(0, str(BENCH))
    yield importlib.import_module("jit_check")
    sys.path[:] = before


def test_luajit_compiles_every_loop_of_the_json_editor(jit_check: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status = jit_check.main([])
    assert status == 0, capsys.readouterr().out


def test_a_loop_that_is_compiled_passes(jit_check: Any) -> None:
    [verdict], _ = jit_check.check(COMPILED, {"body": BODY})
    assert verdict.compiled
    assert verdict.off.instructions > 20_000


def test_a_loop_that_luajit_interprets_fails_and_its_line_is_known(jit_check: Any) -> None:
    [verdict], aborts = jit_check.check(INTERPRETED, {"body": BODY})
    assert not verdict.compiled
    assert verdict.alone.instructions > 20_000
    line = INTERPRETED.splitlines().index(next(line for line in INTERPRETED.splitlines() if "closure" in line)) + 1
    assert line in {found for found, _ in aborts}


def test_a_loop_that_leaves_its_trace_for_a_call_fails(jit_check: Any) -> None:
    [verdict], _ = jit_check.check(LEFT_FOR_A_CALL, {"body": BODY})
    assert not verdict.compiled
    assert verdict.alone.calls > 20_000 > verdict.alone.instructions


def test_a_body_that_is_not_edited_is_an_error_and_not_a_pass(jit_check: Any) -> None:
    with pytest.raises(jit_check.BenchError, match="the editor's result is None"):
        jit_check.check('return function() return nil, "malformed" end', {"body": BODY})


def test_a_line_of_the_bundle_is_named_as_a_line_of_its_file(jit_check: Any) -> None:
    script = jit_check.editor_script()
    lines = (BENCH.parents[1] / "lua" / "json_edit.lua").read_text().splitlines()
    wanted = len(lines) - 1
    while "return json_edit" not in lines[wanted]:
        wanted -= 1
    start = script.splitlines().index("-- lua/json_edit.lua") + 2
    assert script.splitlines()[start + wanted] == lines[wanted]
    assert jit_check.place(script, start + wanted + 1) == f"lua/json_edit.lua:{wanted + 1}"
