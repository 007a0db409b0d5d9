"""A relay's queue for other relays: lanes whose senders take turns, who gives way, which relay is tried first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar
from unittest import mock

from dmsg.rmb.core import ranker as ranking
from dmsg.rmb.core.ranker import Ranker
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.lanes import OUTGOING_BYTES, Held, Lane, Outgoing
from dmsg.sansio.backoff import Backoff
from fuzz.choices import Choices

T = TypeVar("T")

_TWIN = Twin(1, bytes(32))
_ENVELOPES = tuple(Envelope() for _ in range(5))
for _number, _envelope in enumerate(_ENVELOPES):
    _envelope.source.twin = 1 + _number
_SOURCES = range(1, 1 + len(_ENVELOPES))
_RELAYS = ("a", "b", "c", "d", "e", "f")
#: Relays that are ranked, and failures of one of them.
_RANKED, _FAILURES = 4, 3
_WINDOW_S = 60.0
_FAILURES_TO_CLOSE = 3
_BACKOFF = Backoff(first_s=2.0, limit_s=16.0)


def _size(outgoing: Outgoing) -> int:
    """The counted size: its bytes, its outline twice, and the bookkeeping."""
    return len(outgoing.data) + 2 * outgoing.envelope.ByteSize() + OUTGOING_BYTES


class _Shuffle:
    """Gives samples in an order that the input has chosen."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices
        self.drawn: list[str] = []

    def random(self) -> float:
        return self._choices.byte() / 256

    def randrange(self, stop: int, /) -> int:
        return self._choices.below(stop)

    def sample(self, population: Sequence[T], k: int) -> list[T]:
        left = list(population)
        drawn = [left.pop(self._choices.below(len(left))) for _ in range(k)]
        self.drawn = list(map(str, drawn))
        return drawn


