"""URLs of servers, from the command line: HOST:PORT, and whether and how TLS is used."""

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Self

from control_plane.address import Address
from control_plane.errors import InvalidField
from control_plane.tls import ServerTrust, read_ca


@dataclass(frozen=True)
class ControlPlaneEndpoint:
    """Where sidecars poll, and how they verify the control plane. trust: None with plain HTTP."""

    address: Address
    trust: ServerTrust | None

    @classmethod
    def parse(cls, url: str, ca: str | None) -> Self:
        """Return the endpoint of a URL and of the path of a CA. InvalidField names the setting that is wrong.

        A URL without a scheme is rejected, so that nobody gets plain HTTP who did not ask for it: the response to a
        poll is code that the sidecar runs.
        """
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in ("https", "http"):
            raise InvalidField(
                "control_plane",
                f"{url!r} is not a valid URL. Use https://HOST:PORT together with a CA, for example"
                " https://vllm-priority.vllm-priority.svc:443, or http://HOST:PORT in a network that you trust.",
            )
        address = Address.parse(rest, "control_plane")
        if scheme == "http":
            if ca is not None:
                raise InvalidField(
                    "control_plane_ca", "not used with http://. Use an https:// URL for the control plane."
                )
            return cls(address, None)
        if ca is None:
            raise InvalidField(
                "control_plane_ca",
                "not set, and the control plane has an https:// URL. Use the PEM file of the CA that signed its"
                " certificate.",
            )
        return cls(address, ServerTrust(read_ca(ca, "control_plane_ca"), server_name(address.host)))

    @property
    def warning(self) -> str | None:
        """What the user should know of plain HTTP, in one line, or None."""
        if self.trust:
            return None
        return (
            f"warning: polls of http://{self.address} are neither encrypted nor authenticated. Whoever can respond to"
            " them can run code in the sidecar. Use an https:// URL and the CA that signed its certificate."
        )


def otlp_collector(url: str) -> Address:
    """Return the address in the URL of a collector of traces, which gets OTLP over gRPC without TLS.

    InvalidField if it is not http://HOST:PORT.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme != "http":
        raise InvalidField(
            "otlp_endpoint",
            f"{url[:60]!r} is not valid. Use http://HOST:PORT of a collector that accepts OTLP over gRPC, for example"
            " http://127.0.0.1:4317. TLS is not supported: run a collector on the same machine or node.",
        )
    return Address.parse(rest.removesuffix("/"), "otlp_endpoint")


@dataclass(frozen=True)
class UpstreamEndpoint:
    """The vLLM server, and how it is verified. trust: None with plain HTTP."""

    address: Address
    trust: ServerTrust | None

    @classmethod
    def parse(cls, text: str, ca: str | None, name: str | None, insecure: bool) -> Self:
        """Return the endpoint of these settings. InvalidField names the one that is wrong."""
        secure = text.startswith("https://")
        address = Address.parse(text.removeprefix("https://"), "upstream")
        given = {"upstream_ca": ca, "upstream_server_name": name, "upstream_insecure": insecure or None}
        named = [field for field, value in given.items() if value is not None]
        if not secure:
            if named:
                raise InvalidField(named[0], f"not used without TLS. Use https://{address} for the upstream.")
            return cls(address, None)
        if insecure:
            if len(named) > 1:
                raise InvalidField(
                    named[0], "not used if the upstream's certificate is not verified. Set only one of the two."
                )
            if not _is_loopback(address):
                raise InvalidField(
                    "upstream_insecure",
                    f"{address} is not on this machine, so anybody in between could pass for the server. Use a CA.",
                )
            return cls(address, ServerTrust(None, server_name(address.host)))
        if ca is None:
            raise InvalidField(
                "upstream_ca",
                "not set, and the upstream is an https:// URL. Use the PEM file of the CA that signed the server's"
                " certificate. Only for a server on this machine, it can be left unverified.",
            )
        return cls(address, ServerTrust(read_ca(ca, "upstream_ca"), server_name(name or address.host)))

    @property
    def warning(self) -> str | None:
        """What the user should know of a server that is not verified, in one line, or None."""
        if self.trust is None or self.trust.ca is not None:
            return None
        return f"warning: the certificate of https://{self.address} is not verified."


def _is_loopback(address: Address) -> bool:
    return ip_address(address.host).is_loopback if address.is_ip else server_name(address.host) == "localhost"


def server_name(host: str) -> str:
    """Return the name that the certificate of a host must have."""
    return host.rstrip(".").lower()
