"""The script inside Envoy Gateway's proxy: every case of the other tables that is the script's own to keep there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.policy.model import Policy
from control_plane.render.placement import Placement
from control_plane.vllm import Role

from . import test_body, test_meaning, test_transport
from .conftest import GENERATE, MESSAGES, RENDER, SidecarFactory, run_sidecars
from .meshes import GatewayProxy, NewerGatewayProxy, OlderGatewayProxy
from .oracle import assert_moved
from .test_istio import ISTIOS_OWN, cases, lua_counters
from .test_run import FIVE, JSON
from .test_transport import image as image  # a fixture of its cases
from .upstream import RecordingUpstream, answering, response
from .wire import Http1, call, priority

# What Envoy Gateway decides, not the script: its clocks and its own "100 Continue".
GATEWAYS_OWN = ISTIOS_OWN | {
    "test_a_client_that_expects_a_100_gets_the_rejection",
    "test_a_path_with_a_control_character_is_rejected",  # it matches no route of ours there
    "test_no_timeout_is_shorter_than_a_long_queue",
}
# An engine's /render paths are the render servers' at a gateway; the cases below say what remains.
BY_ROLE = {
    "test_the_response_of_messages_render_carries_the_priority",
    "test_each_route_that_ignores_the_header_gets_the_member",
}


@pytest.fixture(scope="module")
def _sidecars(
    envoy: Path, _upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarFactory]:
    yield from run_sidecars(GatewayProxy, envoy, _upstream, tmp_path_factory)


TestBody = cases(test_body, GATEWAYS_OWN)
TestMeaning = cases(test_meaning, GATEWAYS_OWN | BY_ROLE)
TestTransport = cases(test_transport, GATEWAYS_OWN)


@pytest.fixture(
    scope="module",
    params=[OlderGatewayProxy, GatewayProxy, NewerGatewayProxy],
    ids=["before-1.9", "1.9.0", "after-1.9"],
)
def gateway(
    request: pytest.FixtureRequest,
    envoy: Path,
    _upstream: RecordingUpstream,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SidecarFactory]:
    yield from run_sidecars(request.param, envoy, _upstream, tmp_path_factory)


@pytest.mark.parametrize(
    ("role", "target"),
    [
        ("render", RENDER), ("render", "/v1/completions/render"), ("render", "/v1/responses/render"),
        ("engine", GENERATE), ("engine", "/cohere/v2/chat/render"),
    ],
)  # fmt: skip
def test_each_path_of_the_role_gets_the_member(
    gateway: SidecarFactory, upstream: RecordingUpstream, role: Role, target: str
) -> None:
    answer = call(gateway(role).address, target, b'{"a":1}', priority("-3"))
    assert answer.applied == "-3; source=header; outcome=inserted"
    assert_moved(upstream.only, b'{"a":1}', -3)
    assert upstream.only.all("x-vllm-priority") == []


def test_the_response_of_messages_render_carries_the_priority(
    gateway: SidecarFactory, upstream: RecordingUpstream
) -> None:
    upstream.handler = answering(response(b'{"token_ids":[1],"priority":0}'))
    assert call(gateway().address, MESSAGES, b"{}", priority("7")).body == b'{"token_ids":[1],"priority":7}'


class _DefaultLimits(GatewayProxy):
    """With Envoy Gateway's own limits, 32 KiB, which the other tests raise as the guide says."""

    def configuration(self, policy: Policy, placement: Placement) -> dict[str, Any]:
        config = super().configuration(policy, placement)
        config["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 32768
        return config


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("size", [24000, 32700, 32760, 32768, 32769, 70000])
def test_the_report_and_the_counter_say_what_became_of_a_body_near_the_gateways_limit(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path, size: int, framing: str
) -> None:
    front = _DefaultLimits(envoy, tmp_path, "render", Policy(), upstream.address)
    body = b'{"a":"%b"}' % (b"x" * (size - 8))
    fits = size < 32740
    try:
        with Http1(front.address) as client:
            answer = client.post(RENDER, [JSON, FIVE], body, framing=framing)
        counted = lua_counters(front)
    finally:
        front.stop()
    assert answer.status == (200 if fits else 413)
    assert answer.applied == ("5; source=header; outcome=inserted" if fits else "none; outcome=too_large")
    assert counted in ({"inserted" if fits else "too_large": 1}, {})
    assert len(upstream.requests) == fits


@pytest.mark.parametrize("size", [20000, 24570, 30000, 32768, 100000, 200000])
def test_a_response_near_the_gateways_limit_carries_the_priority(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path, size: int
) -> None:
    body = b'{"token_ids":[%b1],"priority":0}' % (b"1," * (size // 2 - 16))
    upstream.handler = answering(response(body))
    front = _DefaultLimits(envoy, tmp_path, "render", Policy(), upstream.address)
    try:
        answer = call(front.address, MESSAGES, b"{}", priority("-7000000"))
    finally:
        front.stop()
    assert (answer.status, answer.body) == (200, body.replace(b":0}", b":-7000000}"))


@pytest.mark.parametrize("target", ["/v1/models", "/v1/chat/completions"])
def test_another_path_does_not_meet_the_script(
    gateway: SidecarFactory, upstream: RecordingUpstream, target: str
) -> None:
    answer = call(gateway().address, target, b"{}", priority("x"))
    assert (answer.status, answer.applied) == (200, None)
    assert upstream.only.all("x-vllm-priority") == ["x"]
