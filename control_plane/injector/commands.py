"""Reads the command line of a container: the servers that it starts, their options, and where each word is written.

vLLM and SGLang are recognised. A command line is a list of words, or a script that a shell runs (`sh -c`). The reader
follows quotes, continued lines, variables that the container sets, and the ends of commands, but it runs nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from control_plane.vllm import DEFAULT_PORT, Role

Kind = Literal["http", "headless", "grpc", "batch"]
"""What a command starts: an HTTP server; a worker of an engine on several nodes; a gRPC server; a batch run."""

Field = Literal["command", "args"]

Environment = Mapping[str, str | None]
"""A container's variables. None: the value is known only when the container starts."""


@dataclass(frozen=True)
class Word:
    """One word of a command line.

    raw: as it is written. literal: without quotes. text: with its variables replaced, None where that is possible only
    at run time. field, index: the list and the entry in which it is written. start: where in the entry, if that is a
    script. None: the entry is the word.
    """

    raw: str
    literal: str
    text: str | None
    field: Field
    index: int
    start: int | None = None


@dataclass(frozen=True)
class Edit:
    """One change to a command line.

    now: the new text. was: what it replaces, part of a script or a whole entry. None: `now` is a new entry at `index`.
    start: where a part of a script begins.
    """

    field: Field
    index: int
    now: str
    was: str | None
    start: int = 0


@dataclass(frozen=True)
class Invocation:
    """One server that a command line starts.

    words: the words of its command, from the program on. understood: the words are certain to be those of the server,
    so an option can be changed.
    """

    kind: Kind
    role: Role
    words: tuple[Word, ...]
    default_port: int
    understood: bool

    def _values(self, *names: str) -> Iterator[tuple[Word, Word | None, str | None]]:
        """Each use of an option: the word that names it, the next word if that is its value, and the value."""
        for word, after in zip_longest(self._own_words, self._own_words[1:]):
            name, equals, _ = word.literal.partition("=")
            if name.startswith("--") and name[2:].replace("_", "-") in names:
                if equals:
                    yield word, None, None if word.text is None else word.text.partition("=")[2]
                else:
                    yield word, after, after.text if after else None

    @property
    def _own_words(self) -> tuple[Word, ...]:
        """The words up to a `--`: vllm-rs passes the others on."""
        stop = next((at for at, word in enumerate(self.words) if word.literal == "--"), len(self.words))
        return self.words[:stop]

    def has(self, *names: str) -> bool:
        """Return whether the command has one of these options."""
        return any(True for _ in self._values(*names))

    def value(self, name: str) -> str | None:
        """Return the value of an option. None: it is not there, or not known before the container starts."""
        found = [value for _, _, value in self._values(name)]
        return found[-1] if found else None  # As argparse does, the last one counts.

    @property
    def port(self) -> int | None:
        """The port that the command names. None: it names none that is known."""
        text = self.value("port") or ""
        return int(text) if re.fullmatch("[0-9]{1,5}", text) and 0 < int(text) < 65536 else None

    def with_port(self, port: int) -> list[Edit]:
        """Return the changes that make the server listen on another port."""
        uses = list(self._values("port"))
        if uses:
            named, valued, _ = uses[-1]
            if valued is None:
                return [_replacement(named, f"{named.literal.partition('=')[0]}={port}")]
            return [_replacement(valued, str(port))]
        # The last word, so that this option counts, whatever variables and configuration files before it contain.
        last = self._own_words[-1] if self._own_words else None
        if last and last.start is not None:
            return [Edit(last.field, last.index, f" --port {port}", "", last.start + len(last.raw))]
        field: Field = last.field if last else "args"
        index = last.index + 1 if last else 0
        return [Edit(field, index, "--port", None), Edit(field, index, str(port), None)]


def _replacement(word: Word, now: str) -> Edit:
    return Edit(word.field, word.index, now, word.raw, word.start or 0)


def apply_edits(entries: list[str], field: Field, edits: Sequence[Edit]) -> list[str]:
    """Return the entries of `command` or `args` after those edits that belong to that field."""
    changed = list(entries)
    for edit in reversed(edits):
        if edit.field != field:
            continue
        if edit.was is None:
            changed.insert(edit.index, edit.now)
        else:
            text = changed[edit.index]
            changed[edit.index] = text[: edit.start] + edit.now + text[edit.start + len(edit.was) :]
    return changed


