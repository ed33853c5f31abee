"""`vllm-priority explain`: what it prints is what the filter does."""

import json
from pathlib import Path
from typing import Any

import pytest

from control_plane.cli import main
from control_plane.explain import explain
from control_plane.policy.model import Policy

GENERATE, MESSAGES = "/inference/v1/generate", "/v1/messages/render"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["explain", *arguments])
    captured = capsys.readouterr()
    assert (ended.value.code, captured.err) == (0, "")
    return captured.out


def test_a_moved_priority_is_shown_as_vllm_gets_it(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--path", GENERATE, "-H", "X-Vllm-Priority: -10", "-H", "X-Other: a", "-d", '{"token_ids":[1]}')
    assert [line.rstrip() for line in out.splitlines()] == [
        "outcome: inserted",
        "response header: x-vllm-priority-applied: -10; source=header; outcome=inserted",
        "request to vLLM:",
        "  x-other: a",
        "  content-type: application/json",
        "  content-length: 32",
        '  {"token_ids":[1],"priority":-10}',
    ]


def test_a_refusal_is_shown_as_the_client_gets_it(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--path", GENERATE, "-H", "X-Vllm-Priority: high")
    assert "outcome: invalid\n" in out
    assert 'response of the sidecar: 400 {"error":{"message":"x-vllm-priority: \'high\' is not an integer' in out
    assert "request to vLLM" not in out


def test_an_edited_response_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "--path", MESSAGES, "-H", "X-Vllm-Priority: 7", "--role", "render")
    assert 'response {"priority":0} reaches the client as: {"priority":7}\n' in out


@pytest.mark.parametrize(
    "arguments", [["--path", "/v1/chat/completions"], ["--path", GENERATE, "-X", "get"], ["--path", f"{GENERATE}/"]]
)
def test_what_is_not_edited_passes_untouched(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *arguments, "-H", "X-Vllm-Priority: 7")
    assert (
        out
        == "outcome: none. Only POST requests on the routes of the policy are edited, so it passes through unchanged.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["-H", "X-Vllm-Priority: 5"],
            {"outcome": "inserted", "priority": "5", "source": "header", "reaches_vllm": True, "response": None},
        ),
        ([], {"outcome": "absent", "priority": None, "source": None, "reaches_vllm": True, "body": "{}"}),
        (
            ["-H", "X-Vllm-Priority: 5", "-H", "X-Vllm-Priority: 6"],
            {"outcome": "ambiguous", "priority": None, "reaches_vllm": False},
        ),
        (
            ["-H", "X-Vllm-Priority: 5", "-H", "Content-Type: text/plain"],
            {"outcome": "unsupported_media_type", "reaches_vllm": False},
        ),
        (["-H", "X-Vllm-Priority: 5", "-d", ""], {"outcome": "empty_body", "reaches_vllm": True, "body": ""}),
        (["-X", "GET"], {"outcome": None, "priority": None, "reaches_vllm": True}),
    ],
)
def test_the_same_for_machines(
    arguments: list[str], expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(run(capsys, "--path", GENERATE, "--json", *arguments))
    assert {key: found[key] for key in expected} == expected


def test_bodies_come_from_files_and_are_kept_to_the_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = tmp_path / "body.json"
    body.write_bytes(b'{"a":"\xff\\ud800"}')
    found = json.loads(run(capsys, "--path", GENERATE, "--json", "-H", "X-Vllm-Priority: 5", "-d", f"@{body}"))
    assert found["body"].rstrip() == '{"a":"\\xff\\ud800","priority":5}'


def test_the_policys_names_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("{header: x-p, report_header: null, policies: [{name: a, selector: {}, policy: {default: 4}}]}")
    out = run(capsys, "--path", GENERATE, "-H", "X-P: 5", "--policy", str(policy))
    assert "outcome: inserted" in out
    assert "response header" not in out
    out = run(capsys, "--path", GENERATE, "--policy", str(policy), "--policy-name", "a", "--json")
    assert json.loads(out)["source"] == "default"


def test_nothing_is_kept_from_one_call_to_the_next() -> None:
    first = explain(Policy(), "engine", GENERATE, [("x-vllm-priority", "high")], [b"{}"])
    second = explain(Policy(), "engine", GENERATE, [("content-type", "application/json")], [b"{}"])
    assert (first.outcome, second.outcome, second.rejection) == ("invalid", "absent", None)
