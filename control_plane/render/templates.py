"""Fills in the templates in envoy/, and writes YAML."""

import json
from functools import cache
from typing import Any

import jinja2
import yaml

from control_plane.package_data import folder

Resource = dict[str, Any]
"""One Envoy or Kubernetes object, ready for yaml.dump or json.dumps."""


def render_template(template: str, **values: Any) -> Resource:
    """The template's YAML with these values placed. Every value is placed as JSON, so none can break out."""
    document = yaml.load(_templates().get_template(f"{template}.yaml.j2").render(values), Loader=_Loader)
    assert isinstance(document, dict), template
    return document


_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder("envoy")),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=True)
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
