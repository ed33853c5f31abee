"""The settings of `vllm-priority serve`, typed, and checked where they are made."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from control_plane.address import Address
from control_plane.errors import InvalidField
from control_plane.injector.settings import InjectorSettings

DEFAULT_TLS_LISTEN = Address("0.0.0.0", 8443)


@dataclass(frozen=True)
class ServeSettings:
    """The settings of one control plane. InvalidField where two of them contradict each other.

    The control plane serves plain HTTP on `listen`, and TLS on `tls_listen` too if it has a certificate and a key.
    """

    policy: Path
    listen: Address = Address("0.0.0.0", 8080)
    tls_listen: Address | None = None
    """None: DEFAULT_TLS_LISTEN, if there is a certificate."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    injector: InjectorSettings = field(default_factory=InjectorSettings)
    read_services: bool = False
    """Whether to read the Services of a pod's namespace from the Kubernetes API. Needs the permission to list them."""
    write_events: bool = False
    """Whether to write Events about injections, on the owners of pods. Needs the permission to create Events."""
    token_file: Path | None = None
    """The tokens that polls must carry, one a line. None: see `token_audience`."""
    token_audience: str | None = None
    """The audience of the service account tokens that polls must carry. None and no `token_file`: anybody may poll."""
    api_token_file: Path | None = None
    """The tokens that requests for /api/, /metrics and the console must carry, one a line. None: anybody may send
    them, except that the console can then be opened only from this machine."""
    console_proxies: tuple[str, ...] = ()
    """Addresses of proxies that authenticate their clients, which may open the console."""
    reload_seconds: float = 1.0
    """Time between two looks at the policy file and the certificate."""
    body_seconds: float = 10.0
    """Time within which the whole body of a request must arrive."""

    def __post_init__(self) -> None:
        if self.tls_cert is not None and self.tls_key is None:
            raise InvalidField("tls_key", "not set. TLS needs both a certificate and its key.")
        if self.tls_key is not None and self.tls_cert is None:
            raise InvalidField("tls_cert", "not set. TLS needs both a certificate and its key.")
        if self.tls_listen is not None and self.tls_cert is None:
            raise InvalidField("tls_listen", "not used without a certificate. Set a certificate and its key too.")
        if self.token_file is not None and self.token_audience is not None:
            raise InvalidField("token_audience", "not used together with a token file. Set one of the two.")
        for proxy in self.console_proxies:
            try:
                ipaddress.ip_address(proxy)
            except ValueError:
                raise InvalidField(
                    "console_proxy", f"{proxy!r} is not an IP address. Use one, for example 10.1.2.3 or 2001:db8::1."
                ) from None
        if self.injector.numeric_services == "redirect" and not self.read_services:
            raise InvalidField(
                "numeric_services",
                "'redirect' works only if the control plane can read Services. Enable that, or use 'warn'.",
            )
