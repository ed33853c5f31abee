"""Clients that are trusted by a token, on real Envoy."""

import base64
import contextlib
import hashlib
import hmac
import json
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.address import Address
from control_plane.proxy import Sidecar
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import Placement
from tests.pem import Authority
from tests.tokens import ISSUER, Issuer

from .conftest import RENDER, SidecarFactory, run_sidecars
from .meshes import IstioSidecar
from .sidecars import load
from .test_control_plane import POLL_SECONDS, ControlPlane, free_port
from .test_tls import Run, trusting
from .upstream import RecordingUpstream
from .waiting import until
from .wire import TRANSPORTS, Answer, Header, call, priority

TRUSTED, UNTRUSTED = "5; source=header; outcome=inserted", "none; outcome=untrusted"
SIGNER, OTHER = Issuer(), Issuer()


@pytest.fixture(scope="module")
def istio(
    envoy: Path, _upstream: RecordingUpstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarFactory]:
    yield from run_sidecars(IstioSidecar, envoy, _upstream, tmp_path_factory)


def policy(jwks: str | None = None, **more: Any) -> str:
    claims = {"issuer": ISSUER, "audiences": ["vllm"], "require": {"scope": "priority"}, **more}
    claims["jwks"] = json.loads(jwks or SIGNER.keys)
    return json.dumps({"trust": {"claims": claims}})


def bearer(token: str, scheme: str = "Bearer") -> Header:
    return (b"Authorization", f"{scheme} {token}".encode())


def b64(content: Any) -> str:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode()


def handmade(header: dict[str, Any], secret: bytes | None = None, **claims: Any) -> str:
    """A token that no library would make: signed by nobody, or by a secret."""
    content = {"iss": ISSUER, "aud": "vllm", "exp": int(time.time()) + 3600, "scope": "priority", **claims}
    signed = f"{b64(header)}.{b64(content)}"
    signature = hmac.new(secret, signed.encode(), hashlib.sha256).digest() if secret else b""
    return f"{signed}.{b64(signature)}"


def changed(token: str, **claims: Any) -> str:
    """The token with other claims, and the signature that it had."""
    header, content, signature = token.split(".")
    old = json.loads(base64.urlsafe_b64decode(content + "=="))
    return f"{header}.{b64({**old, **claims})}.{signature}"


GOOD = SIGNER.token()
NOW = int(time.time())
"""When the tests were collected, which may be an hour before one of them runs."""

