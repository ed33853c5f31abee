"""The injector offline: manifests in, manifests with sidecars out, and back again.

A document that gets no sidecar passes byte for byte. One that does keeps its comments, its order and its quotes; where
the YAML library cannot keep its layout as well, the text as it was travels in an annotation, so that taking the
sidecar out gives the very bytes back. If the output was edited since, the edits stay and only the sidecar goes.
"""

import base64
import binascii
import hashlib
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from control_plane.admission import INJECT_LABEL, InjectorSettings, mutate
from control_plane.errors import BadInput
from control_plane.pod import Pod, read
from control_plane.pod_patch import CONTAINER, INJECTED, ORIGINAL, PORT_PATHS, REDIRECT_CONTAINER
from control_plane.policy import Policies

TEMPLATES: dict[str, tuple[tuple[str, ...], ...]] = {
    "Pod": ((),),
    "Deployment": (("spec", "template"),),
    "StatefulSet": (("spec", "template"),),
    "DaemonSet": (("spec", "template"),),
    "ReplicaSet": (("spec", "template"),),
    "ReplicationController": (("spec", "template"),),
    "Job": (("spec", "template"),),
    "CronJob": (("spec", "jobTemplate", "spec", "template"),),
    "LeaderWorkerSet": (
        ("spec", "leaderWorkerTemplate", "leaderTemplate"),
        ("spec", "leaderWorkerTemplate", "workerTemplate"),
    ),
}
"""Kind -> where its pod templates are."""

Tree = MutableMapping[str, Any]


def inject_stream(text: str, policies: Policies, settings: InjectorSettings) -> tuple[str, list[str]]:
    """Manifests (YAML or JSON, any number of documents) with sidecars where vLLM servers are; and notes, a line each.

    A pod gets it if its label asks for it, or if a container's command or image is that of a server; never with the
    label "false". BadInput names the object where something is not as it should be.
    """
    return _each_document(text, lambda layout, body, notes: _injected_body(layout, body, policies, settings, notes))


def uninject_stream(text: str) -> tuple[str, list[str]]:
    """What `inject_stream` was given, from what it gave."""
    return _each_document(text, _restored_body)


# ---- Documents -----------------------------------------------------------------------------------------------------

# A line that starts with three dashes separates documents wherever it stands, block scalars included (YAML 1.2, 9.1.2).
_SEPARATOR = re.compile(r"^(?=---(?:[ \t\r]|$))", re.MULTILINE)
_HEAD = re.compile(r"\ufeff?(?:---[ \t]*(?:#[^\n]*)?\r?(?:\n|$))?")
_RELEVANT = re.compile(r"""\bkind["']?[ \t]*:[ \t]*["']?(?:""" + "|".join(TEMPLATES) + r"""|[A-Za-z]*List)\b""")


@dataclass
class _Layout:
    """How a document is written: what parses it, and what writes it the same way again."""

    load: Callable[[str], Any]
    dump: Callable[[Any], str]


def _each_document(text: str, change: Callable[[_Layout, str, list[str]], str]) -> tuple[str, list[str]]:
    notes: list[str] = []
    parts, line = [], 1
    for chunk in _SEPARATOR.split(text):
        head = _HEAD.match(chunk)
        start = head.end() if head else 0
        body = chunk[start:]
        if _RELEVANT.search(body):
            unix = "\r\n" not in body
            try:
                changed = change(_layout(body.replace("\r\n", "\n")), body.replace("\r\n", "\n"), notes)
            except MarkedYAMLError as error:
                at = line + chunk[:start].count("\n") + (error.problem_mark.line if error.problem_mark else 0)
                raise BadInput(f"line {at}: not YAML: {_one_line(error.problem or error.context)}") from None
            except (YAMLError, RecursionError, ValueError) as error:
                raise BadInput(f"the document at line {line}: not YAML: {_one_line(error)}") from None
            body = changed if unix else changed.replace("\n", "\r\n")
        parts.append(chunk[:start] + body)
        line += chunk.count("\n")
    return "".join(parts), notes


def _one_line(problem: object) -> str:
    return " ".join(str(problem).split())[:200]


