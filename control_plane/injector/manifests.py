"""Injects sidecars into manifest files, and takes them out again.

A document that gets no sidecar passes through byte for byte. One that does keeps its comments, order and quotes. If the
YAML library cannot keep its layout, the original text travels along in an annotation, so that taking the sidecar out
gives back the very same bytes. If the output was edited since, the edits stay and only the sidecar goes.
"""

import base64
import binascii
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from control_plane.errors import BadInput, CheckFailed
from control_plane.injector.admission import mutate
from control_plane.injector.annotations import (
    INJECT_LABEL,
    INJECTED,
    ORIGINAL,
    WRITTEN_ANNOTATIONS,
    CommandEdit,
    InjectionRecord,
)
from control_plane.injector.json_patch import apply_in_place, replace_in_place
from control_plane.injector.plan import CERTIFICATE_VOLUME, CONTAINER, REDIRECT_CONTAINER, TOKEN_VOLUME
from control_plane.injector.pod import Container, Pod, read
from control_plane.injector.pod_patch import PORT_PATHS
from control_plane.injector.reasons import Reason, not_injected
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.model import Policies

Tree = MutableMapping[str, Any]

_PASSED_UNLESS_ASKED = (Reason.NOT_HTTP, Reason.LEADER_UNKNOWN)
"""Pods that run vLLM, but not a server for a sidecar: only a label makes it an error that they get none."""


Changed = tuple[str, list[str]]
"""A text, and notes on what was done to it and what was not: a line each."""


def inject_stream(text: str, policies: Policies, settings: InjectorSettings) -> Changed:
    """Inject sidecars into the manifests of a text: YAML or JSON, any number of documents.

    A pod gets a sidecar if its label asks for one, or if one of its containers runs vLLM. With the label
    "false" it gets none.

    Raises:
        BadInput: a document or a pod is not valid. The message names the object.
        CheckFailed: pods cannot be injected. The message names all of them.
    """
    rejected: list[str] = []
    changed = _each_document(text, lambda layout, body: _injected_body(layout, body, policies, settings, rejected))
    if rejected:
        raise CheckFailed(f"{' '.join(rejected)} Nothing was written.")
    return changed


def uninject_stream(text: str) -> Changed:
    """Return what `inject_stream` was given, from what it returned.

    Raises:
        BadInput: the injector's annotation was edited.
    """
    return _each_document(text, _restored_body)


# ---- Documents -----------------------------------------------------------------------------------------------------

# A line that starts with three dashes separates documents wherever it is, even in a block scalar (YAML 1.2, 9.1.2).
_SEPARATOR = re.compile(r"^(?=---(?:[ \t\r]|$))", re.MULTILINE)
_HEAD = re.compile(r"\ufeff?(?:---[ \t]*(?:#[^\n]*)?\r?(?:\n|$))?")
_RELEVANT = re.compile(r"""\bkind["']?[ \t]*:[ \t]*["']?(?:Pod|[A-Za-z]*List)\b|\bcontainers["']?[ \t]*:""")
_SCHEMA_OR_DATA = re.compile(r"^kind:[ \t]*[\"']?(?:CustomResourceDefinition|ConfigMap|Secret)\b", re.MULTILINE)


@dataclass
class _Layout:
    """How a document is written: a function that parses it, and one that writes it in the same way."""

    load: Callable[[str], Any]
    dump: Callable[[Any], str]


