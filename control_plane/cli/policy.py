"""The commands about policy files."""

import json

import click

from control_plane.cli.options import (
    example,
    json_option,
    option,
)
from control_plane.cli.terminal import complain
from control_plane.policy.difference import NOT_SET, policy_changes
from control_plane.policy.load import load_policies
from control_plane.policy.restart import listed, needing_restart


@click.command(
    epilog=example("vllm-priority validate -f policy.yaml\nvllm-priority validate -f new.yaml --against old.yaml")
)
@option("-f", "--file", "path", metavar="FILE", required=True, help="Policy in YAML.")
@option("--against", metavar="FILE", help="Policy in YAML to compare with. Prints what changes if --file replaces it.")
@json_option
def validate(path: str, against: str | None, as_json: bool) -> None:
    """Check a policy file."""
    policies = load_policies(path)
    old = load_policies(against) if against is not None else policies
    changes, restart = policy_changes(old, policies), needing_restart(old, policies)
    names = [entry.name for entry in policies.named]
    for name, policy in policies.by_name.items():
        if policy.open_routes:
            complain(f"vllm-priority: {path}: policy {name}: {policy.open_routes}.")
    if as_json:
        report = {"valid": True, "default": policies.default.model_dump(mode="json"), "named": names}
        if against is not None:
            report["changes"] = [change._asdict() for change in changes]
            report["restart"] = restart
        click.echo(json.dumps(report))
        return
    click.echo(f"{path}: valid" + (f"; named policies: {', '.join(names)}" if names else ""))
    for change in changes:
        was, becomes = (value if value == NOT_SET else json.dumps(value) for value in (change.old, change.new))
        click.echo(f"{change.policy}: {change.key}: {was} -> {becomes}")
    for name, keys in restart.items():
        click.echo(f"{name}: running sidecars need a restart for {listed(keys)}")
    if against is not None and not changes:
        click.echo(f"Nothing changes: it has the same values as {against}.")
