"""Tokens: from a file, and reviewed by a server that responds like the Kubernetes API."""

import asyncio
import base64
import http.server
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from control_plane.address import Address
from control_plane.errors import BadInput
from control_plane.kubernetes_api import ApiAccess, trust
from control_plane.server.app import create_app
from control_plane.server.settings import ServeSettings
from control_plane.server.tokens import MAX_WAITING, ReviewedTokens, TokenFile, Verdict
from tests.pem import Authority

ECDS = "/v3/discovery:extension_configs"
ONE, TWO = "one-token-of-this-test", "two-token-of-this-test"
POLL = {"node": {"id": "ml/pod-1", "metadata": {"role": "render"}}}


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    (tmp_path / "policy.yaml").write_text("default: 1\n")
    return tmp_path / "policy.yaml"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text(f"{ONE}\n")
    return tmp_path / "token"


@pytest.mark.parametrize("headers", [{}, bearer(""), bearer(TWO), bearer(ONE[:-1]), {"authorization": ONE}])
def test_a_poll_without_the_token_of_the_file_gets_no_policy(
    headers: dict[str, str], policy: Path, token_file: Path
) -> None:
    with TestClient(create_app(ServeSettings(policy, token_file=token_file))) as client:
        found = client.post(ECDS, json=POLL, headers=headers)
        assert (found.status_code, found.json()) == (401, {"detail": "The token is missing or not valid."})
        assert found.headers["www-authenticate"] == "Bearer"
        assert client.get("/api/sidecars").json()["total"] == 0
        assert client.post(ECDS, json=POLL, headers=bearer(ONE)).status_code == 200
        assert client.get("/api/sidecars").json()["total"] == 1
        assert 'requests_total{result="unauthorized",type="extension_configs"} 1.0' in client.get("/metrics").text


@pytest.mark.parametrize("path", ["/api/sidecars", "/api/policy", "/metrics", "/metrics%0A", "/openapi.json", "/x"])
def test_the_status_and_the_metrics_need_the_api_token_where_there_is_one(
    path: str, policy: Path, token_file: Path
) -> None:
    with TestClient(create_app(ServeSettings(policy, api_token_file=token_file))) as client:
        assert client.get(path).status_code == 401
        assert client.get(path, headers=bearer(TWO)).status_code == 401
        assert client.get(path, headers=bearer(ONE)).status_code in (200, 404)
        assert client.get("/readyz").status_code == client.get("/healthz").status_code == 200
        assert client.post(ECDS, json=POLL).status_code == 200


def test_a_token_is_replaced_without_a_gap(token_file: Path) -> None:
    tokens = TokenFile(token_file, "token_file")

    def accepted() -> list[bool]:
        tokens.reload()
        return [asyncio.run(tokens.check(token)).status == 200 for token in (ONE, TWO)]

    assert accepted() == [True, False]
    token_file.write_text(f"{TWO}\n{ONE}\n")
    assert accepted() == [True, True]
    token_file.write_text(f"{TWO}\n")
    assert accepted() == [False, True]
    token_file.write_text("")
    assert accepted() == [False, True], "a file that is not valid changes nothing"
    assert "not a token file" in str(tokens.problem)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"short\n", b"0123456789abcdef\nshort\n", b"\xff" * 20])
def test_a_file_without_a_long_token_is_rejected(content: bytes, policy: Path, token_file: Path) -> None:
    token_file.write_bytes(content)
    with pytest.raises(BadInput, match=r"^token_file: .*: not a token file\. Use one token a line, each of 16"):
        create_app(ServeSettings(policy, token_file=token_file))


