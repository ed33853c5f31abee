"""The policy file of a running control plane: it keeps the last valid policies while the file is wrong."""

import time
from collections import deque
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from control_plane.errors import PriorityError
from control_plane.policy.difference import unified_difference
from control_plane.policy.load import load_policies
from control_plane.policy.restart import needing_restart
from control_plane.server.xds import Snapshot

MAX_HISTORY = 20
MAX_DIFFERENCE_CHARS = 4000
"""So that a page with several of them stays small."""


class PolicyVersion(NamedTuple):
    """The file's content at one time since the start: loaded, or rejected with a problem.

    `difference` is what changed since the last loaded content, as a unified difference of the policies. `time` is in
    seconds since the epoch, `version` a hash of the content.
    """

    time: float
    version: str
    problem: str | None
    difference: str


class PolicyFile:
    """The policies in force. They are the last valid ones that the file held.

    `problem` is the reason why the file's present content is not in force, or None. `loaded` is the time at which the
    policies in force were loaded, in seconds since the epoch. `restart_for` has the keys that need a restart of
    sidecars that started with the policies before, by policy.
    """

    def __init__(self, path: Path) -> None:
        """Load the file. PolicyError where it is not valid: there are no earlier policies to keep yet."""
        self.path = path
        self.version = ""
        self.problem: str | None = None
        self.earlier_versions: frozenset[str] = frozenset()
        self.restart_for: dict[str, tuple[str, ...]] = {}
        self.snapshot, self.loaded = self._load()
        self.history: deque[PolicyVersion] = deque(
            [PolicyVersion(self.loaded, self.version, None, "")], maxlen=MAX_HISTORY
        )
        """The most recent versions, newest first."""

    def reload(self) -> bool | None:
        """Read the file again: True if a new policy is in force, False if it was rejected, None if nothing changed.

        A change is detected by content, not by time or inode: Kubernetes updates a mounted ConfigMap by swapping a
        symlink.
        """
        version = _content_hash(self.path, *self.snapshot.policies.files)
        if version == self.version:
            return None
        try:
            snapshot, loaded = self._load()
        except PriorityError as error:
            self.problem = str(error)
            self.version = version
            self.history.appendleft(PolicyVersion(time.time(), version, self.problem, ""))
            return False
        self.earlier_versions = frozenset(self.snapshot.versions())
        difference = unified_difference(self.snapshot.policies, snapshot.policies, MAX_DIFFERENCE_CHARS)
        self.history.appendleft(PolicyVersion(loaded, self.version, None, difference))
        self.restart_for = needing_restart(self.snapshot.policies, snapshot.policies)
        self.snapshot, self.loaded = snapshot, loaded
        self.problem = None
        return True

    def _load(self) -> tuple[Snapshot, float]:
        version = _content_hash(self.path)
        snapshot = Snapshot(load_policies(self.path))
        found = _content_hash(self.path, *snapshot.policies.files)
        # If the file has changed meanwhile, it is loaded again.
        self.version = found if found.startswith(version) else ""
        return snapshot, time.time()


def _content_hash(*paths: Path) -> str:
    return " ".join(map(_hash_of, paths))


def _hash_of(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"unreadable: {error.strerror}"
