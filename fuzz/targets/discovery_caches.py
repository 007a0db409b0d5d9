"""A discovery's short-lived caches of its store: entries and relays that other requests change meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from unittest import mock

from dmsg.discovery import entry_cache, relay_cache
from dmsg.discovery.entry import DMSG, ClientPart, Entry, ServerPart, is_available
from dmsg.discovery.entry_cache import ENTRY_LIMIT_BYTES, EntryCache
from dmsg.discovery.relay_cache import RelayCache
from fuzz.choices import Choices
from fuzz.oracles import KEYS

_LIFETIME_NS = 64
_RELAYS = [key.public_key for key in KEYS[:6]]
_LONG = ClientPart((KEYS[7].public_key,) * 40)


def one_input(data: bytes) -> None:
    """First byte even: entries by key, odd: relays. The second byte is the size of the cache; then requests and time."""
    choices = Choices(data)
    relays, how = choices.flag(), choices.byte()
    lifetime_ns = 0 if how % 8 == 7 else _LIFETIME_NS
    if relays:
        held = 16 if how & 8 else 3
        with mock.patch.object(relay_cache, "RELAYS_HELD", held):
            _Relays(choices, lifetime_ns, held).run()
    else:
        with mock.patch.object(entry_cache, "ENTRIES_LIMIT", 3):
            _entries(choices, lifetime_ns)


# --- entries by key --------------------------------------------------------------------------------------------------


@dataclass
class _Question:
    """A pending question to the store for a key's entry."""

    key: str
    body: bytes
    asked_ns: int
    writes: int


def _entries(choices: Choices, lifetime_ns: int) -> None:
    """An entry that is given was in the store a moment ago, and no write through this process has finished since."""
    cache = EntryCache(lifetime_ns)
    now_ns = 10**18
    numbers = [0] * 6  # of the text that the store has
    written = [0] * 6  # of the text that was written last through this process
    kept: dict[str, tuple[bytes, int]] = {}
    questions: list[_Question] = []
    for _ in range(150):
        if not choices.left:
            break
        number, what = choices.byte() % 6, choices.byte()
        key = f"{number:02x}"
        match what % 8:
            case 0 | 1:
                body = b"%d" % numbers[number]
                questions.append(_Question(key, body * (ENTRY_LIMIT_BYTES if what & 128 else 1), now_ns, cache.writes))
            case 2 | 3 if questions:
                one = questions.pop(what >> 3 & 7 if what >> 3 & 7 < len(questions) else 0)
                cache.put(one.key, one.body, one.asked_ns, one.writes)
                if one.writes == cache.writes and len(one.body) <= ENTRY_LIMIT_BYTES and lifetime_ns:
                    kept.pop(one.key, None)
                    kept[one.key] = (one.body, one.asked_ns)
                    if len(kept) > 3:
                        del kept[next(iter(kept))]
            case 4:  # through this process: the store has it somewhere between the two
                cache.forget(key)
                numbers[number] += 1
                cache.forget(key)
                written[number] = numbers[number]
                kept.pop(key, None)
            case 5:  # through another one
                numbers[number] += 1
            case 6:
                now_ns += (what >> 3) - 4
            case _:
                found = cache.get(key, now_ns)
                if key in kept and not 0 <= now_ns - kept[key][1] < lifetime_ns:
                    del kept[key]
                assert found == (kept[key][0] if key in kept else None)
                assert found is None or int(found) >= written[number]
        assert len(cache) == len(kept) <= 3


# --- relays ----------------------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """A pending question to the store for some relays."""

    asked: list[bytes]
    found: list[Entry]
    asked_ns: int
    surrounds: object


