"""Services, read over real TLS from a server that responds like the Kubernetes API."""

import asyncio
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control_plane.errors import BadInput
from control_plane.kubernetes_api import in_cluster
from control_plane.server.services import Services
from tests.kubernetes_api import Api, running_api, write_certificate

ITEMS = [{"metadata": {"name": "llm"}, "spec": {"selector": {"app": "x"}, "ports": [{"port": 8000}]}}]


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """The folder of a service account."""
    write_certificate(tmp_path)
    (tmp_path / "token").write_text("secret-1\n")
    return tmp_path


@pytest.fixture
def api(account: Path) -> Iterator[Api]:
    """A running API that responds to every path with a list of Services."""
    with running_api(account) as server:
        server.body = json.dumps({"kind": "ServiceList", "items": ITEMS})
        yield server


def reader(api: Api, account: Path) -> Services:
    port = str(api.port)
    return Services(in_cluster({"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": port}, account))


def test_services_are_read_with_the_token_of_the_service_account(api: Api, account: Path) -> None:
    async def ask() -> Any:
        services = reader(api, account)
        return await services.of("ml"), services.problem

    assert asyncio.run(ask()) == (ITEMS, None)
    assert api.requests == [("/api/v1/namespaces/ml/services", "Bearer secret-1")]


def test_concurrent_calls_share_one_request(api: Api, account: Path) -> None:
    async def ask() -> Any:
        services = reader(api, account)
        return await asyncio.gather(*(services.of("ml") for _ in range(16)))

    assert asyncio.run(ask()) == [ITEMS] * 16
    assert len(api.requests) == 1


def test_a_renewed_token_is_used(api: Api, account: Path) -> None:
    async def ask() -> None:
        services = reader(api, account)
        await services.of("ml")
        (account / "token").write_text("secret-2")
        await services.of("other")

    asyncio.run(ask())
    assert [token for _, token in api.requests] == ["Bearer secret-1", "Bearer secret-2"]


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (403, "{}", "the API server responded with status 403"),
        (200, "no json", "JSONDecodeError"),
        (200, "[]", "TypeError"),
        (200, '{"items": 3}', "TypeError"),
    ],
)
def test_a_response_that_cannot_be_used_is_reported(
    api: Api, account: Path, status: int, body: str, problem: str
) -> None:
    api.status, api.body = status, body

    async def ask() -> Any:
        services = reader(api, account)
        return await services.of("ml"), services.problem

    found, reported = asyncio.run(ask())
    assert found is None
    assert str(reported).startswith(f"The Services of the namespace ml cannot be read: {problem}")


def test_a_ca_without_key_usage_is_accepted_and_logged(
    api: Api, account: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    create = ssl.create_default_context

    def create_strict(*arguments: Any, **options: Any) -> ssl.SSLContext:
        """Create a context as Python 3.13 does."""
        context = create(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create_strict)

    async def ask() -> Any:
        services = reader(api, account)
        return await services.of("ml"), services.problem

    assert asyncio.run(ask()) == (ITEMS, None)
    assert "has no keyUsage extension" in caplog.text


@pytest.mark.parametrize(("status", "connected"), [(200, True), (401, False)])
def test_a_connection_is_reported(api: Api, account: Path, status: int, connected: bool) -> None:
    api.status = status

    async def connect() -> tuple[bool, bool, str | None]:
        services = reader(api, account)
        return await services.connect(), services.connected, services.problem

    problem = None if connected else "The Kubernetes API cannot be used: the API server responded with status 401"
    assert asyncio.run(connect()) == (connected, connected, problem)
    assert api.requests == [("/version", "Bearer secret-1")]


@pytest.mark.parametrize("namespace", [None, "", "../../secrets", "a b", "A", "x" * 64])
def test_a_name_that_is_not_a_valid_namespace_is_never_requested(
    api: Api, account: Path, namespace: str | None
) -> None:
    async def ask() -> Any:
        return await reader(api, account).of(namespace)

    assert asyncio.run(ask()) is None
    assert api.requests == []


def test_services_cannot_be_read_outside_a_cluster(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="only inside a cluster"):
        in_cluster({}, tmp_path)
    with pytest.raises(BadInput, match="cannot be read"):
        in_cluster({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
