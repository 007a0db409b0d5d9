"""A cache of parsed entries, since entries are read far more often than they change."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Final

from dmsg.discovery.entry import Entry

#: Entries held, and the largest of them in bytes of JSON: at most about 25 MiB.
ENTRIES_LIMIT: Final = 4096
BODY_LIMIT_BYTES: Final = 2048


class ParsedEntries:
    """Parsed entries by their JSON; the one that was used longest ago is evicted first.

    The JSON itself is the key, so a cached entry cannot be out of date. Of each public key only the version parsed last is held:
    a relay posts a new one every minute, and the versions of one day would else evict the entries of all others. It may be used
    in several threads: SQLite's jobs run in those of a pool.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()
        #: The JSON held for each raw public key.
        self._bodies: dict[bytes, bytes] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def parse(self, body: bytes) -> Entry:
        """The entry that ``body`` is the JSON of; raises as :meth:`.Entry.parse` does."""
        with self._lock:
            entry = self._entries.get(body)
            if entry is not None:
                self._entries.move_to_end(body)
                return entry
        entry = Entry.parse(body)
        if len(body) <= BODY_LIMIT_BYTES:
            with self._lock:
                self._hold(body, entry)
        return entry

    def _hold(self, body: bytes, entry: Entry) -> None:
        earlier = self._bodies.pop(entry.static.raw, None)
        if earlier is not None:
            del self._entries[earlier]
        self._bodies[entry.static.raw] = body
        self._entries[body] = entry
        if len(self._entries) > ENTRIES_LIMIT:
            _, oldest = self._entries.popitem(last=False)
            del self._bodies[oldest.static.raw]
