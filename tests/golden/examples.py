"""The example with its sidecars written out, by the function that the webhook and `vllm-priority inject` share."""

from pathlib import Path

from control_plane.injector.manifests import inject_stream
from control_plane.injector.settings import InjectorSettings
from control_plane.policy import Policies

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "deploy" / "examples" / "scale-out"

_HEAD = """\
# scale-out.yaml with the sidecars of the default policy written out, for clusters without an injector.
# Made by `make golden`; your own: vllm-priority inject -f scale-out.yaml [--policy policy.yaml] > written-out.yaml
"""


def written_out() -> str:
    """The text of written-out.yaml."""
    text, _ = inject_stream((EXAMPLE / "scale-out.yaml").read_text(encoding="utf-8"), Policies(), InjectorSettings())
    # The example's own two lines of comment are about choosing between the files.
    return _HEAD + text.split("\n", 2)[2]
