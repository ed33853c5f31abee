"""The command `explain`."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from control_plane.cli.arguments import read_policy
from control_plane.cli.options import (
    example,
    json_option,
    option,
    policy_name_option,
    policy_option,
    request_header,
)
from control_plane.errors import BadInput
from control_plane.explain import (
    Explanation,
    check_request_line,
    client_at,
    explain,
    in_chunks,
    with_framing,
)
from control_plane.policy.model import Policy
from control_plane.vllm import ROLES, Role


@click.command(
    name="explain",
    epilog=example(
        "vllm-priority explain --path /v1/chat/completions/render -H 'X-Vllm-Priority: -10' -d '{\"messages\":[]}'\n"
        "vllm-priority explain --path /inference/v1/generate -H 'X-Vllm-Priority: high' -d @request.json --json\n"
        "vllm-priority explain --path /v1/chat/completions -H 'X-Vllm-Priority: 5' --policy policy.yaml --peer 10.1.2.3"
    ),
)
@option("--path", required=True, metavar="PATH", help="Request target, for example /inference/v1/generate.")
@option("-H", "--header", "headers", multiple=True, metavar="'NAME: VALUE'", help="Request header. Repeatable.")
@option(
    "-d",
    "--data",
    metavar="BODY|@FILE",
    default="{}",
    show_default=True,
    help="Request body, or the file that contains it. @-: standard input.",
)
@option("-X", "--method", default="POST", show_default=True, help="Request method.")
@option(
    "--peer", metavar="IP", default="127.0.0.1", show_default=True,
    help="Address of the client, for a policy with trust.",
)  # fmt: skip
@option(
    "--identity",
    metavar="NAME",
    multiple=True,
    help="URI or DNS name in the client's certificate, for a policy with trust. Repeatable.",
)
@option(
    "--claim",
    "claims",
    metavar="NAME=VALUE",
    multiple=True,
    help="Claim in the client's valid token, for a policy with trust.claims. Repeatable; the same name makes a list.",
)
@option(
    "--role",
    type=click.Choice(ROLES),
    default="engine",
    show_default=True,
    help="Role of the vLLM server behind the sidecar.",
)
@policy_option
@policy_name_option
@json_option
def explain_command(
    path: str,
    headers: tuple[str, ...],
    data: str,
    method: str,
    peer: str,
    identity: tuple[str, ...],
    claims: tuple[str, ...],
    role: Role,
    policy: str | None,
    policy_name: str | None,
    as_json: bool,
) -> None:
    """Show what the sidecar would do to a request. It runs the sidecar's own Lua here, and sends nothing."""
    check_request_line(method, path)
    body = _body(data)
    lines = with_framing([request_header(line) for line in headers], body)
    chosen = read_policy(policy, policy_name)
    sender = client_at(peer, identity, _claims(claims, chosen))
    trusted = chosen.trust and chosen.trust.claims
    if sender.claims and trusted and trusted.header not in {name.lower() for name, _ in lines}:
        lines.append((trusted.header, f"{'Bearer ' if trusted.header == 'authorization' else ''}a.valid.token"))
    found = explain(chosen, role, path, lines, in_chunks(body), method=method.upper(), client=sender)
    if as_json:
        click.echo(json.dumps(_explained(found)))
    else:
        _print_explanation(found, chosen)


def _claims(texts: tuple[str, ...], policy: Policy) -> dict[str, str | list[str]]:
    if texts and not (policy.trust and policy.trust.claims):
        raise BadInput("--claim: not used, since the policy has no trust.claims. Set --policy to one that has.")
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise BadInput(f"--claim: {text!r} is not a valid claim. Use NAME=VALUE, for example scope=priority.")
        found.setdefault(name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in found.items()}


def _body(data: str) -> bytes:
    if not data.startswith("@"):
        return data.encode("utf-8", "surrogateescape")
    if data == "@-":
        return sys.stdin.buffer.read()
    try:
        return Path(data[1:]).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise BadInput(
            f"-d: {data[1:]!r}: cannot be read: {reason}. Use a body, or @ and the path of a file."
        ) from None


def _explained(found: Explanation) -> dict[str, Any]:
    return {
        "outcome": found.outcome,
        "priority": found.value,
        "source": found.source,
        "report": found.report,
        "trusted_by": found.trusted_by,
        "tenant": found.tenant,
        "reaches_vllm": found.rejection is None,
        "headers": list(found.headers),
        "body": found.body.decode("utf-8", "backslashreplace"),
        "response": None
        if found.rejection is None
        else {"status": found.rejection[0], "body": found.rejection[1].decode("utf-8", "backslashreplace")},
        "edited_response": None if found.response is None else found.response.decode("utf-8", "backslashreplace"),
    }


def _print_explanation(found: Explanation, policy: Policy) -> None:
    if found.outcome is None:
        click.echo(
            "outcome: none. Only POST requests on the routes of the policy are edited, so it passes through unchanged."
        )
        return
    click.echo(f"outcome: {found.outcome}")
    if policy.report_header:
        click.echo(f"response header: {policy.report_header}: {found.report}")
    if found.trusted_by is not None:
        click.echo(f"trusted by: {found.trusted_by}")
    if found.tenant is not None:
        click.echo(f"tenant: {found.tenant}")
    if found.rejection is not None:
        click.echo(
            f"response of the sidecar: {found.rejection[0]} {found.rejection[1].decode('utf-8', 'backslashreplace')}"
        )
        return
    click.echo("request to vLLM:")
    for name, value in found.headers:
        click.echo(f"  {name}: {value}")
    click.echo(f"  {found.body.decode('utf-8', 'backslashreplace')}")
    if found.response is not None:
        click.echo(f'response {{"priority":0}} reaches the client as: {found.response.decode()}')
