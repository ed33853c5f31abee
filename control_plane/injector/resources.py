"""Kubernetes' quantities (k8s.io/apimachinery, pkg/api/resource) and resource requirements."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_UP, Context, Decimal
from typing import Any, Self

from control_plane.errors import InvalidField

ResourceRequirements = Mapping[str, Mapping[str, str]]
"""`requests` and `limits`, each a mapping from a resource's name to a quantity."""

DEFAULT_RESOURCES: ResourceRequirements = {
    "requests": {"cpu": "100m", "memory": "128Mi"},
    # The sidecar sheds requests before its resident set reaches this limit.
    "limits": {"memory": "1280Mi"},
}

_EXAMPLE = '{"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}}'

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,2}))?")
_DECIMAL_POWERS = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_BINARY_POWERS = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_NANO = Decimal("1e-9")
_EXACT = Context(prec=400)  # Enough for any quantity of the 200 characters that are read.
_MAX_QUANTITY_CHARACTERS = 200

# The name of a resource, with an optional domain: cpu, hugepages-2Mi, nvidia.com/gpu.
_RESOURCE = re.compile(r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


@dataclass(frozen=True, order=True)
class Quantity:
    """An amount of a resource. Two quantities are equal if they stand for the same amount: "1000m" and "1"."""

    value: Decimal

    @classmethod
    def parse(cls, text: str | float) -> Self:
        """Parse a quantity as Kubernetes does: 2, "500m", "1.5Gi", "2e3". Digits below one nano round up.

        Raises:
            ValueError: `text` is not a quantity.
        """
        written = str(text).strip()
        found = _QUANTITY.fullmatch(written) if len(written) <= _MAX_QUANTITY_CHARACTERS else None
        if found is None or isinstance(text, bool):
            raise ValueError(f"{written[:60]!r} is not a valid quantity")
        number, suffix, exponent = found[1], found[2] or "", int(found[3] or 0)
        factor = Decimal(1024) ** _BINARY_POWERS[suffix] if suffix in _BINARY_POWERS else None
        if factor is None:
            factor = Decimal(1).scaleb(3 * _DECIMAL_POWERS[suffix] + exponent)
        return cls(_EXACT.multiply(Decimal(number), factor).quantize(_NANO, rounding=ROUND_UP, context=_EXACT))


def parse_resources(text: str) -> ResourceRequirements:
    """Parse Kubernetes' ResourceRequirements, written as JSON. Quantities may be bare numbers, as in Kubernetes.

    Raises:
        InvalidField: the text is not JSON, is not a ResourceRequirements, or requests more than it limits.
    """
    try:
        # Numbers keep the digits that were written: Kubernetes parses their text, too.
        found = json.loads(text, parse_int=str, parse_float=str)
    except (ValueError, RecursionError):
        raise _invalid(text, "malformed JSON") from None
    if not isinstance(found, dict):
        raise _invalid(text)
    requirements: dict[str, dict[str, str]] = {}
    for group, amounts in found.items():
        if group not in ("requests", "limits") or not isinstance(amounts, dict):
            raise _invalid(text)
        requirements[group] = {}
        for name, amount in amounts.items():
            if not _RESOURCE.fullmatch(name) or not _is_amount(amount):
                raise _invalid(text)
            requirements[group][name] = amount.strip()
    limits = requirements.get("limits", {})
    for name, amount in requirements.get("requests", {}).items():
        # Kubernetes rejects such a container, but by then it is every pod that fails.
        if name in limits and Quantity.parse(amount) > Quantity.parse(limits[name]):
            raise InvalidField(
                "resources",
                f"requests.{name} {amount} is above limits.{name} {limits[name]}. Request at most the limit.",
            )
    return requirements


def guaranteed(resources: ResourceRequirements) -> ResourceRequirements:
    """Return the same resources with requests that equal the limits, as the QoS class Guaranteed demands.

    CPU and memory must both be limited for that class: what is missing gets a default.
    """
    usual = {"cpu": "1", "memory": DEFAULT_RESOURCES["limits"]["memory"]}
    amounts = {**usual, **resources.get("requests", {}), **resources.get("limits", {})}
    return {"requests": amounts, "limits": amounts}


def are_guaranteed(requests: Mapping[str, str | int | float], limits: Mapping[str, str | int | float]) -> bool:
    """Return whether one container's resources permit the QoS class Guaranteed for its pod.

    CPU and memory must both have a limit above 0, and requests that equal it. A missing request equals the limit.
    """
    try:
        return all(
            Quantity.parse(limits.get(name, 0)).value > 0
            and Quantity.parse(requests.get(name, limits[name])) == Quantity.parse(limits[name])
            for name in ("cpu", "memory")
        )
    except ValueError:
        return False  # Kubernetes will reject the pod.


def _is_amount(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    try:
        return Quantity.parse(value).value >= 0
    except ValueError:
        return False


def _invalid(text: str, what: str = "") -> InvalidField:
    problem = f"{what} {text[:60]!r}." if what else f"{text[:60]!r} is not a valid ResourceRequirements."
    return InvalidField("resources", f"{problem} Use JSON, for example {_EXAMPLE}.")
