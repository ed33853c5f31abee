"""The admission webhook's logic: an AdmissionReview -> its response, and a pod -> the pod with a sidecar.

It is pure, except that the webhook gives each pod a random token for its preStop hook.

`mutate` works out the pod as it should be, and the patch is the difference of the two as data, so the webhook and
`vllm-priority inject` cannot disagree.
"""

import base64
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

from control_plane import strict_json
from control_plane.errors import BadInput
from control_plane.injector.annotations import INJECT_LABEL, STATUS
from control_plane.injector.json_patch import Operation, json_patch
from control_plane.injector.plan import CONTAINER, Plan, make_plan
from control_plane.injector.pod import Name, Partial, Pod, ascii_line, read
from control_plane.injector.pod_patch import with_sidecar
from control_plane.injector.reasons import NotInjectedError, Reason, WarningCode, Warnings, not_injected, warn
from control_plane.injector.settings import InjectorSettings
from control_plane.injector.traffic import Services
from control_plane.policy.model import Policies

_EXPECTED = "Send an AdmissionReview of admission.k8s.io/v1 in JSON."


class _Kind(Partial):
    kind: str


class _Request(Partial):
    uid: Name
    operation: str
    kind: _Kind
    namespace: str = ""
    dryRun: bool | None = None  # noqa: N815
    subResource: str | None = None  # noqa: N815 (Kubernetes' name)
    object: Any = None


class _Review(Partial):
    apiVersion: Literal["admission.k8s.io/v1"]  # noqa: N815
    kind: Literal["AdmissionReview"]
    request: _Request


class Owner(Partial):
    """An object that owns a pod."""

    apiVersion: str  # noqa: N815
    kind: str
    name: Name
    uid: Name
    controller: bool | None = None


class _Metadata(Partial):
    name: str | None = None
    generateName: str | None = None  # noqa: N815
    ownerReferences: list[Owner] | None = None  # noqa: N815


class _Owned(Partial):
    metadata: _Metadata


@dataclass(frozen=True)
class NewPod:
    """A pod that is about to be created: typed, and as it was sent.

    name: the pod's, or the beginning of the name that Kubernetes will give to it, with an asterisk. owner: the object
    that manages the pod, for example a ReplicaSet.
    """

    typed: Pod
    manifest: Mapping[str, Any]
    name: str = ""
    owner: Owner | None = None


@dataclass(frozen=True)
class AdmissionRequest:
    """An AdmissionReview's request.

    namespace: of the object, empty where it has none; a new pod's own metadata may still lack it. dry_run: the object
    will not be stored. pod: None unless the request is for the creation of a pod. manifest: the object as it was sent,
    None where there is none.
    """

    uid: str
    namespace: str
    dry_run: bool
    pod: NewPod | None
    manifest: Mapping[str, Any] | None


@dataclass(frozen=True)
class Mutation:
    """The pod as it should be, and how to get there.

    pod: the pod with the sidecar, or the unchanged pod. reason: why the pod was not injected, None where it was.
    detail: what was done, or why nothing was, in sentences with the codes. rejected: the pod must not be created.
    warnings: for whoever creates the pod.
    """

    pod: Mapping[str, Any]
    patch: list[Operation] = field(default_factory=list)
    reason: Reason | None = None
    detail: str = ""
    rejected: bool = False
    warnings: Warnings = ()

    @property
    def messages(self) -> list[str]:
        """The warnings' messages."""
        return [warning.message for warning in self.warnings]


def decode_review(body: bytes) -> AdmissionRequest:
    """Decode the body of a webhook call.

    Raises:
        BadInput: it is not an AdmissionReview of admission.k8s.io/v1 in JSON, or its pod is not one.
    """
    try:
        data = strict_json.loads(body)
    except RecursionError:
        raise BadInput(f"admission review: nested too deeply. {_EXPECTED}") from None
    except ValueError as error:  # Includes UnicodeDecodeError, and an integer of too many digits.
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"admission review: malformed JSON: {reason}. {_EXPECTED}") from None
    return read_review(data)


def read_review(data: object) -> AdmissionRequest:
    """Return the typed form of an AdmissionReview that was parsed as JSON. BadInput: see `decode_review`."""
    request = read(_Review, data, "AdmissionReview").request
    pod = None
    if request.operation == "CREATE" and request.kind.kind == "Pod" and not request.subResource:
        typed = read(Pod, request.object, "pod")
        metadata = read(_Owned, request.object, "pod").metadata
        owner = next((owner for owner in metadata.ownerReferences or () if owner.controller), None)
        pod = NewPod(typed, request.object, metadata.name or f"{metadata.generateName or ''}*", owner)
    manifest = request.object if isinstance(request.object, dict) else None
    return AdmissionRequest(request.uid, request.namespace, bool(request.dryRun), pod, manifest)