class _Failures:
    """Times of relays' failures, as a ranker should remember them."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}  # the one that failed last is last

    def failed(self, relay: str, now: float) -> None:
        self.of[relay] = [*self.of.pop(relay, ()), now][-_FAILURES:]
        if len(self.of) > _RANKED:
            del self.of[next(iter(self.of))]

    def rate(self, relay: str, now: float) -> float:
        return sum(now - at < _WINDOW_S for at in self.of.get(relay, ())) * 3600 / _WINDOW_S


class _Lane:
    """A lane, and its expected content by its two kinds: the sender with the next turn is first."""

    def __init__(self) -> None:
        self.lane = Lane(_FAILURES_TO_CLOSE, _BACKOFF)
        self.waiting: dict[bool, dict[int, list[Outgoing]]] = {False: {}, True: {}}
        self.next_kind = False
        self.failures = 0
        self.open_from, self.open_by = 0.0, 0.0

    def put(self, outgoing: Outgoing) -> None:
        self.lane.put(outgoing)
        assert outgoing.lane is self.lane
        self.waiting[outgoing.connected_only].setdefault(outgoing.source, []).append(outgoing)

    def discard(self, outgoing: Outgoing) -> None:
        self.lane.discard(outgoing)
        assert outgoing.lane is None
        self._gone(outgoing)

    def take(self, most: int, max_bytes: int) -> list[Outgoing]:
        """At most ``most`` and ``max_bytes``, but at least one; senders take turns with their oldest; kinds take turns."""
        expected: list[Outgoing] = []
        kind = self.next_kind if self.waiting[self.next_kind] else not self.next_kind
        self.next_kind = not kind
        waiting = self.waiting[kind]
        while waiting and len(expected) < most:
            first = next(iter(waiting.values()))[0]
            if expected and sum(len(one.data) for one in (*expected, first)) > max_bytes:
                break
            expected.append(first)
            self._gone(first)
            if first.source in waiting:
                waiting[first.source] = waiting.pop(first.source)
        taken = self.lane.take(most, max_bytes)
        assert taken == expected and all(one.lane is None for one in taken)
        return taken

    def clear(self, most: int) -> list[Outgoing]:
        cleared = self.lane.clear(most)
        queues = [queue for of_kind in self.waiting.values() for queue in of_kind.values()]
        assert cleared == [one for queue in queues for one in queue][:most]
        assert all(one.lane is None for one in cleared)
        for one in cleared:
            self._gone(one)
        return cleared

    def answered(self) -> None:
        self.lane.answered()
        self.failures, self.open_from, self.open_by = 0, 0.0, 0.0

    def failed(self, now: float, choices: Choices) -> None:
        """After several failures in a row the lane closes, each time for longer; failures while closed do not count."""
        was_closed = self.lane.closed(now)
        self.lane.failed(now, lambda: choices.byte() / 256)
        if was_closed:
            return
        self.failures += 1
        over = self.failures - _FAILURES_TO_CLOSE
        if over >= 0:
            pause_s = min(_BACKOFF.limit_s, _BACKOFF.first_s * 2.0**over)
            self.open_from, self.open_by = now + pause_s / 2, now + pause_s

    def check(self, now: float) -> None:
        assert bool(self.lane) == self.lane.busy == any(self.waiting.values())
        assert self.lane.failures == self.failures
        assert self.lane.closed(now) or now >= self.open_from
        assert not self.lane.closed(now) or now < self.open_by
        for kind, queues in self.lane._queues.items():
            assert [(source, list(queue)) for source, queue in queues.items()] == list(self.waiting[kind].items())

    def _gone(self, outgoing: Outgoing) -> None:
        waiting = self.waiting[outgoing.connected_only]
        queue = waiting[outgoing.source]
        queue.remove(outgoing)
        if not queue:
            del waiting[outgoing.source]


class _Relay:
    """All outstanding envelopes, and their possible relays."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 0.0
        self.lanes = {relay: _Lane() for relay in _RELAYS[:3]}
        self.held = Held()
        self.outstanding: dict[int, list[Outgoing]] = {}
        self.shuffle = _Shuffle(choices)
        self.ranker = Ranker(self.shuffle, _WINDOW_S)
        self.failures = _Failures()

    def arrive(self) -> None:
        """An envelope of a twin arrives; it waits unless the twin has too many."""
        choices = self.choices
        envelope = choices.pick(_ENVELOPES)
        outgoing = Outgoing(envelope, bytes(choices.byte() * 8), _TWIN, 0.0, connected_only=choices.flag())
        assert outgoing.size == _size(outgoing)
        if choices.flag() and self.outstanding and not self.make_room(outgoing):
            return
        self.held.add(outgoing)
        self.outstanding.setdefault(outgoing.source, []).append(outgoing)
        self.lane().put(outgoing)

    def make_room(self, outgoing: Outgoing) -> bool:
        """The last envelope of a sender with most gives way, unless the newcomer's sender would have as much."""
        sizes = self.sizes()
        has_most = [source for source in sizes if sizes[source] == max(sizes.values())]
        surplus = self.held.surplus(outgoing.source, outgoing.size)
        would_have = sizes.get(outgoing.source, 0) + outgoing.size
        assert (surplus is None) == (would_have >= max(sizes.values()))
        if surplus is None:
            return False
        assert surplus.source in has_most and surplus.source != outgoing.source
        assert surplus is self.outstanding[surplus.source][-1]
        for lane in self.lanes.values():
            if surplus.lane is lane.lane:
                lane.discard(surplus)
        self.finish(surplus)
        return True

    def finish(self, outgoing: Outgoing) -> None:
        """An envelope was posted or given up."""
        self.held.remove(outgoing)
        self.outstanding[outgoing.source].remove(outgoing)
        if not self.outstanding[outgoing.source]:
            del self.outstanding[outgoing.source]

    def lane(self) -> _Lane:
        return self.lanes[self.choices.pick(_RELAYS[:3])]

    def order(self) -> None:
        """Relays with fewer failures come first, equals in the order drawn. Nothing is drawn for a single relay."""
        relays = [relay for number, relay in enumerate(_RELAYS) if self.choices.byte() >> number & 1]
        found = self.ranker.order(iter(relays), self.now)
        if len(relays) < 2:
            assert found == relays
            return
        assert sorted(self.shuffle.drawn) == sorted(relays)
        assert found == sorted(self.shuffle.drawn, key=lambda relay: self.failures.rate(relay, self.now))

    def sizes(self) -> dict[int, int]:
        """The bytes of each sender."""
        return {source: sum(map(_size, of)) for source, of in self.outstanding.items()}

    def check(self) -> None:
        """All counters are correct."""
        sizes = self.sizes()
        assert self.held.used == sum(sizes.values())
        assert [self.held.of(source) for source in _SOURCES] == [sizes.get(source, 0) for source in _SOURCES]
        assert {source: list(of) for source, of in self.held._of.items()} == self.outstanding
        for lane in self.lanes.values():
            lane.check(self.now)
        assert len(self.ranker._failures) <= _RANKED
        assert all(len(each) <= _FAILURES for each in self.ranker._failures.values())


