"""Counts the Lua instructions and the bytes of new strings that one request takes, which no other load changes."""

from types import ModuleType
from typing import Any

import pytest
from lupa import luajit21

from . import filter_driver
from .filter_driver import Sent

_HOOK = b"""
return function()
  jit.off()
  jit.flush()
  local count = 0
  debug.sethook(function() count = count + 1 end, "", 100)
  return function()
    debug.sethook()
    return count
  end
end
"""


def counted(monkeypatch: pytest.MonkeyPatch, module: ModuleType, sent: Sent) -> int:
    """Return the hundreds of instructions that this request takes, without the JIT, on a filter loaded for it.

    module: the one that makes the runtime, as `luajit21.LuaRuntime`.
    """
    made: list[Any] = []

    class Recording:
        @staticmethod
        def LuaRuntime(**options: Any) -> Any:
            made.append(luajit21.LuaRuntime(**options))
            return made[-1]

    monkeypatch.setattr(module, "luajit21", Recording)
    monkeypatch.setattr(filter_driver, "_filters", {})
    filter_driver.run(Sent([b"{}"], framing=sent.framing))
    stop = made[0].execute(_HOOK)()
    filter_driver.run(sent)
    return int(stop())