class Api(http.server.ThreadingHTTPServer):
    """The part of the Kubernetes API that is used here: `tokens` are those that it accepts, with their answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.tokens: dict[str, dict[str, Any]] = {}
        self.reviews: list[dict[str, Any]] = []
        self.status = 201
        self.hold: threading.Event | None = None


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Api

    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert (self.path, review["kind"]) == ("/apis/authentication.k8s.io/v1/tokenreviews", "TokenReview")
        assert self.headers["authorization"] == "Bearer own"
        self.server.reviews.append(review["spec"])
        if self.server.hold:
            self.server.hold.wait(10)
        status = self.server.tokens.get(review["spec"]["token"], {"authenticated": False})
        body = json.dumps({**review, "status": status}).encode()
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    server = Api()
    authority = Authority("kubernetes")
    cert, key = authority.write(tmp_path / "api", "127.0.0.1")
    authority.write_ca(tmp_path / "ca.crt")
    (tmp_path / "own").write_text("own")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def jwt(audience: object = "vllm-priority", seconds: float = 600, mark: str = "") -> str:
    claims = {"aud": audience, "exp": time.time() + seconds, "mark": mark}
    return ".".join(["e30", base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("="), "c2ln"])


def of_pod(pod: str = "pod-1", namespace: str = "ml", audience: str = "vllm-priority") -> dict[str, Any]:
    """The status of a review of a pod's token."""
    return {
        "authenticated": True,
        "audiences": [audience],
        "user": {
            "username": f"system:serviceaccount:{namespace}:default",
            "extra": {"authentication.kubernetes.io/pod-name": [pod]},
        },
    }


def access(api: Api, folder: Path) -> ApiAccess:
    url = f"https://{Address('127.0.0.1', api.server_address[1])}"
    return ApiAccess(url, trust((folder / "ca.crt").read_text()), lambda: (folder / "own").read_text().strip())


def with_tokens(
    api: Api, folder: Path, use: Callable[[ReviewedTokens], Coroutine[Any, Any, Any]], cache_seconds: float = 300
) -> Any:
    async def run() -> Any:
        tokens = ReviewedTokens(access(api, folder), "vllm-priority", cache_seconds)
        try:
            return await use(tokens)
        finally:
            await tokens.close()

    return asyncio.run(run())


def test_a_token_is_accepted_when_the_api_server_accepts_it_for_the_audience(api: Api, tmp_path: Path) -> None:
    good, unknown, elsewhere = jwt(["vllm-priority"], mark="good"), jwt(mark="unknown"), jwt(mark="elsewhere")
    api.tokens = {good: of_pod(), elsewhere: of_pod(audience="another")}

    async def use(tokens: ReviewedTokens) -> list[Verdict]:
        return [await tokens.check(token) for token in (good, unknown, elsewhere, good, unknown)]

    first, *rejected, again, rejected_again = with_tokens(api, tmp_path, use)
    assert first == again == Verdict(200, node_id="ml/pod-1")
    assert {verdict.status for verdict in (*rejected, rejected_again)} == {401}
    assert [review["token"] for review in api.reviews] == [good, unknown, elsewhere], "verdicts are cached"
    assert all(review["audiences"] == ["vllm-priority"] for review in api.reviews)


@pytest.mark.parametrize(
    "token",
    ["", "x", "a.b", "a.b.c", "a.!!.c", f"a.{'e30' * 9000}.c", "e30.W10.c", jwt("other"), jwt(seconds=-1), jwt(5)],
)
def test_the_api_server_is_not_asked_about_what_is_not_such_a_token(token: str, api: Api, tmp_path: Path) -> None:
    assert with_tokens(api, tmp_path, lambda tokens: tokens.check(token)).status == 401
    assert api.reviews == []


def test_known_sidecars_go_on_while_the_api_server_is_away(api: Api, tmp_path: Path) -> None:
    known, new = jwt(mark="known"), jwt(mark="new")
    api.tokens = {known: of_pod(), new: of_pod()}

    async def use(tokens: ReviewedTokens) -> list[object]:
        found: list[object] = [(await tokens.check(known)).status]
        api.status = 500
        found += [(await tokens.check(token)).status for token in (known, new)]
        found.append(tokens.problem)
        api.status = 201
        found += [(await tokens.check(new)).status, tokens.problem]
        return found

    problem = "Tokens of sidecars cannot be reviewed: the API server responded with status 500"
    assert with_tokens(api, tmp_path, use) == [200, 200, 503, problem, 200, None]


