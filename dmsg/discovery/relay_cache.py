"""A cache of relays' entries, since lists are asked for far more often than relays change. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple

from dmsg.discovery.entry import DMSG, Entry, is_available

#: Entries held, and the largest entry held in bytes of JSON. Each has its JSON twice, with and without the signature: at
#: most 8 MiB in all.
RELAYS_HELD: Final = 2048
RELAY_LIMIT_BYTES: Final = 2048


class _Held(NamedTuple):
    """``address`` is ``None`` for a relay that was not available at ``read_ns``; ``entry`` is also ``None`` if too long."""

    entry: Entry | None
    read_ns: int
    timestamp: int
    address: tuple[str, str] | None = None


class RelayCache:
    """Entries of available relays that speak ``protocol``, by raw key; the one that was read longest ago is evicted first.

    An entry is valid for ``lifetime_ns`` after it was read: for that time, an entry may be listed that another process has
    replaced, or that has expired. Entries put through this process count at once, see :meth:`changed`. 0 keeps nothing.
    """

    def __init__(self, lifetime_ns: int, protocol: str = DMSG) -> None:
        self._lifetime_ns = lifetime_ns
        self._protocol = protocol
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._reads = 0
        #: Goes up when an entry put through this process changes the set of relays, or a relay's address.
        self.version = 0

    def __len__(self) -> int:
        return len(self._held)

    def look_up(self, keys: Iterable[bytes], now_ns: int) -> tuple[dict[bytes, Entry], list[bytes]]:
        """The cached entries of available relays among ``keys``, and the keys for which to ask the store."""
        found: dict[bytes, Entry] = {}
        unknown: list[bytes] = []
        held_of, lifetime_ns = self._held.get, self._lifetime_ns
        for key in keys:
            held = held_of(key)
            if held is None or not 0 <= now_ns - held[1] < lifetime_ns:
                unknown.append(key)
            elif held[0] is not None:
                found[key] = held[0]
            elif held[3] is not None:
                unknown.append(key)  # too long to be held
        return found, unknown

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Surrounds a question to the store: entries put meanwhile are later than the answer."""
        self._reads += 1
        try:
            yield
        finally:
            self._reads -= 1

    def fill(self, asked: Sequence[bytes], entries: Iterable[Entry], read_ns: int) -> None:
        """The store, asked at ``read_ns`` for ``asked``, gave ``entries``. Entries put meanwhile stay."""
        if not self._lifetime_ns:
            return
        missing = dict.fromkeys(asked)
        for entry in entries:
            missing.pop(entry.static.raw, None)
            held = self._held.get(entry.static.raw)
            if held is None or held.timestamp <= entry.timestamp:
                self._hold(entry, read_ns)
        for key in missing:
            held = self._held.get(key)
            if held is None or held.read_ns < read_ns:
                self._keep(key, _Held(None, read_ns, 0 if held is None else held.timestamp))

    def changed(self, entry: Entry, now_ns: int) -> None:
        """``entry`` was put through this process at ``now_ns``."""
        held = self._held.get(entry.static.raw)
        if not self._lifetime_ns or (held is not None and held.timestamp > entry.timestamp):
            return
        if held is not None and not 0 <= now_ns - held.read_ns < self._lifetime_ns:
            before = None  # it may have expired since
        else:
            before = None if held is None else held.address
        after = self._address(entry)
        if after is not None or held is not None or self._reads:
            self._hold(entry, now_ns)
        if after != before:
            self.version += 1

    def _address(self, entry: Entry) -> tuple[str, str] | None:
        server = entry.server
        if server is None or entry.protocol != self._protocol or not is_available(entry):
            return None
        return server.address, server.port or ""

    def _hold(self, entry: Entry, read_ns: int) -> None:
        address = self._address(entry)
        is_held = address is not None and len(entry.to_json()) <= RELAY_LIMIT_BYTES
        self._keep(entry.static.raw, _Held(entry if is_held else None, read_ns, entry.timestamp, address))

    def _keep(self, key: bytes, held: _Held) -> None:
        self._held[key] = held
        self._held.move_to_end(key)
        if len(self._held) > RELAYS_HELD:
            self._held.popitem(last=False)
