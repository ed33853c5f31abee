"""What is said of a request, by whoever answers it, in Envoys and scripts that are not of one age."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from control_plane.address import Address
from control_plane.policy.model import Policy
from control_plane.render.filter import ManagedEnvoy, filter_config
from control_plane.render.placement import Placement
from control_plane.render.templates import Resource

from .conftest import MESSAGES, RENDER, SidecarFactory
from .sidecars import NAMESPACE, RunningSidecar, counted, load
from .test_control_plane import free_port
from .upstream import RecordingUpstream, answering, response
from .wire import call, priority

APPLIED, TOLD = "x-vllm-priority-applied", "x-told"


def _managers(bootstrap: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for listener in bootstrap["static_resources"]["listeners"]:
        for chain in listener["filter_chains"]:
            for entry in chain["filters"]:
                yield entry["typed_config"]


def _with_script(bootstrap: dict[str, Any], config: Resource) -> dict[str, Any]:
    for manager in _managers(bootstrap):
        for entry in manager["http_filters"]:
            if entry["name"] == NAMESPACE:
                entry["typed_config"] = config
    return bootstrap


class Renamed(RunningSidecar):
    """Began with the usual header, and has a policy since that names another."""

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        new = load(f"report_header: {TOLD}")
        return _with_script(
            super().configuration(policy, placement), filter_config(new, placement.role, ManagedEnvoy.of(policy))
        )


class Silenced(RunningSidecar):
    """Began with the usual header, and has a policy since that wants none."""

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        new = load("report_header: null")
        return _with_script(
            super().configuration(policy, placement), filter_config(new, placement.role, ManagedEnvoy.of(policy))
        )


@dataclass(frozen=True)
class Said:
    """A request for priority 5, and what is said of it."""

    report: str
    outcome: str
    target: str = RENDER
    body: bytes = b"{}"
    value: str = "5"
    transport: str = "h1-length"
    status: int = 200
    answer: Any = None


_WIDE = json.dumps({"messages": ["a" * 1_000_000]}).encode("utf-16")
_LONG = json.dumps({"messages": ["a" * 1_000_000]}).encode()
_INSERTED = "5; source=header; outcome=inserted"
_EDITED = "5; source=header; outcome=response_edited"
_CHARSET = "none; outcome=unsupported_charset"

CASES = {
    "inserted": Said(_INSERTED, "inserted"),
    "inserted, h2c": Said(_INSERTED, "inserted", transport="h2c"),
    "inserted, streamed": Said(_INSERTED, "inserted", body=_LONG),
    "inserted, of unknown length": Said(_INSERTED, "inserted", transport="h1-chunked"),
    "refused by its value": Said("none; outcome=invalid", "invalid", value="x", status=400),
    "refused while it streamed": Said(_CHARSET, "unsupported_charset", body=_WIDE, status=415),
    "refused, of unknown length": Said(_CHARSET, "unsupported_charset", body=_WIDE, transport="h1-chunked", status=415),
    "answer edited": Said(_EDITED, "response_edited", target=MESSAGES, answer={"priority": 5}),
    "answer edited, path in escapes": Said(
        _EDITED, "response_edited", target="/v1/messages%2Frender", answer={"priority": 5}
    ),
    "answer edited, of unknown length": Said(
        _EDITED, "response_edited", target=MESSAGES, transport="h1-chunked", answer={"priority": 5}
    ),
    "answer edited, request streamed": Said(
        _EDITED, "response_edited", target=MESSAGES, body=_LONG, answer={"priority": 5}
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [RunningSidecar, Renamed, Silenced])
def test_it_is_said_once_whatever_the_ages_of_envoys_configuration_and_of_the_script(
    kind: type[RunningSidecar], name: str, fronts: dict[type, RunningSidecar], upstream: RecordingUpstream
) -> None:
    case, front = CASES[name], fronts[kind]
    upstream.handler = answering(response(b'{"priority":0}'))
    before = front.counters()
    answer = call(front.address, case.target, case.body, priority(case.value), transport=case.transport)
    assert answer.status == case.status
    header = {Renamed: TOLD, Silenced: None}.get(kind, APPLIED)
    said = [(key.lower(), value) for key, value in answer.headers if key.lower() in (APPLIED.encode(), TOLD.encode())]
    assert said == ([(header.encode(), case.report.encode())] if header else [])
    assert sum(front.counters().values()) == sum(before.values()) + 1
    assert front.counter(case.outcome) == counted(before, case.outcome) + 1
    if case.answer is not None:
        assert json.loads(answer.body) == case.answer
    if case.status == 415:
        assert json.loads(answer.body)["error"]["code"] == 415


@pytest.fixture(scope="module")
def fronts(
    envoy: Path, _upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[type, RunningSidecar]]:
    """One running sidecar of each kind."""
    with ExitStack() as stack:
        started: dict[type, RunningSidecar] = {}
        for kind in (RunningSidecar, Renamed, Silenced):
            folder = tmp_path_factory.mktemp(kind.__name__)
            started[kind] = kind(envoy, folder, "render", load("{}"), _upstream.address)
            stack.callback(started[kind].stop)
        yield started
        for sidecar in started.values():
            assert not any(sidecar.lua_errors().values()), sidecar.messages()


@pytest.mark.parametrize(("target", "outcome"), [(RENDER, "inserted"), (MESSAGES, None)])
def test_an_answer_that_envoy_makes_up_says_it_too(sidecar: SidecarFactory, target: str, outcome: str | None) -> None:
    front = sidecar(to=Address("127.0.0.1", free_port()), fresh=True)
    answer = call(front.address, target, b"{}", priority("5"))
    assert answer.status == 503
    assert answer.applied == (f"5; source=header; outcome={outcome}" if outcome else "none; outcome=upstream_error")
    assert call(front.address, "/v1/completions", b"{}", priority("5")).applied is None
