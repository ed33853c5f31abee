"""The errors of this package.

    PriorityError            any error raised on purpose: one line, no traceback
    ├── BadInput             the caller's input is wrong; exit status 2
    │   ├── InvalidField     a setting is wrong
    │   └── PolicyError      the policy file is wrong: it names the file and the key's path
    └── CheckFailed          what was examined fails; exit status 1
        └── EnvoyError       Envoy rejects a configuration, or cannot start

Every message is one line that says what is wrong and what to do instead. It names a setting by its field, never by an
option: the command line puts the option in front of it.
"""


class PriorityError(Exception):
    """Base of all errors raised on purpose.

    Args:
        problem: What is wrong, in full sentences.
        field: The setting that is wrong, if it is one.
    """

    exit_status = 1
    """What the command line returns."""

    def __init__(self, problem: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.problem = problem
        self.field = field


class BadInput(PriorityError):
    """The caller's input is wrong: a setting, an address, a file."""

    exit_status = 2


class InvalidField(BadInput):
    """A setting is wrong."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(problem, field)


class PolicyError(BadInput):
    """A policy is wrong; the message names the file, the key's path, and what is valid there."""


class CheckFailed(PriorityError):
    """What was examined fails: a dead upstream, a lost priority."""


class EnvoyError(CheckFailed):
    """Envoy rejects a configuration, or cannot start."""
