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

from control_plane.errors import BadInput
from control_plane.injector.admission import mutate
from control_plane.injector.annotations import (
    INJECT_LABEL,
    INJECTED,
    ORIGINAL,
    WRITTEN_ANNOTATIONS,
    InjectionRecord,
)
from control_plane.injector.json_patch import apply_in_place
from control_plane.injector.plan import CONTAINER, REDIRECT_CONTAINER, TOKEN_VOLUME
from control_plane.injector.pod import Pod, read
from control_plane.injector.pod_patch import PORT_PATHS
from control_plane.injector.reasons import Reason, not_injected
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.model import Policies

TEMPLATES: dict[str, tuple[tuple[str, ...], ...]] = {
    "Pod": ((),),
    "Deployment": (("spec", "template"),),
    "StatefulSet": (("spec", "template"),),
    "DaemonSet": (("spec", "template"),),
    "ReplicaSet": (("spec", "template"),),
    "ReplicationController": (("spec", "template"),),
    "Job": (("spec", "template"),),
    "Rollout": (("spec", "template"),),
    "CronJob": (("spec", "jobTemplate", "spec", "template"),),
    "LeaderWorkerSet": (
        ("spec", "leaderWorkerTemplate", "leaderTemplate"),
        ("spec", "leaderWorkerTemplate", "workerTemplate"),
    ),
}
"""A kind -> the paths of its pod templates."""

Tree = MutableMapping[str, Any]


Changed = tuple[str, list[str]]
"""A text, and notes on what was done to it and what was not: a line each."""


def inject_stream(text: str, policies: Policies, settings: InjectorSettings) -> Changed:
    """Inject sidecars into the manifests of a text: YAML or JSON, any number of documents.

    A pod gets a sidecar if its label asks for one, or if one of its containers runs vLLM. With the label
    "false" it gets none.

    Raises:
        BadInput: a document or a pod is not valid, or a pod cannot be injected. The message names the object.
    """
    return _each_document(text, lambda layout, body: _injected_body(layout, body, policies, settings))


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
_RELEVANT = re.compile(r"""\bkind["']?[ \t]*:[ \t]*["']?(?:""" + "|".join(TEMPLATES) + r"""|[A-Za-z]*List)\b""")


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
        if _RELEVANT.search(body):
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


def templates(tree: Any) -> Iterator[tuple[str, Tree]]:
    """Yield the pod templates of a document, each with the name that notes use for it."""
    if not isinstance(tree, MutableMapping):
        return
    kind = tree.get("kind")
    if isinstance(kind, str) and kind.endswith("List") and isinstance(tree.get("items"), list):
        for item in tree["items"]:
            yield from templates(item)
        return
    for path in TEMPLATES.get(kind if isinstance(kind, str) else "", ()):
        at: Any = tree
        for key in path:
            at = at.get(key) if isinstance(at, MutableMapping) else None
        if isinstance(at, MutableMapping):
            metadata = tree.get("metadata")
            metadata = metadata if isinstance(metadata, MutableMapping) else {}
            name = metadata.get("name") or metadata.get("generateName") or "?"
            where = f" {path[-1]}" if len(TEMPLATES[str(kind)]) > 1 else ""
            yield f"{kind}/{name}{where}", at


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


def _injected_body(layout: _Layout, body: str, policies: Policies, settings: InjectorSettings) -> Changed:
    tree = layout.load(body)
    notes: list[str] = []
    injected: list[Tree] = []
    for name, template in templates(tree):
        pod = _plain(template)
        try:
            if not _wanted(pod):
                notes.append(f"{name}: {not_injected(Reason.NO_VLLM_CONTAINER, 'no container runs vLLM.')}")
                continue
            mutation = mutate(pod, policies, settings)
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from None
        if mutation.rejected:
            raise BadInput(f"{name}: {mutation.detail}")
        if mutation.reason and not mutation.warnings:
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


def _wanted(pod: Any) -> bool:
    typed = read(Pod, pod, "pod")
    return INJECT_LABEL in typed.labels or any(container.role for container in typed.spec.containers)


# ---- Taking the sidecar out ------------------------------------------------------------------------------------------


def _restored_body(layout: _Layout, body: str) -> Changed:
    tree = layout.load(body)
    original = None
    found = False
    for name, template in templates(tree):
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
        containers = spec.get(key) or []
        for index in range(len(containers) - 1, -1, -1):
            if containers[index]["name"] in (CONTAINER, REDIRECT_CONTAINER):
                del containers[index]
        if key in record.created and key in spec and not spec[key]:
            del spec[key]
    for index, volume in enumerate(spec.get("volumes") or ()):
        if volume["name"] == TOKEN_VOLUME:
            del spec["volumes"][index]
            break
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


def _restore_server(server: Tree, record: InjectionRecord) -> None:
    if record.port_name:
        for port in server.get("ports") or ():
            if port.get("name") == record.port_renamed_to:
                port["name"] = record.port_name
        for path in PORT_PATHS:
            at: Any = server if "/".join(path) in record.numbered else None
            for key in path:
                at = at.get(key) if isinstance(at, MutableMapping) else None
            if isinstance(at, MutableMapping) and at.get("port") == record.upstream_port:
                at["port"] = record.port_name
    lifecycle = server.get("lifecycle")
    if record.added_hook and isinstance(lifecycle, MutableMapping):
        hook = lifecycle.get("preStop")
        if isinstance(hook, MutableMapping) and list(hook) == ["sleep"]:
            del lifecycle["preStop"]
        if record.added_hook == "lifecycle" and not lifecycle:
            del server["lifecycle"]
