"""URLs of servers, from the command line: HOST:PORT, and whether and how TLS is used."""

from dataclasses import dataclass
from ipaddress import ip_address
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


@dataclass(frozen=True)
class UpstreamEndpoint:
    """The vLLM server, and how it is verified. trust: None with plain HTTP."""

    address: Address
    trust: ServerTrust | None

    @classmethod
    def parse(cls, text: str, ca: str | None, name: str | None, insecure: bool) -> Self:
        """From the values of --upstream and the options that begin with it. BadInput names the option that is wrong."""
        secure = text.startswith("https://")
        address = Address.parse(text.removeprefix("https://"), "--upstream")
        given = {"--upstream-ca": ca, "--upstream-server-name": name, "--upstream-insecure": insecure or None}
        named = [option for option, value in given.items() if value is not None]
        if not secure:
            if named:
                raise BadInput(f"{named[0]}: not used without TLS. Use https://{address} in --upstream.")
            return cls(address, None)
        if insecure:
            if len(named) > 1:
                raise BadInput(f"{named[0]}: not used together with --upstream-insecure. Use one of the two.")
            if not _is_loopback(address):
                raise BadInput(
                    f"--upstream-insecure: {address} is not on this machine, so anybody in between could pass for the"
                    " server. Use --upstream-ca."
                )
            return cls(address, ServerTrust(None, server_name(address.host)))
        if ca is None:
            raise BadInput(
                "--upstream-ca: not set, and --upstream is an https:// URL. Use the PEM file of the CA that signed the"
                " server's certificate, or --upstream-insecure for a server on this machine."
            )
        return cls(address, ServerTrust(read_ca(ca, "--upstream-ca"), server_name(name or address.host)))

    @property
    def warning(self) -> str | None:
        """What the user should know of a server that is not verified, in one line, or None."""
        if self.trust is None or self.trust.ca is not None:
            return None
        return f"warning: the certificate of https://{self.address} is not verified (--upstream-insecure)."


def _is_loopback(address: Address) -> bool:
    return ip_address(address.host).is_loopback if address.is_ip else server_name(address.host) == "localhost"


def server_name(host: str) -> str:
    """Return the name that the certificate of a host must have."""
    return host.rstrip(".").lower()
