"""Policy in, each render target out: by role, for the built-in policy and for one that says much.

The script is long and the same in all of them, so the golden files keep its settings and leave out the rest.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from control_plane.address import Address
from control_plane.policy.load import load_policies
from control_plane.render.placement import Attachment, Placement
from control_plane.render.targets import TARGETS, render
from control_plane.render.templates import to_yaml
from control_plane.tls import ServerTrust
from control_plane.vllm import ROLES, Role

_FOLDER = "tests/golden/targets"
_ROOT = Path(__file__).resolve().parent.parent.parent

INPUTS = (f"{_FOLDER}/default/policy.yaml", f"{_FOLDER}/rich/policy.yaml")
"""The policies, as paths from the root of the repository."""

_VARIANTS: tuple[tuple[str, str | None], ...] = (("default", None), ("rich", None), ("rich", "night"))


def golden_files() -> Mapping[str, Callable[[], str]]:
    """Path -> its whole text."""
    files: dict[str, Callable[[], str]] = {}
    for folder, name in _VARIANTS:
        for role in ROLES:
            for target in TARGETS:
                file = "-".join(filter(None, (name, role, target)))
                files[f"{_FOLDER}/{folder}/{file}.yaml"] = partial(_shortened, target, folder, role, name)
    return files


def _placement(folder: str, role: Role, target: str, name: str | None) -> Placement:
    default = Placement.default(role, target)
    if folder == "default":
        return default
    return Placement(
        role,
        Address("::", 18000),
        Address(f"vllm-{role}.serving", 8000),
        default.admin,
        health=Address("0.0.0.0", 19002),
        control_plane=Address("vllm-priority.priority-system.svc", 443),
        control_plane_trust=ServerTrust("-----BEGIN CERTIFICATE-----\n", "vllm-priority.priority-system.svc"),
        token_file="/var/run/secrets/vllm-priority/token",
        node_id=f"{role}-0",
        labels={"app": f"vllm-{role}", "shift": "night"},
        policy_name=name,
        access_log="/dev/stderr",
        attachment=Attachment("serving", {"app": f"vllm-{role}"}, "infra/inference"),
    )


def _shortened(target: str, folder: str, role: Role, name: str | None) -> str:
    policy = load_policies(_ROOT / _FOLDER / folder / "policy.yaml").choose({}, name)
    assert policy is not None, name
    return to_yaml(_settings_only(render(target, policy, _placement(folder, role, target, name))))


def _settings_only(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _settings_only(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_settings_only(value) for value in node]
    if isinstance(node, str) and (script := re.match(r"local settings = .*\n", node)):
        return script[0] + "-- The text of lua/*.lua follows here; this file leaves it out.\n"
    return node