def decide(
    request: AdmissionRequest, policies: Policies, settings: InjectorSettings, services: Services | None = None
) -> Mutation | None:
    """Return what happens to the pod of a request. None: the request is not for the creation of a pod.

    Args:
        services: the Services of the pod's namespace. None: the control plane may not read them.
    """
    return _reviewed(request.pod, request.namespace, policies, settings, services) if request.pod else None


def review(uid: str, mutation: Mutation | None = None, warnings: Warnings = ()) -> dict[str, Any]:
    """Return the AdmissionReview with the response to a request.

    Args:
        uid: the request's.
        mutation: what happens to its pod.
        warnings: what to warn of besides.
    """
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if mutation:
        warnings += mutation.warnings
        if mutation.rejected:
            response["allowed"] = False
            response["status"] = {"code": 400, "reason": "BadRequest", "message": ascii_line(mutation.detail)}
        if mutation.patch:
            response["patchType"] = "JSONPatch"
            response["patch"] = base64.b64encode(encode_json(mutation.patch)).decode()
    if warnings:
        response["warnings"] = [ascii_line(warning.message) for warning in warnings]
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}


def encode_json(value: object) -> bytes:
    """Return `value` as compact JSON.

    A review takes most of its time to write long texts, and orjson does that fastest. What it rejects (lone surrogates,
    integers beyond 64 bits, deep nesting) the json module writes, in ASCII.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def mutate(
    pod: Mapping[str, Any], policies: Policies, settings: InjectorSettings, services: Services | None = None
) -> Mutation:
    """Return `pod`, or a pod template, with the sidecar. `pod` itself does not change.

    A pod that has the sidecar already is left alone, because Kubernetes may call a webhook again.

    Raises:
        BadInput: it is not a pod.
    """
    return _mutated(NewPod(read(Pod, pod, "pod"), pod), policies, settings, services)


def _reviewed(
    pod: NewPod, namespace: str, policies: Policies, settings: InjectorSettings, services: Services | None
) -> Mutation:
    if pod.typed.labels.get(INJECT_LABEL) != "true":
        return _left_alone(pod, Reason.NOT_REQUESTED, f"the label {INJECT_LABEL} is not 'true'.")
    # The webhook's selector excludes these, too. A selector that somebody edited must not lock up a cluster.
    if settings.excludes(namespace):
        return _failed(pod, Reason.NAMESPACE_EXCLUDED, f"the namespace is {namespace}.", settings)
    mutation = _mutated(pod, policies, settings, services, secrets.token_hex(16))
    if mutation.reason and mutation.warnings:
        # The pod starts without the sidecar that it asked for, and a controller drops the warning.
        changed = _with_status(pod.manifest, ascii_line(mutation.detail))
        return replace(mutation, pod=changed, patch=json_patch(pod.manifest, changed))
    return mutation


def _mutated(
    pod: NewPod,
    policies: Policies,
    settings: InjectorSettings,
    services: Services | None,
    drain_token: str | None = None,
) -> Mutation:
    typed = pod.typed
    if typed.labels.get(INJECT_LABEL) == "false":
        return _left_alone(pod, Reason.OPTED_OUT, f"the label {INJECT_LABEL} is 'false'.")
    if any(container.name == CONTAINER for container in typed.spec.all_containers):
        return _left_alone(pod, Reason.ALREADY_INJECTED, "the pod has the sidecar already.")
    try:
        plan, warnings = make_plan(typed, policies, settings, services, drain_token)
    except NotInjectedError as error:
        return _failed(pod, error.reason, error.detail, settings)
    status = _status(plan, warnings)
    changed = _with_status(with_sidecar(pod.manifest, typed, plan), status)
    return Mutation(changed, json_patch(pod.manifest, changed), detail=status, warnings=warnings)


def _status(plan: Plan, warnings: Warnings) -> str:
    """What was done to a pod and what it warns of, as one line."""
    done = f"injected: mode {plan.mode}, {plan.role} sidecar on port {plan.listen}, vLLM on port {plan.upstream}."
    return " ".join((done, *(f"{warning.code}: {ascii_line(warning.message)}" for warning in warnings)))


def _with_status(pod: Mapping[str, Any], status: str) -> dict[str, Any]:
    metadata = pod.get("metadata") or {}
    annotations = {**(metadata.get("annotations") or {}), STATUS: status}
    return {**pod, "metadata": {**metadata, "annotations": annotations}}


def _left_alone(pod: NewPod, reason: Reason, detail: str) -> Mutation:
    """The pod does not ask for a sidecar, or has one."""
    return Mutation(pod.manifest, reason=reason, detail=not_injected(reason, detail))


def _failed(pod: NewPod, reason: Reason, detail: str, settings: InjectorSettings) -> Mutation:
    """The pod asks for a sidecar and cannot have one."""
    text = not_injected(reason, detail)
    if reason.user_error and settings.on_injection_failure == "fail":
        return Mutation(pod.manifest, reason=reason, detail=text, rejected=True)
    return Mutation(pod.manifest, reason=reason, detail=text, warnings=warn(WarningCode.NOT_INJECTED, text))
