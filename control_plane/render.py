"""Policy and placement -> what each target reads: one function and one table row a target.

Values are worked out here; the templates in envoy/ only place them.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from typing import Any, Self

import jinja2
import yaml

from control_plane.errors import BadInput
from control_plane.lua_bundle import Setting, bundle
from control_plane.package_data import folder
from control_plane.policy import RESPONSE_ROUTES, Policy, Role

Resource = dict[str, Any]
"""One Envoy or Kubernetes object, ready for yaml.dump or json.dumps."""

FILTER_NAME = "vllm_priority"
"""Name of the HTTP filter, its ECDS resource, its dynamic metadata namespace, and the prefix of its stats."""


@dataclass(frozen=True)
class Address:
    """A host (name, IPv4, or IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, what: str) -> Self:
        """`HOST:PORT` or `[V6]:PORT`; BadInput names `what` was wrong."""
        host, _, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        host = host[1:-1] if bracketed else host
        wrong = not host or (":" in host) != bracketed or any(c.isspace() or c in "/@?#[]" for c in host)
        if wrong or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
            raise BadInput(f"{what}: {text!r} is no address; allowed: HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000")
        return cls(host, int(port))

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


DEFAULT_LISTEN: Mapping[Role, Address] = {"render": Address("0.0.0.0", 18000), "engine": Address("0.0.0.0", 18001)}
DEFAULT_UPSTREAM: Mapping[Role, Address] = {"render": Address("127.0.0.1", 8000), "engine": Address("127.0.0.1", 8001)}
DEFAULT_ADMIN: Mapping[Role, Address] = {"render": Address("127.0.0.1", 19000), "engine": Address("127.0.0.1", 19001)}


@dataclass(frozen=True)
class Placement:
    """Where one sidecar stands. `health` and `control_plane` are left out where None."""

    role: Role
    listen: Address
    upstream: Address
    admin: Address
    health: Address | None = None
    control_plane: Address | None = None
    node_id: str = "vllm-priority"
    labels: Mapping[str, str] = field(default_factory=dict)
    policy_name: str | None = None
    access_log: str = "/dev/stdout"

    @classmethod
    def default(cls, role: Role) -> Self:
        """The placement the commands use where nothing is named."""
        return cls(role, DEFAULT_LISTEN[role], DEFAULT_UPSTREAM[role], DEFAULT_ADMIN[role])
