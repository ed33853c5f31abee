"""Network addresses, as a person writes them."""

import re
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Self

from control_plane.errors import InvalidField

# RFC 1123, and the underscores that resolvers take. What ends in a number is an IPv4 address or a slip of the pen.
_HOST_NAME = (
    r"(?=.{1,253}$)([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.)*(?![0-9]+\.?$)[A-Za-z0-9_]"
    r"([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?\.?"
)


@dataclass(frozen=True)
class Address:
    """A host (name, IPv4, or IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str) -> Self:
        """Return the address of `HOST:PORT` or `[V6]:PORT`. InvalidField, which names `field`, if it is neither."""
        host, _, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        address = cls(host, int(port)) if re.fullmatch(r"[0-9]{1,5}", port) else None
        named = (":" in host) == bracketed and (re.fullmatch(_HOST_NAME, host) or (address and address.is_ip))
        if not named or address is None or not 0 < address.port < 65536:
            raise InvalidField(
                field, f"{text!r} is not a valid address. Use HOST:PORT, for example 127.0.0.1:8000 or [::1]:8000."
            )
        return address

    @property
    def is_ip(self) -> bool:
        """Whether the host is an IP address, not a name to resolve."""
        try:
            ip_address(self.host)
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