# ---- Which servers a container starts ------------------------------------------------------------------------------

_SHELL = re.compile(r"(?:.*/)?(?:ba|da|a|z|k)?sh")
_SCRIPT_OPTION = re.compile(r"-[a-zA-Z]*c")
_PYTHON_MODULE = re.compile(r"vllm(?:\.frontend)?\.entrypoints\.(?:.*\.)?(\w+)|sglang\.(launch_server)")
_PYTHON_FILE = re.compile(r"vllm/(?:frontend/)?entrypoints/(?:[^/]+/){0,3}(api_server|grpc_server|run_batch)\.py$")
_ENTRY_POINT_IMAGE = re.compile(r"vllm-openai")
"""Images whose entry point is `vllm serve`: vLLM's Dockerfile, and those that are built from it."""
_SERVER_IMAGE = re.compile(r"^(?!.*(?:router|gateway|exporter|operator|controller|benchmark)).*(?:vllm|sglang)")
_TELLING_OPTIONS = (
    "model", "served-model-name", "max-model-len", "max-num-seqs", "gpu-memory-utilization", "tensor-parallel-size",
)  # fmt: skip
"""With one of these as an argument, the entry point of an image is a server."""
_MENTIONED = re.compile(
    r"\bvllm(?:-rs)?\s+(?:serve|launch\s+(?:render|tokens))\b"
    r"|\b(?:vllm(?:\.frontend)?\.entrypoints\.[\w.]{0,99}api_server|sglang\.launch_server)\b"
)
_NOT_RUN = frozenset({"echo", "printf", "which", "type", "pkill", "pgrep", "pip", "pip3", "test", "["})
"""Programs that start no server that their arguments mention."""
_RESERVED = frozenset({"if", "then", "elif", "else", "while", "until", "do", "!", "{"})
"""Words of the shell that a command may follow."""

_LONGEST_ARGUMENT = 128 * 1024
"""Linux cannot start a program with a longer argument (MAX_ARG_STRLEN of execve(2)), and reading it could take long."""
_MOST_WORDS = 10_000
"""A script whose "$@" make more words of a container's arguments is too intricate."""
_LONGEST_WORD = 4096
"""A word that is longer once its variables are replaced counts as unknown. Of a word, only options and paths matter."""

SGLANG_PORT = 30000
"""SGLang's port where the command line names none."""


def invocations(
    command: Sequence[str], args: Sequence[str], image: str, environment: Environment
) -> tuple[Invocation, ...]:
    """Return the servers that a container starts, in the order of its command line."""
    if any(len(text) > _LONGEST_ARGUMENT for text in (*command, *args)):
        return ()
    words = [
        *(_entry(text, "command", index, environment) for index, text in enumerate(command)),
        *(_entry(text, "args", index, environment) for index, text in enumerate(args)),
    ]
    commands = _commands(words, environment)
    found = tuple(start for words in commands or () if (start := _started(words)))
    if found:
        return found
    line = "\n".join(" ".join(word.raw for word in words) for words in commands or [tuple(words)])
    if mentioned := _MENTIONED.search(line):
        # A script that is too intricate, or one that another program is given.
        texts = ["-m", *(text.strip("'\"") for text in line[mentioned.start() :].split())]
        started = _started([Word(text, text, text, "args", 0) for text in texts])
        return (replace(started, understood=False),) if started else ()
    return () if command else _of_image(image.rsplit("/", 1)[-1], words)


def _of_image(image: str, words: Sequence[Word]) -> tuple[Invocation, ...]:
    """The server that the image's entry point starts, which gets the container's arguments."""
    if [word.literal for word in words[:2]] == ["launch", "render"]:
        return (_server("render", words, understood=True),)
    if not _SERVER_IMAGE.search(image):
        return ()
    started = _server("engine", words, understood=False)
    understood = bool(_ENTRY_POINT_IMAGE.search(image)) or started.has(*_TELLING_OPTIONS)
    port = SGLANG_PORT if "sglang" in image else DEFAULT_PORT
    return (replace(started, understood=understood, default_port=port),)


