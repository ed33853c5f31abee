"""The policy file of a running control plane: it keeps the last valid policies while the file is wrong."""

import time
from hashlib import sha256
from pathlib import Path

from control_plane.errors import PriorityError
from control_plane.policy.load import load_policies
from control_plane.server.xds import Snapshot


class PolicyFile:
    """The policies in force. They are the last valid ones that the file held.

    `problem` is the reason why the file's present content is not in force, or None. `loaded` is the time at which the
    policies in force were loaded, in seconds since the epoch.
    """

    def __init__(self, path: Path) -> None:
        """Load the file. PolicyError where it is not valid: there are no earlier policies to keep yet."""
        self.path = path
        self.version = ""
        self.problem: str | None = None
        self.earlier_versions: frozenset[str] = frozenset()
        self.snapshot, self.loaded = self._load()

    def reload(self) -> bool | None:
        """Read the file again: True if a new policy is in force, False if it was rejected, None if nothing changed.

        A change is detected by content, not by time or inode: Kubernetes updates a mounted ConfigMap by swapping a
        symlink.
        """
        version = _content_hash(self.path)
        if version == self.version:
            return None
        try:
            snapshot, loaded = self._load()
        except PriorityError as error:
            self.problem = str(error)
            self.version = version
            return False
        self.earlier_versions = frozenset(self.snapshot.versions())
        self.snapshot, self.loaded = snapshot, loaded
        self.problem = None
        return True

    def _load(self) -> tuple[Snapshot, float]:
        version = _content_hash(self.path)
        snapshot = Snapshot(load_policies(self.path))
        self.version = version
        return snapshot, time.time()


def _content_hash(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"unreadable: {error.strerror}"