class _Relays:
    """A cache, the store behind it, and the history of writes."""

    def __init__(self, choices: Choices, lifetime_ns: int, held: int) -> None:
        self.choices = choices
        self.cache = RelayCache(lifetime_ns)
        self.lifetime_ns = lifetime_ns
        self.held = held
        self.now_ns = 10**18
        self.store: dict[bytes, Entry] = {}
        #: Each key's former entries and until when they held.
        self.past: dict[bytes, list[tuple[Entry, int]]] = {key.raw: [] for key in _RELAYS}
        #: The last timestamp that was put through this process.
        self.own: dict[bytes, int] = {}
        self.readings: list[_Reading] = []

    def run(self) -> None:
        """Writes here or elsewhere, questions and answers, lists; and time."""
        for _ in range(150):
            if not self.choices.left:
                break
            number, what = self.choices.byte() % len(_RELAYS), self.choices.byte()
            match what % 8:
                case 0 | 1 | 2:
                    self.put(number, what >> 3, here=what % 8 < 2)
                case 3:
                    self.ask(what >> 3)
                case 4 if self.readings:
                    self.answer(self.readings.pop((what >> 3) % len(self.readings)))
                case 5:
                    self.now_ns += what >> 3
                case _:
                    self.list()
            assert len(self.cache) <= self.held and (self.lifetime_ns or not len(self.cache))
        while self.readings:
            self.answer(self.readings.pop())
        assert not self.cache._reads
        self.list()

    def put(self, number: int, kind: int, *, here: bool) -> None:
        """A later entry of a key, through this process or another one."""
        key = _RELAYS[number].raw
        last = self.store.get(key)
        entry = _entry(number, 1 if last is None else last.timestamp + 1, kind)
        if last is not None:
            self.past[key].append((last, self.now_ns))
        self.store[key] = entry
        if not here:
            return
        cache, version = self.cache, self.cache.version
        known, unknown = cache.look_up([key], self.now_ns)
        held = cache._held.get(key)
        cache.changed(entry, self.now_ns)
        self.own[key] = entry.timestamp
        assert cache.version >= version
        after = _address(entry)
        if not self.lifetime_ns:
            assert cache.version == version and not len(cache)
        elif not unknown and last is not None and key in known:
            assert (cache.version > version) is (_address(known[key]) != after)
        elif after is not None:
            # For an entry too long to be cached, its address is cached.
            is_known = held is not None and 0 <= self.now_ns - held.read_ns < self.lifetime_ns
            before = held.address[0] if held is not None and is_known and held.address is not None else None
            assert (cache.version > version) is (before != after)
        if self.lifetime_ns:
            found, again = cache.look_up([key], self.now_ns)
            assert found.get(key, entry) == entry
            assert (key in found) is (after is not None and _is_short(entry))
            assert again == [] or key not in found

    def ask(self, which: int) -> None:
        """Ask the store for relays that the cache lacks."""
        keys = [key.raw for number, key in enumerate(_RELAYS) if which >> number % 5 & 1]
        _, unknown = self.cache.look_up(keys, self.now_ns)
        asked = [] if which == 31 else unknown  # a sample of all
        found = [self.store[key] for key in asked or keys if key in self.store]
        found = [entry for entry in found if _address(entry) is not None]
        surrounds = self.cache.reading()
        surrounds.__enter__()
        self.readings.append(_Reading(asked, found, self.now_ns, surrounds))

    def answer(self, reading: _Reading) -> None:
        """The store's answer arrives, together with writes made meanwhile."""
        reading.surrounds.__exit__(None, None, None)  # type: ignore[attr-defined]
        self.cache.fill(reading.asked, reading.found, reading.asked_ns)

    def list(self) -> None:
        """Look up all keys: no entry is given that was replaced here, or elsewhere longer than a lifetime ago."""
        keys = [key.raw for key in _RELAYS]
        found, unknown = self.cache.look_up(keys, self.now_ns)
        assert not set(found) & set(unknown) and unknown == [key for key in keys if key in set(unknown)]
        for key, entry in found.items():
            assert entry.static.raw == key and _address(entry) is not None
            if entry != self.store[key]:
                until_ns = next(at_ns for one, at_ns in self.past[key] if one == entry)
                assert until_ns > self.now_ns - self.lifetime_ns
            if self.held >= len(_RELAYS):
                assert entry.timestamp >= self.own.get(key, 0)
        for key in {*keys} - {*found} - {*unknown}:  # known not to be available
            last = self.store.get(key)
            if self.held >= len(_RELAYS) and last is not None and last.timestamp == self.own.get(key):
                assert _address(last) is None


def _address(entry: Entry) -> str | None:
    """The address of a relay, if the relay may be listed."""
    server = entry.server
    return server.address if server is not None and is_available(entry) and entry.protocol == DMSG else None


def _is_short(entry: Entry) -> bool:
    """Whether an entry is short enough to be held."""
    return len(entry.to_json()) <= relay_cache.RELAY_LIMIT_BYTES


@lru_cache(maxsize=4_096)
def _entry(number: int, timestamp: int, kind: int) -> Entry:
    entry = Entry("0.0.1", timestamp - 1, timestamp, _RELAYS[number], ClientPart(()))
    if kind & 1:
        address = f"9.9.{number}.{kind >> 1 & 1}:80"
        entry = replace(entry, server=ServerPart(address, 0 if kind & 12 == 4 else 5, later=kind & 12 == 8))
    if kind & 12 == 12:
        return replace(entry, version="0.0.1+messaging")
    return replace(entry, client=_LONG) if kind & 16 else entry


def seeds() -> Iterator[bytes]:
    """Questions overtaken by writes; too many, too long and too old entries; relays that come, move and go."""

    def op(number: int, what: int, more: int = 0) -> bytes:
        return bytes((number, what | more << 3))

    for lifetime in (0, 7):
        ask, answer, write, other, get = (op(0, what) for what in (0, 2, 4, 5, 7))
        head = bytes((0, lifetime))
        yield head + ask + answer + get + op(0, 6, 31) * 2 + get + op(0, 6, 31) + get
        yield head + ask + write + answer + get + ask + answer + other + get + write + get
        yield head + b"".join(op(at, 0) for at in range(6)) + answer * 6 + b"".join(op(at, 7) for at in range(6))
        yield head + op(0, 0, 16) + other * 9 + op(0, 0, 16) + answer * 2 + get + ask + answer + op(0, 6, 0) + get
    for head in (b"\x01\x00", b"\x01\x08", b"\x01\x07"):
        kinds = (1, 3, 5, 9, 13, 17, 0, 1, 21, 3)
        listed = op(0, 6)
        yield head + b"".join(op(0, 0, kind) + listed for kind in kinds)
        yield head + b"".join(op(0, 0, kind) + op(0, 5, 31) * 3 + listed for kind in kinds)
        yield head + b"".join(op(at, 2, kind) for at, kind in enumerate(kinds)) + op(0, 3, 30) + op(0, 4) + listed
        for late in kinds:
            yield head + op(0, 2, 1) + op(0, 3, 1) + op(0, 0, late) + op(0, 4) + listed + op(0, 5, 31) * 3 + listed
            yield head + op(0, 0, late) + op(0, 5, 31) * 3 + op(0, 3, 31) + op(0, 2, 3) + op(0, 4) + listed
        yield head + b"".join(op(at, 0, 1) for at in range(6)) * 2 + op(0, 3, 31) + op(0, 3, 1) + op(0, 4) * 2 + listed
        yield head + op(0, 3, 1) + op(0, 5, 1) + op(0, 3, 1) + op(0, 4, 1) + op(0, 4) + listed + op(0, 0, 1) + listed