def _each_document(text: str, change: Callable[[_Layout, str], Changed]) -> Changed:
    notes: list[str] = []
    parts, line = [], 1
    for chunk in _SEPARATOR.split(text):
        head = _HEAD.match(chunk)
        start = head.end() if head else 0
        body = chunk[start:]
        if _RELEVANT.search(body) and not _SCHEMA_OR_DATA.search(body):
            unix = body.replace("\r\n", "\n")
            try:
                changed, found = change(_layout(unix), unix)
            except MarkedYAMLError as error:
                at = line + chunk[:start].count("\n") + (error.problem_mark.line if error.problem_mark else 0)
                raise BadInput(f"line {at}: malformed YAML: {_one_line(error.problem or error.context)}") from None
            except (YAMLError, RecursionError, ValueError) as error:
                raise BadInput(f"the document at line {line}: malformed YAML: {_one_line(error)}") from None
            notes += found
            body = changed if unix == body else changed.replace("\n", "\r\n")
        parts.append(chunk[:start] + body)
        line += chunk.count("\n")
    return "".join(parts), notes


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:200]


def _layout(body: str) -> _Layout:
    """The layout that reproduces `body` best: exactly, if there is one that does."""
    if body.lstrip().startswith("{"):
        try:
            value = json.loads(body)
        except ValueError:
            pass  # It may still be YAML in flow style.
        else:
            layouts = [_json_layout(indent, end) for indent in (4, 2, "\t", None) for end in ("\n", "")]
            return _best(layouts, value, body)
    layouts = [_yaml_layout(*style) for style in ((2, 2, 0), (2, 4, 2), (4, 4, 0), (4, 4, 2), (4, 6, 4))]
    return _best(layouts, layouts[0].load(body), body)


def _best(layouts: list[_Layout], value: Any, body: str) -> _Layout:
    lines = set(body.splitlines())
    found, most = layouts[0], -1
    for layout in layouts:
        written = layout.dump(value)
        if written == body:
            return layout
        alike = sum(line in lines for line in written.splitlines())
        if alike > most:
            found, most = layout, alike
    return found


def _json_layout(indent: int | str | None, end: str) -> _Layout:
    separators = None if indent else (",", ":")
    return _Layout(json.loads, lambda v: json.dumps(v, indent=indent, separators=separators, ensure_ascii=False) + end)


def _yaml_layout(mapping: int, sequence: int, offset: int) -> _Layout:
    def library() -> YAML:
        yaml = YAML(typ="rt")
        yaml.preserve_quotes = True
        yaml.width = 2**30
        yaml.indent(mapping=mapping, sequence=sequence, offset=offset)
        return yaml

    def dump(value: Any) -> str:
        stream = io.StringIO()
        library().dump(value, stream)
        return stream.getvalue()

    return _Layout(lambda body: library().load(body), dump)


# ---- Pod templates -------------------------------------------------------------------------------------------------


_NOT_OF_PODS = frozenset({"CustomResourceDefinition", "ConfigMap", "Secret"})
"""Kinds that hold schemas and data, which may look like pod templates."""


def _objects(tree: Any) -> Iterator[Tree]:
    """The objects of a document: itself, or the items of a List."""
    if not isinstance(tree, MutableMapping):
        return
    kind = tree.get("kind")
    if isinstance(kind, str) and kind.endswith("List") and isinstance(tree.get("items"), list):
        for item in tree["items"]:
            yield from _objects(item)
    elif isinstance(kind, str) and kind not in _NOT_OF_PODS:
        yield tree


def _name(tree: Tree) -> str:
    metadata = tree.get("metadata")
    metadata = metadata if isinstance(metadata, MutableMapping) else {}
    return f"{tree['kind']}/{metadata.get('name') or metadata.get('generateName') or '?'}"


def templates(tree: Tree) -> Iterator[tuple[str, Tree]]:
    """All pod templates of an object, each with the name that notes use for it.

    They are recognised by their shape, so that kinds that this module does not know have them, too.
    """
    name = _name(tree)
    if tree["kind"] == "Pod":
        yield name, tree
    elif not str(tree.get("apiVersion")).startswith("serving.knative.dev/"):  # Only one container may have ports there.
        found = [entry for key in ("spec", "template") for entry in _templates_below(tree.get(key), (key,))]
        for path, template in found:
            where = path[-2] if path[-1] == "template" and len(path) > 1 else path[-1]
            yield f"{name} {where}" if len(found) > 1 else name, template


