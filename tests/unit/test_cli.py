"""Every command on bad input: one line on stderr that says what is allowed or next, nothing on stdout, no traceback."""

import ast
import io
import itertools
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import yaml

from control_plane import __version__
from control_plane.cli import cli, main
from control_plane.cli.options import OPTIONS, USED_BY, option_of
from control_plane.render.targets import TARGETS
from tests.pem import Authority, write_pair
from tools.build_manifests import injected_example

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(cli.commands)


class Outcome(NamedTuple):
    """What a command did: exit status, standard output, standard error."""

    status: int
    out: str
    err: str


CA = Authority().pem


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with files that are good and bad in one way each."""
    for name, content in {
        "ok.yaml": b"default: 1",
        "named.yaml": b"policies: [{name: batch, selector: {}, policy: {default: 10}}]",
        "broken.yaml": b"default: [",
        "unknown.yaml": b"defualt: 1",
        "contradiction.yaml": b"range: {min: 2, max: 1}",
        "latin.yaml": b"header: \xff",
        "list.yaml": b"- default: 1",
        "pod.yaml": b"apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec: [",
        "text": b"hello",
        "not-envoy": b"#!/bin/sh\necho version: 1.40\n",
        "no-program": b"\x7fELF",
    }.items():
        (tmp_path / name).write_bytes(content)
    for name in ("not-envoy", "no-program"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "folder").mkdir()
    (tmp_path / "ca.crt").write_text(CA)
    monkeypatch.chdir(tmp_path)
    for name in ("ENVOY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def taken() -> Iterator[str]:
    """An address on which something listens already."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead() -> Iterator[str]:
    """An address that is bound, so that nobody else takes it, and on which nothing answers."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture
def free() -> str:
    """An address that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def call(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> Outcome:
    """Run a command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    captured = capsys.readouterr()
    status = ended.value.code
    assert isinstance(status, int)
    return Outcome(status, captured.out, captured.err)


def refused(found: Outcome, status: int, message: str) -> None:
    assert found.status == status, found.err
    assert found.out == ""
    assert found.err.endswith("\n")
    line = found.err[:-1]
    assert line.isprintable(), "one line, which no terminal takes for a command"
    assert line.startswith("vllm-priority")
    assert message in line


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_examples_that_the_command_line_accepts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, [name, "--help"])
    assert (status, err) == (0, "")
    lines = out.partition("Examples:\n")[2].splitlines()
    examples = [found[1] for line in lines if (found := re.search(rf"vllm-priority {name}\b(.*)$", line))]
    assert examples and len(examples) == len(lines)
    for example in examples:
        words = itertools.takewhile(lambda word: word not in ("|", ">"), shlex.split(example.rstrip(')"')))
        cli.commands[name].make_context(name, list(words))  # raises if a word is not valid


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_has_the_same_help_on_its_own(name: str) -> None:
    alone = cli.commands[name]
    found = alone.get_help_option(click.Context(alone, **alone.context_settings))
    assert found and found.opts == ["-h", "--help"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_is_for(name: str) -> None:
    silent = [
        parameter.name
        for parameter in cli.commands[name].params
        if isinstance(parameter, click.Option) and not parameter.help and parameter.name != "method"
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for name in COMMANDS
        for option in cli.commands[name].params
        if isinstance(option, click.Option)
        and not isinstance(option.type, (click.types.StringParamType, click.types.BoolParamType))
    ],
    ids=lambda value: value if isinstance(value, str) else max(value.opts, key=len),
)
@pytest.mark.parametrize("value", ["", "nonsense", "nan", "inf", "9" * 5000])
def test_what_an_option_cannot_be_is_named_with_what_it_can_be(
    name: str, option: click.Parameter, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    long_name = max(option.opts, key=len)
    message = f"vllm-priority: {long_name}: {value[:60]!r} is not valid. "
    refused(call(capsys, [name, f"{long_name}={value}"]), 2, message)


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name in COMMANDS for option in cli.commands[name].params if option.metavar == "FILE"],
    ids=lambda value: value if isinstance(value, str) else max(value.opts, key=len),
)
def test_an_empty_text_is_no_file(name: str, option: click.Option, capsys: pytest.CaptureFixture[str]) -> None:
    long_name = max(option.opts, key=len)
    refused(
        call(capsys, [name, f"{long_name}="]),
        2,
        f"{long_name}: '' is not valid. Use the path of a file.",
    )


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_the_bare_command_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, arguments)
    assert (status, err) == (0, "")
    assert all(f"  {name}" in out for name in COMMANDS)
    assert "vllm-priority demo" in out


@pytest.mark.parametrize("arguments", [["--version"], ["--version", "run"]])
def test_the_option_version_prints_only_the_version(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, arguments) == (0, f"vllm-priority {__version__}\n", "")


def _complete(line: str, folder: Path) -> list[str]:
    """What bash, set up by the command, completes at the end of a line."""
    program = folder / "bin" / "vllm-priority"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m control_plane.cli "$@"\n')
    program.chmod(0o755)
    script = f"""
        compopt() {{ COMPREPLY+=("compopt $2"); }}
        eval "$(vllm-priority completion bash)"
        complete -p vllm-priority >/dev/null || exit 1
        COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        _vllm_priority_completion vllm-priority
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True,
        env={**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vllm-priority ex", ["explain"]),
        ("vllm-priority run --drain", ["--drain-seconds", "--drain-accept-seconds"]),
        ("vllm-priority config --target istio", ["istio", "istio-waypoint"]),
        ("vllm-priority validate --file pol", ["compopt default"]),
    ],
)
def test_bash_completes_commands_options_values_and_files(line: str, expected: list[str], tmp_path: Path) -> None:
    assert _complete(line, tmp_path) == expected