def _layout(body: str) -> _Layout:
    """The layout that gives `body` back best: exactly, if there is one."""
    if body.lstrip().startswith("{"):
        try:
            value = json.loads(body)
        except ValueError:
            pass  # YAML's own flow style looks like that too
        else:
            layouts = [_json_layout(indent, end) for indent in (4, 2, "\t", None) for end in ("\n", "")]
            return _best(layouts, value, body)
    configs: dict[str, str] = {}
    layouts = [_yaml_layout(*style, configs) for style in ((2, 2, 0), (2, 4, 2), (4, 4, 0), (4, 4, 2), (4, 6, 4))]
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


# The sidecar's configuration as this module writes it: one JSON text in double quotes.
_CONFIG_START = '{"node":'
_CONFIG = re.compile(r'"\{\\"node\\":(?:[^"\\\n]|\\.)*"')


def _yaml_layout(mapping: int, sequence: int, offset: int, configs: dict[str, str]) -> _Layout:
    """`configs`: a short name -> the configuration it stands for. The library takes a second for a long scalar."""

    def library() -> YAML:
        yaml = YAML(typ="rt")
        yaml.preserve_quotes = True
        yaml.width = 2**30
        yaml.indent(mapping=mapping, sequence=sequence, offset=offset)
        return yaml

    def shortened(config: str) -> str:
        name = f"vllm-priority-config-{len(configs)}-{_digest(config)}"
        configs[name] = config
        return name

    def dump(value: Any) -> str:
        stream = io.StringIO()
        with _replaced(value, lambda text: shortened(json.dumps(text)) if text.startswith(_CONFIG_START) else None):
            library().dump(value, stream)
        written = stream.getvalue()
        for name, config in configs.items():
            written = written.replace(name, config)
        return written

    return _Layout(lambda body: library().load(_CONFIG.sub(lambda found: shortened(found[0]), body)), dump)


@contextmanager
def _replaced(value: Any, replace: Callable[[str], str | None]) -> Iterator[None]:
    """The texts in lists of `value` are other ones for a while: those for which `replace` gives one."""
    undo: list[tuple[list[Any], int, str]] = []

    def walk(at: Any) -> None:
        for key in at if isinstance(at, MutableMapping) else range(len(at)):
            entry = at[key]
            if isinstance(entry, MutableMapping | list):
                walk(entry)
            elif isinstance(at, list) and isinstance(entry, str) and (other := replace(entry)) is not None:
                undo.append((at, key, entry))
                at[key] = other

    if isinstance(value, MutableMapping | list):
        walk(value)
    yield
    for at, index, text in undo:
        at[index] = text


# ---- Pod templates -------------------------------------------------------------------------------------------------


def _templates(tree: Any) -> Iterator[tuple[str, Tree]]:
    """(name for the notes, pod template) of all templates in a document."""
    if not isinstance(tree, MutableMapping):
        return
    kind = tree.get("kind")
    if isinstance(kind, str) and kind.endswith("List") and isinstance(tree.get("items"), list):
        for item in tree["items"]:
            yield from _templates(item)
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
    """The value as json.loads would give it: without comments, anchors and styles."""
    if isinstance(value, MutableMapping):
        return {str(key): _plain(value[key]) for key in value}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _injected_body(layout: _Layout, body: str, policies: Policies, settings: InjectorSettings, notes: list[str]) -> str:
    tree = layout.load(body)
    touched: list[Tree] = []
    for name, template in _templates(tree):
        pod = _plain(template)
        try:
            if not _wanted(pod):
                notes.append(f"{name}: passed as it is: no container runs vLLM")
                continue
            mutation = mutate(pod, policies, settings)
        except BadInput as error:
            raise BadInput(f"{name}: {error}") from None
        if mutation.refused:
            raise BadInput(f"{name}: {mutation.skipped}")
        if mutation.skipped and not mutation.warnings:
            notes.append(f"{name}: passed as it is: {mutation.skipped}")
        notes += [f"{name}: {warning}" for warning in mutation.warnings]
        if mutation.patch:
            for operation in mutation.patch:
                _apply(template, operation)
            if _plain(template) != mutation.pod:
                raise BadInput(f"{name}: shares an anchor with what has to change; allowed: anchors written out")
            touched.append(template)
    if not touched:
        return body
    written = layout.dump(tree)
    bare = _bare(written)
    if bare == body:
        return written
    packed = base64.b64encode(zlib.compress(body.encode(), 9)).decode()
    touched[0]["metadata"]["annotations"][ORIGINAL] = f"{_digest(bare)}:{packed}"
    return layout.dump(tree)


