"""Write the manifests of a release, which hold the whole Lua and are too long to commit: `make manifests`.

python -m tools.build_manifests FOLDER
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from control_plane.injector.manifests import inject_stream
from control_plane.injector.settings import InjectorSettings
from control_plane.policy.model import Policies
from control_plane.render.placement import Placement
from control_plane.render.targets import render
from control_plane.render.templates import to_yaml
from control_plane.vllm import ROLES, Role

_EXAMPLE = Path(__file__).resolve().parent.parent / "deploy" / "examples" / "scale-out" / "scale-out.yaml"


def manifests() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each manifest, all with the built-in policy."""
    for target in ("istio", "istio-waypoint", "envoy-gateway"):
        for role in ROLES:
            yield f"{target}-{role}.yaml", rendered(target, role)
    yield "scale-out-injected.yaml", injected_example()


def rendered(target: str, role: Role) -> str:
    """Return the manifest of one target, with the command that writes it for another policy."""
    return (
        f"# The built-in policy. For your own policy or your own names:\n"
        f"#   vllm-priority config --role {role} --target {target} --policy policy.yaml\n"
        f"# See docs/guides/{target.removesuffix('-waypoint')}.md.\n"
        + to_yaml(render(target, Policies().default, Placement.default(role, target)))
    )


def injected_example() -> str:
    """Return the example with its sidecars, by the function that the webhook and `vllm-priority inject` share."""
    text, _ = inject_stream(_EXAMPLE.read_text(encoding="utf-8"), Policies(), InjectorSettings())
    # The example's own three lines of comment say how to inject it.
    return (
        "# deploy/examples/scale-out/scale-out.yaml with the sidecars of the built-in policy, for clusters without an\n"
        "# injector. For your own policy: vllm-priority inject -f scale-out.yaml --policy policy.yaml\n"
        + text.split("\n", 3)[3]
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in manifests():
        (folder / name).write_text(text, encoding="utf-8")
        print(folder / name)
