"""Discovery as a pure function: request and policies in, resources and the hash of their content out."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from control_plane.address import Address
from control_plane.policy.load import parse_policies
from control_plane.policy.model import Policies
from control_plane.render.clusters import clusters
from control_plane.render.filter import ManagedEnvoy, filter_config
from control_plane.render.listener import listeners
from control_plane.render.placement import DEFAULT_ADMIN, Placement
from control_plane.server import xds
from control_plane.server.discovery_request import TYPE_URLS, RequestDecoder, decode
from control_plane.server.xds import DiscoveryResponse, Snapshot

POLICIES = """
default: 1
policies:
- {name: batch, selector: {tier: batch}, policy: {default: 10}}
- {name: by-name, selector: {}, policy: {default: 20}}
"""


SNAPSHOT = Snapshot(parse_policies(POLICIES))


def request(version: str = "", **metadata: Any) -> bytes:
    body: dict[str, object] = {"version_info": version} if version else {}
    body["node"] = {"id": "pod-1", "metadata": {"role": "render", **metadata}}
    return json.dumps(body, separators=(",", ":")).encode()


def discover(type_name: str, body: bytes, policies: Policies | None = None) -> DiscoveryResponse:
    client, version = RequestDecoder().decode(type_name, body)
    return (Snapshot(policies) if policies else SNAPSHOT).respond(client, version)


def default_of(response: DiscoveryResponse) -> str:
    """Return the default priority in the script that was served."""
    script = json.loads(response.body)["resources"][0]["typed_config"]["default_source_code"]["inline_string"]
    return str(script).partition('["default"] = "')[2].partition('"')[0]


def test_the_filter_configuration_is_the_rendered_one() -> None:
    response = discover("extension_configs", request(role="engine"))
    policies = parse_policies(POLICIES)
    assert json.loads(response.body) == {
        "version_info": response.version,
        "type_url": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
        "resources": [
            {
                "@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
                "name": "vllm_priority",
                "typed_config": filter_config(policies.default, "engine", ManagedEnvoy("")),
            }
        ],
    }


@pytest.mark.parametrize(
    ("said", "own"),
    [
        ({"report_header": "x-vllm-priority-applied"}, "x-vllm-priority-applied"),
        ({"report_header": "x-told"}, "x-told"),
        ({"report_header": ""}, ""),
        ({}, ""),
    ],
)
def test_the_filter_configuration_matches_the_bootstrap_of_the_sidecar(said: dict[str, str], own: str) -> None:
    served = json.loads(discover("extension_configs", request(role="engine", **said)).body)["resources"][0][
        "typed_config"
    ]
    policy = parse_policies(POLICIES).default
    assert served == filter_config(policy, "engine", ManagedEnvoy(own))
    renamed = '["routes_report"]' in served["default_source_code"]["inline_string"]
    assert renamed == (own != policy.report_header)


@pytest.mark.parametrize("kind", ["listeners", "clusters"])
def test_listeners_and_clusters_have_the_addresses_that_the_sidecar_names(kind: str) -> None:
    response = discover(kind, request(role="engine", listen="127.0.0.1:7001", upstream="vllm:9000"))
    placement = Placement(
        "engine", Address("127.0.0.1", 7001), Address("vllm", 9000), DEFAULT_ADMIN["engine"]
    )  # fmt: skip
    render = {"listeners": listeners, "clusters": clusters}[kind]
    expected = render(parse_policies(POLICIES).default, placement)
    served = json.loads(response.body)["resources"]
    assert [{key: value for key, value in resource.items() if key != "@type"} for resource in served] == expected
    assert {resource["@type"] for resource in served} == {TYPE_URLS[kind]}


@pytest.mark.parametrize(
    ("metadata", "default"),
    [
        ({}, "1"),
        ({"labels": {"tier": "batch", "app": "x"}}, "10"),
        ({"labels": {"tier": "other"}}, "1"),
        ({"policy": "by-name"}, "20"),
        ({"policy": "by-name", "labels": {"tier": "batch"}}, "20"),
        ({"policy": "default", "labels": {"tier": "batch"}}, "1"),
    ],
)
def test_the_policy_is_chosen_by_name_then_by_labels_else_the_default(metadata: dict[str, Any], default: str) -> None:
    assert default_of(discover("extension_configs", request(**metadata))) == default


def test_a_client_with_the_current_version_gets_not_modified() -> None:
    version = discover("extension_configs", request()).version
    assert discover("extension_configs", request(version)) == DiscoveryResponse("not_modified")


def test_a_client_with_an_old_version_gets_the_new_resources() -> None:
    old = discover("extension_configs", request()).version
    response = discover("extension_configs", request(old), parse_policies("default: 2"))
    assert response.state == "found"
    assert response.version != old


def test_the_version_depends_on_the_content_and_not_on_the_file_or_the_client() -> None:
    first = discover("extension_configs", request())
    other_file = parse_policies("# another file, the same default policy\ndefault: 1")
    assert discover("extension_configs", request(labels={"app": "y"}), other_file).version == first.version


def test_the_version_is_the_same_in_every_process() -> None:
    code = (
        "from control_plane.policy.load import parse_policies; from control_plane.server.xds import *\n"
        "from control_plane.server.discovery_request import TYPE_URLS, RequestDecoder\n"
        "s = Snapshot(parse_policies('{classes: {a: 1, b: 2, c: 3}}'))\n"
        'body = b\'{"node":{"metadata":{"role":"engine"}}}\'\n'
        "print([s.respond(*RequestDecoder().decode(name, body)).version for name in TYPE_URLS])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


def test_a_sidecar_between_two_replicas_stays_on_the_new_policy_once_both_have_it() -> None:
    old, new = (Snapshot(parse_policies(f"default: {value}")) for value in (1, 2))
    decoder = RequestDecoder()

    def poll(snapshot: Snapshot, has: str) -> str:
        response = snapshot.respond(*decoder.decode("extension_configs", request(has)))
        return response.version or has

    version, seen = "", []
    for replicas in ([old, new] * 3, [new, new] * 3):
        for replica in replicas:
            version = poll(replica, version)
            seen.append(version)
    assert len(set(seen[:6])) == 2
    assert set(seen[6:]) == {new.current(decoder.decode("extension_configs", request()).client).version}


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("clusters", request(role="router"), "node.metadata.role: 'router' is not a valid role. Use render or engine."),
        ("extension_configs", b'{"node":{}}', "node.metadata.role: '' is not a valid role. Use render or engine."),
        (
            "listeners",
            request(policy="no"),
            "node.metadata.policy: 'no' is not a known policy. Use one of: default, batch, by-name.",
        ),
        (
            "clusters",
            b'{"node":{"metadata":{"role":"render"}},"type_url":"t/v2.Route"}',
            f"type_url: 't/v2.Route' is not valid for this path. Use {TYPE_URLS['clusters']}.",
        ),
        (
            "extension_configs",
            b'{"node":{"metadata":{"role":"render"}},"resource_names":["other"]}',
            "resource_names: 'other' is not served. Use vllm_priority.",
        ),
    ],
)  # fmt: skip
def test_what_does_not_exist_is_not_found_and_the_reason_names_what_exists(kind: str, body: bytes, reason: str) -> None:
    assert discover(kind, body) == DiscoveryResponse("not_found", reason=reason)


def test_unknown_fields_of_later_envoys_are_ignored() -> None:
    body = b'{"node":{"metadata":{"role":"render","new":{}},"extensions":[{}]},"new_field":{"a":[1]}}'
    assert discover("extension_configs", body).state == "found"


@pytest.mark.parametrize("type_name", ["listeners", "clusters", "extension_configs"])
def test_a_client_with_a_new_address_per_poll_costs_no_rendering_each(
    type_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[object] = []
    render = xds._render

    def counting_render(key: Any, policy: Any) -> Any:
        rendered.append(key)
        return render(key, policy)

    monkeypatch.setattr(xds, "_render", counting_render)
    monkeypatch.setattr(xds, "RENDERINGS_PER_SECOND", 0)
    snapshot = Snapshot(parse_policies("default: 1"))
    known = decode(type_name, request()).client
    version = snapshot.current(known).version
    rendered.clear()
    states = []
    for port in range(1, 201):
        poll = request(listen=port, report_header=f"x-{port}")
        states.append(snapshot.current(decode(type_name, poll).client).state)
    assert len(rendered) == states.count("found") <= xds.RENDERINGS_AT_ONCE
    assert states[-1] == "busy"
    assert snapshot.respond(known, version).state == "not_modified"