def one_input(data: bytes) -> None:
    """Operations: envelopes that arrive, are taken in batches or given up; relays that answer or fail; time."""
    with mock.patch.multiple(ranking, RANKED_RELAYS=_RANKED, RANKED_FAILURES=_FAILURES):
        _run(_Relay(Choices(data)))


def _run(relay: _Relay) -> None:
    choices = relay.choices
    for _ in range(50):
        if not choices.left:
            break
        match choices.below(10):
            case 0:
                relay.now += choices.byte() / 4
            case 1:
                for outgoing in relay.lane().take(choices.byte() % 8, choices.byte() * 32):
                    if choices.flag():
                        relay.finish(outgoing)
                    else:
                        relay.lane().put(outgoing)
            case 2:
                lane = relay.lane()
                for outgoing in lane.clear(1 + choices.byte() % 8):
                    relay.lane().put(outgoing)
            case 3:
                relay.lane().answered()
            case 4:
                relay.lane().failed(relay.now, choices)
            case 5:
                name = choices.pick(_RELAYS)
                relay.ranker.failed(name, relay.now)
                relay.failures.failed(name, relay.now)
            case 6:
                name = choices.pick(_RELAYS)
                assert relay.ranker.rate(name, relay.now) == relay.failures.rate(name, relay.now)
            case 7:
                relay.order()
            case _:
                relay.arrive()
        relay.check()


def seeds() -> Iterator[bytes]:
    """Batches of several senders; a sender that gives way; lanes that close and open; relays that fail."""
    come = b"".join(bytes((8, number % 3, number, number & 4, 0, number & 1)) for number in range(12))
    yield come + b"\x01\x00\x05\xff" + b"\x01" * 5 + b"\x01\x01\x03\x00\x00\x02" + b"\x02\x00" + b"\x01" * 9
    yield come + b"\x08\x04\x00\x00\x01\x00" * 2 + b"\x08\x00\xff\x00\x01\x00" + b"\x01\x00\x07\xff" * 2
    yield b"\x04\x00\x80" * 3 + b"\x04\x00" + b"\x00\x20" + b"\x04\x00\xff" + b"\x03\x00" + b"\x00\xff\x04\x00\x00" * 4
    fail = b"".join(bytes((5, number)) for number in (0, 1, 1, 2, 2, 2, 2, 3, 4, 5, 0))
    look = b"".join(bytes((6, number)) for number in range(6)) + b"\x07" + b"\xff" * 6 + b"\x02\x01\x00\x01\x00\x00"
    yield fail + look + b"\x00\x78" + b"\x05\x01" + look + b"\x00\x80" + look + b"\x00\xff" + look
    yield bytes((number * 7919) % 251 for number in range(700))
    yield bytes((number * 61) % 256 for number in range(500))
