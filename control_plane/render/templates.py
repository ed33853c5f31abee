"""Fills in the templates in envoy/, and writes YAML."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import jinja2
import yaml

from control_plane.package_data import folder

Resource = dict[str, Any]
"""One Envoy or Kubernetes object, ready for yaml.dump or json.dumps."""


def render_template(template: str, **values: Any) -> Resource:
    """Return the template's document with these values placed, as copies.

    A value never passes through the template's text, so no value can change the document's structure, and nothing is
    written and parsed again. A value without a name in the template has no effect.
    """
    placed: list[Any] = []
    text = _environment().get_template(f"{template}.yaml.j2").render(values, placed=placed)
    document = _copy(_parse(text), placed)
    assert isinstance(document, dict), template
    return document


@dataclass(frozen=True)
class _Reference:
    """Stands in a parsed template where the value of this index belongs."""

    index: int


@jinja2.pass_context
def _reference(context: jinja2.runtime.Context, value: Any) -> str:
    """The filter `tojson` of the templates: it keeps the value aside, and writes a reference to it."""
    if jinja2.is_undefined(value):
        raise jinja2.UndefinedError(f"{context.name}: {value._undefined_message}")
    placed = context["placed"]
    placed.append(value)
    return f"!value {len(placed) - 1}"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML with references."""


_Loader.add_constructor("!value", lambda loader, node: _Reference(int(loader.construct_scalar(node))))


@lru_cache(maxsize=128)
def _parse(text: str) -> Any:
    """Parse a template, whose text is the same for all values of the same shape. The result must not be changed."""
    return yaml.load(text, _Loader)


def _copy(node: Any, placed: Sequence[Any]) -> Any:
    if isinstance(node, dict):
        return {key: _copy(value, placed) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_copy(value, placed) for value in node]
    return _copy(placed[node.index], ()) if isinstance(node, _Reference) else node


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder("envoy")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["tojson"] = _reference
    return environment


class _Dumper(yaml.SafeDumper):
    """Block style for texts of several lines, so that a script is read as it was written; no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def to_yaml(documents: list[Resource]) -> str:
    """YAML, one document each, keys in the order in which they were placed."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=1000, explicit_start=len(documents) > 1)
