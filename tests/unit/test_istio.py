"""The target istio: what the EnvoyFilter's published schema asks for, and where its filter goes."""

from dataclasses import replace
from typing import Any

import pytest

from control_plane.address import Address
from control_plane.errors import BadInput
from control_plane.policy.load import parse_policies
from control_plane.render.placement import Attachment, Placement
from control_plane.render.targets import render
from control_plane.vllm import ROLES, Role
from tests.crd_schemas import problems
from tests.integration.meshes import apply_envoy_filter

POLICIES = {
    "default": "{}",
    "rich": "default: 3\nclasses: {batch: 10}\nrange: {min: -9, max: 10, outside: clamp}\nroutes: {extra: [/x]}\n",
}


def _envoy_filter(policy: str = "{}", role: Role = "render", **changes: Any) -> dict[str, Any]:
    (document,) = render("istio", parse_policies(policy).default, replace(Placement.default(role), **changes))
    return document


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_it_passes_the_published_schema(policy: str, role: Role) -> None:
    attachment = Attachment.parse("ml", ["app=vllm", "llm-d.ai/role=decode"], None)
    assert problems(_envoy_filter(policy, role)) == []
    assert problems(_envoy_filter(policy, role, attachment=attachment, policy_name="night")) == []


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        (["spec", "configPatches", 0, "applyTo"], "HTTP"),
        (["spec", "configPatches", 0, "match", "context"], "INBOUND"),
        (["spec", "configPatches", 0, "patch", "operation"], "INSERT"),
        (["spec", "priority"], "10"),
    ],
    ids=str,
)
def test_the_published_schema_sees_what_is_wrong(where: list[str | int], wrong: object) -> None:
    document = _envoy_filter()
    node: Any = document
    for key in where[:-1]:
        node = node[key]
    node[where[-1]] = wrong
    assert problems(document)


def test_the_two_roles_and_each_policy_have_objects_of_their_own() -> None:
    names = [_envoy_filter(role=role, policy_name=name)["metadata"]["name"] for role in ROLES for name in (None, "b")]
    assert names == ["vllm-priority-render", "vllm-priority-render-b", "vllm-priority-engine", "vllm-priority-engine-b"]


def test_pods_are_chosen_by_the_role_label_where_nothing_is_named() -> None:
    document = _envoy_filter(role="engine")
    assert document["spec"]["workloadSelector"] == {"labels": {"vllm-priority.io/role": "engine"}}
    assert "namespace" not in document["metadata"]


def test_pods_are_chosen_by_the_named_labels_in_the_named_namespace() -> None:
    document = _envoy_filter(attachment=Attachment.parse("ml", ["app=vllm", "tier="], None))
    assert document["spec"]["workloadSelector"] == {"labels": {"app": "vllm", "tier": ""}}
    assert document["metadata"]["namespace"] == "ml"


@pytest.mark.parametrize("selector", ["app", "=x", "app=*", "app=a b", "a/b/c=d", "app=" + "x" * 64, ""])
def test_what_is_no_label_is_refused(selector: str) -> None:
    with pytest.raises(BadInput, match="selector: .* is not a valid label. Use KEY=VALUE"):
        Attachment.parse(None, [selector], None)


def test_a_label_with_two_values_is_refused() -> None:
    assert Attachment.parse(None, ["a=b", "a=b"], None).selector == {"a": "b"}
    with pytest.raises(BadInput, match="selector: 'a' has two values"):
        Attachment.parse(None, ["a=b", "a=c"], None)


@pytest.mark.parametrize("namespace", ["", "ML", "a.b", "-a", "a" * 64])
def test_what_is_no_namespace_is_refused(namespace: str) -> None:
    with pytest.raises(BadInput, match="namespace: .* is not a valid namespace"):
        Attachment.parse(namespace, [], None)


def test_it_is_inserted_before_the_router_of_every_http_chain_and_nowhere_else() -> None:
    manager = "envoy.filters.network.http_connection_manager"
    names = ["envoy.filters.http.rbac", "envoy.filters.http.cors", "envoy.filters.http.router"]
    http_chain = {"filters": [{"name": manager, "typed_config": {"http_filters": [{"name": n} for n in names]}}]}
    tcp_chain = {"filters": [{"name": "envoy.filters.network.tcp_proxy", "typed_config": {}}]}
    listener = {"filter_chains": [tcp_chain, http_chain]}
    apply_envoy_filter(_envoy_filter(), listener)
    assert [f["name"] for f in http_chain["filters"][0]["typed_config"]["http_filters"]] == [  # type: ignore[index]
        *names[:2], "vllm_priority", "vllm_priority_deferred", names[2],
    ]  # fmt: skip
    assert tcp_chain["filters"][0]["typed_config"] == {}


def test_it_counts_by_no_cluster_that_the_mesh_does_not_have() -> None:
    value = _envoy_filter()["spec"]["configPatches"][0]["patch"]["value"]
    assert '["counts"] = true' in value["typed_config"]["default_source_code"]["inline_string"]
    assert value["typed_config"]["stat_prefix"] == "vllm_priority"


def _traffic_extension(role: Role = "render", **changes: Any) -> dict[str, Any]:
    placement = replace(Placement.default(role, "istio-waypoint"), **changes)
    (document,) = render("istio-waypoint", parse_policies(POLICIES["rich"]).default, placement)
    return document


@pytest.mark.parametrize("role", ROLES)
def test_a_waypoint_gets_the_script_for_the_traffic_of_one_service(role: Role) -> None:
    document = _traffic_extension(role)
    assert (document["apiVersion"], document["kind"]) == ("extensions.istio.io/v1alpha1", "TrafficExtension")
    assert document["spec"]["targetRefs"] == [{"kind": "Service", "group": "", "name": f"vllm-{role}"}]
    assert '["counts"] = true' in document["spec"]["lua"]["inlineCode"]
    assert "namespace" not in document["metadata"]


def test_a_waypoints_script_is_within_what_istio_takes() -> None:
    assert len(_traffic_extension()["spec"]["lua"]["inlineCode"]) <= 65536  # LuaConfig.inline_code's MaxLength


@pytest.mark.parametrize(
    ("host", "namespace", "found"),
    [("vllm", "ml", "ml"), ("vllm.ml", None, "ml"), ("vllm.ml.svc.cluster.local", "ml", "ml")],
)
def test_a_traffic_extension_stands_beside_its_service(host: str, namespace: str | None, found: str) -> None:
    document = _traffic_extension(upstream=Address(host, 8000), attachment=Attachment(namespace))
    assert document["metadata"]["namespace"] == found
    assert document["spec"]["targetRefs"][0]["name"] == "vllm"


def test_a_traffic_extension_apart_from_its_service_is_refused() -> None:
    with pytest.raises(BadInput, match="namespace: ml is not the namespace of the Service. Use serving"):
        _traffic_extension(upstream=Address("vllm.serving", 8000), attachment=Attachment("ml"))
    with pytest.raises(BadInput, match="upstream: .* is not a valid Service"):
        _traffic_extension(upstream=Address("127.0.0.1", 8000))