@pytest.mark.parametrize(
    ("shell", "registers"),
    [("bash", "complete -o nosort"), ("zsh", "compdef _vllm_priority_completion vllm-priority"),
     ("fish", "complete --no-files --command vllm-priority")],
)  # fmt: skip
def test_each_shell_has_a_completion_script(
    shell: str, registers: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, out, err = call(capsys, ["completion", shell])
    assert (status, err) == (0, "")
    assert registers in out
    # What the script runs when a key is pressed.
    monkeypatch.setenv("_VLLM_PRIORITY_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "vllm-priority ex")
    monkeypatch.setenv("COMP_CWORD", "ex" if shell == "fish" else "1")
    status, out, _ = call(capsys, [])
    assert (status, "explain" in out) == (0, True)


def test_colours_are_left_out_if_the_environment_says_so(
    dead: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """https://no-color.org"""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    assert colour.search(call(capsys, ["doctor", "--engine", f"http://{dead}"]).out)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colour.search(call(capsys, ["doctor", "--engine", f"http://{dead}"]).out)


def test_version_says_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, ["version"]).out.startswith(f"vllm-priority {__version__} (Envoy ")


def test_version_works_without_an_envoy(capsys: pytest.CaptureFixture[str], no_envoy: None) -> None:
    assert call(capsys, ["version"]) == (0, f"vllm-priority {__version__} (Envoy not found)\n", "")
    assert json.loads(call(capsys, ["version", "--json"]).out) == {
        "version": __version__, "envoy": None, "envoy_path": None,
    }  # fmt: skip


@pytest.fixture
def no_envoy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither on the PATH, nor beside Python where the wheel puts it."""
    monkeypatch.delenv("ENVOY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("control_plane.proxy.sysconfig.get_path", lambda name: str(tmp_path))


POLICY_FILES = [
    ("missing.yaml", "missing.yaml: there is no such file. Use the path of a policy in YAML, for example policy.yaml."),
    ("folder", "folder: cannot be read: Is a directory"),
    ("latin.yaml", "latin.yaml: cannot be read: not UTF-8 text"),
    ("broken.yaml", "broken.yaml: not valid YAML: line 1, column 11: expected the node content"),
    ("list.yaml", "list.yaml: [{'default': 1}] is not a valid policy. Use a mapping of a policy's keys"),
    ("unknown.yaml", "unknown.yaml: defualt: this key is unknown. It must be one of: header, engine, "),
    (
        "contradiction.yaml",
        "contradiction.yaml: range.min: 2 is greater than range.max, which is 1. Use a smaller value.",
    ),
    ("new\nline.yaml", "new\\nline.yaml: there is no such file"),
    ("\x1b[2J", "\\x1b[2J: there is no such file"),
]

# Each takes a policy file as its last word.
TAKES_A_POLICY = [
    "validate -f",
    "config --role render --target bootstrap --policy",
    "config --role engine --target istio --policy",
    "run --role render --upstream 127.0.0.1:8000 --listen 127.0.0.1:18000 --policy",
    "explain --path /inference/v1/generate --policy",
    "inject -f ok.yaml --policy",
]


@pytest.mark.parametrize(("file", "message"), POLICY_FILES)
@pytest.mark.parametrize("command", TAKES_A_POLICY)
def test_a_wrong_policy_is_named(
    command: str, file: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(call(capsys, [*command.split(), file]), 2, message)


BOOTSTRAP = ["config", "--role", "render", "--target", "bootstrap"]
RUN = ["run", "--role", "render", "--upstream", "{dead}", "--listen", "{free}"]
EXPLAIN = ["explain", "--path", "/inference/v1/generate"]
INJECT = ["inject", "-f", "ok.yaml"]
SERVE = ["serve", "--policy", "ok.yaml", "--listen", "127.0.0.1:1"]
NOT_A_URL = "is not a valid URL. Use https://HOST:PORT together with a CA, for example https://"
ADDRESS = "is not a valid address. Use HOST:PORT, for example 127.0.0.1:8000 or [::1]:8000."
URL = "is not a valid server URL. Use the root URL of a server, for example http://127.0.0.1:8000."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "vllm-priority: 'nope' is not a command. It must be one of: completion, config,"),
        (["--nope"], "vllm-priority: '--nope' is not an option of this command. See vllm-priority --help."),
        (["run", "--lisen", "x"], "'--lisen' is not an option of this command. Did you mean --listen?"),
        (["version", "x"], "vllm-priority version: 'x' is not expected. Every value must follow its option. See"),
        (["validate"], "vllm-priority validate: --file: not set. Use the path of a file. See vllm-"),
        (["completion"], "vllm-priority completion: SHELL: not set. It must be one of: bash, zsh, fish. See"),
        (["completion", "sh"], "vllm-priority completion: SHELL: not valid. It must be one of: bash, zsh, fish. See"),
        # config
        (["config", "--role", "render"], "--target: not set. It must be one of: bootstrap, xds, istio"),
        (["config", "--role", "pooler", "--target", "xds"], "--role: 'pooler' is not valid. It must be one of:"),
        (["config", "--role", "render", "--target", "nginx"], "--target: 'nginx' is not valid. It must be one of: "),
        *(
            ([*BOOTSTRAP, option, address], f"{option}: {address!r} {ADDRESS}")
            for option in ("--upstream", "--listen", "--admin")
            for address in ("", "vllm", ":80", "vllm:", "vllm:http", "vllm:0", "vllm:65536", "http://vllm:80", "::1:80")
        ),
        *(
            ([*BOOTSTRAP, "--upstream", address], f"--upstream: {address!r} {ADDRESS}")
            for address in ("a b:80", "a..b:80", "-a:80", "1.2.3:80", "256.1.1.1:80", "[g::]:80", "[1.2.3.4]:80", "a:٨")
        ),
        *(
            ([*BOOTSTRAP, "--control-plane", url], f"--control-plane: {url!r} {NOT_A_URL}")
            for url in ("", "vllm", "vllm:80", "127.0.0.1:8080", "HTTPS://vllm:80", "ftp://vllm:80", "//vllm:80")
        ),
        *(
            ([*BOOTSTRAP, "--control-plane", f"{scheme}://{address}"], f"--control-plane: {address!r} {ADDRESS}")
            for scheme in ("http", "https")
            for address in ("", "vllm", "vllm:", "vllm:0", "vllm:80/", "user@vllm:80", "::1:80", "http://vllm:80")
        ),
        (
            [*BOOTSTRAP, "--control-plane", "https://vllm:80"],
            "--control-plane-ca: not set, and the control plane has an https:// URL. Use the PEM file",
        ),
        (
            [*BOOTSTRAP, "--control-plane", "http://vllm:80", "--control-plane-ca", "ca.crt"],
            "--control-plane-ca: not used with http://. Use an https:// URL for the control plane.",
        ),
        (
            [*BOOTSTRAP, "--control-plane-ca", "ca.crt"],
            "--control-plane-ca: not used without --control-plane. Set --control-plane too.",
        ),
        *(
            ([*BOOTSTRAP, *option, "--upstream", "vllm:80"], f"{option[0]}: not used without TLS. Use https://vllm:80")
            for option in (["--upstream-ca", "ca.crt"], ["--upstream-server-name", "a"], ["--upstream-insecure"])
        ),
        ([*BOOTSTRAP, "--upstream", "https://vllm:80"], "--upstream-ca: not set, and the upstream is an https:// URL."),
        (
            [*BOOTSTRAP, "--upstream", "https://vllm:80", "--upstream-insecure"],
            "--upstream-insecure: vllm:80 is not on this machine, so anybody in between could pass for the server.",
        ),
        (
            [*BOOTSTRAP, "--upstream", "https://localhost:80", "--upstream-insecure", "--upstream-ca", "ca.crt"],
            "--upstream-ca: not used if the upstream's certificate is not verified. Set only one of the two.",
        ),
        ([*RUN, "--tls-cert", "tls.crt"], "--tls-key: not set. TLS needs both a certificate and its key."),
        ([*RUN, "--tls-key", "tls.key"], "--tls-cert: not set. TLS needs both a certificate and its key."),
        ([*RUN, "--client-ca", "ca.crt"], "--client-ca: not used without TLS. Set --tls-cert and --tls-key too."),
        (
            [*RUN, "--tls-cert", "ok.yaml", "--tls-key", "ok.yaml"],
            "--tls-cert: ok.yaml: cannot be used: not a certificate in PEM format.",
        ),
        (
            [*RUN, "--tls-cert", "ca.crt", "--tls-key", "ok.yaml"],
            "--tls-key: ok.yaml: cannot be used: not a key in PEM format without a password.",
        ),
        (
            [*BOOTSTRAP, "--token-file", "token"],
            "--token-file: not used without --control-plane. Set --control-plane too.",
        ),
        *(
            ([*SERVE, option, "none"], f"{option}: none: cannot be read: No such file or directory.")
            for option in ("--token-file", "--api-token-file")
        ),
        ([*SERVE, "--token-audience", "a b"], "--token-audience: not used without a control plane."),
        (
            [*SERVE, "--token-audience", "a b", "--control-plane", "https://a:1", "--control-plane-ca", "ca.crt"],
            "--token-audience: 'a b' is not a valid audience. Use letters, digits and ./:-_, for example vllm-",
        ),
        (
            [*BOOTSTRAP, "--control-plane", "https://vllm:80", "--control-plane-ca", "none.crt"],
            "--control-plane-ca: none.crt: cannot be read: No such file or directory. Use a file in PEM format.",
        ),
        (
            [*BOOTSTRAP, "--control-plane", "https://vllm:80", "--control-plane-ca", "ok.yaml"],
            "--control-plane-ca: ok.yaml: not a certificate in PEM format. Use the file of the CA.",
        ),
        (
            [*BOOTSTRAP, "--listen", "localhost:80"],
            "--listen: 'localhost:80' is not an IP address and a port. Use both, for example 127.0.0.1:18000.",
        ),
        ([*BOOTSTRAP, "--admin", "localhost:80"], "--admin: 'localhost:80' is not an IP address and a port."),
        (
            [*BOOTSTRAP, "--listen", "127.0.0.1:8000"],
            "--listen: 127.0.0.1:8000 is the address in --upstream. Use another address.",
        ),
        (
            [*BOOTSTRAP, "--listen", "127.0.0.1:5", "--admin", "127.0.0.1:5"],
            "--listen: 127.0.0.1:5 is the address in --admin. Use another address.",
        ),
        ([*BOOTSTRAP, "-o", "none/x"], "-o: none/x: cannot be written: No such file or directory. Use a file in"),
        ([*BOOTSTRAP, "-o", "folder"], "-o: folder: cannot be written: Is a directory"),
        ([*BOOTSTRAP, "-o", "/dev/full"], "-o: /dev/full: cannot be written: No space left on device"),
        (
            [*BOOTSTRAP, "--policy", "named.yaml", "--policy-name", "urgent"],
            "--policy-name: named.yaml has no policy 'urgent'. Use one of: default, batch.",
        ),
        ([*BOOTSTRAP, "--policy-name", "urgent"], "the built-in policy has no policy 'urgent'. Use one of: default."),
        ([*BOOTSTRAP, "--check", "--envoy", "none"], "--envoy: 'none' is not a program that can be run. Use the"),
        ([*BOOTSTRAP, "--check", "--envoy", "./text"], "--envoy: './text' is not a program that can be run"),
        ([*BOOTSTRAP, "--check", "--envoy", "./not-envoy"], "not-envoy is not an Envoy: it does not print"),
        ([*BOOTSTRAP, "--check", "--envoy", "./no-program"], "no-program cannot be run: Exec format error."),
        ([*BOOTSTRAP, "--check", "--envoy", "true"], "true is not an Envoy: it does not print"),
        (
            ["config", "--role", "render", "--target", "istio", "--check"],
            "--check: not used by --target istio. It has an effect only with --target bootstrap.",
        ),
        (
            ["config", "--role", "render", "--target", "istio", "--selector", "x"],
            "--selector: 'x' is not a valid label. Use KEY=VALUE",
        ),
        (
            ["config", "--role", "render", "--target", "envoy-gateway", "--upstream", "127.0.0.1:8000"],
            "--upstream: 127.0.0.1:8000 is not a valid Service. Use NAME:PORT or NAME.NAMESPACE:PORT",
        ),
        # run
        (["run"], "vllm-priority run: --role: not set. It must be one of: render, engine."),
        (["run", "--role", "render", "--listen", "127.0.0.1:1"], "--upstream: not set. Use [https://]HOST:PORT."),
        ([*RUN, "--upstream", "nowhere"], f"--upstream: 'nowhere' {ADDRESS}"),
        ([*RUN, "--upstream", "http://127.0.0.1:8000"], f"--upstream: 'http://127.0.0.1:8000' {ADDRESS}"),
        ([*RUN, "--listen", "localhost:18000"], "--listen: 'localhost:18000' is not an IP address and a port."),
        ([*RUN, "--concurrency", "0"], "--concurrency: '0' is not valid. Use a whole number from 1 to 1024."),
        ([*RUN, "--request-timeout", "-1"], "--request-timeout: '-1' is not valid. Use a whole number from 0 to"),
        ([*BOOTSTRAP, "--request-timeout", "0.5"], "--request-timeout: '0.5' is not valid. Use a whole number"),
        (
            [*RUN, "--otlp-endpoint", "https://127.0.0.1:4317"],
            "--otlp-endpoint: 'https://127.0.0.1:4317' is not valid. Use http://HOST:PORT of a collector",
        ),
        ([*RUN, "--trace-percent", "5"], "--trace-percent: not used without a collector. Set --otlp-endpoint too."),
        ([*RUN, "--drain-seconds", "-1"], "--drain-seconds: '-1' is not valid. Use a number from 0 to 86400."),
        ([*RUN, "--drain-seconds", "nan"], "--drain-seconds: 'nan' is not valid. Use a number from 0 to 86400."),
        (
            [*RUN, "--drain-accept-seconds", "31"],
            "--drain-accept-seconds: 31 is more than --drain-seconds, which is 30 and bounds it. Raise",
        ),
        ([*RUN, "--spread"], " is one address. Use it with a name in --upstream."),
        ([*RUN, "--envoy", "none"], "--envoy: 'none' is not a program that can be run. Use the path of"),
        # explain
        (["explain"], "--path: not set. Use PATH."),
        (["explain", "--path", "generate"], "--path: 'generate' is not a valid request target. Use a path that starts"),
        (["explain", "--path", "/a b"], "--path: '/a b' is not a valid request target"),
        (["explain", "--path", "/\udcff"], "--path: '/\\udcff' is not a valid request target"),
        ([*EXPLAIN, "-H", "nope"], "-H: 'nope' is not a valid header. Use NAME: VALUE"),
        ([*EXPLAIN, "-H", ": 5"], "-H: ': 5' is not a valid header"),
        ([*EXPLAIN, "-H", "a b: 5"], "-H: 'a b: 5' is not a valid header"),
        ([*EXPLAIN, "-H", "x-a: 5\nb"], "-H: 'x-a: 5\\nb' is not a valid header"),
        ([*EXPLAIN, "-H", "x-a: €"], "-H: 'x-a: €' is not a valid header"),
        ([*EXPLAIN, "-d", "@none"], "-d: 'none': cannot be read: No such file or directory. Use a"),
        ([*EXPLAIN, "-d", "@folder"], "-d: 'folder': cannot be read: Is a directory"),
        ([*EXPLAIN, "-d", "@a\0b"], "-d: 'a\\x00b': cannot be read: embedded null byte"),
        ([*EXPLAIN, "-X", "P T"], "--method: 'P T' is not a valid method. Use a token, for example POST."),
        ([*EXPLAIN, "--policy", "named.yaml", "--policy-name", "x"], "has no policy 'x'. Use one of: default, batch."),
        # doctor
        (["doctor"], "--render: neither a render server nor an engine is given. Use the root URL of at least one"),
        *(
            (["doctor", option, url], f"{option}: {url!r} {URL}")
            for option in ("--render", "--engine")
            for url in ("", "vllm", "vllm:8000", "ftp://vllm", "http://", "http://vllm:99999", "http://[::1")
        ),
        (
            ["doctor", "--engine", "http://{dead}", "--priority", "5"],
            "--priority: '5' is not valid. Use a whole number from -9223372036854775808 to -1.",
        ),
        (
            ["doctor", "--engine", "http://{dead}", "--priority", str(-(2**63) - 1)],
            "--priority: '-9223372036854775809' is not valid. Use a whole number from -9223372036854775808 to -1.",
        ),
        (["doctor", "--engine", "http://{dead}", "--header", "a b"], "--header: 'a b' is not a valid header name."),
        (["doctor", "--engine", "http://{dead}", "--api-key", "é"], "--api-key: the value cannot be sent in a header."),
        # demo
        (["demo", "--envoy", "none"], "--envoy: 'none' is not a program that can be run"),
        (["demo", "--envoy", "./not-envoy"], "not-envoy is not an Envoy: it does not print"),
        # inject
        (["inject"], "vllm-priority inject: --file: not set. Use the path of a file."),
        (["inject", "-f", "none"], "-f: none: cannot be read: No such file or directory. Use a file, or - for stdin."),
        (["inject", "-f", "folder"], "-f: folder: cannot be read: Is a directory"),
        (["inject", "-f", "latin.yaml"], "-f: latin.yaml: not UTF-8 text. Use manifests in YAML or JSON."),
        (["inject", "-f", "pod.yaml"], "line 4: malformed YAML: "),
        (["inject", "-f", "pod.yaml", "--uninject"], "line 4: malformed YAML: "),
        ([*INJECT, "--sidecar-resources", "{"], "--sidecar-resources: malformed JSON '{'. Use JSON, for example"),
        ([*INJECT, "--control-plane", "here:80"], f"--control-plane: 'here:80' {NOT_A_URL}"),
        # serve
        (["serve"], "vllm-priority serve: --policy: not set. Use the path of a file."),
        (["serve", "--policy", "ok.yaml", "--listen", "here"], f"--listen: 'here' {ADDRESS}"),
        (
            ["serve", "--policy", "ok.yaml", "--tls-cert", "text", "--tls-key", "text", "--tls-listen", "here"],
            f"--tls-listen: 'here' {ADDRESS}",
        ),
        (
            ["serve", "--policy", "ok.yaml", "--listen", "{taken}", "--tls-listen", "127.0.0.1:8443"],
            "--tls-listen: not used without a certificate. Set a certificate and its key too.",
        ),
        (
            ["serve", "--policy", "ok.yaml", "--listen", "{taken}", "--numeric-services", "redirect"],
            "--numeric-services: 'redirect' works only if the control plane can read Services.",
        ),
        (["serve", "--policy", "ok.yaml", "--tls-cert", "text"], "--tls-key: not set. TLS needs both"),
        (["serve", "--policy", "ok.yaml", "--tls-key", "text"], "--tls-cert: not set. TLS needs both"),
    ],
)  # fmt: skip
def test_a_wrong_use_is_refused(
    arguments: list[str],
    message: str,
    folder: Path,
    dead: str,
    free: str,
    taken: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    addresses = {"{dead}": dead, "{free}": free, "{taken}": taken}
    placed = [re.sub(r"\{\w+\}", lambda found: addresses[found[0]], argument) for argument in arguments]
    refused(call(capsys, placed), 2, message)


INJECTOR_OPTIONS = [
    *(
        (option, image, f"{option}: {image[:60]!r} is not a valid image reference. Use HOST/PATH:TAG")
        for option in ("--sidecar-image", "--redirect-image")
        for image in ("", "a b", "http://corp/envoy", "corp/envoy:", ":1.40.0", "corp//envoy", "/envoy", "corp/Envoy",
                      "envoy@sha256:12", "envoy:" + "1" * 129, "envoy\n", "{{ image }}")
    ),
    ("--sidecar-resources", "", "--sidecar-resources: malformed JSON ''. Use JSON, for example"),
    ("--sidecar-resources", "[]", "--sidecar-resources: '[]' is not a valid ResourceRequirements. Use JSON"),
    ("--sidecar-resources", '{"requests": {"": "1"}}', "is not a valid ResourceRequirements. Use JSON"),
    ("--sidecar-resources", '{"requests": {"c pu": "1"}}', "is not a valid ResourceRequirements. Use JSON"),
    (
        "--sidecar-resources", '{"requests": {"cpu": "1500m"}, "limits": {"cpu": "1"}}',
        "--sidecar-resources: requests.cpu 1500m is above limits.cpu 1. Request at most the limit.",
    ),
    (
        "--sidecar-resources", '{"requests": {"memory": "1Gi"}, "limits": {"memory": "1G"}}',
        "--sidecar-resources: requests.memory 1Gi is above limits.memory 1G. Request at most the limit.",
    ),
    *(
        ("--kubernetes-version", text, f"--kubernetes-version: {text!r} is not a valid version. Use MAJOR.MINOR")
        for text in ("", "new", "1", "1.33 or so", "1.33/x", "1.٣")
    ),
    *(
        ("--sidecar-listen-host", host, f"--sidecar-listen-host: {host!r} is not an address on which every pod can be "
         "reached. Use 0.0.0.0, or :: for IPv4 and IPv6.")
        for host in ("", "localhost", "127.0.0.1", "224.0.0.1", "10.0.0.1", "::1", "fe80::1%eth0", "[::]")
    ),
    *(
        ("--sidecar-uid", uid, f"--sidecar-uid: {uid[:60]!r} is not a valid user id. Use a number from 1 to")
        for uid in ("", "0", "-1", "root", "None", "1.0", "2147483648", "9" * 5000)
    ),
    *(
        ("--control-plane", url, f"--control-plane: {url!r} {NOT_A_URL}") for url in ("", "here", "vllm-priority:8080")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("option", "value", "message"), INJECTOR_OPTIONS)
@pytest.mark.parametrize("command", ["inject -f ok.yaml", "serve --policy ok.yaml --listen {taken}"])
def test_what_no_sidecar_can_be_set_up_with_is_refused_at_the_start(
    command: str, option: str, value: str, message: str, folder: Path, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.replace("{taken}", taken).split()
    refused(call(capsys, [*words, f"{option}={value}"]), 2, message)


def test_inject_gives_one_reason_for_what_it_leaves_as_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    injected = folder / "injected.yaml"
    injected.write_text(injected_example())
    already = "not injected (AlreadyInjected): the pod has the sidecar already."
    assert call(capsys, ["inject", "-f", str(injected)]).err.splitlines() == [
        f"vllm-priority inject: Deployment/vllm-render: {already}",
        f"vllm-priority inject: Deployment/vllm-engine: {already}",
        f"vllm-priority inject: {injected}: unchanged",
    ]
    nothing = "vllm-priority inject: ok.yaml: unchanged: it contains no pod template of a vLLM server\n"
    assert call(capsys, ["inject", "-f", "ok.yaml"]) == (0, "default: 1", nothing)


@pytest.mark.parametrize("name", ["", "A B", "Vllm", "a.b", "-a", "a-", "a_b", "a" * 64])
def test_a_namespace_that_no_cluster_can_have_is_refused_by_serve(
    name: str, folder: Path, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["serve", "--policy", "ok.yaml", "--listen", taken, f"--own-namespace={name}"]
    message = f"--own-namespace: {name[:60]!r} is not a valid namespace. Use 1 to 63 lower-case letters, digits and -"
    refused(call(capsys, arguments), 2, message)


@pytest.mark.parametrize("missing", ["cert", "key"])
def test_an_empty_path_is_not_taken_for_no_tls(
    missing: str, folder: Path, taken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"cert": "text", "key": "text"} | {missing: ""}
    files = [f"--tls-{kind}={path}" for kind, path in paths.items()]
    found = call(capsys, ["serve", "--policy", "ok.yaml", "--listen", taken, *files])
    refused(found, 2, f"--tls-{missing}: '' is not valid. Use the path of a file.")


@pytest.mark.parametrize(
    "arguments",
    [
        *(["--sidecar-image", image] for image in (
            "envoy", "envoy:v1.40.0", "localhost:5000/envoy", "docker.io/envoyproxy/envoy:distroless-v1.40.0",
            "registry.corp:443/a/b__c/d-e.f:x@sha256:" + "0a" * 32, "[fd00::1]:5000/envoy",
        )),
        *(["--kubernetes-version", text] for text in ("1.33", "v1.33.2", "v1.33.2-gke.100", "1.33+", "v1.32.9+k3s1")),
        ["--sidecar-listen-host", "::"], ["--sidecar-uid", "none"], ["--sidecar-uid", "1"],
        ["--sidecar-resources", '{"requests": {"cpu": "0.5", "nvidia.com/gpu": "1"}, "limits": {"cpu": "500m"}}'],
        ["--sidecar-resources", "{}"],
    ],
)  # fmt: skip
def test_what_a_sidecar_can_be_set_up_with_is_taken(
    arguments: list[str], folder: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*INJECT, *arguments])
    assert ended.value.code == 0, capsysbinary.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [*BOOTSTRAP, "--check"],
        ["run", "--role", "render", "--upstream", "127.0.0.1:8000", "--listen", "127.0.0.1:18000"],
        ["demo"],
    ],
)
def test_no_envoy_is_refused_with_how_to_get_one(
    arguments: list[str], no_envoy: None, capfd: pytest.CaptureFixture[str]
) -> None:
    refused(
        call(capfd, arguments),
        2,
        "--envoy: not set, and there is no Envoy on the PATH. Use the path of an",
    )


@pytest.mark.parametrize("arguments", [[*BOOTSTRAP, "--check"], ["demo"]])
def test_an_envoy_of_the_environment_that_is_none_is_named(
    arguments: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENVOY", "/nowhere/envoy")
    refused(call(capsys, arguments), 2, "$ENVOY: '/nowhere/envoy' is not a program that can be run. Use the path of")


@pytest.mark.parametrize("option", ["--render", "--engine"])
def test_the_doctor_finds_a_dead_server_unreachable(option: str, dead: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, ["doctor", option, f"http://{dead}", "--json"])
    assert status == 1
    assert json.loads(out)["exit_status"] == 1
    assert "refused" in out
    assert "Traceback" not in err
    assert len(err.splitlines()) == 1, "what it sends, and nothing else"


def test_the_doctors_advice_names_options_of_the_command(dead: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = call(capsys, ["doctor", "--engine", f"http://{dead}", "--json"])
    assert [check["next_step"] for check in json.loads(out)["checks"]] == ["Start the server, or correct --engine."]


def _core() -> Iterator[tuple[Path, ast.AST]]:
    """The modules of the package without its command line, each with all nodes of its syntax."""
    package = ROOT / "control_plane"
    for path in sorted(package.rglob("*.py")):
        if package / "cli" not in path.parents:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                yield path.relative_to(package), node


def _known_options() -> set[str]:
    return {name for command in cli.commands.values() for parameter in command.params for name in parameter.opts}


def test_every_field_that_an_error_can_name_has_an_option() -> None:
    fields = {
        str(node.args[0].value)
        for _, node in _core()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "InvalidField"
        if isinstance(node.args[0], ast.Constant)
    }
    assert {"control_plane_ca", "uid", "max_fill"} <= fields
    assert {field: option_of(field) for field in fields if option_of(field) not in _known_options()} == {}
    assert set(OPTIONS.values()) <= _known_options()


def _texts(node: ast.AST) -> str:
    """A string, an f-string without its values, or nothing. Docstrings are not messages."""
    match node:
        case ast.Call(args=args) | ast.Tuple(elts=args) | ast.Dict(values=args):
            return "".join(map(_texts, args))
        case ast.Assign(value=value) | ast.Return(value=ast.expr() as value) | ast.keyword(value=value):
            return _texts(value)
        case ast.JoinedStr(values=values):
            return "".join(str(value.value) for value in values if isinstance(value, ast.Constant))
        case ast.Constant(value=str(text)):
            return text
    return ""


def test_only_the_command_line_spells_its_options() -> None:
    """Errors, warnings and advice name fields or things. A whole command to run may have options."""
    spelled = [
        f"{path}: {text}"
        for path, node in _core()
        if not isinstance(node, (ast.JoinedStr, ast.Constant))
        and " " in (text := _texts(node))
        and not re.search("vllm-priority [a-z]|vllm serve", text)
        if set(re.findall(r"(?<![\w-])--[a-z-]+", text)) & _known_options()
    ]
    assert spelled == []


def _command(arguments: Sequence[str], folder: Path, **environment: str) -> Outcome:
    """Run a command in a process of its own, for those that set a process up."""
    done = subprocess.run(
        [sys.executable, "-m", "control_plane.cli", *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "missing.yaml"], "missing.yaml: there is no such file"),
        (["--policy", "unknown.yaml"], "unknown.yaml: defualt: this key is unknown. It must be one of: "),
        (
            ["--policy", "ok.yaml", "--listen", "{taken}"],
            "--listen: cannot listen on {taken}: Address already in use. Use a free address of this machine.",
        ),
        (
            ["--policy", "ok.yaml", "--listen", "192.0.2.1:8080"],
            "--listen: cannot listen on 192.0.2.1:8080: Cannot assign requested address. Use a free address",
        ),
        (
            ["--policy", "ok.yaml", "--tls-cert", "tls.crt", "--tls-key", "tls.key", "--tls-listen", "{taken}"],
            "--tls-listen: cannot listen on {taken}: Address already in use. Use a free address of this machine.",
        ),
        (["--policy", "ok.yaml", "--tls-cert", "text", "--tls-key", "text"], "text: cannot be read: not a certificate"),
        (["--policy", "ok.yaml", "--tls-cert", "none", "--tls-key", "none"], "none: cannot be read: No such file or"),
    ],
)  # fmt: skip
def test_serve_refuses_what_it_cannot_serve(
    arguments: list[str], message: str, folder: Path, taken: str, free: str
) -> None:
    write_pair(folder)
    placed = ["serve", "--listen", free, *(argument.replace("{taken}", taken) for argument in arguments)]
    refused(_command(placed, folder), 2, message.replace("{taken}", taken))


def test_a_reader_that_goes_away_is_no_traceback(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "control_plane.cli", *BOOTSTRAP],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(30) == 1


def test_no_message_guesses_the_article_of_what_it_names() -> None:
    """f"a {noun}" reads "a AdmissionReview" for one noun or another."""
    guesses = [
        f"{path.name}:{node.lineno}"
        for path in sorted((ROOT / "control_plane").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr)
        for text, placed in itertools.pairwise(node.values)
        if isinstance(placed, ast.FormattedValue) and isinstance(text, ast.Constant)
        and re.search(r"\b[Aa]n? $", str(text.value))
    ]  # fmt: skip
    assert guesses == []


def test_validate_names_the_policies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, ["validate", "-f", "named.yaml"]) == (0, "named.yaml: valid; named policies: batch\n", "")
    assert json.loads(call(capsys, ["validate", "-f", "ok.yaml", "--json"]).out)["default"]["default"] == 1


@pytest.mark.parametrize("target", ["bootstrap", "xds", "istio", "istio-waypoint", "envoy-gateway"])
def test_config_writes_the_same_to_a_file_as_to_stdout(
    target: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["config", "--role", "engine", "--target", target, "--policy", "ok.yaml"]
    status, out, err = call(capsys, arguments)
    assert status == 0
    assert "enableLua" in err if target == "envoy-gateway" else err == "", "what must be done first is said"
    assert call(capsys, [*arguments, "-o", "out.yaml"]) == (0, "", err)
    assert (folder / "out.yaml").read_text() == out
    assert list(yaml.safe_load_all(out))


# A value for each option of `config` that changes what comes out, where the target uses the option.
CHANGES = {
    "--role": ["render"],
    "--target": ["{other}"],
    "--policy": ["ok.yaml"],
    "--policy-name": ["batch", "--policy", "named.yaml"],
    "--upstream": ["vllm:9000"],
    "--upstream-ca": ["ca.crt", "--upstream", "https://vllm:9000"],
    "--upstream-server-name": ["vllm.test", "--upstream", "https://vllm:9000", "--upstream-ca", "ca.crt"],
    "--upstream-insecure": ["--upstream", "https://localhost:9000"],
    "--spread": ["--upstream", "vllm:9000"],
    "--listen": ["127.0.0.1:9001"],
    "--admin": ["127.0.0.1:9002"],
    "--control-plane": ["http://127.0.0.1:9003"],
    "--control-plane-ca": ["ca.crt", "--control-plane", "https://127.0.0.1:9003"],
    "--token-file": ["token", "--control-plane", "http://127.0.0.1:9003"],
    "--health": ["127.0.0.1:9004"],
    "--access-log": ["/dev/null"],
    "--log-requests": ["none"],
    "--otlp-endpoint": ["http://127.0.0.1:4317"],
    "--trace-percent": ["5", "--otlp-endpoint", "http://127.0.0.1:4317"],
    "--request-timeout": ["60"],
    "--memory-limit": ["512Mi"],
    "--namespace": ["ml"],
    "--selector": ["app=vllm"],
    "--gateway": ["infra/eg"],
    "--check": [],
    "--envoy": ["none", "--check"],
    "--output": ["out.yaml"],
}


def _long_name(option: click.Parameter) -> str:
    return max(option.opts, key=len)


def test_the_table_of_what_a_target_uses_names_every_option_of_config_and_every_target() -> None:
    options = {_long_name(option) for option in cli.commands["config"].params}
    assert set(USED_BY) == options == set(CHANGES)
    assert set().union(*USED_BY.values()) == set(TARGETS)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("option", list(CHANGES))
def test_config_says_which_option_the_target_does_not_use_and_heeds_the_others(
    option: str, target: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVOY", "/nowhere/envoy")  # so that it shows whether Envoy is asked
    plain = ["config", "--role", "engine", "--target", target]
    other = "xds" if target == "bootstrap" else "bootstrap"
    with_option = [*plain, option, *(word.replace("{other}", other) for word in CHANGES[option])]
    found = call(capsys, with_option)
    if target in USED_BY[option]:
        assert "not used by" not in found.err
        assert found != call(capsys, plain)
    else:
        *firsts, last = USED_BY[option]
        users = f"{', '.join(firsts)} or {last}" if firsts else last
        line = f"{option}: not used by --target {target}. It has an effect only with --target {users}."
        if option in ("--upstream", "--listen", "--admin"):
            status, out, err = call(capsys, plain)
            assert found == (status, out, f"vllm-priority: note: {line}\n{err}")
        else:
            refused(found, 2, line)


def test_an_option_that_is_refused_for_a_target_is_refused_with_its_default_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["config", "--role", "engine", "--target", "istio", "--access-log", "/dev/stdout"]
    refused(call(capsys, arguments), 2, "--access-log: not used by --target istio. It has an effect only with ")


def test_plain_http_to_the_control_plane_is_possible_and_warned_about(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = call(capsys, [*BOOTSTRAP, "--control-plane", "http://127.0.0.1:8080"])
    assert (found.status, found.err) == (
        0,
        "vllm-priority: warning: polls of http://127.0.0.1:8080 are neither encrypted nor authenticated. Whoever can "
        "respond to them can run code in the sidecar. Use an https:// URL and the CA that signed its certificate.\n",
    )
    found = call(capsys, [*BOOTSTRAP, "--control-plane", "https://127.0.0.1:8080", "--control-plane-ca", "ca.crt"])
    assert (found.status, found.err) == (0, "")


def test_an_envoy_that_nothing_would_run_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(call(capsys, [*BOOTSTRAP, "--envoy", "none"]), 2, "--envoy: not used without --check. Set --check too.")


def test_an_address_that_the_target_does_not_use_is_in_nobodys_way(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """19001 is the admin's port by default, and xds writes no admin."""
    arguments = ["config", "--role", "engine", "--target", "xds", "--listen", "127.0.0.1:19001"]
    assert call(capsys, arguments).status == 0


def test_explain_reads_the_body_from_stdin(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"a":1}')))
    found = call(capsys, [*EXPLAIN, "-H", "X-Vllm-Priority: 5", "-d", "@-", "--json"])
    assert json.loads(found.out)["body"].rstrip() == '{"a":1,"priority":5}'
