"""TLS with real handshakes: polls of the control plane, vLLM servers, and clients."""

import contextlib
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from control_plane.address import Address
from control_plane.render.bootstrap import bootstrap
from control_plane.render.placement import Placement
from control_plane.sidecar import ControlPlaneWatch, Sidecar
from control_plane.tls import ServerTrust
from tests.pem import Authority, write_pair

from .sidecars import load
from .test_control_plane import POLL_SECONDS, ControlPlane, applied, free_port, set_default, until
from .upstream import RecordingUpstream

NAME = "control-plane.test"


class TlsControlPlane(ControlPlane):
    """`serve` with TLS; `tls` is the address of that listener."""

    def __init__(self, policy: Path, folder: Path, **settings: object) -> None:
        self.tls = Address("127.0.0.1", free_port())
        pair = {"tls_cert": folder / "tls.crt", "tls_key": folder / "tls.key"}
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
                token_file=token_file and str(token_file), node_id="pod-1", access_log="/dev/null",
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


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("unknown CA", "has an expired certificate, or one that its CA (--control-plane-ca) did not sign"),
        ("self-signed", "has an expired certificate, or one that its CA (--control-plane-ca) did not sign"),
        ("expired", "has an expired certificate, or one that its CA (--control-plane-ca) did not sign"),
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
        expected = f"the control plane {plane.tls} {reason}; the sidecar keeps its last policy"
        until(lambda: polling.look() == expected, "the reason")
        assert applied(polling.listen) == "0"
        assert plane.get("/api/sidecars").json()["total"] == 0
        authority.write(tmp_path, NAME)
        until(lambda: applied(polling.listen) == "1", "the policy, once the certificate is right")
        until(lambda: "answers again" in polling.look(), "that the control plane answers again")


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