def test_a_verdict_ends_with_the_cache_and_with_the_token(api: Api, tmp_path: Path) -> None:
    token = jwt(seconds=0.3)
    api.tokens = {token: of_pod()}

    async def use(tokens: ReviewedTokens) -> int:
        assert (await tokens.check(token)).status == 200
        await asyncio.sleep(0.4)
        return (await tokens.check(token)).status

    assert with_tokens(api, tmp_path, use) == 401


def test_tokens_in_any_number_do_not_pile_up_at_the_api_server(api: Api, tmp_path: Path) -> None:
    api.hold = threading.Event()

    async def use(tokens: ReviewedTokens) -> list[int]:
        checks = [asyncio.create_task(tokens.check(jwt(mark=str(number)))) for number in range(MAX_WAITING + 20)]
        await asyncio.sleep(0.2)
        early = [task.result().status for task in checks if task.done()]
        api.hold.set()  # type: ignore[union-attr]
        await asyncio.gather(*checks)
        return early

    assert with_tokens(api, tmp_path, use) == [503] * 20


def test_a_sidecar_cannot_poll_as_another_pod(
    api: Api, tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = jwt()
    api.tokens = {token: of_pod("pod-2")}
    monkeypatch.setattr("control_plane.server.app.in_cluster", lambda: access(api, tmp_path))
    with TestClient(create_app(ServeSettings(policy, token_audience="vllm-priority"))) as client:
        found = client.post(ECDS, json=POLL, headers=bearer(token))
        detail = "node.id: the token belongs to ml/pod-2, not to this node."
        assert (found.status_code, found.json()) == (403, {"detail": detail})
        own = {"node": {**POLL["node"], "id": "ml/pod-2"}}
        assert client.post(ECDS, json=own, headers=bearer(token)).status_code == 200
        assert client.post(ECDS, json=own).status_code == 401


def test_a_probe_cannot_poll_as_another_pod_either(
    api: Api, tmp_path: Path, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = jwt()
    api.tokens = {token: of_pod("helm-test")}
    monkeypatch.setattr("control_plane.server.app.in_cluster", lambda: access(api, tmp_path))
    with TestClient(create_app(ServeSettings(policy, token_audience="vllm-priority"))) as client:

        def poll(node_id: str) -> int:
            node = {"id": node_id, "metadata": {"role": "render", "probe": True}}
            return int(client.post(ECDS, json={"node": node}, headers=bearer(token)).status_code)

        assert [poll("ml/pod-1"), poll("ml/helm-test")] == [403, 200]


@pytest.mark.parametrize(
    "user",
    [
        {"username": "system:serviceaccount:ml:default"},
        {"username": "system:serviceaccount:ml:default", "extra": {"authentication.kubernetes.io/pod-name": []}},
        {"username": "admin", "extra": {"authentication.kubernetes.io/pod-name": ["pod-1"]}},
    ],
)
def test_a_token_is_accepted_only_if_it_is_bound_to_a_pod(user: dict[str, Any], api: Api, tmp_path: Path) -> None:
    token = jwt()
    api.tokens = {token: {**of_pod(), "user": user}}
    verdict = with_tokens(api, tmp_path, lambda tokens: tokens.check(token))
    assert verdict == Verdict(401, "The token is not bound to a pod. Use a projected service account token.")


@pytest.mark.skipif("KUBERNETES_SERVICE_HOST" in os.environ, reason="this is a pod")
def test_tokens_cannot_be_reviewed_outside_a_cluster(policy: Path) -> None:
    with pytest.raises(BadInput, match="can be used only inside a cluster"):
        create_app(ServeSettings(policy, token_audience="vllm-priority"))


@pytest.mark.parametrize(
    "end", ["1" + "0" * 400, "1e999", "NaN", "Infinity", '"nan"', '"inf"', "-Infinity"], ids=lambda end: end[:9]
)
def test_a_token_that_never_ends_is_not_reviewed(end: str, api: Api, tmp_path: Path) -> None:
    claims = base64.urlsafe_b64encode(f'{{"aud":"vllm-priority","exp":{end}}}'.encode()).decode()

    async def use(tokens: ReviewedTokens) -> int:
        return (await tokens.check(f"a.{claims}.b")).status

    assert with_tokens(api, tmp_path, use) == 401
    assert api.reviews == []
