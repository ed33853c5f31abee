"""What is built from the values.yaml of the chart: values.schema.json, and the rows of the documented values."""

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from control_plane.injector.annotations import PREFIX, REQUEST_ANNOTATIONS
from control_plane.policy.model import policy_schema
from control_plane.render.placement import LOGGED_REQUESTS

_ROOT = Path(__file__).resolve().parent.parent
_VALUES = _ROOT / "deploy" / "chart" / "values.yaml"

_TEXT = {"type": "string"}
_BOOL = {"type": "boolean"}
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_OBJECT = {"type": "object"}
_NAMES = {"type": "array", "items": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}}
_NAME_OR_EMPTY = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$"}


def _enum(*values: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(values)}


# The types of what values.yaml holds. A mapping without "type" is a group of keys of its own.
_TYPES: dict[str, Any] = {
    "image": {
        "repository": {"type": "string", "minLength": 1, "pattern": "^[^@\\s]+$"},
        "tag": {"type": "string", "pattern": "^[A-Za-z0-9_.-]*$"},
        "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
        "pullPolicy": _enum("Always", "IfNotPresent", "Never"),
    },
    "imagePullSecrets": {
        "type": "array",
        "items": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}, "additionalProperties": False},
    },
    "replicas": {"type": "integer", "minimum": 1, "maximum": 100},
    "policy": {"$ref": "#/$defs/Policy"},
    "policies": {"type": "array", "items": {"$ref": "#/$defs/NamedPolicy"}},
    "policyConfigMap": _NAME_OR_EMPTY,
    "webhook": {
        "enabled": _BOOL,
        "failurePolicy": _enum("Ignore", "Fail"),
        "timeoutSeconds": {"type": "integer", "minimum": 1, "maximum": 30},
        "excludedNamespaces": _NAMES,
        "namespaceLabels": _LABELS,
        "url": {"type": "string", "pattern": "^(https://[^/?#@\\s]+/inject)?$"},
    },
    "sidecar": {
        "image": {"type": "string", "pattern": "^\\S*$"},
        "redirectImage": {"type": "string", "pattern": "^\\S*$"},
        "resources": _OBJECT,
        "concurrency": {"type": "integer", "minimum": 1, "maximum": 64},
        "runAsUser": {"type": ["integer", "null"], "minimum": 1},
        "native": {"enum": ["auto", "true", "false", True, False]},
        "drainSeconds": {"type": "integer", "minimum": 0, "maximum": 3600},
        "logRequests": _enum(*LOGGED_REQUESTS),
        "otlpEndpoint": {"type": "string", "pattern": "^(http://[^/?#@\\s]+:[0-9]{1,5})?$"},
        "tracePercent": {"type": "number", "minimum": 0, "maximum": 100},
        "listenHost": _enum("0.0.0.0", "::"),
        "onInjectionFailure": _enum("fail", "ignore"),
        "tokens": _BOOL,
        "forbiddenAnnotations": {
            "type": "array",
            "items": _enum(*(name.removeprefix(PREFIX) for name in REQUEST_ANNOTATIONS)),
            "uniqueItems": True,
        },
        "numericServices": _enum("warn", "redirect"),
    },
    "certificates": {
        "source": _enum("chart", "cert-manager", "secret"),
        "days": {"type": "integer", "minimum": 1, "maximum": 36500},
        "secretName": _NAME_OR_EMPTY,
        "caBundle": {"type": "string", "pattern": "^(-----BEGIN CERTIFICATE-----[\\s\\S]*)?$"},
        "issuer": {"name": _TEXT, "kind": _enum("Issuer", "ClusterIssuer")},
    },
    "writeEvents": _BOOL,
    "readServices": _BOOL,
    "readServicesNamespaces": _NAMES,
    "serviceAccount": {"create": _BOOL, "name": _NAME_OR_EMPTY, "annotations": _LABELS},
    "networkPolicy": {
        "enabled": _BOOL,
        "prometheusLabels": _LABELS,
        "apiServerPorts": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 65535}},
    },
    "api": {
        "tokenSecret": _NAME_OR_EMPTY,
        "consoleProxies": {
            "type": "array",
            "items": {"type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]},
        },
    },
    "monitoring": {
        "serviceMonitor": _BOOL,
        "podMonitor": _BOOL,
        "alerts": _BOOL,
        "interval": {"type": "string", "pattern": "^([0-9]+(ms|s|m|h))+$"},
        "labels": _LABELS,
        "dashboard": _BOOL,
        "dashboardLabels": _LABELS,
    },
    "resources": _OBJECT,
    "runAsUser": {"type": ["integer", "null"], "minimum": 1},
    "priorityClassName": _TEXT,
    "podLabels": _LABELS,
    "podAnnotations": _LABELS,
    "nodeSelector": _LABELS,
    "tolerations": {"type": "array", "items": _OBJECT},
    "affinity": _OBJECT,
    "fullnameOverride": {"type": "string", "pattern": "^([a-z]([-a-z0-9]{0,48}[a-z0-9])?)?$"},
}


