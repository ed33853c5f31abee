"""Check that LuaJIT compiles the loops of the JSON editor. No time is measured: the figures do not depend on the load.

    python tests/bench/jit_check.py                             exit status 1 if a loop is not compiled
    python tests/bench/jit_check.py --bodies 29KB,200KB-tools   some of the bodies
    python tests/bench/jit_check.py --aborts                    also list where and why LuaJIT aborted traces

LuaJIT interprets a loop that it cannot compile, which costs five to twenty times as much and changes no result. The
check edits each body until LuaJIT has compiled what it can, and then once more with a debug hook. Compiled code does
not call hooks, so the hook sees exactly what is left to the interpreter:

- instructions: if a loop is interpreted, their number grows with the body;
- calls: if a compiled loop has to leave its trace for a function that LuaJIT cannot compile (string.find with a
  pattern, string.gsub), their number grows with the body.

Both are compared with the same edit while the JIT compiler is off. LuaJIT does not choose the same traces in each
process, so every body is edited in several fresh Lua states, in its own ("alone") and after all other bodies
("mixed"), and the worst figure counts. Prints Markdown.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # a checkout that is not installed

import bodies
from lupa import luajit21
from processes import BenchError, chosen

from control_plane.policy.model import Policy
from control_plane.render.filter import ManagedEnvoy, filter_settings
from control_plane.render.lua_bundle import bundle

EDIT = """
return function(pieces)
  local editor = json_edit.new("priority", "5", function() return "5" end)
  for index = 1, #pieces do
    json_edit.feed(editor, pieces[index])
  end
  return json_edit.finish(editor)
end
"""
"""How a body is edited: the only lines here that know the editor's functions. They see each module as a local."""

PIECE = 65536
"""Bytes of a piece, as in lua/body.lua."""

BODIES = ("29KB", "200KB", "170KB-short", "200KB-tools", "400KB", "1MB")
CASES = ("insert", "replace-end")
"""Without the member, and with one at the end: the editor must then scan the whole body to find it."""

EDITS = 300
"""Edits of each body before anything is counted: LuaJIT still adds side traces after the first hundred."""

STATES = 5
"""Fresh Lua states for each body, and for all of them mixed."""

SHARE, INSTRUCTIONS, CALLS = 0.02, 4000, 200
"""The interpreter may execute this share of the instructions and calls that it executes alone, and this many more.

The constants cover what surrounds the loops: the edit of each piece begins and ends in the interpreter, and the largest
body has 16 pieces. A loop that is interpreted executes many times as much.
"""

_COUNTER = r"""
local edit = ...
local util = require("jit.util")
local aborts = {}

jit.attach(function(what, _, func, pc, code)
  if what == "abort" then
    local key = util.funcinfo(func, pc).currentline .. " " .. tonumber(code)
    aborts[key] = (aborts[key] or 0) + 1
  end
end, "trace")

-- Envoy runs every request in a coroutine of its own.
local function run(times, pieces)
  local result
  for _ = 1, times do
    result = coroutine.wrap(edit)(pieces)
  end
  return result
end

-- LuaJIT must not compile this loop: it is not part of the editor.
jit.off(run)

local function count(pieces)
  local instructions, calls = 0, 0
  debug.sethook(function(event)
    if event == "count" then
      instructions = instructions + 1
    else
      calls = calls + 1
    end
  end, "c", 1)
  coroutine.wrap(edit)(pieces)
  debug.sethook()
  return instructions, calls
end

return { run = run, count = count, aborts = aborts, off = function()
  jit.off()
  jit.flush()
end }
"""

_REASONS = {
    0: "error thrown or hook called during recording",
    1: "trace too short",
    2: "trace too long",
    3: "trace too deep",
    4: "too many snapshots",
    5: "blacklisted",
    6: "retry recording",
    7: "bytecode not supported",
    8: "leaving loop in root trace",
    9: "inner loop in root trace",
    10: "loop unroll limit reached",
    11: "bad argument type",
    12: "JIT compilation disabled for function",
    13: "call unroll limit reached",
    14: "down-recursion, restarting",
    15: "function variant not supported",
}
"""The first entries of LuaJIT's lj_traceerr.h."""


@dataclass(frozen=True)
class Count:
    """What the interpreter executed during one edit."""

    instructions: int
    calls: int


class State:
    """A fresh Lua state with one script, which returns a function of the pieces of a body."""

    def __init__(self, script: str) -> None:
        self._lua = luajit21.LuaRuntime(encoding=None)
        load = self._lua.eval(b"function(text, name, ...) return assert(loadstring(text, name))(...) end")
        self._counter = load(_COUNTER.encode(), b"@counter", load(script.encode(), b"@script"))

    def pieces(self, body: bytes) -> Any:
        """`body` as a Lua table of strings."""
        return self._lua.table_from([body[at : at + PIECE] for at in range(0, len(body), PIECE)])

    def run(self, pieces: Any, times: int = EDITS) -> str | None:
        """Edit a body several times; the editor's result."""
        result = self._counter[b"run"](times, pieces)
        # Lua returns a reason as a second value where there is no result.
        return result.decode() if isinstance(result, bytes) else None

    def count(self, pieces: Any) -> Count:
        """Edit a body once more and count."""
        return Count(*self._counter[b"count"](pieces))

    def switch_off(self) -> None:
        """Switch the JIT compiler off and forget what it compiled."""
        self._counter[b"off"]()

    def aborts(self) -> Counter[tuple[int, int]]:
        """How often the recording of a trace was aborted: by line of the script and code of the reason."""
        found: Counter[tuple[int, int]] = Counter()
        for key, times in self._counter[b"aborts"].items():
            line, code = key.split()
            found[int(line), int(code)] += times
        return found


