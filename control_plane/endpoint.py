"""URLs of servers, from the command line: HOST:PORT, and whether and how TLS is used."""

from dataclasses import dataclass
from typing import Self

from control_plane.address import Address
from control_plane.errors import BadInput
from control_plane.tls import ServerTrust, read_ca


@dataclass(frozen=True)
class ControlPlaneEndpoint:
    """Where sidecars poll, and how they verify who answers. trust: None with plain HTTP."""

    address: Address
    trust: ServerTrust | None

    @classmethod
    def parse(cls, url: str, ca: str | None) -> Self:
        """From the values of --control-plane and --control-plane-ca. BadInput names the option that is wrong.

        A URL without a scheme is rejected, so that nobody gets plain HTTP who did not ask for it: the response to a
        poll is code that the sidecar runs.
        """
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in ("https", "http"):
            raise BadInput(
                f"--control-plane: {url!r} is not a valid URL. Use https://HOST:PORT together with --control-plane-ca,"
                " for example https://vllm-priority.vllm-priority.svc:443, or http://HOST:PORT in a network that you"
                " trust."
            )
        address = Address.parse(rest, "--control-plane")
        if scheme == "http":
            if ca is not None:
                raise BadInput("--control-plane-ca: not used with http://. Use an https:// URL in --control-plane.")
            return cls(address, None)
        if ca is None:
            raise BadInput(
                "--control-plane-ca: not set, and --control-plane is an https:// URL. Use the PEM file of the CA that"
                " signed the control plane's certificate."
            )
        return cls(address, ServerTrust(read_ca(ca, "--control-plane-ca"), server_name(address.host)))

    @property
    def warning(self) -> str | None:
        """What the user should know of plain HTTP, in one line, or None."""
        if self.trust:
            return None
        return (
            f"warning: polls of http://{self.address} are neither encrypted nor authenticated. Whoever can answer them"
            " can run code in the sidecar. Use an https:// URL and --control-plane-ca."
        )


def server_name(host: str) -> str:
    """Return the name that the certificate of a host must have."""
    return host.rstrip(".").lower()