def _started(words: Sequence[Word]) -> Invocation | None:
    """The server that one command starts."""
    texts = [word.literal for word in words]
    if next((text for text in texts if text not in _RESERVED), "") in _NOT_RUN:
        return None
    for at, text in enumerate(texts):
        program, rest = text.rsplit("/", 1)[-1], texts[at + 1 : at + 4]
        if text == "-m" and rest and (module := _PYTHON_MODULE.fullmatch(rest[0])):
            name = module[1] or module[2]
            if name != "main":
                return _of_module(name, words[at:])
            program, rest = "vllm", rest[1:]
        elif file := _PYTHON_FILE.search(text):
            return _of_module(file[1], words[at:])
        if program in ("vllm", "vllm-rs", "sglang") and rest:
            if rest[0] == "serve":
                return _server("engine", words[at:], understood=True, sglang=program == "sglang")
            if rest[0] == "launch" and rest[1:2] in (["render"], ["tokens"]):
                return _server("render" if rest[1] == "render" else "engine", words[at:], understood=True)
            if rest[0] == "run-batch":
                return _of_module("run_batch", words[at:])
    return None


def _of_module(name: str, words: Sequence[Word]) -> Invocation | None:
    kinds: Mapping[str, Kind] = {
        "api_server": "http",
        "launch_server": "http",
        "grpc_server": "grpc",
        "run_batch": "batch",
    }
    if name not in kinds:
        return None
    started = _server("engine", words, understood=True, sglang=name == "launch_server")
    return started if kinds[name] == "http" else replace(started, kind=kinds[name])


def _server(role: Role, words: Sequence[Word], *, understood: bool, sglang: bool = False) -> Invocation:
    found = Invocation("http", role, tuple(words), SGLANG_PORT if sglang else DEFAULT_PORT, understood)
    kind: Kind = "headless" if found.has("headless") else "grpc" if found.has("grpc", "grpc-mode") else "http"
    # Such a server listens on several ports.
    return replace(found, kind=kind, understood=understood and not found.has("data-parallel-multi-port-external-lb"))


def _commands(words: list[Word], environment: Environment) -> list[tuple[Word, ...]] | None:
    """The commands that a command line runs, each as its words. None: it has a script that is too intricate."""
    literals = [word.literal for word in words]
    shell = next((at for at, text in enumerate(literals[:-1]) if _SHELL.fullmatch(text)), None)
    if shell is None:
        return [tuple(words)]
    option = next((at for at in range(shell + 1, len(words)) if _SCRIPT_OPTION.fullmatch(literals[at])), None)
    if option is None or option + 1 >= len(words):
        return [tuple(words)]
    script = words[option + 1]
    commands = _script_commands(script, environment)
    if commands is None:
        return None
    # The words after a script are its $0, $1, ...
    passed = words[option + 3 :]
    uses = sum(word.literal in ("$@", "$*") for found in commands for word in found)
    if uses * len(passed) > _MOST_WORDS:
        return None
    return [
        tuple(part for word in found for part in (passed if word.literal in ("$@", "$*") else [word]))
        for found in commands
    ]


def _entry(text: str, field: Field, index: int, environment: Environment) -> Word:
    return Word(text, text, _replaced(text, _KUBERNETES_VARIABLE, environment), field, index)


