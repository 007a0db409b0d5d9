"""Rate limits and bounded memories, held against the plainest models of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dmsg.mux.core.window import AckGate, SendWindow
from dmsg.sansio.buffer import ByteQueue
from dmsg.sansio.rate import FairBucket, RateLimiterTable, RecentSet, TokenBucket
from dmsg.sansio.tally import Tally
from fuzz.choices import Choices


def one_input(data: bytes) -> None:
    """The first byte says which of them; the rest are its operations."""
    choices = Choices(data)
    (_buckets, _fair, _recent, _tally, _queue, _windows, _table)[choices.byte() % 7](choices)


def _buckets(choices: Choices) -> None:
    rate, burst = choices.byte() / 4, 1 + choices.byte()
    bucket = TokenBucket(rate, burst, 0.0)
    now = latest = 0.0
    forwards = taken = 0.0
    while choices.left:
        step = (choices.byte() - 32) / 8
        now += step
        forwards += max(0.0, step)
        number = choices.byte() / 2
        could, wait_s = bucket.has(now, number), bucket.wait_s(now, number)
        assert could == (wait_s == 0)
        assert bucket.take(now, number) is could
        taken += number if could else 0
        assert taken <= burst + rate * forwards + 1e-6
        latest = max(latest, now)


def _fair(choices: Choices) -> None:
    rate, burst = 1.0 + choices.byte() / 8, 4 + choices.byte() % 64
    bucket: FairBucket[int] = FairBucket(rate, burst, 0.0)
    now = forwards = 0.0
    taken = 0
    while choices.left:
        step = (choices.byte() - 8) / 64
        now += step
        forwards += max(0.0, step)
        taken += bucket.take(choices.byte(), now)
        assert taken <= burst + rate * forwards + 1e-6
        assert len(bucket) <= 3 * burst + 1
    assert bucket.take(-1, now + 1_000)  # a newcomer has its turn once all is paid


def _recent(choices: Choices) -> None:
    capacity = 1 + choices.byte() % 8
    recent: RecentSet[int] = RecentSet(capacity)
    model: list[int] = []
    while choices.left:
        item = choices.byte() % 16
        if choices.flag():
            recent.discard(item)
            model = [one for one in model if one != item]
        else:
            recent.add(item)
            model = [*(one for one in model if one != item), item][-capacity:]
        assert len(recent) == len(model) and all((one in recent) == (one in model) for one in range(16))


def _tally(choices: Choices) -> None:
    tally: Tally[int] = Tally()
    model: Counter[int] = Counter()
    while choices.left:
        key = choices.byte() % 8
        if choices.flag() and model[key]:
            tally.remove(key)
            model[key] -= 1
        else:
            tally.add(key)
            model[key] += 1
        assert tally.most == max(model.values()) and len(tally) == sum(one > 0 for one in model.values())
        assert all(tally[one] == model[one] for one in range(8))
        assert not tally.most or model[tally.largest()] == tally.most


def _queue(choices: Choices) -> None:
    queue, model = ByteQueue(), b""
    while choices.left:
        if choices.flag():
            data = choices.chunk(20)
            queue.append(data)
            model += data
        else:
            size = choices.byte() % 32
            assert queue.take(size) == model[:size]
            model = model[size:]
        assert queue.size == len(queue) == len(model) and bool(queue) == bool(model)


def _windows(choices: Choices) -> None:
    window, gate = SendWindow(1_000, choices.below(0x10000)), AckGate()
    sent: dict[int, int] = {}
    held: list[int] = []
    unread = 0
    while choices.left:
        match choices.below(4):
            case 0 if window.room_bytes:
                size = choices.byte() % (window.room_bytes + 1)
                sequence = window.send(size)
                assert sequence not in sent
                sent[sequence] = size
            case 1:
                sequence = choices.below(0x10000)
                known = list(sent)
                if known and sequence & 1:
                    sequence = known[sequence % len(known)]
                assert window.acknowledge(sequence) == sent.pop(sequence, 0)
            case 2:
                size = choices.below(0x8000)
                unread += size
                now = gate.arrived(len(held), size)
                assert now == (unread <= AckGate.THRESHOLD_BYTES)
                held += [] if now else [len(held)]
            case _:
                size = choices.below(0x10000) % (unread + 1)
                unread -= size
                released = gate.consumed(size)
                assert released == (held if unread < AckGate.THRESHOLD_BYTES else [])
                held = [] if released else held
        assert window.outstanding_bytes == sum(sent.values()) and window.idle == (not sent)
        assert gate.unread_bytes == unread and gate.held == held


def _table(choices: Choices) -> None:
    table: RateLimiterTable[int] = RateLimiterTable(1.0, 4.0, 3)
    now = 0.0
    while choices.left:
        now += choices.byte() / 64
        table.take(choices.byte() % 8, now)
        assert 1 <= len(table) <= 3


def seeds() -> Iterator[bytes]:
    """A few operations of each."""
    for which in range(7):
        yield bytes((which, 8, 16)) + bytes(range(64))
        yield bytes((which, 255, 1)) + b"\x20\x01\x40\x03" * 16
        yield bytes((which,)) + b"\x00\xff\xff\x01\x80" * 20