@dataclass(frozen=True)
class Verdict:
    """The counts for one body: without the JIT compiler, and the worst with it."""

    name: str
    off: Count
    alone: Count
    mixed: Count

    @property
    def limit(self) -> Count:
        """The most that the interpreter may execute."""
        return Count(INSTRUCTIONS + int(SHARE * self.off.instructions), CALLS + int(SHARE * self.off.calls))

    @property
    def compiled(self) -> bool:
        """Whether all loops were compiled."""
        worst = _worst([self.alone, self.mixed])
        return worst.instructions <= self.limit.instructions and worst.calls <= self.limit.calls


def check(script: str, made: dict[str, bytes], states: int = STATES) -> tuple[list[Verdict], Counter[tuple[int, int]]]:
    """The verdict on each of the named bodies, and the aborted traces of all states.

    BenchError if the script edits a body in none of the expected ways: the counts would then say nothing.
    """
    aborts: Counter[tuple[int, int]] = Counter()
    off: dict[str, Count] = {}
    alone: dict[str, list[Count]] = {name: [] for name in made}
    mixed: dict[str, list[Count]] = {name: [] for name in made}
    for _ in range(states):
        for name, body in made.items():
            state = State(script)
            pieces = state.pieces(body)
            result = state.run(pieces)
            if result not in ("inserted", "replaced"):
                raise BenchError(f"{name}: the editor's result is {result}, and must be inserted or replaced")
            alone[name].append(state.count(pieces))
            aborts += state.aborts()
            if name not in off:
                state.switch_off()
                off[name] = state.count(pieces)
        state = State(script)
        every = {name: state.pieces(body) for name, body in made.items()}
        for _ in range(EDITS):
            for pieces in every.values():
                state.run(pieces, 1)
        for name, pieces in every.items():
            mixed[name].append(state.count(pieces))
        aborts += state.aborts()
    return [Verdict(name, off[name], _worst(alone[name]), _worst(mixed[name])) for name in made], aborts


def _worst(counts: Sequence[Count]) -> Count:
    return Count(max(count.instructions for count in counts), max(count.calls for count in counts))


def editor_script() -> str:
    """The filter's own script, followed by EDIT."""
    return bundle(filter_settings(Policy(), "engine", ManagedEnvoy.of(Policy()))) + EDIT


def place(script: str, line: int) -> str:
    """A line of the script as FILE:LINE: bundle() writes `-- lua/NAME.lua` and one more line before each file."""
    lines = script.splitlines()[:line]
    for at in range(len(lines), 0, -1):
        if lines[at - 1].startswith("-- lua/"):
            return f"{lines[at - 1][3:]}:{line - at - 1}"
    return f"line {line}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", default=",".join(BODIES), help=f"comma-separated, of: {', '.join(bodies.NAMES)}")
    parser.add_argument("--states", type=int, default=STATES, help="fresh Lua states for each body")
    parser.add_argument("--aborts", action="store_true", help="list the aborted traces")
    options = parser.parse_args(arguments)
    try:
        made = {}
        for name in chosen("--bodies", options.bodies, bodies.NAMES):
            body = bodies.body(name)
            made[f"{name}, {CASES[0]}"] = body.data
            made[f"{name}, {CASES[1]}"] = body.with_priority("end")
        script = editor_script()
        verdicts, aborts = check(script, made, options.states)
    except BenchError as error:
        print(f"jit_check: {error}", file=sys.stderr)
        return 2
    print("| interpreted instructions, calls | JIT off | at most | alone | mixed | compiled |")
    print("|---|---:|---:|---:|---:|---|")
    for verdict in verdicts:
        cells = (
            f"{count.instructions:,}, {count.calls:,}"
            for count in (verdict.off, verdict.limit, verdict.alone, verdict.mixed)
        )
        print(f"| {verdict.name} | {' | '.join(cells)} | {'yes' if verdict.compiled else 'NO'} |")
    failed = [verdict.name for verdict in verdicts if not verdict.compiled]
    if options.aborts or failed:
        print("\n| traces aborted | times | reason |\n|---|---:|---|")
        for (line, code), times in aborts.most_common(20):
            print(f"| {place(script, line)} | {times} | {_REASONS.get(code, f'code {code} of lj_traceerr.h')} |")
    if failed:
        print(
            f"jit_check: LuaJIT interprets a loop of the JSON editor for: {'; '.join(failed)}. The table above shows "
            "where it gave up compiling.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
