"""The relays that are not proved, and which of them gives its record up when there are too many. Pure.

The source that has the most loses its oldest: otherwise a flood from many sources would make discovery forget a relay before
its turn comes, however often the relay registers again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from dmsg.discovery.proofs.record import RelayRecord
from dmsg.sansio.tally import Tally


class Unproved:
    """Records by the source of their last registration, in each source the one that was registered longest ago first."""

    def __init__(self) -> None:
        self._sources: dict[bytes, str] = {}
        self._records: dict[str, OrderedDict[bytes, RelayRecord]] = {}
        self._sizes: Tally[str] = Tally()

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._sources)

    def put(self, record: RelayRecord) -> None:
        """Add ``record``, or move it, as the newest of its source."""
        self.discard(record.key)
        self._sources[record.key] = record.source
        self._records.setdefault(record.source, OrderedDict())[record.key] = record
        self._sizes.add(record.source)

    def discard(self, key: bytes) -> None:
        """Take the record of ``key`` out; silent when it is not there."""
        source = self._sources.pop(key, None)
        if source is None:
            return
        records = self._records[source]
        del records[key]
        if not records:
            del self._records[source]
        self._sizes.remove(source)

    def victim(self) -> RelayRecord | None:
        """The oldest record of the source that has the most; ``None`` when there is none."""
        return next(iter(self._records[self._sizes.largest()].values())) if self._records else None
