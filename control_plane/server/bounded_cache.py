"""A cache that cannot grow without bound, however many different clients there are."""

from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class BoundedCache(Generic[_Key, _Value]):
    """A dict that drops its oldest entries where it would hold more than `limit`, or more than `max_bytes` of them."""

    def __init__(self, limit: int, max_bytes: int | None = None) -> None:
        self._limit = limit
        self._max_bytes = max_bytes
        self._bytes = 0
        self._sizes: dict[_Key, int] = {}
        self._entries: dict[_Key, _Value] = {}
        # The dict's own methods, not wrappers around them: a lookup is part of every poll.
        self.get = self._entries.get
        self.values = self._entries.values

    def add(self, key: _Key, value: _Value, size: int = 0) -> None:
        """Add an entry, which takes about `size` bytes."""
        if key in self._entries:
            self._drop(key)
        while self._entries and (
            len(self._entries) >= self._limit or (self._max_bytes and self._bytes + size > self._max_bytes)
        ):
            self._drop(next(iter(self._entries)))
        self._entries[key] = value
        self._sizes[key] = size
        self._bytes += size

    def _drop(self, key: _Key) -> None:
        del self._entries[key]
        self._bytes -= self._sizes.pop(key)
