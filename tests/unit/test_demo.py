"""The demo succeeds only if it shows the fault and its cure, and its table fits a terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from control_plane import demo
from control_plane.doctor import Report, Row, Verdict
from control_plane.errors import BadInput
from control_plane.vllm import RENDER_ROUTES


def report(**verdicts: Verdict) -> Report:
    rows = tuple(Row("render", check, verdict, f"This is {verdict}.") for check, verdict in verdicts.items())
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
def test_the_demo_succeeds_only_if_the_sidecars_cure_every_loss(
    fault: Report, cure: Report, status: int, said: str
) -> None:
    sentence, result = demo.conclusion(fault, cure, "It takes 1 s.", faster=True)
    assert (result, said in sentence) == (status, True)


def test_the_demo_fails_if_interactive_requests_are_no_faster() -> None:
    text, result = demo.conclusion(report(chat="lost"), report(chat="ok"), "It takes 1 s.", faster=False)
    assert (result, text) == (1, "The sidecar makes interactive requests no faster. It takes 1 s.")


def printed(fault: Report, cure: Report) -> str:
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(demo.side_by_side(fault, cure))
    return captured.get()


def test_the_table_has_both_halves_and_leaves_out_what_is_the_same() -> None:
    text = printed(report(reachable="ok", chat="lost"), report(reachable="ok", chat="ok", x="fail"))
    assert "lost: This is lost." in text
    assert "ok: This is ok." in text
    assert "fail: This is fail." in text, "a check that fails only through the sidecar is shown"
    assert "reachable" not in text, "a check that succeeds either way is left out"


def test_the_table_fits_80_columns_and_cuts_no_word_even_with_long_findings() -> None:
    finding = "The rendered priority is 0 without a priority, missing (status 400) with -10 in the header."
    rows = tuple(Row("render", route, "lost", finding) for route in RENDER_ROUTES)
    found = Report(rows, {})
    lines = printed(found, found).splitlines()
    assert max(map(len, lines)) <= 80
    assert [route for route in RENDER_ROUTES if not any(f"│ {route} " in line for line in lines)] == []
    cells = [cell.strip() for line in lines if line.startswith("│") for cell in line.strip("│").split("│")[1:]]
    words = {word for cell in cells for word in cell.split()}
    assert words == {"lost:", *finding.split()}


def test_the_next_steps_name_only_commands_and_options_that_exist() -> None:
    from control_plane.cli import cli

    text, _ = demo.conclusion(report(chat="lost"), report(chat="ok"), "It takes 1 s.", faster=True)
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("  vllm-priority ")]
    assert {command for command, *_ in lines} == {"doctor", "run"}
    for command, *words in lines:
        known = {name for parameter in cli.commands[command].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def test_a_program_that_is_not_envoy_gives_one_error_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(BadInput, match="is not an Envoy: it does not print a version of one"):
        demo.run_demo(Path("/bin/true"))
    assert capsys.readouterr() == ("", "")