def _wanted(pod: Any) -> bool:
    typed = read(Pod, pod, "pod")
    return INJECT_LABEL in typed.labels or any(container.role for container in typed.spec.containers)


def _apply(template: Tree, operation: dict[str, Any]) -> None:
    """One operation of `json_patch` on the document's own nodes, so that what surrounds them stays."""
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    at: Any = template
    for part in path:
        at = at[int(part)] if isinstance(at, list) else at[part]
    if isinstance(at, list):
        if operation["op"] == "add":
            at.insert(int(last), operation["value"])
        else:
            at[int(last)] = operation["value"]
    else:
        at[last] = operation["value"]


# ---- And back ------------------------------------------------------------------------------------------------------


def _restored_body(layout: _Layout, body: str, notes: list[str]) -> str:
    tree = layout.load(body)
    original = None
    touched = False
    for name, template in _templates(tree):
        annotations = (template.get("metadata") or {}).get("annotations") or {}
        if isinstance(annotations, MutableMapping) and INJECTED in annotations:
            original = annotations.get(ORIGINAL) or original
            try:
                _take_out(template)
            except (AttributeError, KeyError, TypeError, ValueError):
                raise BadInput(f"{name}: annotation {INJECTED} was edited; allowed: what the injector wrote") from None
            touched = True
    if not touched:
        return body
    bare = layout.dump(tree)
    if original:
        digest, _, packed = str(original).partition(":")
        if digest == _digest(bare):
            try:
                return zlib.decompress(base64.b64decode(packed, validate=True)).decode()
            except (binascii.Error, zlib.error, UnicodeDecodeError):
                notes.append(f"annotation {ORIGINAL} cannot be read: the layout is a new one")
        else:
            notes.append("edited since it was injected: the edits are kept, the layout is a new one")
    return bare


def _bare(written: str) -> str:
    """What taking the sidecar out of this text gives, without the help of the original."""
    return _restored_body(_layout(written), written, [])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _take_out(template: Tree) -> None:
    """The inverse of `pod_patch.injected`, in place: by names, so that what was added since does not matter."""
    metadata, spec = template["metadata"], template["spec"]
    done = json.loads(metadata["annotations"][INJECTED])
    made = done["made"]
    for key in ("containers", "initContainers"):
        containers = spec.get(key) or []
        for index in range(len(containers) - 1, -1, -1):
            if containers[index]["name"] in (CONTAINER, REDIRECT_CONTAINER):
                del containers[index]
        if key in made and key in spec and not spec[key]:
            del spec[key]
    for container in spec["containers"]:
        if container["name"] == done["container"]:
            _take_back(container, done)
    for key in (INJECTED, ORIGINAL):
        metadata["annotations"].pop(key, None)
    if "annotations" in made and not metadata["annotations"]:
        del metadata["annotations"]
    if "metadata" in made and not metadata:
        del template["metadata"]


def _take_back(app: Tree, done: dict[str, Any]) -> None:
    if "name" in done:
        for port in app.get("ports") or ():
            if port.get("name") == done["renamed"]:
                port["name"] = done["name"]
        numbered = ["/".join(path) for path in PORT_PATHS if "/".join(path) in done["numbered"]]
        for path in numbered:
            at: Any = app
            for key in path.split("/"):
                at = at.get(key) if isinstance(at, MutableMapping) else None
            if isinstance(at, MutableMapping) and at.get("port") == done["port"]:
                at["port"] = done["name"]
    lifecycle = app.get("lifecycle")
    if "slept" in done and isinstance(lifecycle, MutableMapping):
        hook = lifecycle.get("preStop")
        if isinstance(hook, MutableMapping) and list(hook) == ["sleep"]:
            del lifecycle["preStop"]
        if done["slept"] == "lifecycle" and not lifecycle:
            del app["lifecycle"]
