"""Reads policies from YAML, and validates them once."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from control_plane.errors import PolicyError
from control_plane.policy.claims import NamedFiles
from control_plane.policy.messages import one_line, problems, shown
from control_plane.policy.model import NamedPolicy, Policies, Policy

MAX_FILE_BYTES = 1024 * 1024
"""What a ConfigMap holds at most, and far more than a policy needs."""

_USE_A_FILE = "Use the path of a policy in YAML, for example policy.yaml."
_USE_KEYS = "Use a mapping of a policy's keys, for example default: 5."


def load_policies(path: Path | str) -> Policies:
    """Policies of a YAML file. PolicyError if it cannot be read or is wrong."""
    try:
        with Path(path).open("rb") as file:
            read = file.read(MAX_FILE_BYTES + 1)
        text = read.decode("utf-8")
    except FileNotFoundError:
        raise PolicyError(f"{path}: there is no such file. {_USE_A_FILE}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise PolicyError(f"{path}: cannot be read: {reason}. {_USE_A_FILE}") from None
    except ValueError:  # a NUL, which no path has
        raise PolicyError(f"{shown(str(path))}: not a valid path. {_USE_A_FILE}") from None
    if len(read) > MAX_FILE_BYTES:
        raise PolicyError(f"{path}: larger than {MAX_FILE_BYTES} bytes. Use a smaller policy.")
    return parse_policies(text, str(path), NamedFiles(Path(path).parent))


def parse_policies(text: str, source: str = "policy", files: NamedFiles | None = None) -> Policies:
    """Policies of a YAML text. PolicyError names `source`, the key's path, and what is allowed.

    files: those that the policy names. None: it may not name any.
    """
    try:
        document = yaml.load(text, _StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}, column {mark.column + 1}:" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
        raise PolicyError(f"{source}: not valid YAML:{where} {one_line(problem)}.") from None
    except RecursionError:
        raise PolicyError(f"{source}: nested too deeply. {_USE_KEYS}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A date or number that YAML recognises and Python refuses, or a tag on what it does not fit, as in `!!int ""`.
        reason = f": {one_line(str(error))}" if isinstance(error, ValueError) else ", or does not fit its tag"
        raise PolicyError(f"{source}: not valid YAML: a value cannot be read{reason}.") from None
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise PolicyError(f"{source}: {shown(document)} is not a valid policy. {_USE_KEYS}")
    top = {key: value for key, value in document.items() if key != "policies"}
    entries = document.get("policies")
    entries = [] if entries is None else entries
    default = _validate(Policy, top, source, files=files)
    if not isinstance(entries, list):
        raise PolicyError(f"{source}: policies: {shown(entries)} is not valid. Use a list of named policies.")
    named = []
    for index, entry in enumerate(entries):
        path = f"policies[{index}]"
        if not isinstance(entry, dict):
            raise PolicyError(f"{source}: {path}: {shown(entry)} is not valid. Use the keys name, selector and policy.")
        own = entry.get("policy")
        own = {} if own is None else own
        if not isinstance(own, dict):
            raise PolicyError(f"{source}: {path}.policy: {shown(own)} is not valid. {_USE_KEYS}")
        policy = _validate(Policy, {**top, **own}, source, f"{path}.policy.", files)
        named.append(_validate(NamedPolicy, {**entry, "policy": policy}, source, f"{path}."))
    paths = tuple(files.paths) if files else ()
    return _validate(Policies, {"default": default, "named": named, "files": paths}, source)


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that rejects a repeated key, which YAML forbids and PyYAML accepts.

    A merge key is rejected too: a few lines of them grow to more mappings than any machine holds.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    "the merge key << is not supported. Write the keys out",
                    key_node.start_mark,
                )
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | bool | None):
                continue
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {shown(key)} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_ModelT = TypeVar("_ModelT", bound=BaseModel)


def _validate(
    model: type[_ModelT], data: Mapping[str, Any], source: str, prefix: str = "", files: NamedFiles | None = None
) -> _ModelT:
    try:
        return model.model_validate(dict(data), context={"files": files})
    except ValidationError as error:
        extra_keys = ("policies",) if model is Policy and not prefix else ()
        raise PolicyError(f"{source}: {problems(model, error, prefix, extra_keys)}") from None
