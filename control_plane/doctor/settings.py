"""The settings of one examination."""

import re
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from control_plane.errors import InvalidField

_NOT_TO_SET = ("content-length", "content-type", "connection", "host", "transfer-encoding")
# A token of RFC 9110, 5.6.2.
_HEADER_NAME = r"[A-Za-z0-9!#$%&'*+.^_`|~-]+"


@dataclass(frozen=True)
class DoctorSettings:
    """What to examine, and how far to go.

    Args:
        render: The root URL of a render server, or None. At least one of `render` and `engine` is required.
        engine: The root URL of an engine, or None.
        api_key: The servers' API key, or None.
        header: The request header that carries the priority.
        report_header: The response header in which a sidecar reports what it did.
        model: The name of the served model; None chooses the first model that /v1/models lists.
        priority: The urgent priority to send, below 0.
        timeout: How long to wait for an ordinary response, in seconds.
        queue_timeout: How long to wait for the queue to change, in seconds.
        max_fill: The largest number of long requests that may be sent to fill the engine's slots.
        headers: Further headers to send with each request, for example the one that names a tenant.
        class_name: A class of the policy to examine on the routes, too, or None.
        ca: A file with the certificates to trust, in PEM. None trusts those of the system.
        client_cert: A file with the certificate to present, in PEM, or None.
        client_key: The file with its key. None: `client_cert` contains it.
        poll: The time between two reads of the queue's gauges, in seconds.

    Raises:
        InvalidField: A value is not valid.
    """

    render: str | None = None
    engine: str | None = None
    api_key: str | None = None
    header: str = "x-vllm-priority"
    report_header: str = "x-vllm-priority-applied"
    model: str | None = None
    priority: int = -10
    timeout: float = 10.0
    queue_timeout: float = 20.0
    max_fill: int = 8
    headers: tuple[tuple[str, str], ...] = ()
    class_name: str | None = None
    ca: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    poll: float = 0.02

    def __post_init__(self) -> None:
        if self.render is None and self.engine is None:
            raise InvalidField(
                "render", "neither a render server nor an engine is given. Use the root URL of at least one of them."
            )
        for field, url in (("render", self.render), ("engine", self.engine)):
            if url is not None:
                _check_url(field, url)
        for field, name in (("header", self.header), ("report_header", self.report_header)):
            if not re.fullmatch(_HEADER_NAME, name):
                raise InvalidField(field, f"{name!r} is not a valid header name. Use a name such as X-Vllm-Priority.")
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise InvalidField(
                "api_key", "the value cannot be sent in a header. Use printable ASCII characters without blanks."
            )
        if self.priority >= 0:
            raise InvalidField(
                "priority", f"{self.priority} is not more urgent than 0. Use a negative integer, for example -10."
            )
        for field, number in (("timeout", self.timeout), ("queue_timeout", self.queue_timeout)):
            if not 0 < number < float("inf"):
                raise InvalidField(field, f"{number:g} is not a valid time. Use a number of seconds above 0.")
        for name, value in self.headers:
            if name.lower() in {*_NOT_TO_SET, self.header.lower()}:
                raise InvalidField("headers", f"{name} is a header that the doctor sets itself. Leave it out.")
            if not re.fullmatch(r"[\t -~]*", value):
                raise InvalidField("headers", f"the value of {name} is not printable ASCII.")
        if self.class_name is not None and not re.fullmatch(r"(?!-?[0-9]+$)[!-~]+", self.class_name):
            raise InvalidField("class_name", f"{self.class_name!r} is not a valid class name. Use for example batch.")
        self.tls()
        if self.max_fill < 1:
            raise InvalidField("max_fill", f"{self.max_fill} is not a valid number of requests. Use 1 or more.")

    def tls(self) -> ssl.SSLContext:
        """Return what a TLS connection is verified with. InvalidField if a file cannot be used."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ValueError) as error:
            raise InvalidField("ca", f"{self.ca!r} cannot be read as certificates in PEM: {error}.") from None
        if self.client_cert is not None:
            try:
                # An empty password: without it, OpenSSL would ask for one at the terminal.
                context.load_cert_chain(self.client_cert, self.client_key, password="")
            except (OSError, ValueError) as error:
                files = f"{self.client_cert!r}" + (f" with {self.client_key!r}" if self.client_key else "")
                what = f"{files} cannot be read as a certificate and its key in PEM: {error}."
                raise InvalidField("client_cert", what) from None
        elif self.client_key is not None:
            raise InvalidField("client_key", "there is no certificate for this key. Give the certificate, too.")
        return context


def _check_url(field: str, url: str) -> None:
    advice = "Use the root URL of a server, for example http://127.0.0.1:8000."
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):
        wrong = True
    if wrong or parts.query or parts.fragment or any(c.isspace() for c in url):
        raise InvalidField(field, f"{url!r} is not a valid server URL. {advice}")
    if parts.username is not None:
        # The message does not repeat the URL, because it would put the password into a log, too.
        raise InvalidField(field, "the URL contains a user name or password, which logs would show. Use the API key.")
    if re.search(r"/v1(/|$)", parts.path):
        raise InvalidField(field, f"{url!r} contains the API path /v1. {advice}")
