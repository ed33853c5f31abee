"""Who may open the console, and the headers that keep other web sites away from it.

A browser on the machine of the control plane is trusted, and every web site that it shows can send requests to
localhost. With a DNS name that changes its address, a site could even read the responses. The Host header gives that
away, because a page cannot choose it.
"""

import base64
import ipaddress
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from control_plane.server.tokens import TokenCheck, bearer

LOCAL_ADDRESSES = frozenset({"127.0.0.1", "::1"})
"""Not all of 127.0.0.0/8: Istio's sidecar, for example, passes requests of other pods on from 127.0.0.6."""
LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_PASSED_ON = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
"""Headers that only a proxy adds."""

SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self';"
    " img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # With no-referrer, a browser would send "null" as the origin of the console's own form.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cache-control": "no-store",
}


class Denial(NamedTuple):
    """The response to a request that may not see the console."""

    status: int
    detail: str
    headers: dict[str, str]


class Access:
    """Decides about requests for the console.

    With API tokens, a request must carry one of them. Without, it must come from this machine. `proxies` are the
    addresses of proxies that authenticate their clients: what comes from one of them is accepted.
    """

    def __init__(self, tokens: TokenCheck | None, proxies: Sequence[str]) -> None:
        self._tokens = tokens
        self._proxies = frozenset(str(ipaddress.ip_address(proxy)) for proxy in proxies)

    async def denial(self, scope: Scope) -> Denial | None:
        """Return why a request is not accepted; None if it is."""
        headers = Headers(scope=scope)
        peer = _address(scope)
        local = peer in LOCAL_ADDRESSES
        # A proxy on this machine must send a local name: the address alone is that of the machine's browsers too.
        if not (peer in self._proxies and (not local or _names_this_machine(headers))):
            if self._tokens:
                verdict = await self._tokens.check(_token(scope["headers"]))
                if verdict.status != 200:
                    challenge = {"www-authenticate": 'Basic realm="vllm-priority console", charset="UTF-8"'}
                    return Denial(
                        verdict.status,
                        "Log in with an API token of this control plane as the password. Any user name will do.",
                        challenge if verdict.status == 401 else {},
                    )
            elif not local or any(name in headers for name in _PASSED_ON):
                return Denial(
                    403,
                    "Without API tokens, the console can be opened only from the machine or pod of the control plane,"
                    " for example through kubectl port-forward. Give the control plane a file of API tokens, or name"
                    " the proxy that authenticates the users of the console.",
                    {},
                )
            elif not _names_this_machine(headers):
                return Denial(403, "The Host header does not name this machine. Open the console as localhost.", {})
        return _cross_site(scope, headers)


def _cross_site(scope: Scope, headers: Headers) -> Denial | None:
    """Reject what the page of another web site sends. Links to the console's pages may be anywhere."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        linked = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
        own = site in ("same-origin", "none") or linked
    else:
        # Browsers send Sec-Fetch-Site to localhost and over TLS only, and the origin with each POST.
        own = origin is None or urlsplit(origin).netloc == headers.get("host")
    if own:
        return None
    return Denial(403, "The request comes from another web site. Open the console, and use its own pages.", {})


def _address(scope: Scope) -> str:
    try:
        address = ipaddress.ip_address((scope.get("client") or ("", 0))[0])
    except ValueError:
        return ""
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)


def _names_this_machine(headers: Headers) -> bool:
    hosts = headers.getlist("host")
    try:
        return len(hosts) == 1 and urlsplit(f"//{hosts[0]}").hostname in LOCAL_NAMES
    except ValueError:
        return False


def _token(headers: list[tuple[bytes, bytes]]) -> str:
    """Return the password (RFC 7617) or the bearer token of a request, or the empty string."""
    for name, value in headers:
        if name == b"authorization" and value[:6].lower() == b"basic ":
            try:
                return base64.b64decode(value[6:].strip(), validate=True).decode("latin-1").partition(":")[2]
            except ValueError:
                return ""
    return bearer(headers)
