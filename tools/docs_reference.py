"""The generated parts of the documentation: tables that are made from the real objects by `make golden`.

A page marks the place of such a part by two comments, and the part stands between them:

    <!-- generated: chart_values -->
    <!-- /generated -->
"""

import ast
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import click
from prometheus_client.parser import text_string_to_metric_families

from control_plane.cli import cli
from control_plane.injector import annotations
from control_plane.injector.reasons import Reason
from control_plane.policy.model import NamedPolicy, Policy
from control_plane.server.certificates import Certificate
from control_plane.server.discovery_request import DiscoveryClient
from control_plane.server.fleet import Fleet
from control_plane.server.injections import InjectionCount, Injections
from control_plane.server.metrics import Metrics
from control_plane.server.policy_file import PolicyFile
from tools import build_values

_PLACE = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->\n)", re.DOTALL)
_DOCS = Path(__file__).resolve().parent.parent / "docs"


def fill_in(markdown: str) -> str:
    """Write into each marked place of a page the part that it names.

    Raises:
        KeyError: a place names a part that does not exist.
    """
    return _PLACE.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}{match[3]}", markdown)


def pages() -> dict[str, Callable[[], str]]:
    """Return the pages that have generated parts: path from the repository's root -> the function that returns it."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(_DOCS.rglob("*.md"))}
    return {
        path.relative_to(_DOCS.parent).as_posix(): partial(fill_in, text)
        for path, text in texts.items()
        if _PLACE.search(text)
    }


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Line breaks in a cell become spaces. Cells have a | only within code."""
    cells = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(" ".join(cell.split()) for cell in row) + " |\n" for row in cells)


# ---- The policy ----------------------------------------------------------------------------------------------------


def policy_keys() -> str:
    """Return the table of the keys of a policy."""
    return table(("key", "value", "default", "meaning"), _keys(Policy.model_json_schema()))


def named_policy_keys() -> str:
    """Return the table of the keys of a named policy."""
    schema = NamedPolicy.model_json_schema()
    schema["$defs"]["Policy"]["properties"] = {}  # the table of policy_keys has them
    return table(("key", "value", "default", "meaning"), _keys(schema))


_POWERS = {-(2**63): "-2^63", 2**63 - 1: "2^63-1", 2**52: "2^52"}


def _keys(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    models = schema.get("$defs", {})

    def rows(model: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str, str]]:
        for key, value in model["properties"].items():
            path, inner = f"{prefix}{key}", _inner_model(value)
            meaning = value.get("description") or (models[inner[1]].get("description", "") if inner else "")
            default = f"`{json.dumps(value['default'])}`" if "default" in value else "required"
            if inner and models[inner[1]]["properties"]:
                yield f"`{path}`", _value(value), "" if isinstance(value.get("default"), dict) else default, meaning
                yield from rows(models[inner[1]], f"{path}{inner[0]}.")
            else:
                yield f"`{path}`", _value(value), default, meaning

    return rows(schema, "")


def _inner_model(value: Mapping[str, Any]) -> tuple[str, str] | None:
    """(what stands between the key and the keys of its model, name of that model), or None without a model."""
    for choice in value.get("anyOf", [value]):
        if "$ref" in choice:
            return "", choice["$ref"].rpartition("/")[2]
        for item in (choice.get("additionalProperties"), *choice.get("patternProperties", {}).values()):
            if isinstance(item, dict) and "$ref" in item:
                return ".NAME", item["$ref"].rpartition("/")[2]
    return None


def _value(value: Mapping[str, Any]) -> str:
    """What a key can have, in words."""
    if "anyOf" in value:
        return " or ".join(_value(choice) for choice in value["anyOf"])
    if "const" in value or "enum" in value:
        return ", ".join(f"`{choice}`" for choice in value.get("enum", [value.get("const")]))
    kind = value.get("type", "object")
    if kind == "integer" and "minimum" in value:
        low, high = (_POWERS.get(value[bound], str(value[bound])) for bound in ("minimum", "maximum"))
        return f"integer from {low} to {high}"
    if kind == "array":
        return f"list of {_value(value['items'])}"
    if kind == "object":
        return "mapping"
    return {"boolean": "`true` or `false`", "null": "`null`", "string": "text"}[kind]