def _templates_below(at: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tree]]:
    if isinstance(at, list):
        for index, entry in enumerate(at):
            yield from _templates_below(entry, (*path[:-1], f"{path[-1]}[{index}]"))
    elif isinstance(at, MutableMapping):
        spec = at.get("spec")
        if path[-1].lower().endswith("template") and isinstance(spec, MutableMapping) and _containers(spec):
            yield path, at
            return
        for key, entry in at.items():
            yield from _templates_below(entry, (*path, str(key)))


def _containers(spec: Tree) -> list[Tree]:
    """The containers of a pod's spec. Empty: it does not have the shape of one."""
    found = spec.get("containers")
    if not isinstance(found, list) or not all(isinstance(c, MutableMapping) and "name" in c for c in found):
        return []
    return found


def _runs_vllm_elsewhere(at: Any) -> bool:
    """Whether containers that are not part of a pod template run vLLM."""
    if isinstance(at, list):
        return any(_runs_vllm_elsewhere(entry) for entry in at)
    if not isinstance(at, MutableMapping):
        return False
    for container in _containers(at):
        try:
            if read(Container, _plain(container), "container").servers:
                return True
        except BadInput:
            continue
    return any(_runs_vllm_elsewhere(entry) for entry in at.values())


def _plain(value: Any) -> Any:
    """The value as json.loads would return it: without comments, anchors and styles."""
    if isinstance(value, MutableMapping):
        return {str(key): _plain(value[key]) for key in value}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _injected_body(
    layout: _Layout, body: str, policies: Policies, settings: InjectorSettings, rejected: list[str]
) -> Changed:
    tree = layout.load(body)
    notes: list[str] = []
    injected: list[Tree] = []
    for holder in _objects(tree):
        found = list(templates(holder))
        if not found and _runs_vllm_elsewhere(holder):
            detail = "the containers are not in a pod template. Label the pods, and let the webhook inject them."
            notes.append(f"{_name(holder)}: {not_injected(Reason.NO_POD_TEMPLATE, detail)}")
        for name, template in found:
            pod = _plain(template)
            try:
                typed = read(Pod, pod, "pod")
                if INJECT_LABEL not in typed.labels and not any(c.starts for c in typed.spec.containers):
                    notes.append(f"{name}: {not_injected(Reason.NO_VLLM_CONTAINER, 'no container runs vLLM.')}")
                    continue
                mutation = mutate(pod, policies, settings)
            except BadInput as error:
                raise BadInput(f"{name}: {error}") from None
            if mutation.rejected and not (INJECT_LABEL not in typed.labels and mutation.reason in _PASSED_UNLESS_ASKED):
                rejected.append(f"{name}: {mutation.detail}")
            elif mutation.reason and not mutation.warnings:
                notes.append(f"{name}: {mutation.detail}")
            notes += [f"{name}: {message}" for message in mutation.messages]
            if mutation.patch:
                apply_in_place(template, mutation.patch)
                if _plain(template) != mutation.pod:
                    raise BadInput(
                        f"{name}: shares a YAML anchor with a part that must not change. Write the alias out instead."
                    )
                injected.append(template)
    if not injected:
        return body, notes
    written = layout.dump(tree)
    bare = _bare(written)
    if bare == body:
        return written, notes
    packed = base64.b64encode(zlib.compress(body.encode(), 9)).decode()
    injected[0]["metadata"]["annotations"][ORIGINAL] = f"{_digest(bare)}:{packed}"
    return layout.dump(tree), notes


# ---- Taking the sidecar out ------------------------------------------------------------------------------------------