def values_schema_text() -> str:
    """Return the text of values.schema.json."""
    return json.dumps(values_schema(), indent=2) + "\n"


def values_schema() -> dict[str, Any]:
    """JSON Schema of the values: the policy's own from the pydantic model, the rest from `_TYPES` and values.yaml."""
    defaults = yaml.safe_load(_VALUES.read_text(encoding="utf-8"))
    descriptions = dict(value_comments())
    schema = _group(_TYPES, defaults, descriptions, ())
    policy = _for_helm(copy.deepcopy(policy_schema()))
    parts = policy.pop("$defs", {})
    named = {
        "type": "object",
        "description": "A policy for the sidecars whose labels match; its keys replace those of the policy above.",
        "required": ["name", "selector"],
        "additionalProperties": False,
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"},
            "selector": _LABELS,
            "policy": {"$ref": "#/$defs/Policy"},
        },
    }
    # A parent chart hands its `global` down.
    schema["properties"]["global"] = _OBJECT
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart vllm-priority",
        **schema,
        "$defs": {**parts, "Policy": policy, "NamedPolicy": named},
    }


def _group(
    types: Mapping[str, Any],
    defaults: Mapping[str, Any],
    descriptions: Mapping[tuple[str, ...], str],
    at: tuple[str, ...],
) -> dict[str, Any]:
    if set(types) != set(defaults):
        raise ValueError(
            f"values.yaml and the schema differ at {'.'.join(at) or 'the top'}: {set(types) ^ set(defaults)}"
        )
    properties = {}
    for key, kind in types.items():
        path = (*at, key)
        inner = kind if {"type", "$ref", "enum"} & set(kind) else _group(kind, defaults[key], descriptions, path)
        properties[key] = {"description": descriptions[path], **inner} if path in descriptions else dict(inner)
    return {"type": "object", "additionalProperties": False, "properties": properties}


# Helm reads a number as a double, which would change a larger one without a word.
_EXACT = 2**53 - 1


def _for_helm(schema: Any) -> Any:
    """The schema with integers held to what Helm keeps, and with no names but those of a pattern."""
    if isinstance(schema, list):
        return [_for_helm(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _for_helm(value) for key, value in schema.items()}
    if schema.get("type") == "integer":
        schema["minimum"] = max(schema["minimum"], -_EXACT)
        schema["maximum"] = min(schema["maximum"], _EXACT)
    if "patternProperties" in schema:
        schema["additionalProperties"] = False
    return schema


def value_comments() -> Iterator[tuple[tuple[str, ...], str]]:
    """(path of a key, the comment above it) for each key of values.yaml that has one, in order."""
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in _VALUES.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if text.startswith("#"):
            comment.append(text.removeprefix("#").strip())
        elif key := re.match(r"^( *)([A-Za-z]\w*):", line):
            depth = len(key[1])
            path = [*(part for part in path if part[0] < depth), (depth, key[2])]
            if comment:
                yield tuple(name for _, name in path), " ".join(comment)
            comment = []
        else:
            comment = []


def documented_values() -> Iterator[tuple[str, str, str]]:
    """(value, its default as code or "" for a group, its comment) for each documented value, in order."""
    defaults = yaml.safe_load(_VALUES.read_text(encoding="utf-8"))
    comments = list(value_comments())
    for path, comment in comments:
        value: Any = defaults
        for key in path:
            value = value[key]
        is_group = any(known[: len(path)] == path and known != path for known, _ in comments)
        yield f"`{'.'.join(path)}`", "" if is_group else f"`{json.dumps(value)}`", comment