# headers -> whether the client is trusted
CASES: dict[str, tuple[list[Header], bool]] = {
    "a valid token": ([bearer(GOOD)], True),
    "one scope of several": ([bearer(SIGNER.token(scope="read priority write"))], True),
    "the scope in a list": ([bearer(SIGNER.token(scope=["read", "priority"]))], True),
    "one audience of several": ([bearer(SIGNER.token(aud=["x", "vllm"]))], True),
    "the scheme in lower case": ([bearer(GOOD, "bearer")], True),
    "the scheme in upper case": ([bearer(GOOD, "BEARER")], True),
    "no token": ([], False),
    "another key": ([bearer(OTHER.token())], False),
    "no signature": ([bearer(GOOD.rpartition(".")[0] + ".")], False),
    "two parts": ([bearer(GOOD.rpartition(".")[0])], False),
    "changed claims": ([bearer(changed(SIGNER.token(scope="read"), scope="priority"))], False),
    "alg none": ([bearer(handmade({"alg": "none", "typ": "JWT"}))], False),
    "alg None": ([bearer(handmade({"alg": "None", "kid": "one"}))], False),
    "the public key as a secret": ([bearer(handmade({"alg": "HS256", "kid": "one"}, SIGNER.keys.encode()))], False),
    "a key of its own": ([bearer(handmade({"alg": "RS256", "jwk": OTHER.jwks["keys"][0]}))], False),
    "expired": ([bearer(SIGNER.token(exp=NOW - 86400))], False),
    "not yet valid": ([bearer(SIGNER.token(nbf=NOW + 86400))], False),
    "no end": ([bearer(SIGNER.token(without=("exp",)))], False),
    "another issuer": ([bearer(SIGNER.token(iss="https://other.test"))], False),
    "no issuer": ([bearer(SIGNER.token(without=("iss",)))], False),
    "another audience": ([bearer(SIGNER.token(aud="other"))], False),
    "no audience": ([bearer(SIGNER.token(without=("aud",)))], False),
    "no scope": ([bearer(SIGNER.token(without=("scope",)))], False),
    "another scope": ([bearer(SIGNER.token(scope="read"))], False),
    "a longer scope": ([bearer(SIGNER.token(scope="priority:read nopriority"))], False),
    "a scope that is no text": ([bearer(SIGNER.token(scope={"priority": True}))], False),
    "a scope of numbers": ([bearer(SIGNER.token(scope=[1, None, {"x": "priority"}]))], False),
    "the scope past the bound of a list": ([bearer(SIGNER.token(scope=["x"] * 300 + ["priority"]))], False),
    "the scope past the bound of a text": ([bearer(SIGNER.token(scope="x " * 5000 + "priority"))], False),
    "nested deeply": ([bearer(SIGNER.token(x=json.loads("[" * 60 + "]" * 60)))], True),
    "two lines, both valid": ([bearer(GOOD), bearer(GOOD)], False),
    "two lines, one valid": ([bearer(GOOD), bearer("sk-key")], False),
    "two lines, the other valid": ([bearer("sk-key"), bearer(GOOD)], False),
    "two tokens in one line": ([(b"Authorization", f"Bearer {OTHER.token()} bearer {GOOD}".encode())], False),
    "after another scheme": ([(b"Authorization", f"Basic x Bearer {GOOD}".encode())], False),
    "another scheme": ([bearer(GOOD, "Basic")], False),
    "an API key": ([bearer("sk-0123456789")], False),
    "in another header": ([(b"X-Token", GOOD.encode())], False),
    "a payload in a header": (
        [(b"x-jwt-payload", b64({"scope": "priority"}).encode()), (b"envoy.filters.http.jwt_authn", b"{}")], False,
    ),
    "a long header that is no token": ([bearer("x" * 60_000)], False),
}  # fmt: skip


def sent(upstream: RecordingUpstream, answer: Answer) -> tuple[str | None, bytes, list[str]]:
    request = upstream.only
    return answer.applied, request.body, request.all("authorization")


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("name", CASES)
def test_only_a_valid_token_with_the_claims_is_trusted_and_vllm_gets_every_header(
    sidecar: SidecarFactory, upstream: RecordingUpstream, name: str, transport: str
) -> None:
    headers, trusted = CASES[name]
    call(sidecar().address, RENDER, b"{}", priority("5"), *headers, transport=transport)
    without_claims = upstream.only.headers
    upstream.clear()
    answer = call(sidecar(policy=policy()).address, RENDER, b"{}", priority("5"), *headers, transport=transport)
    assert (answer.applied, upstream.only.body) == ((TRUSTED, b'{"priority":5}') if trusted else (UNTRUSTED, b"{}"))

    def others(lines: Sequence[Header]) -> list[Header]:
        return [line for line in lines if line[0].lower() != b"content-length"]

    assert others(upstream.only.headers) == others(without_claims)


@pytest.mark.parametrize("kind", ["ES256", "EdDSA"])
def test_other_keys_verify_too(sidecar: SidecarFactory, upstream: RecordingUpstream, kind: str) -> None:
    issuer = Issuer(kind)
    front = sidecar(policy=policy(issuer.keys))
    assert call(front.address, RENDER, b"{}", priority("5"), bearer(issuer.token())).applied == TRUSTED
    assert call(front.address, RENDER, b"{}", priority("5"), bearer(GOOD)).applied == UNTRUSTED


