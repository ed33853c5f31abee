"""How Envoy writes addresses."""

from control_plane.address import Address
from control_plane.render.templates import Resource


def socket_address(address: Address) -> Resource:
    """Return Envoy's form of an address."""
    # "::" accepts IPv4, too, as it does elsewhere. Without this, Envoy would accept only IPv6.
    both = {"ipv4_compat": True} if address.host == "::" else {}
    return {"socket_address": {"address": address.host, "port_value": address.port, **both}}


def discovery_type(address: Address, *, spread: bool = False) -> str:
    """Return how Envoy finds the addresses of a cluster's host.

    Args:
        address: The host and its port.
        spread: Whether each address of a name is a server of its own.
    """
    if address.is_ip:
        return "STATIC"
    # With LOGICAL_DNS Envoy tries a name's addresses one after the other (happy eyeballs). With STRICT_DNS each
    # address is a server of its own, and those on which nothing listens fail every request that they get.
    return "STRICT_DNS" if spread else "LOGICAL_DNS"
