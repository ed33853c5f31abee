"""TLS with real handshakes: polls of the control plane, vLLM servers, and clients."""

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import uvicorn

from control_plane.address import Address
from control_plane.proxy import ControlPlaneWatch, Sidecar
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import Placement
from control_plane.tls import ServerTrust
from tests.pem import Authority, write_pair

from .conftest import RENDER
from .conftest import _echo as echo_app
from .sidecars import load
from .test_control_plane import POLL_SECONDS, ControlPlane, applied, free_port, set_default
from .upstream import RecordingUpstream
from .waiting import until

NAME = "control-plane.test"


class TlsControlPlane(ControlPlane):
    """`serve` with TLS; `tls` is the address of that listener."""

    def __init__(self, policy: Path, folder: Path, **settings: Any) -> None:
        self.tls = Address("127.0.0.1", free_port())
        pair: dict[str, Any] = {"tls_cert": folder / "tls.crt", "tls_key": folder / "tls.key"}
        super().__init__(policy, tls_listen=self.tls, **pair, **settings)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """The file that the control plane serves."""
    path = tmp_path / "policy.yaml"
    set_default(path, 1)
    return path


class Polling:
    """A sidecar with `default: 0` that polls."""

    def __init__(self, sidecar: Sidecar, listen: Address, control_plane: Address) -> None:
        self.sidecar, self.listen = sidecar, listen
        self.watch = ControlPlaneWatch(control_plane)
        self.said: list[str] = []

    def look(self) -> str:
        """Look as `run` does, and return what was said so far."""
        if line := self.watch.look(self.watch.read(self.sidecar)):
            self.said.append(line)
        return "\n".join(self.said)

    def counter(self, name: str) -> int:
        return sum(self.sidecar.stats(name).values())


@pytest.fixture
def start_polling(envoy: Path, upstream: RecordingUpstream) -> Iterator[Callable[..., Polling]]:
    with contextlib.ExitStack() as stack:

        def start(control_plane: Address, trust: ServerTrust | None, token_file: Path | None = None) -> Polling:
            listen, admin = Address("127.0.0.1", free_port()), Address("127.0.0.1", free_port())
            placement = Placement(
                "render", listen, upstream.address, admin, control_plane=control_plane, control_plane_trust=trust,
                token_file=str(token_file) if token_file else None, node_id="pod-1", access_log="/dev/null",
                refresh_seconds=POLL_SECONDS,
            )  # fmt: skip
            sidecar = stack.enter_context(Sidecar(bootstrap(load("default: 0"), placement), envoy))
            return Polling(sidecar, listen, control_plane)

        yield start


@pytest.mark.parametrize("name", [NAME, "127.0.0.1"])
def test_a_sidecar_polls_over_tls(
    name: str, policy: Path, tmp_path: Path, start_polling: Callable[..., Polling]
) -> None:
    authority = Authority()
    authority.write(tmp_path, name)
    with TlsControlPlane(policy, tmp_path) as plane:
        polling = start_polling(plane.tls, ServerTrust(authority.pem, name))
        until(lambda: applied(polling.listen) == "1", "the control plane's policy")
        set_default(policy, 2)
        until(lambda: applied(polling.listen) == "2", "the changed policy")
        assert polling.look() == ""
        for path in ("/api/sidecars", "/api/policy", "/metrics"):
            found = httpx.get(f"https://{plane.tls}{path}", verify=False, trust_env=False)
            assert (found.status_code, "a file of API tokens" in found.text) == (403, True)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("unknown CA", "has an expired certificate, or one that the configured CA did not sign"),
        ("self-signed", "has an expired certificate, or one that the configured CA did not sign"),
        ("expired", "has an expired certificate, or one that the configured CA did not sign"),
        ("wrong name", "has a certificate for another name"),
    ],
)
def test_a_sidecar_takes_nothing_from_a_control_plane_that_it_cannot_verify(
    fault: str, reason: str, policy: Path, tmp_path: Path, start_polling: Callable[..., Polling]
) -> None:
    authority = Authority()
    if fault == "self-signed":
        write_pair(tmp_path, NAME)
    else:
        signer = Authority() if fault == "unknown CA" else authority
        other = "other.test" if fault == "wrong name" else NAME
        signer.write(tmp_path, other, days=-1 if fault == "expired" else 20)
    with TlsControlPlane(policy, tmp_path) as plane:
        polling = start_polling(plane.tls, ServerTrust(authority.pem, NAME))
        expected = f"The control plane {plane.tls} {reason}. The sidecar keeps its last policy."
        until(lambda: polling.look() == expected, "the reason")
        assert applied(polling.listen) == "0"
        assert plane.get("/api/sidecars").json()["total"] == 0
        authority.write(tmp_path, NAME)
        until(lambda: applied(polling.listen) == "1", "the policy, once the certificate is right")
        until(lambda: "responds again" in polling.look(), "that the control plane responds again")


