"""The demo's own judgement: it succeeds only where the fault is shown and the sidecars cure it."""

from pathlib import Path

import pytest
from rich.console import Console

from control_plane import demo
from control_plane.doctor import Report, Row, Verdict
from control_plane.errors import BadInput


def report(**verdicts: Verdict) -> Report:
    rows = tuple(Row("render", check, verdict, f"seen {verdict}") for check, verdict in verdicts.items())
    return Report(rows, {"render": "http://127.0.0.1:1"})


@pytest.mark.parametrize(
    ("fault", "cure", "status", "said"),
    [
        (report(chat="lost"), report(chat="ok"), 0, "vllm-priority doctor --render URL --engine URL"),
        (report(chat="ok"), report(chat="ok"), 1, "shows no fault"),
        (report(chat="lost"), report(chat="lost"), 1, "do not cure it: chat"),
        (report(chat="lost"), report(chat="unknown"), 1, "do not cure it: chat"),
        (report(chat="lost"), report(), 1, "do not cure it: chat"),
        (report(chat="lost"), report(chat="ok", reachable="fail"), 1, "do not cure it"),
    ],
)
def test_the_demo_succeeds_only_where_the_sidecars_cure_what_was_lost(
    fault: Report, cure: Report, status: int, said: str
) -> None:
    sentence, result = demo.conclusion(fault, cure)
    assert (result, said in sentence) == (status, True)


def test_both_halves_stand_in_one_table() -> None:
    console = Console(width=80)
    with console.capture() as printed:
        console.print(
            demo.side_by_side(report(reachable="ok", chat="lost"), report(reachable="ok", chat="ok", x="fail"))
        )
    text = printed.get()
    assert "seen lost" in text
    assert "seen ok" in text
    assert "seen fail" in text, "a check that fails only behind the sidecar is not hidden"
    assert "reachable" not in text, "what is the same either way is left out"


def test_a_program_that_is_no_envoy_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="does not answer --version like an Envoy"):
        demo.run_demo(Path("/bin/true"))
    assert capsys.readouterr() == ("", ""), "it is said before anything is started"