# ---- Shells --------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r"""(?P<blank>(?:[ \t\r]|\\\r?\n)+|\#[^\n]*)
    |(?P<redirection>&>>?|[0-9]*(?:>>?|<>?)(?:&[0-9-]+|&)?(?!<))
    |(?P<end>[\n;&|()]+)
    |(?P<word>(?:\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\((?:[^()]|\([^()]*\))*\)|\$\{[^{}]*\}|`[^`]*`|[^\s;&|()<>'"\\`])+)""",
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""'([^']*)'|"((?:\\.|[^"\\])*)"|\\(.)""", re.DOTALL)
_KUBERNETES_VARIABLE = re.compile(r"\$\((?P<name>[A-Za-z_][\w.-]*)\)(?P<default>(?!))?")
_SHELL_VARIABLE = re.compile(
    r"\$(?:\((?P<expanded>[A-Za-z_]\w*)\)|\{(?P<braced>[A-Za-z_]\w*)(?::?-(?P<default>[^}$]*))?\}|(?P<name>[A-Za-z_]\w*))"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=")


def _script_commands(script: Word, environment: Environment) -> list[tuple[Word, ...]] | None:
    """The commands of a shell script, with what its `eval` commands run.

    None: its syntax is beyond this reader, for example a here-document, or an `eval` that runs another.
    """
    known = dict(environment)
    commands = _read_script(script, script.raw, range(len(script.raw)), known)
    if commands is None:
        return None
    found: list[tuple[Word, ...]] = []
    for words in commands:
        arguments = _arguments_of_eval(words)
        if arguments is None:
            found.append(words)
            continue
        evaluated = _read_script(script, *_evaluated(arguments), known)
        if evaluated is None or any(_arguments_of_eval(words) is not None for words in evaluated):
            return None
        found += evaluated
    return found


def _arguments_of_eval(words: Sequence[Word]) -> Sequence[Word] | None:
    """The words after `eval`. None: the command is another."""
    name = next((at for at, word in enumerate(words) if word.literal not in _RESERVED), 0)
    return words[name + 1 :] if words[name].literal == "eval" else None


def _read_script(
    script: Word, text: str, positions: Sequence[int], known: dict[str, str | None]
) -> list[tuple[Word, ...]] | None:
    """The commands of a text: the script, or what `eval` makes of a part of it.

    positions: of each character of the text in the script. known: the variables; the text's own become unknown.
    """
    at = 0
    commands: list[list[Word]] = [[]]
    is_target = False
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            return None
        if token.lastgroup == "word":
            raw, start = token["word"], positions[at]
            if script.raw[start : positions[token.end() - 1] + 1] != raw:
                return None  # Quotes run through the word, so it cannot be replaced.
            literal = _QUOTED.sub(lambda found: found[1] or found[2] or found[3] or "", raw)
            if assigned := _ASSIGNMENT.match(raw):
                known[assigned[1]] = None
            if not is_target:
                value = _replaced(literal, _SHELL_VARIABLE, known)
                commands[-1].append(Word(raw, literal, value, script.field, script.index, start))
            is_target = False
        elif token.lastgroup == "redirection":
            is_target = "&" not in token["redirection"].lstrip("&")
        elif token.lastgroup == "end":
            commands.append([])
        at = token.end()
    return [tuple(words) for words in commands if words]


_QUOTE_PART = re.compile(r"""'(?P<single>[^']*)'|"(?P<double>(?:\\.|[^"\\])*)"|(?P<bare>\\.|[^'"\\])""", re.DOTALL)
_PLAIN = re.compile(r"(?P<escaped>(?!))|(?P<plain>.)", re.DOTALL)
_ESCAPED = re.compile(r"\\(?P<escaped>.)|(?P<plain>.)", re.DOTALL)
_ESCAPED_IN_QUOTES = re.compile(r"""\\(?P<escaped>[$`"\\\n])|(?P<plain>.)""", re.DOTALL)


def _evaluated(words: Sequence[Word]) -> tuple[str, list[int]]:
    """The text that `eval` reads, its arguments without their quotes, and the position of each character in the script.

    An escaped character has the position of its backslash, so a word with one never looks like the script's own text.
    """
    characters: list[str] = []
    positions: list[int] = []

    def add(pattern: re.Pattern[str], text: str, start: int) -> None:
        for found in pattern.finditer(text):
            character = found["escaped"] or found["plain"]
            if found["escaped"] != "\n":  # A line that continues
                characters.append(character)
                positions.append(start + found.start())

    for word in words:
        for part in _QUOTE_PART.finditer(word.raw):
            kind = part.lastgroup or "bare"
            pattern = {"single": _PLAIN, "double": _ESCAPED_IN_QUOTES, "bare": _ESCAPED}[kind]
            add(pattern, part[kind], (word.start or 0) + part.start(kind))
        characters.append(" ")
        positions.append(0)
    return "".join(characters), positions


def _replaced(text: str, variable: re.Pattern[str], environment: Environment) -> str | None:
    """The text with its variables replaced. None: one of them is not known, or the text becomes too long."""
    parts: list[str] = []
    at = length = 0
    for found in variable.finditer(text):
        groups = found.groupdict()
        name = groups["name"] or groups.get("braced") or groups.get("expanded") or ""
        value = environment.get(name, groups["default"])
        length += len(value or "")
        if value is None or length > _LONGEST_WORD:
            return None
        parts += (text[at : found.start()], value)
        at = found.end()
    replaced = "".join(parts) + text[at:]
    return None if ("$" in replaced and variable is _SHELL_VARIABLE) or "`" in replaced else replaced
