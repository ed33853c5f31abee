"""The commands behind `make chaos` and `make soak` run, and fail where something is lost."""

from pathlib import Path

import pytest

from tests.integration.upstream import Connection, Request, answering, response
from tests.reliability import chaos, soak


def test_the_days_are_listed_with_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(chaos.DAYS)
    assert all(len(line.split()) > 3 for line in lines)


def test_a_day_prints_its_figure(envoy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--only", "upstream-resets-in-response"]) == 0
    row, end = capsys.readouterr().out.splitlines()
    assert row.split()[:2] == ["upstream-resets-in-response", "ok"]
    assert "100 requests: 100 cut off" in row
    assert end == "1 of 1 ok"


def test_a_control_plane_that_lies_changes_nothing(envoy: Path) -> None:
    assert chaos.main(["--only", "control-plane-lies"]) == 0


def test_a_thousand_slow_streams_keep_no_other_request_waiting(envoy: Path) -> None:
    assert chaos.main(["--only", "slow-streams"]) == 0


def test_a_day_that_ends_otherwise_fails(
    envoy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(place: chaos.Place) -> str:
        raise AssertionError("5 requests were lost")

    monkeypatch.setitem(chaos.DAYS, "sigterm", lost)
    assert chaos.main(["--only", "sigterm"]) == 1
    assert "FAILED  5 requests were lost" in (out := capsys.readouterr().out)
    assert out.splitlines()[-1] == "0 of 1 ok; FAILED: sigterm"


def test_a_soak_counts_its_requests(envoy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--seconds", "2", "--rate", "30", "--seed", "1"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if len(line.split()) > 1)
    assert int(rows["requests"].split()[0]) > 20
    assert (rows["wrong"], rows["lost"]) == ("0", "0")


def test_a_soak_sees_what_is_lost_and_what_is_wrong(
    envoy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = soak.Recorder.__call__

    def failing(self: soak.Recorder, request: Request, connection: Connection) -> None:
        number = int(request.all("x-soak")[0])
        if number == 3:
            answering(response(b"{}", b"500 Internal Server Error"))(request, connection)
        else:
            usual(self, request, connection)

    monkeypatch.setattr(soak.Recorder, "__call__", failing)
    assert soak.main(["--seconds", "2", "--rate", "30", "--seed", "1"]) == 1
    out = capsys.readouterr().out
    assert "request 3 (" in out
    assert "wrong: status 500, 0 reached the upstream" in out
    assert out.splitlines()[-1] == "FAILED"
