"""One server under examination: the connection to it, the rows about it, and the advice that several checks give."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import httpx

from control_plane.doctor.report import Row, Verdict
from control_plane.doctor.responses import failure_reason
from control_plane.doctor.settings import DoctorSettings
from control_plane.render.placement import DEFAULT_LISTEN
from control_plane.report_header import parse_report
from control_plane.vllm import Role

LOOK_AT_LOG = "Look at the server's log."
ENABLE_SCALE_OUT = "Restart vllm serve with --enable-scale-out."

_NO_HEADER = (
    "The sidecar saw no priority header. Check that the policy's header has this name, and that every proxy in front "
    "of the sidecar passes it on."
)

_BY_OUTCOME = {
    "absent": _NO_HEADER,
    "kept": f"{_NO_HEADER} It kept the body's own priority.",
    "too_large": "Raise limits.max_body_bytes in the sidecar's policy.",
    "upstream_error": "The response was not a JSON response with status 200. Look at the server's log.",
}
"""What to do if a sidecar reports this outcome. For the other outcomes, the policy itself has to be checked."""

_CHECK_SIDECAR = "Check the sidecar's policy with vllm-priority explain, and look at its log."


class StopExamination(Exception):
    """The server cannot be examined any further. The row that says why has been added."""


class Server:
    """One server under examination. Its checks send requests through it and add rows to it."""

    def __init__(
        self,
        settings: DoctorSettings,
        role: Role,
        url: str,
        client: httpx.AsyncClient,
        rows: list[Row],
        spell: Callable[[str], str] = str,
    ) -> None:
        """Examine the server at `url`.

        Args:
            settings: The settings of the examination.
            role: The role in which the server was given.
            url: The root URL of the server.
            client: A client with this URL as its base.
            rows: The list that receives the rows.
            spell: Returns how the user writes a field of the settings, for example "--api-key" for "api_key".
        """
        self.settings, self.role, self.url, self.client = settings, role, url, client
        self.spell = spell
        self.priority = settings.priority
        self.model: str | None = settings.model
        self.max_model_len: int | None = None
        self._rows = rows

    def add(
        self, check: str, verdict: Verdict, seen: str, next_step: str = "", *, brief: str = "", **evidence: Any
    ) -> None:
        """Add a row about this server; see Row for the arguments."""
        self._rows.append(Row(self.role, check, verdict, seen, next_step, evidence, brief))

    def stop(self, check: str, seen: str, next_step: str, **evidence: Any) -> StopExamination:
        """Add a failed row and return the exception to raise."""
        self.add(check, "fail", seen, next_step, **evidence)
        return StopExamination()

    def has_row(self, check: str) -> bool:
        """Return whether this server has a row of this check."""
        return any(row.check == check and row.server == self.role for row in self._rows)

    def reason(self, error: BaseException) -> str:
        """Return in a clause why a request to this server failed."""
        return failure_reason(error, self.settings.timeout)

    def reported(self, report: str | None) -> str:
        """Return a sentence that quotes a sidecar's report, to be appended to another; empty without a report."""
        return f' The sidecar reported "{report}".' if report else ""

    def advice_for_lost_header(self, report: str | None) -> str:
        """Return what to do if the header has no effect; `report` is the sidecar's report, if there is one."""
        if not report:
            return f"Put a sidecar in front of this server and send clients to it: {self._sidecar_command}"
        parsed = parse_report(report)
        if parsed and parsed.source == "default":
            return f"{_NO_HEADER} It applied the policy's default."
        return _BY_OUTCOME.get(parsed.outcome, _CHECK_SIDECAR) if parsed else _CHECK_SIDECAR

    @property
    def check_sidecar(self) -> str:
        """What to do if a sidecar is there and the priority is wrong all the same."""
        return _CHECK_SIDECAR

    @property
    def use_accepted_priority(self) -> str:
        """What to do if the sidecar's policy rejects the examined priority."""
        return f"Examine again with a value of {self.spell('priority')} that the sidecar's policy accepts."

    @property
    def _sidecar_command(self) -> str:
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        listen = DEFAULT_LISTEN[self.role]
        return f"vllm-priority run --role {self.role} --upstream {parts.hostname}:{port} --listen {listen}"


@asynccontextmanager
async def connect(
    settings: DoctorSettings, role: Role, url: str, rows: list[Row], spell: Callable[[str], str]
) -> AsyncIterator[Server]:
    """Connect to a server during the block; see Server for the arguments."""
    host = urlsplit(url).hostname or ""
    headers = dict(settings.headers)
    if settings.api_key and "authorization" not in map(str.lower, headers):
        headers["authorization"] = f"Bearer {settings.api_key}"
    async with httpx.AsyncClient(
        base_url=url.rstrip("/"),
        headers=headers,
        verify=settings.tls(),
        timeout=httpx.Timeout(settings.timeout, connect=min(settings.timeout, 5.0)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=4),
        trust_env=not _is_loopback(host),
    ) as client:
        yield Server(settings, role, url, client, rows, spell)


def _is_loopback(host: str) -> bool:
    """Return whether the host is this machine, which a proxy of the environment cannot reach."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
