"""A name server for tests: it knows a few names, IPv4 only, in a fixed order."""

import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Self

A = 1


class NameServer:
    """Answers DNS queries over UDP on a port of its own, as a context manager."""

    def __init__(self, names: Mapping[str, Sequence[str]]) -> None:
        self._names = names
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def resolver(self) -> dict[str, Any]:
        """A cluster's `typed_dns_resolver_config`."""
        address = {"address": "127.0.0.1", "port_value": self._socket.getsockname()[1]}
        return {
            "name": "envoy.network.dns_resolver.cares",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
                "resolvers": [{"socket_address": address}],
            },
        }

    def _serve(self) -> None:
        while True:
            try:
                query, peer = self._socket.recvfrom(4096)
            except OSError:
                return
            self._socket.sendto(self._answer(query), peer)

    def _answer(self, query: bytes) -> bytes:
        labels, at = [], 12
        while length := query[at]:
            labels.append(query[at + 1 : at + 1 + length].decode().lower())
            at += 1 + length
        question = query[12 : at + 5]
        (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
        known = self._names.get(".".join(labels))
        addresses = (known or ()) if kind == A else ()
        records = b"".join(struct.pack("!HHHIH", 0xC00C, A, 1, 1, 4) + socket.inet_aton(each) for each in addresses)
        flags = 0x8580 | (0 if known else 3)
        return query[:2] + struct.pack("!HHHHH", flags, 1, len(addresses), 0, 0) + question + records