def test_no_poll_fails_while_the_ca_and_the_certificate_change(
    policy: Path, tmp_path: Path, start_polling: Callable[..., Polling]
) -> None:
    old, new = Authority("old"), Authority("new")
    old.write(tmp_path, NAME)
    with TlsControlPlane(policy, tmp_path) as plane:
        polling = start_polling(plane.tls, ServerTrust(old.pem + new.pem, NAME))
        until(lambda: applied(polling.listen) == "1", "the policy under the old CA")
        new.write(tmp_path, NAME)
        until(lambda: _issuer(plane.tls, new), "the certificate of the new CA")
        fresh = start_polling(plane.tls, ServerTrust(new.pem, NAME))
        until(lambda: applied(fresh.listen) == "1", "the policy in a sidecar that trusts the new CA only")
        set_default(policy, 2)
        handshakes = polling.counter(r"control_plane\.ssl\.handshake")
        plane.process.send_signal(signal.SIGTERM)  # type: ignore[union-attr]  # now each response closes its connection
        until(lambda: polling.counter(r"control_plane\.ssl\.handshake") > handshakes, "a handshake under the new CA")
        until(lambda: applied(polling.listen) == "2", "the changed policy")
        assert polling.counter(r"control_plane\.ssl\.(fail_verify|connection_error)") == 0
        assert polling.look() == ""


def test_polls_carry_the_token_of_a_file_that_changes(
    policy: Path, tmp_path: Path, start_polling: Callable[..., Polling]
) -> None:
    first, second = "first-token-of-this-test", "second-token-of-this-test"
    accepted, sent = tmp_path / "accepted", tmp_path / "sent"
    accepted.write_text(f"{first}\n")
    sent.write_text(f"{second}\n")
    authority = Authority()
    authority.write(tmp_path, NAME)
    with TlsControlPlane(policy, tmp_path, token_file=accepted) as plane:
        polling = start_polling(plane.tls, ServerTrust(authority.pem, NAME), sent)
        expected = f"The control plane {plane.tls} rejects the sidecar's token. The sidecar keeps its last policy."
        until(lambda: polling.look() == expected, "the reason")
        assert applied(polling.listen) == "0"
        accepted.write_text(f"{second}\n{first}\n")
        until(lambda: applied(polling.listen) == "1", "the policy, once the token is accepted")
        until(lambda: "responds again" in polling.look(), "that the control plane responds again")
        sent.write_text(first)
        rejected = polling.counter(r"cluster\.control_plane\.upstream_rq_401")
        set_default(policy, 2)
        until(lambda: applied(polling.listen) == "2", "the policy, with the other token")
        assert polling.counter(r"cluster\.control_plane\.upstream_rq_401") == rejected
        sent.unlink()
        until(lambda: polling.counter(r"cluster\.control_plane\.upstream_rq_401") > rejected, "polls without the file")
        assert polling.counter(r"lua\..*errors") == 0


def _issuer(address: Address, authority: Authority) -> bool:
    context = ssl.create_default_context(cadata=authority.pem)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    try:
        with (
            socket.create_connection((address.host, address.port)) as plain,
            context.wrap_socket(plain, server_hostname=NAME),
        ):
            return True
    except ssl.SSLError:
        return False


# ---- To vLLM and from clients ----------------------------------------------------------------------------------------

