"""deploy/compose: the compose file as docker compose reads it, and the names that the other files use."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.injector.settings import ENVOY_IMAGE
from control_plane.vllm import ROLES
from tools.fetch_tools import fetch

FOLDER = Path(__file__).resolve().parent.parent.parent / "deploy" / "compose"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    (compose,) = fetch(["docker-compose"])
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    command: list[str | Path] = [compose, "-f", FOLDER / "compose.yaml", "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


@pytest.mark.parametrize("role", ROLES)
def test_a_sidecar_and_the_control_plane_read_what_make_envoy_config_writes(
    services: dict[str, Any], role: str
) -> None:
    sidecar, control_plane = services[f"{role}-sidecar"], services["control-plane"]
    assert sidecar["image"] == ENVOY_IMAGE
    assert sidecar["command"][:2] == ["-c", f"/etc/envoy/{role}.yaml"]
    assert control_plane["command"][:3] == ["serve", "--policy", "/etc/envoy/policy.yaml"]
    for service in (sidecar, control_plane):
        (mount,) = service["volumes"]
        assert mount["target"] == "/etc/envoy"
        assert Path(mount["source"]) == FOLDER.parent.parent / "build" / "envoy"


def test_each_service_has_its_own_network_and_restarts_and_no_vllm_server_is_published(
    services: dict[str, Any],
) -> None:
    for name, service in services.items():
        assert "network_mode" not in service, name
        assert service["restart"] == "unless-stopped", name
        assert service["logging"]["options"] == {"max-file": "5", "max-size": "10m"}, name
    assert all("ports" not in services[role] for role in ROLES)


def test_no_vllm_server_is_in_the_network_of_the_control_plane(services: dict[str, Any]) -> None:
    networks = {name: set(service["networks"]) for name, service in services.items()}
    for role in ROLES:
        assert networks[f"{role}-sidecar"] == {"polls", role}
        assert networks[role] == {role}
    assert networks["control-plane"] == {"polls"}


def test_the_engine_orders_by_priority_and_serves_the_scale_out_routes(services: dict[str, Any]) -> None:
    assert {"--enable-scale-out", "--scheduling-policy=priority"} <= set(services["engine"]["command"])


def test_settings_come_from_the_environment() -> None:
    (compose,) = fetch(["docker-compose"])
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "MODEL": "m/x",
        "BIND": "0.0.0.0",
        "VLLM_VERSION": "v1",
    }
    command: list[str | Path] = [compose, "-f", FOLDER / "compose.yaml", "config"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=True)
    found = yaml.safe_load(done.stdout)["services"]
    assert found["engine"]["command"][0] == found["render"]["command"][0] == "m/x"
    assert found["render-sidecar"]["ports"][0]["host_ip"] == "0.0.0.0"
    assert found["engine"]["image"].endswith(":v1")


def test_the_unit_and_the_script_name_options_that_the_command_has() -> None:
    from control_plane.cli import cli

    known = {name for parameter in cli.commands["run"].params for name in parameter.opts}
    for file in ("vllm-priority@.service", "run-pair.sh"):
        lines = [
            line
            for line in (FOLDER / file).read_text().splitlines()
            if re.search("(vllm-priority run|start_sidecar) --", line)
        ]
        assert lines
        for line in lines:
            used = {word for word in line.split() if word.startswith("--")}
            assert used <= known, file


def test_a_plain_shell_reads_the_script() -> None:
    subprocess.run(["sh", "-n", FOLDER / "run-pair.sh"], check=True)
