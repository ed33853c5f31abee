"""One story on one cluster: each test goes on where the one before has left it, and all is taken away at the end."""

import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster, CommandError, ControlPlane, Release, free_port

_UNCHECKED = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """The cluster that KUBECONFIG names. IMAGE: the control plane's image, where the cluster can pull or has it."""
    found = Cluster.connect()
    request.config.stash[_UNCHECKED] = found.unchecked
    # A story: what comes after a test that failed would fail because of it.
    request.config.option.maxfail = 1
    if found.nodes and found.image is None:
        pytest.exit(
            "the cluster has nodes, so the control plane runs there. Build the image, push or load it, and "
            "make test-cluster IMAGE=REPOSITORY:TAG",
            2,
        )
    if not found.nodes:
        found.unchecked += [
            "the cluster has no node that is ready: no pod ran, neither the control plane's nor a sidecar",
            "the control plane ran on this machine, with the arguments of the chart's Deployment and webhook.url",
        ]
    return found


@pytest.fixture(scope="session")
def apps(cluster: Cluster) -> Iterator[str]:
    """A namespace for pods that ask for sidecars."""
    name = f"priority-story-{uuid.uuid4().hex[:6]}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def ports() -> tuple[int, int]:
    """For a control plane on this machine: plain and TLS."""
    return free_port(), free_port()


@pytest.fixture(scope="session")
def release(cluster: Cluster, ports: tuple[int, int]) -> Iterator[Release]:
    """The chart, not yet installed."""
    name = f"vllm-priority-{uuid.uuid4().hex[:6]}"
    values: dict[str, str] = {}
    if cluster.runs_pods:
        assert cluster.image is not None
        repository, _, tag = cluster.image.rpartition(":")
        values |= {"image.repository": json.dumps(repository), "image.tag": json.dumps(tag)}
    else:
        # The control plane outside the cluster has no service account to have tokens reviewed with.
        values["sidecar.tokens"] = "false"
        values["webhook.url"] = json.dumps(f"https://127.0.0.1:{ports[1]}/inject")
    found = Release(cluster, name, f"{name}-system", values)
    yield found
    # The webhook first, whatever became of the rest: nobody's pods must wait for a control plane that is gone.
    with contextlib.suppress(CommandError):
        kinds = "mutatingwebhookconfiguration,validatingwebhookconfiguration"
        cluster.kubectl("delete", kinds, name, "--ignore-not-found")
        found.uninstall()
    cluster.kubectl("delete", "namespace", found.namespace, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def control_plane(
    release: Release, ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """The release's control plane, not yet started."""
    folder: Path = tmp_path_factory.mktemp("control-plane")
    found = ControlPlane(release, folder, *ports)
    yield found
    if found.process is not None:
        found.stop()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says what could not be checked."""
    if unchecked := config.stash.get(_UNCHECKED, []):
        terminalreporter.section("what this cluster could not show")
        for line in unchecked:
            terminalreporter.write_line(f"- {line}")
