"""A cache that cannot grow without bound, however many different clients there are."""

from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BoundedCache(Generic[_Key, _Value]):
    """A dict that drops its oldest entry when it holds `limit` entries and another one is added."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: dict[_Key, _Value] = {}
        # The dict's own methods, not wrappers around them: a lookup is part of every poll.
        self.get = self._entries.get
        self.values = self._entries.values

    def add(self, key: _Key, value: _Value) -> None:
        """Add an entry."""
        if len(self._entries) >= self._limit:
            del self._entries[next(iter(self._entries))]
        self._entries[key] = value
