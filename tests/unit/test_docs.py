"""The documentation: nothing that a user can set or see is missing from it, and what it names exists."""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click
import pytest
import yaml
from pydantic import BaseModel

from control_plane.cli import cli
from control_plane.doctor.report import TOPICS, TROUBLESHOOTING
from control_plane.injector import annotations
from control_plane.injector.reasons import Reason
from control_plane.policy.fields import Range
from control_plane.policy.load import parse_policies
from control_plane.policy.model import Limits, NamedPolicy, Policy, Routes
from control_plane.policy.trust import Tenant, Tenants, Trust
from control_plane.render.filter import OUTCOMES
from control_plane.render.loggers import LOG_FIELDS
from control_plane.render.tracing import ATTRIBUTES
from control_plane.server.fleet import CONFIG_STATUSES
from tools import build_values
from tools.docs_hook import ROOT_PAGES, adapt_links
from tools.docs_reference import PARTS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WRITTEN = [*PAGES, ROOT / "README.md", *(ROOT / name for name in ROOT_PAGES.values())]


def page(name: str) -> str:
    """A page of the site."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def leaf_commands(command: click.Command, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    """The commands below a command that are not groups, by the words that call them."""
    if not isinstance(command, click.Group):
        return {path: command}
    below = [leaf_commands(found, (*path, name)) for name, found in command.commands.items()]
    return {words: found for commands in below for words, found in commands.items()}


# ---- Nothing is missing --------------------------------------------------------------------------------------------


def test_every_field_of_the_access_log_and_of_a_span_is_documented() -> None:
    text = page("guides/logs-and-traces.md")
    rows = re.findall(r"^\| (`.*?) \|", text[text.index("| field |") : text.index("No body")], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(LOG_FIELDS)
    assert all(f".{name}`" in text for name in ATTRIBUTES)


@pytest.mark.parametrize(
    ("model", "prefix"),
    [
        (Policy, ""), (Range, "range."), (Routes, "routes."), (Limits, "limits."), (Trust, "trust."),
        (Tenants, "tenants."), (Tenant, "tenants.rules.NAME."), (NamedPolicy, ""),
    ],
)  # fmt: skip
def test_the_reference_lists_every_key_of_a_policy(model: type[BaseModel], prefix: str) -> None:
    reference = page("reference/policy.md")
    for key, field in model.model_fields.items():
        assert f"| `{prefix}{key}` |" in reference
        assert field.description
        assert field.description in reference


def test_the_reference_lists_every_command_with_its_options_and_examples() -> None:
    reference = page("reference/cli.md")
    sections = dict(re.findall(r"^## vllm-priority (.+?)\n(.*?)(?=^## |\Z)", reference, re.MULTILINE | re.DOTALL))
    commands = {" ".join(path): command for path, command in leaf_commands(cli).items() if not command.hidden}
    assert set(sections) == set(commands)
    for name, command in commands.items():
        assert "\nvllm-priority " in sections[name]
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                for option in parameter.opts:
                    assert re.search(rf"^\| `.*{option}\b.*` \|", sections[name], re.MULTILINE), (name, option)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_the_reference_explains_every_outcome(outcome: str) -> None:
    assert page("reference/outcomes.md").count(f"\n| `{outcome}` |") == 1


def test_the_reference_explains_no_outcome_that_does_not_exist() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", page("reference/outcomes.md"), re.MULTILINE)
    assert set(rows) - {"source", "outcome", "clamped"} == set(OUTCOMES)


def test_the_reference_lists_every_label_annotation_and_reason() -> None:
    reference = page("reference/annotations.md")
    for name in (*annotations.REQUEST_ANNOTATIONS, *annotations.WRITTEN_ANNOTATIONS, annotations.INJECT_LABEL):
        assert f"| `{name}` |" in reference
    for reason in Reason:
        assert f"| `{reason.code}` | {'yes' if reason.user_error else 'no'} | {reason.meaning} |" in reference


@pytest.mark.parametrize(
    "metric",
    [
        "requests_total", "policy_reloads_total", "policy_broken", "policy_loaded_timestamp_seconds",
        "certificate_expiry_timestamp_seconds", "inject_seconds", "sidecars", "sidecars_to_restart",
        "injections_total",
    ],
)  # fmt: skip
def test_the_reference_lists_the_metrics_with_their_labels(metric: str) -> None:
    [row] = re.findall(rf"^\| `vllm_priority_control_plane_{metric}` \|.*", page("reference/metrics.md"), re.MULTILINE)
    if metric == "sidecars":
        assert "`role`, `status`, `type`, `version`" in row


def test_the_reference_lists_every_value_of_the_chart() -> None:
    reference = page("reference/chart-values.md")
    for path, _ in build_values.value_comments():
        assert f"| `{'.'.join(path)}` |" in reference


def test_every_generated_part_has_a_place_in_one_page() -> None:
    places = [name for file in PAGES for name in re.findall(r"<!-- generated: (\w+) -->", file.read_text("utf-8"))]
    assert sorted(places) == sorted(PARTS)


@pytest.mark.parametrize("status", CONFIG_STATUSES)
def test_the_status_of_a_sidecar_is_explained(status: str) -> None:
    assert f"| {status} |" in page("guides/control-plane.md")


def test_the_doctor_leads_to_sections_of_the_troubleshooting_page() -> None:
    text = (ROOT / TROUBLESHOOTING).read_text(encoding="utf-8")
    sections = {heading.lower().replace(" ", "-") for heading in re.findall(r"^## (.*)$", text, re.MULTILINE)}
    assert set(TOPICS) <= sections


def test_the_places_that_newcomers_are_sent_to_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text[text.index("## Where to find what") : text.index("## Decisions")]
    top = "control_plane|lua|envoy|deploy|tests|tools|docs"
    places = re.findall(rf"(?<![\w/.])((?:{top})/[\w./-]*\w|(?:{top})/)", table)
    assert len(places) > 40
    assert [place for place in places if not (ROOT / place).exists()] == []


# ---- What is named exists ------------------------------------------------------------------------------------------


def commands_in(text: str) -> Iterator[list[str]]:
    """The words of each vllm-priority command in a page's code blocks, without its name."""
    for block in re.findall(r"^ *```(?:sh|console)\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if "vllm-priority " in line:
                lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|;&()")
                lexer.whitespace_split = True
                for _, group in groupby(lexer, lambda word: word[:1] in set("|;&()")):
                    name, *words = group
                    if name == "vllm-priority":
                        yield words


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_command_in_the_docs_exists_with_its_options(file: Path) -> None:
    known = leaf_commands(cli)
    for words in commands_in(file.read_text(encoding="utf-8")):
        command = known.get((words[0],)) or known.get(tuple(words[:2]))
        assert command, f"vllm-priority {words[0]} does not exist"
        options = {option for parameter in command.params for option in parameter.opts}
        for word in words[1:]:
            if word.startswith("-") and not re.match(r"-\d|-$", word):
                assert word.partition("=")[0] in {*options, "--help"}, f"{' '.join(words)}: {word}"


@pytest.mark.parametrize("file", WRITTEN, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_make_target_in_the_docs_exists(file: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= targets


def test_every_policy_in_the_reference_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", page("reference/policy.md"), re.DOTALL)
    assert blocks
    for block in blocks:
        parse_policies(block)


def test_every_test_that_the_threat_model_names_exists() -> None:
    existing = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    named = re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert named
    assert set(named) <= existing


# ---- Links ---------------------------------------------------------------------------------------------------------


def test_a_link_to_a_file_of_the_repository_becomes_its_path() -> None:
    assert adapt_links("See [the file](../../Makefile).", "guides/istio.md") == "See the file (`Makefile`)."
    assert adapt_links("See [Makefile](../../Makefile).", "guides/istio.md") == "See `Makefile`."


def test_a_link_from_a_page_of_the_root_points_into_the_site() -> None:
    link = "[performance](docs/performance.md#how-it-is-measured)"
    assert adapt_links(link, "contributing/index.md") == "[performance](../performance.md#how-it-is-measured)"
    assert adapt_links("[it](../SECURITY.md)", "how-it-works.md") == "[it](threat-model.md)"


@pytest.mark.parametrize("link", ["no_such_page.md", "performance.md#no-such-heading", "../no_such_file.py", "/docs"])
def test_a_dead_link_fails_the_build(tmp_path: Path, link: str) -> None:
    [options] = re.findall(r"mkdocs build (.*)", (ROOT / "Makefile").read_text())
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a") as file:
        file.write(f"[a link]({link})\n")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text()) | {"hooks": [str(ROOT / "tools" / "docs_hook.py")]}
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(config | {"docs_dir": "docs", "site_dir": "site"}))
    command = [sys.executable, "-m", "mkdocs", "build", *options.split(), "--config-file", str(tmp_path / "mkdocs.yml")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 1
    assert f"contains {'an absolute' if link[0] == '/' else 'a'} link '{link}'" in built.stderr
    assert "Aborted with 1 warnings" in built.stderr + built.stdout


@pytest.mark.parametrize("name", ["README.md", *ROOT_PAGES.values()])
def test_links_of_the_pages_of_the_root_lead_to_files_and_headings(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)", text):
        file = ROOT / target
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor[1:] in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
