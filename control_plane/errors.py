"""The errors of this package.

    PriorityError            anything we raise on purpose: one line, no traceback
    ├── BadInput             the caller's input is wrong; exit status 2
    │   ├── InvalidField     a field of a settings object is wrong: the command line names its own option instead
    │   └── PolicyError      the policy file is wrong: file, key path, what is allowed
    └── CheckFailed          the thing asked about fails; exit status 1
        └── EnvoyError       Envoy refuses a config, or cannot start

Every message is one line that names what was wrong and what is allowed or what to do next.
"""


class PriorityError(Exception):
    """Base of all errors raised on purpose. `exit_status` is what the command line returns."""

    exit_status = 1


class BadInput(PriorityError):
    """The caller's input is wrong: a flag, an address, a file."""

    exit_status = 2


class InvalidField(BadInput):
    """A field of a settings object is wrong. The command line puts the name of its option in place of `field`."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class PolicyError(BadInput):
    """A policy is wrong; the message names the file, the key's path and what is allowed."""


class CheckFailed(PriorityError):
    """The thing that was asked about fails: a dead upstream, a lost priority."""


class EnvoyError(CheckFailed):
    """Envoy refuses a config, or cannot start."""
