"""How much memory a sidecar may use, and which bodies lua/memory.lua sheds."""

import os
from pathlib import Path
from typing import Any

import lupa.luajit21 as luajit
import pytest

from control_plane.errors import BadInput
from control_plane.memory import LEAST_BYTES, default_limit, parse_limit
from control_plane.package_data import read_text

MEBIBYTE = 1 << 20
PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
GROUP = 512 * MEBIBYTE


def _system(root: Path, own_group: str, limits: dict[str, int | str]) -> Path:
    for name, text in {"proc/self/cgroup": own_group, **limits}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("own_group", "limits"),
    [
        ("0::/", {"sys/fs/cgroup/memory.max": GROUP}),
        ("0::/a/b", {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": GROUP}),
        ("0::/a", {"sys/fs/cgroup/a/memory.max": GROUP, "sys/fs/cgroup/memory.max": 2 * GROUP}),
        ("0::/kubepods/x", {"sys/fs/cgroup/memory.max": GROUP}),
        ("4:memory:/docker/x\n1:cpu:/", {"sys/fs/cgroup/memory/memory.limit_in_bytes": GROUP}),
        ("4:cpu,memory:/x\n0::/", {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": GROUP}),
        ("1:cpu:/\n0::/x", {"sys/fs/cgroup/unified/x/memory.max": GROUP}),
    ],
)
def test_the_default_is_the_lowest_limit_of_the_process_s_control_groups(
    tmp_path: Path, own_group: str, limits: dict[str, int | str]
) -> None:
    assert default_limit(_system(tmp_path, own_group, limits)) == GROUP


@pytest.mark.parametrize(
    "limits", [{}, {"sys/fs/cgroup/memory.max": "max"}, {"sys/fs/cgroup/memory.max": 2**63 - 4096}]
)
def test_without_a_limit_the_default_is_a_quarter_of_the_machine(tmp_path: Path, limits: dict[str, int | str]) -> None:
    assert default_limit(_system(tmp_path, "0::/", limits)) == PHYSICAL // 4


def test_without_proc_the_default_is_a_quarter_of_the_machine(tmp_path: Path) -> None:
    assert default_limit(tmp_path) == PHYSICAL // 4


def test_a_limit_below_what_an_idle_sidecar_needs_is_not_used(tmp_path: Path) -> None:
    assert default_limit(_system(tmp_path, "0::/", {"sys/fs/cgroup/memory.max": 4096})) == LEAST_BYTES


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("1280Mi", 1280 * MEBIBYTE), ("2G", 2 * 10**9), ("536870912", GROUP), ("1.5Gi", 1536 * MEBIBYTE)],
)
def test_a_limit_is_a_kubernetes_quantity(text: str, bytes_: int) -> None:
    assert parse_limit(text, "memory_limit") == bytes_


@pytest.mark.parametrize("text", ["", "x", "-1Gi", "127Mi", "100m", "1 Gi", "10E", "1e99"])
def test_any_other_limit_is_rejected_with_an_example(text: str) -> None:
    with pytest.raises(BadInput) as raised:
        parse_limit(text, "memory_limit")
    assert str(raised.value) == (
        f"memory_limit: {text!r} is not a valid amount of memory. Use bytes or a Kubernetes quantity of at least"
        " 128Mi, for example 1280Mi."
    )


class Envoy:
    """One worker's lua/memory.lua, with a resident set that the test sets."""

    LIMIT = 1000 * MEBIBYTE

    def __init__(self, *, proc: bool = True) -> None:
        self.lua = luajit.LuaRuntime(encoding=None)
        self.resident = self.readings = self.seconds = 0
        self.lua.globals()[b"status_text"] = self._status if proc else None
        self.lua.globals().os.time = lambda: self.seconds
        self.lua.execute(b"collectgarbage('stop')")  # as in a sidecar whose scripts allocate little
        self.lua.execute(
            b"io = { open = function() return status_text and"
            b" { read = function() return status_text() end, close = function() end } end }"
        )
        source = read_text("lua", "memory.lua").encode()
        self._memory = self.lua.execute(b"return (function(...) " + source + b"\nend)()")

    def _status(self) -> bytes:
        self.readings += 1
        return b"Name:\tenvoy\nVmHWM:\t  9 kB\nVmRSS:\t  %d kB\nThreads:\t9\n" % (self.resident * MEBIBYTE // 1024)

    def body(self) -> Any:
        return self.lua.execute(b"return {}")

    def end(self, body: Any) -> None:
        self._memory[b"release"](body)

    def sheds(self, body: Any, mebibytes: float) -> bool:
        """Whether the body is shed when so much more of it arrives. The resident set does not change by it."""
        return bool(self._memory[b"is_exhausted"](body, self.LIMIT, int(mebibytes * MEBIBYTE)))


def test_below_the_limit_every_body_may_grow() -> None:
    envoy = Envoy()
    envoy.resident = 1000
    assert not any(envoy.sheds(envoy.body(), 64) for _ in range(40))


def test_above_the_limit_one_large_body_goes_on_and_the_others_are_shed() -> None:
    envoy = Envoy()
    bodies = [envoy.body() for _ in range(10)]
    assert not any(envoy.sheds(body, 20) for body in bodies)
    envoy.resident = 1001
    assert [envoy.sheds(body, 2) for body in bodies] == [False, *[True] * 9]
    assert [envoy.sheds(body, 2) for body in bodies] == [False, *[True] * 9]
    assert not envoy.sheds(envoy.body(), 0.5), "a small body goes on"
    envoy.resident = 1126  # an eighth above the limit
    assert all(envoy.sheds(body, 0.1) for body in [*bodies, envoy.body()])
    envoy.resident = 900
    assert not any(envoy.sheds(envoy.body(), 2) for _ in range(10))


@pytest.mark.parametrize("end", ["the client left", "the body is complete"])
def test_another_body_goes_on_once_the_first_is_gone(end: str) -> None:
    envoy = Envoy()
    bodies = [envoy.body() for _ in range(10)]
    assert not any(envoy.sheds(body, 20) for body in bodies)
    envoy.resident, envoy.seconds = 1001, 1
    assert [envoy.sheds(body, 2) for body in bodies[:2]] == [False, True]
    if end == "the body is complete":
        envoy.end(bodies[0])
    del bodies[0]
    envoy.seconds = 2
    assert [envoy.sheds(body, 2) for body in bodies[:2]] == [False, True]


def test_memory_that_bodies_left_behind_is_used_again() -> None:
    envoy = Envoy()
    gone = [envoy.body() for _ in range(10)]
    envoy.resident, envoy.seconds = 1200, 1
    assert [envoy.sheds(body, 20) for body in gone][-1]
    del gone
    body = envoy.body()
    assert envoy.sheds(body, 1), "garbage is collected once a second"
    envoy.seconds = 2
    assert not envoy.sheds(body, 30)
    assert not envoy.sheds(body, 30)
    assert envoy.sheds(body, 30), "but only up to a sixteenth of the limit"


def test_memory_of_complete_bodies_is_used_again_at_once() -> None:
    envoy = Envoy()
    bodies = [envoy.body() for _ in range(10)]
    envoy.resident = 1200
    assert [envoy.sheds(body, 20) for body in bodies][-1]
    for body in bodies:
        envoy.end(body)
    assert not envoy.sheds(envoy.body(), 30)


def test_the_resident_set_is_read_once_for_each_mebibyte_that_arrives() -> None:
    envoy = Envoy()
    for _ in range(160):
        envoy.sheds(envoy.body(), 1 / 16)
    assert envoy.readings == 10


def test_without_proc_nothing_is_shed() -> None:
    envoy = Envoy(proc=False)
    assert not any(envoy.sheds(envoy.body(), 64) for _ in range(40))
