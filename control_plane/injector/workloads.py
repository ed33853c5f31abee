"""What to warn of when a Deployment or another workload is created or changed.

A controller creates the workload's pods and drops the warnings of the pods' own admission, so nobody would see them.
Pure, like the admission of pods.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from control_plane.errors import BadInput
from control_plane.injector.admission import AdmissionRequest, mutate
from control_plane.injector.annotations import INJECT_LABEL
from control_plane.injector.manifests import templates
from control_plane.injector.reasons import InjectionWarning, WarningCode, Warnings, warn
from control_plane.injector.settings import InjectorSettings
from control_plane.injector.traffic import Services
from control_plane.policy.model import Policies


def workload_warnings(
    request: AdmissionRequest, policies: Policies, settings: InjectorSettings, services: Services | None = None
) -> Warnings:
    """Return what the injection of a workload's pods would warn of. Each message begins with the workload's name.

    Args:
        services: the Services of the workload's namespace. None: the control plane may not read them.
    """
    workload = request.manifest
    if workload is None or settings.excludes(request.namespace):
        return ()
    found = list(templates(dict(workload)))
    labelled = [(name, template) for name, template in found if _has_label(template)]
    if found and not labelled and _has_label(workload):
        return warn(
            WarningCode.LABEL_NOT_ON_TEMPLATE,
            f"{found[0][0]}: the label {INJECT_LABEL} is on the workload itself, so its pods get no sidecar."
            " Set it on the pod template.",
        )
    return tuple(
        warning
        for name, template in labelled
        for warning in _template_warnings(name, template, policies, settings, services)
    )


def _has_label(tree: Mapping[str, Any]) -> bool:
    metadata = tree.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    return isinstance(labels, dict) and labels.get(INJECT_LABEL) == "true"


def _template_warnings(
    name: str, template: Mapping[str, Any], policies: Policies, settings: InjectorSettings, services: Services | None
) -> Iterator[InjectionWarning]:
    try:
        mutation = mutate(template, policies, settings, services)
    except BadInput as error:
        yield from warn(WarningCode.NOT_INJECTED, f"{name}: {error}")
        return
    if mutation.rejected:
        yield from warn(WarningCode.NOT_INJECTED, f"{name}: its pods will be rejected: {mutation.detail}")
    for warning in mutation.warnings:
        yield from warn(warning.code, f"{name}: {warning.message}")
