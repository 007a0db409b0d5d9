"""A cache of entries as they were sent, since base clients ask once for each dial. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

#: Entries held, and the largest of them: at most 8 MiB.
ENTRIES_LIMIT: Final = 4096
ENTRY_LIMIT_BYTES: Final = 2048


class EntryCache:
    """JSON of entries by the hex text of their key; the one that was put longest ago is evicted first.

    Each is valid for ``lifetime_ns``; 0 keeps nothing.
    """

    def __init__(self, lifetime_ns: int) -> None:
        self._lifetime_ns = lifetime_ns
        self._held: OrderedDict[str, tuple[bytes, int]] = OrderedDict()
        #: Writes so far. An entry that was read from the store before the last write is not kept.
        self.writes = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: str, now_ns: int) -> bytes | None:
        """The JSON of ``key``'s entry if it was put less than ``lifetime_ns`` ago."""
        held = self._held.get(key)
        if held is None:
            return None
        if not 0 <= now_ns - held[1] < self._lifetime_ns:
            del self._held[key]
            return None
        return held[0]

    def put(self, key: str, body: bytes, read_ns: int, writes: int) -> None:
        """Keep ``body``, which was asked of the store at ``read_ns``, after ``writes`` writes."""
        if writes != self.writes or len(body) > ENTRY_LIMIT_BYTES or not self._lifetime_ns:
            return
        self._held[key] = (body, read_ns)
        self._held.move_to_end(key)
        if len(self._held) > ENTRIES_LIMIT:
            self._held.popitem(last=False)

    def forget(self, key: str) -> None:
        """``key``'s entry is being written, or was: drop the cached one."""
        self.writes += 1
        self._held.pop(key, None)
