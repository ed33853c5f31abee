"""Discovery as a pure function: request and policies in, resources and the hash of their content out."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane import render
from control_plane.errors import BadInput
from control_plane.policy import Policies, parse_policies
from control_plane.render import Address, Placement
from control_plane.xds import TYPES, Answer, Askers, Snapshot, read_asker

POLICIES = """
default: 1
policies:
- {name: batch, selector: {tier: batch}, policy: {default: 10}}
- {name: by-name, selector: {}, policy: {default: 20}}
"""


SNAPSHOT = Snapshot(parse_policies(POLICIES))


def request(version: str = "", **metadata: object) -> bytes:
    body: dict[str, object] = {"version_info": version} if version else {}
    body["node"] = {"id": "pod-1", "metadata": {"role": "render", **metadata}}
    return json.dumps(body, separators=(",", ":")).encode()


def ask(kind: str, body: bytes, policies: Policies | None = None) -> Answer:
    asker, version = Askers().read(kind, body)
    return (Snapshot(policies) if policies else SNAPSHOT).answer(asker, version)


def default_of(answer: Answer) -> str:
    """The default priority in the script that was served."""
    script = json.loads(answer.body)["resources"][0]["typed_config"]["default_source_code"]["inline_string"]
    return str(script).partition('["default"] = "')[2].partition('"')[0]


def test_filter_configuration_is_the_rendered_one() -> None:
    answer = ask("extension_configs", request(role="engine"))
    policies = parse_policies(POLICIES)
    assert json.loads(answer.body) == {
        "version_info": answer.version,
        "type_url": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
        "resources": [
            {
                "@type": "type.googleapis.com/envoy.config.core.v3.TypedExtensionConfig",
                "name": "vllm_priority",
                "typed_config": render.filter_config(policies.default, "engine", render.ManagedEnvoy("")),
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
def test_filter_configuration_is_for_the_envoy_that_the_sidecar_began_with(said: dict[str, str], own: str) -> None:
    served = json.loads(ask("extension_configs", request(role="engine", **said)).body)["resources"][0]["typed_config"]
    policy = parse_policies(POLICIES).default
    assert served == render.filter_config(policy, "engine", render.ManagedEnvoy(own))
    renamed = '["routes_report"]' in served["default_source_code"]["inline_string"]
    assert renamed == (own != policy.report_header)


@pytest.mark.parametrize("kind", ["listeners", "clusters"])
def test_listeners_and_clusters_stand_where_the_sidecar_says(kind: str) -> None:
    answer = ask(kind, request(role="engine", listen="127.0.0.1:7001", upstream="vllm:9000"))
    placement = Placement(
        "engine", Address("127.0.0.1", 7001), Address("vllm", 9000), render.DEFAULT_ADMIN["engine"]
    )  # fmt: skip
    expected = getattr(render, kind)(parse_policies(POLICIES).default, placement)
    served = json.loads(answer.body)["resources"]
    assert [{key: value for key, value in resource.items() if key != "@type"} for resource in served] == expected
    assert {resource["@type"] for resource in served} == {TYPES[kind].url}


@pytest.mark.parametrize(
    ("given_listen", "text"),
    [(7001, "0.0.0.0:7001"), ("7001", "0.0.0.0:7001"), ("[::1]:7001", "[::1]:7001"), (None, "0.0.0.0:18000")],
)
def test_listen_is_an_address_or_a_port(given_listen: object, text: str) -> None:
    asker = read_asker("listeners", request(listen=given_listen))
    assert asker.question is not None
    assert str(asker.question.listen) == text


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
def test_policy_is_chosen_by_name_then_by_labels_else_the_default(metadata: dict[str, object], default: str) -> None:
    assert default_of(ask("extension_configs", request(**metadata))) == default


def test_same_version_is_answered_with_nothing() -> None:
    version = ask("extension_configs", request()).version
    assert ask("extension_configs", request(version)) == Answer("not_modified")


def test_old_version_is_answered_with_the_new_resources() -> None:
    old = ask("extension_configs", request()).version
    answer = ask("extension_configs", request(old), parse_policies("default: 2"))
    assert answer.state == "found"
    assert answer.version != old


def test_version_names_the_content_not_the_file_nor_the_asker() -> None:
    first = ask("extension_configs", request())
    other_file = parse_policies("# another file, the same default policy\ndefault: 1")
    assert ask("extension_configs", request(labels={"app": "y"}), other_file).version == first.version


def test_version_is_the_same_in_every_process() -> None:
    code = (
        "from control_plane.policy import parse_policies; from control_plane.xds import *\n"
        "s = Snapshot(parse_policies('{classes: {a: 1, b: 2, c: 3}}'))\n"
        'print([s.answer(*Askers().read(k, b\'{"node":{"metadata":{"role":"engine"}}}\')).version for k in TYPES])'
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(outputs) == 1


def test_two_replicas_with_different_policies_leave_a_sidecar_on_the_new_one_for_good() -> None:
    old, new = (Snapshot(parse_policies(f"default: {value}")) for value in (1, 2))
    askers = Askers()

    def poll(snapshot: Snapshot, has: str) -> str:
        answer = snapshot.answer(*askers.read("extension_configs", request(has)))
        return answer.version or has

    version, seen = "", []
    for replicas in ([old, new] * 3, [new, new] * 3):
        for replica in replicas:
            version = poll(replica, version)
            seen.append(version)
    assert len(set(seen[:6])) == 2
    assert set(seen[6:]) == {new.current(askers.read("extension_configs", request())[0]).version}


@pytest.mark.parametrize(
    ("kind", "body", "reason"),
    [
        ("clusters", request(role="router"), "node.metadata.role: 'router' is unknown; allowed: render, engine"),
        ("extension_configs", b'{"node":{}}', "node.metadata.role: '' is unknown; allowed: render, engine"),
        ("listeners", request(policy="no"), "node.metadata.policy: 'no' is unknown; allowed: default, batch, by-name"),
        (
            "clusters",
            b'{"node":{"metadata":{"role":"render"}},"type_url":"t/v2.Route"}',
            "type_url: 't/v2.Route' is unknown here; allowed: type.googleapis.com/envoy.config.cluster.v3.Cluster",
        ),
        (
            "extension_configs",
            b'{"node":{"metadata":{"role":"render"}},"resource_names":["other"]}',
            "resource_names: 'other' is unknown; allowed: vllm_priority",
        ),
    ],
)  # fmt: skip
def test_what_there_is_not_is_not_found_and_the_reason_says_what_there_is(kind: str, body: bytes, reason: str) -> None:
    assert ask(kind, body) == Answer("not_found", reason=reason)


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (b"", "not JSON: EOF while parsing a value at line 1 column 0; allowed: an Envoy discovery request in JSON"),
        (b"\xff\xfe", "not JSON: "),
        (b"[]", "body: [] is not allowed; allowed: an object"),
        (b"null", "body: None is not allowed; allowed: an object"),
        (b"{}", "node: is missing; allowed: an Envoy discovery request, with node"),
        (b'{"node":{"id":5}}', "node.id: 5 is not allowed; allowed: a text"),
        (b'{"node":{"id":"\\ud800"}}', "not JSON: "),
        (b"[" * 100_000, "not JSON: recursion limit exceeded"),
        (request(labels={"team": True}), "node.metadata.labels.team: True is not allowed; allowed: a text"),
        (request(listen=True), "node.metadata.listen: True is not allowed; allowed: HOST:PORT, or a port"),
        (request(listen=70000), "node.metadata.listen: 70000 is not allowed; allowed: HOST:PORT, or a port"),
        (request(upstream="here"), "node.metadata.upstream: 'here' is no address; allowed: HOST:PORT"),
        (b'x"node":{"id":"pod-1","metadata":{"role":"render"}}}', "not JSON: "),
    ],
)  # fmt: skip
def test_what_is_no_discovery_request_is_refused_with_one_line(body: bytes, line: str) -> None:
    askers = Askers()
    askers.read("listeners", request())
    with pytest.raises(BadInput) as error:
        askers.read("listeners", body)
    assert str(error.value).startswith(f"discovery request: {line}")
    assert "\n" not in str(error.value)


def test_fields_of_later_envoys_are_let_through() -> None:
    body = b'{"node":{"metadata":{"role":"render","new":{}},"extensions":[{}]},"new_field":{"a":[1]}}'
    assert ask("extension_configs", body).state == "found"


@given(st.text("0123456789abcdef", min_size=1, max_size=16), st.booleans())
def test_a_remembered_body_is_read_as_at_first_sight(version: str, version_first: bool) -> None:
    node = {"id": "pod-1", "metadata": {"role": "render"}}
    both = {"version_info": version, "node": node}
    body = json.dumps(
        both if version_first else {"node": node, "version_info": version}, separators=(",", ":")
    ).encode()
    askers = Askers()
    askers.read("extension_configs", request())
    first, again = askers.read("extension_configs", body), askers.read("extension_configs", body)
    assert first == again
    assert first[1] == version


def test_a_remembered_body_of_one_type_is_not_taken_for_another() -> None:
    askers = Askers()
    assert [askers.read(kind, request())[0].kind for kind in TYPES] == list(TYPES)


def test_what_is_remembered_is_bounded() -> None:
    askers = Askers(limit=3)
    for number in range(10):
        askers.read("extension_configs", request(labels={"n": str(number)}))
    assert len(askers._known.values()) == 3


def test_an_error_of_the_sidecars_is_kept_as_one_line() -> None:
    body = b'{"node":{"metadata":{"role":"render"}},"error_detail":{"message":"bad\\n  script"}}'
    assert read_asker("extension_configs", body).error == "bad script"