VLLM = "vllm.test"


@contextlib.contextmanager
def vllm(folder: Path) -> Iterator[Address]:
    """A real uvicorn with the certificate of this folder, as `vllm serve --ssl-certfile` has one."""
    config = uvicorn.Config(
        echo_app, host="127.0.0.1", port=0, log_level="error", lifespan="off",
        ssl_certfile=folder / "tls.crt", ssl_keyfile=folder / "tls.key",
    )  # fmt: skip
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, "uvicorn's start")
    yield Address("127.0.0.1", server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    thread.join(5)


class Run:
    """`vllm-priority run`."""

    def __init__(self, upstream: str, *options: str, scheme: str = "http") -> None:
        self.listen = Address("127.0.0.1", free_port())
        self.url = f"{scheme}://{self.listen}"
        command = [
            sys.executable, "-m", "control_plane.cli", "run", "--role", "render", "--upstream", upstream,
            "--listen", str(self.listen), "--admin", f"127.0.0.1:{free_port()}", "--access-log", "/dev/null",
            "--drain-seconds", "0", "--concurrency", "1", *options,
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def __enter__(self) -> Self:
        until(lambda: self.said("sidecar listens on") or self.process.poll() is not None, "the sidecar's start")
        assert self.process.poll() is None, self.lines
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._reader.join(5)


def send(run: Run, verify: ssl.SSLContext | bool = True) -> httpx.Response:
    with httpx.Client(verify=verify, trust_env=False, timeout=30) as client:
        return client.post(f"{run.url}{RENDER}", json={"messages": []}, headers={"x-vllm-priority": "7"})


def test_a_vllm_server_that_expects_tls_is_recognised_and_one_with_plain_http_is_not(
    envoy: Path, tmp_path: Path, upstream: RecordingUpstream
) -> None:
    Authority().write(tmp_path, VLLM)
    with vllm(tmp_path) as server, Run(str(server), "--envoy", str(envoy)) as run:
        assert run.said(f"{server} expects TLS, so plain HTTP gets a 503. Give the upstream as https://{server}.")
        assert send(run).status_code == 503
    with Run(str(upstream.address), "--envoy", str(envoy)) as run:
        assert not run.said("TLS")


@pytest.mark.parametrize("insecure", [False, True])
def test_requests_reach_a_vllm_server_with_tls(insecure: bool, envoy: Path, tmp_path: Path) -> None:
    authority = Authority()
    authority.write(tmp_path, VLLM)
    ca = str(authority.write_ca(tmp_path / "ca.crt"))
    options = ["--upstream-insecure"] if insecure else ["--upstream-ca", ca, "--upstream-server-name", VLLM]
    with vllm(tmp_path) as server, Run(f"https://{server}", "--envoy", str(envoy), *options) as run:
        assert send(run).json() == {"messages": [], "priority": 7}
        assert run.said("is not verified") == insecure


@pytest.mark.parametrize("fault", ["unknown CA", "expired", "wrong name"])
def test_requests_do_not_reach_a_vllm_server_that_cannot_be_verified(fault: str, envoy: Path, tmp_path: Path) -> None:
    authority = Authority()
    signer = Authority() if fault == "unknown CA" else authority
    signer.write(tmp_path, "other.test" if fault == "wrong name" else VLLM, days=-1 if fault == "expired" else 20)
    ca = str(authority.write_ca(tmp_path / "ca.crt"))
    options = ("--envoy", str(envoy), "--upstream-ca", ca, "--upstream-server-name", VLLM)
    with vllm(tmp_path) as server, Run(f"https://{server}", *options) as run:
        reply = send(run)
        assert reply.status_code == 503
        assert "the sidecar cannot establish TLS with the vLLM server" in reply.json()["error"]["message"]


def trusting(authority: Authority, client: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """A client's context, with a certificate of its own where there is one."""
    context = ssl.create_default_context(cadata=authority.pem)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if client:
        context.load_cert_chain(*client)
    return context


def test_a_client_needs_a_certificate_of_the_client_ca_and_its_name_decides_what_it_may(
    envoy: Path, tmp_path: Path, upstream: RecordingUpstream
) -> None:
    authority, clients = Authority(), Authority("clients")
    cert, key = authority.write(tmp_path, "127.0.0.1")
    trusted = clients.write(tmp_path / "trusted", "spiffe://cluster.local/ns/gateway/sa/front")
    other = clients.write(tmp_path / "other", "spiffe://cluster.local/ns/batch/sa/front")
    stranger = Authority().write(tmp_path / "stranger", "spiffe://cluster.local/ns/gateway/sa/front")
    expired = clients.write(tmp_path / "expired", "spiffe://cluster.local/ns/gateway/sa/front", days=-1)
    (tmp_path / "trust.yaml").write_text(
        "trust: {identities: ['spiffe://cluster.local/ns/gateway/sa/*'], otherwise: drop}\ndefault: 3\n"
    )
    ca = clients.write_ca(tmp_path / "clients.crt")
    options = (
        "--envoy", str(envoy), "--tls-cert", str(cert), "--tls-key", str(key), "--client-ca", str(ca),
        "--policy", str(tmp_path / "trust.yaml"),
    )  # fmt: skip
    with Run(str(upstream.address), *options, scheme="https") as run:
        for client, priority in ((trusted, 7), (other, 3)):
            assert send(run, trusting(authority, client)).status_code == 200
            assert upstream.requests[-1].priorities == [priority]
        for rejected in (None, stranger, expired):
            with pytest.raises((httpx.HTTPError, ssl.SSLError)):
                send(run, trusting(authority, rejected))
        assert len(upstream.requests) == 2


@pytest.mark.parametrize("protocol", ["h2", "http/1.1"])
def test_the_listener_offers_both_protocols(protocol: str, envoy: Path, tmp_path: Path) -> None:
    authority = Authority()
    cert, key = authority.write(tmp_path, "127.0.0.1")
    options = ("--envoy", str(envoy), "--tls-cert", str(cert), "--tls-key", str(key))
    context = trusting(authority)
    context.set_alpn_protocols([protocol])
    with (
        Run("127.0.0.1:9", *options, scheme="https") as run,
        socket.create_connection((run.listen.host, run.listen.port)) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        assert connection.selected_alpn_protocol() == protocol


def test_no_request_is_lost_while_the_listeners_certificate_changes(
    envoy: Path, tmp_path: Path, upstream: RecordingUpstream
) -> None:
    old, new = Authority("old"), Authority("new")
    cert, key = old.write(tmp_path, "127.0.0.1")
    both = ssl.create_default_context(cadata=old.pem + new.pem)
    both.verify_flags &= ~ssl.VERIFY_X509_STRICT
    options = ("--envoy", str(envoy), "--tls-cert", str(cert), "--tls-key", str(key))
    wrong: list[object] = []
    stop = threading.Event()
    with Run(str(upstream.address), *options, scheme="https") as run:

        def load(keep: bool) -> None:
            with httpx.Client(verify=both, trust_env=False, timeout=30) as client:
                while not stop.is_set():
                    headers = {"x-vllm-priority": "7"} | ({} if keep else {"connection": "close"})
                    try:
                        reply = client.post(f"{run.url}{RENDER}", json={"messages": []}, headers=headers)
                        if reply.status_code != 200:
                            wrong.append(reply.text)
                    except httpx.HTTPError as error:
                        wrong.append(error)

        threads = [threading.Thread(target=load, args=(keep,)) for keep in (True, False)]
        for thread in threads:
            thread.start()
        new_cert, new_key = new.write(tmp_path / "new", "127.0.0.1")
        # In place, and not by a rename, with a pair between that does not match.
        cert.write_bytes(new_cert.read_bytes())
        until(lambda: run.said("not the key of the certificate. The listener keeps its last"), "the reason")
        key.write_bytes(new_key.read_bytes())
        until(lambda: run.said("loaded the certificate"), "the new certificate")

        def served() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return send(run, trusting(new)).status_code == 200
            return False

        until(served, "the certificate of the new CA")
        stop.set()
        for thread in threads:
            thread.join(30)
    assert wrong == []
    assert len(upstream.requests) > 20
