"""Addresses, and what a rendered bootstrap holds: what a sidecar must never do to other traffic."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from control_plane.address import Address
from control_plane.errors import BadInput
from control_plane.policy.model import Policies, Policy
from control_plane.render.bootstrap import bootstrap, node_metadata
from control_plane.render.clusters import clusters
from control_plane.render.listener import listeners
from control_plane.render.placement import Attachment, Placement
from control_plane.render.targets import TARGETS, render
from control_plane.render.templates import Resource, to_yaml
from control_plane.vllm import ROLES, Role


@pytest.mark.parametrize(
    ("text", "host", "port", "is_ip"),
    [
        ("127.0.0.1:8000", "127.0.0.1", 8000, True),
        ("0.0.0.0:1", "0.0.0.0", 1, True),
        ("[::1]:65535", "::1", 65535, True),
        ("localhost:80", "localhost", 80, False),
        ("vllm-render.ml.svc.cluster.local:8000", "vllm-render.ml.svc.cluster.local", 8000, False),
        ("vllm.:80", "vllm.", 80, False),
        ("my_host:80", "my_host", 80, False),
        ("1a:80", "1a", 80, False),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int, is_ip: bool) -> None:
    address = Address.parse(text, "upstream")
    assert (address, str(address), address.is_ip) == (Address(host, port), text, is_ip)


@pytest.mark.parametrize(
    "text",
    ["", ":", "a", "a:", ":80", "a:0", "a:65536", "a:-1", "a:+1", "a:8e1", "a: 80", "a:80 ", "a:٨٠", "a:080000",
     "a b:80", "a/b:80", "http://a:80", "u@a:80", "a..b:80", ".a:80", "-a:80", "a-:80", "1.2.3:80", "256.0.0.1:80",
     "::1:80", "[a]:80", "[1.2.3.4]:80", "[::1:80", "::1]:80", "[::1]", "a\n:80", "a\0:80", "é:80", "*:80", "$(X):80",
     "x" * 64 + ":80", ".".join(["x" * 60] * 5) + ":80"],
)  # fmt: skip
def test_what_is_no_address_is_named(text: str) -> None:
    with pytest.raises(BadInput, match="^upstream: .* is not a valid address. Use HOST:PORT, for example"):
        Address.parse(text, "upstream")


def found(node: Any, key: str) -> Iterator[Any]:
    """Every value of a key, however deep."""
    if isinstance(node, dict):
        yield from ([node[key]] if key in node else [])
        for value in node.values():
            yield from found(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from found(value, key)


def built(role: Role = "render", **changes: Any) -> Resource:
    placement = Placement.default(role)
    return bootstrap(Policy(), Placement(**{**vars(placement), **changes}))


@pytest.mark.parametrize("role", ROLES)
def test_the_bootstrap_names_what_it_was_given(role: Role) -> None:
    made = built(role, listen=Address("10.0.0.1", 7), upstream=Address("vllm", 9), admin=Address("127.0.0.1", 8))
    listener = made["static_resources"]["listeners"][0]
    assert listener["address"]["socket_address"] == {"address": "10.0.0.1", "port_value": 7}
    assert made["admin"]["address"]["socket_address"] == {"address": "127.0.0.1", "port_value": 8}
    upstream = made["static_resources"]["clusters"][0]
    assert upstream["name"] == "upstream"
    assert upstream["type"] == "LOGICAL_DNS"
    assert {"address": "vllm", "port_value": 9} in found(upstream, "socket_address")


@pytest.mark.parametrize(("host", "kind"), [("127.0.0.1", "STATIC"), ("::1", "STATIC"), ("vllm", "LOGICAL_DNS")])
def test_a_name_is_resolved_and_an_ip_is_not(host: str, kind: str) -> None:
    assert built(upstream=Address(host, 9))["static_resources"]["clusters"][0]["type"] == kind


def test_ipv6_any_takes_ipv4_too() -> None:
    (address,) = found(built(listen=Address("::", 7))["static_resources"]["listeners"], "socket_address")
    assert address["ipv4_compat"] is True


def test_a_request_has_five_minutes_to_arrive_unless_told_otherwise() -> None:
    assert list(found(built(), "request_timeout")) == ["300s"]
    assert list(found(built(request_timeout_seconds=5), "request_timeout")) == ["5s"]
    assert list(found(built(request_timeout_seconds=0), "request_timeout")) == ["0s"]


@pytest.mark.parametrize(("bound", "told"), [(300, "timeout of 300 s."), (0, "within 60 s.")])
def test_the_response_to_a_late_request_names_the_bound(bound: int, told: str) -> None:
    mappers = list(found(built(request_timeout_seconds=bound), "mappers"))[0]
    text = next(found(mappers, "text_format_source"))
    message = json.loads(text["inline_string"])["error"]["message"]
    assert told in message
    assert ("request timeout" in message) == bool(bound)


def test_the_last_mapper_of_local_responses_matches_all_of_them() -> None:
    """The first one that matches is used: one after it would never be."""
    mappers = list(found(built(), "mappers"))[0]
    comparison = mappers[-1]["filter"]["status_code_filter"]["comparison"]
    assert (comparison["op"], comparison["value"]["default_value"]) == ("GE", 100)
    assert all(mapper["headers_to_add"] for mapper in mappers)


@pytest.mark.parametrize("upgrade", ["websocket", "WebSocket", "websocke", "websockets", "w", "", "TLS/1.2", "h2c"])
def test_every_upgrade_but_websocket_is_ignored(upgrade: str) -> None:
    matchers = list(found(built(), "ignore_http_11_upgrade"))[0]
    ignored = any(re.fullmatch(pattern, upgrade) for pattern in found(matchers, "regex"))
    assert ignored == (upgrade.lower() != "websocket")


def test_a_route_never_times_out_and_never_retries() -> None:
    made = built()
    assert set(found(made, "timeout")) == {"0s"}
    assert not list(found(made, "retry_policy"))
    assert True not in set(found(made, "allow_chunked_length"))


def test_the_default_admin_is_on_loopback() -> None:
    for role in ROLES:
        assert Placement.default(role).admin.host == "127.0.0.1"


def test_parts_that_a_placement_does_not_call_for_are_left_out() -> None:
    names = {cluster["name"] for cluster in clusters(Policy(), Placement.default("render"))}
    assert names == {"upstream"}
    assert len(listeners(Policy(), Placement.default("render"))) == 1


def test_a_control_plane_has_a_default_to_start_with() -> None:
    made = built(control_plane=Address("control", 8080))
    (discovery,) = found(made, "config_discovery")
    assert discovery["apply_default_config_without_warming"] is True
    assert "envoy_on_request" in next(found(discovery["default_config"], "inline_string"))
    assert "control_plane" in {cluster["name"] for cluster in made["static_resources"]["clusters"]}


def test_a_health_listener_is_added_on_its_own_address() -> None:
    made = built(health=Address("0.0.0.0", 8090))
    assert len(made["static_resources"]["listeners"]) == 2
    assert list(found(made["static_resources"]["clusters"][0], "tcp_health_check")) == [{}]


def test_node_metadata_is_what_the_control_plane_chooses_by() -> None:
    placement = Placement(
        "engine",
        Address("0.0.0.0", 1),
        Address("::1", 2),
        Address("127.0.0.1", 3),
        labels={"tier": "a"},
        policy_name="b",
    )
    assert node_metadata(Policy(), placement) == {
        "role": "engine", "listen": "0.0.0.0:1", "upstream": "[::1]:2", "labels": {"tier": "a"},
        "report_header": "x-vllm-priority-applied", "policy": "b",
    }  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_is_the_same_as_yaml_and_as_data(target: str, role: Role) -> None:
    documents = render(target, Policies().default, Placement.default(role, target))
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents
    assert "&id" not in to_yaml(documents)


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(
        BadInput, match="^target: 'nginx' is not a valid target. It must be one of: bootstrap, xds, istio, "
    ):
        render("nginx", Policy(), Placement.default("render"))


@pytest.mark.parametrize("text", ["'\"${x}", "a: b", "{{ x }}", "- x", "\n", "#", "%REQ(X)%", "é"])
def test_no_value_breaks_out_of_its_template(text: str) -> None:
    made = built(labels={text: text}, node_id=text, policy_name=text, access_log=text)
    assert made["node"]["id"] == text
    assert made["node"]["metadata"]["labels"] == {text: text}
    assert text in list(found(made, "path"))


@pytest.mark.parametrize(
    ("namespace", "selector", "gateway", "what"),
    [
        ("A", [], None, "namespace"), ("a.b", [], None, "namespace"), ("", [], None, "namespace"),
        (None, ["x"], None, "selector"), (None, ["=y"], None, "selector"), (None, ["a=b c"], None, "selector"),
        (None, ["a=1", "a=2"], None, "selector"), (None, [], "", "gateway"), (None, [], "a/b/c", "gateway"),
    ],
)  # fmt: skip
def test_a_wrong_attachment_is_named(
    namespace: str | None, selector: list[str], gateway: str | None, what: str
) -> None:
    with pytest.raises(BadInput, match=f"^{what}: .*Use "):
        Attachment.parse(namespace, selector, gateway)