def test_a_token_can_come_in_a_header_of_its_own(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    front = sidecar(policy=policy(header="X-Gateway-Token"))
    key, token = bearer("sk-0123456789"), (b"X-Gateway-Token", GOOD.encode())
    answer = call(front.address, RENDER, b"{}", priority("5"), key, token)
    assert sent(upstream, answer) == (TRUSTED, b'{"priority":5}', ["Bearer sk-0123456789"])
    assert upstream.only.all("x-gateway-token") == [GOOD]
    for headers in ([bearer(GOOD)], [token, token], [(b"X-Gateway-Token", b"Bearer " + GOOD.encode())]):
        assert call(front.address, RENDER, b"{}", priority("5"), *headers).applied == UNTRUSTED


def test_without_a_token_the_request_can_be_rejected(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    rules = json.loads(policy())
    rules["trust"]["otherwise"] = "reject"
    front = sidecar(policy=json.dumps(rules))
    assert call(front.address, RENDER, b"{}", priority("5"), bearer(OTHER.token())).status == 403
    assert call(front.address, RENDER, b'{"priority":5}').status == 403
    assert call(front.address, RENDER, b"{}").status == 200
    assert call(front.address, RENDER, b"{}", priority("5"), bearer(GOOD)).status == 200


@pytest.mark.parametrize("place", ["sidecar", "istio"])
def test_a_token_decides_on_the_ordinary_routes_too(
    sidecar: SidecarFactory, istio: SidecarFactory, upstream: RecordingUpstream, place: str
) -> None:
    rules = json.dumps({**json.loads(policy()), "ordinary": "enforce", "classes": {"batch": 10}})
    front = {"sidecar": sidecar, "istio": istio}[place]("engine", rules)
    for path in ("/v1/chat/completions", "/v1/chat/%63ompletions?x=1"):
        for token, left in ((GOOD, ["10"]), (OTHER.token(), []), ("sk-key", [])):
            upstream.clear()
            call(front.address, path, b"{}", priority("batch"), bearer(token))
            assert upstream.only.all("x-vllm-priority") == left
            assert upstream.only.all("authorization") == [f"Bearer {token}"]


def test_an_expired_token_is_not_remembered(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    """Envoy allows for clocks that differ by a minute."""
    front = sidecar(policy=policy())
    now = int(time.time())
    assert call(front.address, RENDER, b"{}", priority("5"), bearer(SIGNER.token(exp=now - 30))).applied == TRUSTED
    assert call(front.address, RENDER, b"{}", priority("5"), bearer(SIGNER.token(exp=now - 90))).applied == UNTRUSTED


def test_a_peer_is_trusted_whatever_its_token_is(sidecar: SidecarFactory, upstream: RecordingUpstream) -> None:
    rules = json.loads(policy())
    rules["trust"]["peers"] = ["127.0.0.0/8"]
    front = sidecar(policy=json.dumps(rules))
    assert call(front.address, RENDER, b"{}", priority("5"), bearer(OTHER.token())).applied == TRUSTED


@pytest.mark.parametrize("name", [name for name in CASES if "long" not in name])
def test_an_istio_sidecar_decides_alike(istio: SidecarFactory, upstream: RecordingUpstream, name: str) -> None:
    headers, trusted = CASES[name]
    answer = call(istio(policy=policy()).address, RENDER, b"{}", priority("5"), *headers)
    assert (answer.applied, upstream.only.body) == ((TRUSTED, b'{"priority":5}') if trusted else (UNTRUSTED, b"{}"))


class Keys:
    """An HTTPS server with the keys of SIGNER, whose certificate is in `folder`."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.asked = threading.Event()
        keys, asked = SIGNER.keys.encode(), self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.set()
                self.send_response(200)
                self.send_header("content-length", str(len(keys)))
                self.end_headers()
                self.wfile.write(keys)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.uri = f"https://127.0.0.1:{self.server.server_port}/keys"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def fetching(uri: str, ca: str) -> str:
    rules = json.loads(policy())
    rules["trust"]["claims"] |= {"jwks": uri, "jwks_ca": ca}
    return json.dumps(rules)


def test_keys_are_fetched_over_tls(sidecar: SidecarFactory, upstream: RecordingUpstream, tmp_path: Path) -> None:
    authority = Authority()
    authority.write(tmp_path, "127.0.0.1")
    keys = Keys(tmp_path)
    try:
        front = sidecar(policy=fetching(keys.uri, authority.pem))
        assert call(front.address, RENDER, b"{}", priority("5"), bearer(GOOD)).applied == TRUSTED
        assert call(front.address, RENDER, b"{}", priority("5"), bearer(OTHER.token())).applied == UNTRUSTED
    finally:
        keys.stop()
    assert call(front.address, RENDER, b"{}", priority("5"), bearer(GOOD)).applied == TRUSTED, "Envoy has the keys"


def test_keys_that_come_later_are_used(sidecar: SidecarFactory, upstream: RecordingUpstream, tmp_path: Path) -> None:
    authority, port = Authority(), free_port()
    authority.write(tmp_path, "127.0.0.1")
    front = sidecar(policy=fetching(f"https://127.0.0.1:{port}/keys", authority.pem))
    assert call(front.address, RENDER, b"{}", priority("5"), bearer(GOOD)).applied == UNTRUSTED
    keys = Keys(tmp_path, port)
    try:
        until(lambda: call(front.address, RENDER, b"{}", priority("5"), bearer(GOOD)).applied == TRUSTED, "the keys")
    finally:
        keys.stop()


@pytest.mark.parametrize("fault", ["down", "unknown CA", "wrong name"])
def test_without_keys_no_token_is_trusted_and_requests_pass(
    sidecar: SidecarFactory, upstream: RecordingUpstream, tmp_path: Path, fault: str
) -> None:
    authority = Authority()
    authority.write(tmp_path, "other.test" if fault == "wrong name" else "127.0.0.1")
    keys = Keys(tmp_path)
    try:
        if fault == "down":
            keys.stop()
        front = sidecar(policy=fetching(keys.uri, Authority("other").pem if fault == "unknown CA" else authority.pem))
        for token in (GOOD, "sk-key"):
            upstream.clear()
            assert call(front.address, RENDER, b"{}", priority("5"), bearer(token)).applied == UNTRUSTED
            assert upstream.only.body == b"{}"
        assert not keys.asked.is_set()
    finally:
        if fault != "down":
            keys.stop()


TENANTS = {"batch": {"range": {"min": 50}, "default": 80}, "interactive": {"default": 1}}


def by_claim() -> str:
    rules = json.loads(policy(require={}))
    return json.dumps({**rules, "default": 9, "tenants": {"claim": "team", "rules": TENANTS}})


# the claim, and the header of the request -> the report
TEAMS: list[tuple[Any, list[Header], str]] = [
    ("batch", [], "80; source=default; outcome=inserted"),
    ("batch", [priority("5")], "none; outcome=out_of_range"),
    ("interactive", [], "1; source=default; outcome=inserted"),
    ("interactive", [priority("5")], "5; source=header; outcome=inserted"),
    ("other", [], "9; source=default; outcome=inserted"),
    (None, [], "9; source=default; outcome=inserted"),
    (["batch"], [], "9; source=default; outcome=inserted"),
    ({"batch": "batch"}, [], "9; source=default; outcome=inserted"),
    (5, [], "9; source=default; outcome=inserted"),
]


@pytest.mark.parametrize(("team", "headers", "report"), TEAMS)
@pytest.mark.parametrize("place", ["sidecar", "istio"])
def test_a_claim_names_the_tenant(
    sidecar: SidecarFactory,
    istio: SidecarFactory,
    upstream: RecordingUpstream,
    place: str,
    team: Any,
    headers: list[Header],
    report: str,
) -> None:
    front = {"sidecar": sidecar, "istio": istio}[place](policy=by_claim())
    answer = call(front.address, RENDER, b"{}", bearer(SIGNER.token(team=team)), *headers)
    assert answer.applied == report
    forged = changed(SIGNER.token(team="x"), team=team)
    if not headers and report != "9; source=default; outcome=inserted":
        assert call(front.address, RENDER, b"{}", bearer(forged)).applied == (
            "9; source=default; outcome=inserted; untrusted"
        )


def test_a_certificate_names_the_tenant(envoy: Path, tmp_path: Path, upstream: RecordingUpstream) -> None:
    authority, clients = Authority(), Authority("clients")
    cert, key = authority.write(tmp_path, "127.0.0.1")
    ca = clients.write_ca(tmp_path / "clients.crt")
    rules = tmp_path / "policy.yaml"
    rules.write_text(
        "{default: 9, tenants: {identity: true, rules: {'spiffe://test/ns/batch/sa/one': {default: 70}, "
        "'spiffe://test/ns/batch/sa/*': {default: 80}, edge.test: {default: 1}}}}"
    )
    options = (
        "--envoy", str(envoy), "--tls-cert", str(cert), "--tls-key", str(key), "--client-ca", str(ca),
        "--policy", str(rules),
    )  # fmt: skip
    with Run(str(upstream.address), *options, scheme="https") as run:
        for names, expected in (
            (["spiffe://test/ns/batch/sa/two"], 80),
            (["spiffe://test/ns/batch/sa/one"], 70),
            (["spiffe://test/ns/batch/sa/two", "edge.test"], 80),
            (["edge.test"], 1),
            (["spiffe://test/ns/batch/sa/"], 9),
            (["spiffe://test/ns/other/sa/two"], 9),
        ):
            pair = clients.write(tmp_path / f"client-{expected}-{len(names)}-{len(names[0])}", *names)
            with httpx.Client(verify=trusting(authority, pair), trust_env=False, timeout=30) as client:
                reply = client.post(f"https://{run.listen}{RENDER}", json={})
            assert reply.headers["x-vllm-priority-applied"].startswith(f"{expected}; "), names
        assert not run.said("--client-ca")
    with Run(str(upstream.address), "--envoy", str(envoy), "--policy", str(rules)) as run:
        assert run.said(
            "tenants.identity: without --client-ca, no client has a certificate, so this matches no client."
        )


def test_a_sidecar_whose_own_policy_verifies_other_tokens_trusts_none(
    envoy: Path, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    """It polls a policy with claims. Its Envoy cannot be sent what verifies them."""
    path = tmp_path / "policy.yaml"
    path.write_text(policy())
    others = {
        "none": "default: 0",
        "another issuer": policy(issuer="https://other.test"),
        "other keys": policy(OTHER.keys),
        "no audience": policy(audiences=[]),
        "other claims": policy(require={"scope": "read"}),
    }
    with ControlPlane(path) as plane, contextlib.ExitStack() as stack:
        fronts = {}
        for node, text in others.items():
            listen, admin = Address("127.0.0.1", free_port()), Address("127.0.0.1", free_port())
            placement = Placement(
                "render", listen, upstream.address, admin, control_plane=plane.address, node_id=node,
                access_log="/dev/null", refresh_seconds=POLL_SECONDS,
            )  # fmt: skip
            stack.enter_context(Sidecar(bootstrap(load(text), placement), envoy))
            fronts[node] = listen

        def listed() -> dict[str, dict[str, Any]]:
            return {row["node_id"]: row for row in plane.get("/api/sidecars").json()["sidecars"]}

        until(lambda: [row["status"] for row in listed().values()] == ["SYNCED"] * len(others), "the policy")
        tokens = {
            "another issuer": Issuer(name="https://other.test").token(), "other keys": OTHER.token(),
            "no audience": SIGNER.token(aud="other"),
        }  # fmt: skip
        for node, listen in fronts.items():
            restart = [] if node == "other claims" else ["trust.claims"]
            assert listed()[node]["restart_for"] == restart, node
            for token in (GOOD, tokens.get(node, GOOD)):
                answer = call(listen, RENDER, b"{}", priority("5"), bearer(token))
                assert answer.applied == (TRUSTED if not restart else UNTRUSTED), node