# ---- The command line ----------------------------------------------------------------------------------------------


def commands() -> str:
    """Return a section for each command: what it does, how it is used, its options and examples."""
    return "\n".join(_sections(cli, click.Context(cli, info_name="vllm-priority", **cli.context_settings)))


def _sections(command: click.Command, context: click.Context) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found and not found.hidden:
                yield from _sections(
                    found, click.Context(found, info_name=name, parent=context, **found.context_settings)
                )
        return
    yield f"## {context.command_path}\n"
    yield f"{command.help}\n"
    yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    options = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    yield table(("option", "meaning"), [(f"`{names}`", _escaped(text)) for names, text in filter(None, options)])
    if command.epilog:
        notes, _, examples = command.epilog.replace("\b\n", "").partition("Examples:\n")
        if notes.strip():
            yield f"```text\n{notes.strip()}\n```\n"
        yield f"```sh\n{inspect.cleandoc(examples)}\n```\n"


def _escaped(text: str) -> str:
    """Help texts are plain text, in which no character is Markdown but a backtick."""
    return re.sub(r"([\[\]*_])", r"\\\1", text).replace("<", "&lt;").replace("|", "&#124;")


# ---- Labels, annotations and reason codes --------------------------------------------------------------------------


def labels_and_annotations() -> str:
    """Return the table of labels and annotations, from the documented constants of the injector."""
    documented = dict(_documented_constants(annotations))
    kinds = [
        (annotations.INJECT_LABEL, "label"),
        *((name, "annotation") for name in annotations.REQUEST_ANNOTATIONS),
        *((name, "annotation, written by the injector") for name in annotations.WRITTEN_ANNOTATIONS),
    ]
    return table(("name", "kind", "value"), [(f"`{name}`", kind, documented[name]) for name, kind in kinds])


def _documented_constants(module: ModuleType) -> Iterator[tuple[Any, str]]:
    """(value, the text below it) for each constant of a module that has one."""
    body = ast.parse(inspect.getsource(module)).body
    for statement, below in zip(body, body[1:], strict=False):
        if (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            yield getattr(module, statement.targets[0].id), str(below.value.value)


def reasons() -> str:
    """Return the table of reasons why a pod is not injected."""
    return table(
        ("code", "user error", "meaning"),
        [(f"`{reason.code}`", "yes" if reason.user_error else "no", reason.meaning) for reason in Reason],
    )


# ---- Metrics and chart values --------------------------------------------------------------------------------------


def control_plane_metrics() -> str:
    """Return the table of the control plane's own metrics, from an exposition of a control plane with one sidecar."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "policy.yaml"
        file.write_text("{}", encoding="utf-8")
        policy, fleet = PolicyFile(file), Fleet()
    client = DiscoveryClient("node", "extension_configs", "render", key=None, reason="", error="")
    fleet.record(client, "", policy.snapshot.respond(client, ""))
    certificate = cast(Certificate, SimpleNamespace(expires=SimpleNamespace(timestamp=lambda: 0.0)))
    injections = Injections()
    injections.counts[InjectionCount("vllm", "injected", "")] = 1
    metrics = Metrics(policy, fleet, injections, certificate)
    families = text_string_to_metric_families(metrics.exposition().decode("utf-8"))
    rows = []
    for family in families:
        if family.name.startswith("vllm_priority") and not family.name.endswith("_created"):
            labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
            name = family.name + ("_total" if family.type == "counter" else "")
            rows.append((f"`{name}`", family.type, ", ".join(f"`{label}`" for label in labels), family.documentation))
    return table(("metric", "type", "labels", "meaning"), rows)


def chart_values() -> str:
    """Return the table of the chart's values."""
    return table(("value", "default", "meaning"), build_values.documented_values())


PARTS: dict[str, Callable[[], str]] = {
    "chart_values": chart_values,
    "commands": commands,
    "control_plane_metrics": control_plane_metrics,
    "labels_and_annotations": labels_and_annotations,
    "named_policy_keys": named_policy_keys,
    "policy_keys": policy_keys,
    "reasons": reasons,
}
"""Name of a part -> the function that returns its Markdown."""