def _restored_body(layout: _Layout, body: str) -> Changed:
    tree = layout.load(body)
    original = None
    found = False
    for name, template in (found for holder in _objects(tree) for found in templates(holder)):
        annotations = (template.get("metadata") or {}).get("annotations") or {}
        if isinstance(annotations, MutableMapping) and INJECTED in annotations:
            original = annotations.get(ORIGINAL) or original
            try:
                _take_out(template)
            except (AttributeError, KeyError, TypeError, ValueError):
                raise BadInput(
                    f"{name}: annotation {INJECTED} was edited, so the sidecar cannot be taken out."
                    " Restore the value that the injector wrote."
                ) from None
            found = True
    if not found:
        return body, []
    bare = layout.dump(tree)
    if not original:
        return bare, []
    digest, _, packed = str(original).partition(":")
    if digest != _digest(bare):
        return bare, ["edited since the injection: the edits are kept, but the layout may differ"]
    try:
        return zlib.decompress(base64.b64decode(packed, validate=True)).decode(), []
    except (binascii.Error, zlib.error, UnicodeDecodeError):
        return bare, [f"annotation {ORIGINAL} cannot be read, so the layout may differ"]


def _bare(written: str) -> str:
    """The text without the sidecar, as it is without the help of the original."""
    return _restored_body(_layout(written), written)[0]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _take_out(template: Tree) -> None:
    """Undo `pod_patch.with_sidecar`, in place. It goes by names, so whatever was added since does not matter."""
    metadata, spec = template["metadata"], template["spec"]
    record = InjectionRecord.from_json(metadata["annotations"][INJECTED])
    for key in ("containers", "initContainers"):
        _remove(spec.get(key) or [], CONTAINER, REDIRECT_CONTAINER)
        if key in record.created and key in spec and not spec[key]:
            del spec[key]
    _remove(spec.get("volumes") or [], TOKEN_VOLUME, CERTIFICATE_VOLUME)
    if "volumes" in record.created and "volumes" in spec and not spec["volumes"]:
        del spec["volumes"]
    for container in spec["containers"]:
        if container["name"] == record.container:
            _restore_server(container, record)
    for key in WRITTEN_ANNOTATIONS:
        metadata["annotations"].pop(key, None)
    if "annotations" in record.created and not metadata["annotations"]:
        del metadata["annotations"]
    if "metadata" in record.created and not metadata:
        del template["metadata"]


def _remove(entries: list[Tree], *names: str) -> None:
    for index in reversed(range(len(entries))):
        if entries[index]["name"] in names:
            del entries[index]


def _restore_server(server: Tree, record: InjectionRecord) -> None:
    before = record.port_before or record.upstream_port
    for port in server.get("ports") or ():
        if record.port_name and port.get("name") == record.port_renamed_to:
            replace_in_place(port, "name", record.port_name)
        if port.get("containerPort") == record.upstream_port:
            replace_in_place(port, "containerPort", before)
    for path in PORT_PATHS:
        at: Any = server
        for key in path:
            at = at.get(key) if isinstance(at, MutableMapping) else None
        if isinstance(at, MutableMapping) and at.get("port") == record.upstream_port:
            replace_in_place(at, "port", record.port_name if "/".join(path) in record.numbered else before)
    for edit in reversed(record.edits):
        _restore_entry(server.get(edit.field) or [], edit)
    if "args" in record.created and not server.get("args"):
        server.pop("args", None)
    lifecycle = server.get("lifecycle")
    if record.added_hook and isinstance(lifecycle, MutableMapping):
        hook = lifecycle.get("preStop")
        if isinstance(hook, MutableMapping) and list(hook) == ["sleep"]:
            del lifecycle["preStop"]
        if record.added_hook == "lifecycle" and not lifecycle:
            del server["lifecycle"]


def _restore_entry(entries: list[Any], edit: CommandEdit) -> None:
    """Undo one edit of a command line, where it was made, or where the entry is now."""
    for index in (edit.index, *range(len(entries))):
        text = entries[index] if index < len(entries) else None
        if text == edit.now and edit.was is None:
            del entries[index]
            return
        if isinstance(text, str) and edit.now in text and edit.was is not None:
            head, _, tail = text.rpartition(edit.now)
            replace_in_place(entries, index, head + edit.was + tail)
            return
