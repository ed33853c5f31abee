"""Schemathesis calls the control plane as its OpenAPI schema says, and otherwise: no 5xx, nothing undocumented.

The app itself publishes no schema. What the fast path serves is not in FastAPI's, so it is described here.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
import schemathesis.checks
from hypothesis import HealthCheck, settings

from control_plane.injector.admission import _Review
from control_plane.server.app import create_app
from control_plane.server.discovery_request import TYPE_URLS, _DiscoveryRequest
from control_plane.server.settings import ServeSettings

from .test_control_plane import in_thread

DETAIL = {"type": "object", "required": ["detail"], "properties": {"detail": {"type": "string"}}}
OBJECT = {"type": "object"}
DISCOVERY = {
    "type": "object",
    "required": ["version_info", "resources", "type_url"],
    "properties": {"resources": {"type": "array", "minItems": 1}, "type_url": {"enum": list(TYPE_URLS.values())}},
}
REVIEWED = {
    "type": "object",
    "required": ["response"],
    "properties": {"response": {"type": "object", "required": ["uid", "allowed"]}},
}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}


def _post(body: dict[str, Any], responses: dict[str, Any]) -> dict[str, Any]:
    return {"post": {"requestBody": {"required": True, **_json(body)}, "responses": responses}}


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """FastAPI's schema with what docs/guides/control-plane.md says of the responses, and with the fast path."""
    schema = copy.deepcopy(schema)
    rejected = {"description": "rejected", **_json(DETAIL)}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            content = {"text/plain": {"schema": {"type": "string"}}} if path == "/metrics" else _json(OBJECT)["content"]
            operation["responses"] = {"200": {"description": "found", "content": content}}
            if operation.get("parameters"):
                operation["responses"]["400"] = rejected
    request, review = (
        model.model_json_schema(ref_template="#/components/schemas/{model}") for model in (_DiscoveryRequest, _Review)
    )
    for definitions in (request.pop("$defs"), review.pop("$defs")):
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions)
    found = {"200": {"description": "resources", **_json(DISCOVERY)}, "304": {"description": "nothing new"}}
    for name in TYPE_URLS:
        missing_or_busy = {"404": rejected, "503": rejected}
        schema["paths"][f"/v3/discovery:{name}"] = _post(request, {**found, "400": rejected, **missing_or_busy})
    for path in ("/inject", "/validate-workload"):
        schema["paths"][path] = _post(review, {"200": {"description": "a review", **_json(REVIEWED)}, "400": rejected})
    return schema


_APP = create_app(ServeSettings(Path("/dev/null")))
SCHEMA = schemathesis.openapi.from_dict(described(_APP.openapi()))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    policy = tmp_path_factory.mktemp("schema") / "policy.yaml"
    policy.write_text("default: 1\n")
    with in_thread(create_app(ServeSettings(policy))) as address:
        yield f"http://{address}"


@SCHEMA.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_response_is_documented_and_none_is_a_server_error(case: schemathesis.Case[Any], url: str) -> None:
    # JSON that is not an AdmissionReview of a pod may be accepted: the response then allows it unchanged.
    case.call_and_validate(
        base_url=url,
        excluded_checks=[
            schemathesis.checks.negative_data_rejection,
            schemathesis.checks.positive_data_acceptance,
        ],
    )
