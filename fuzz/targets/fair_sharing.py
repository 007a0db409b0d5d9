"""Fair sharing among twins and relays: queues with turns, weights, tallies, room, time windows, limits, turns of posts, lists
of commands, shares of what goes to other relays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dmsg.rmb.core.errors import InvalidLimit
from dmsg.rmb.core.fair_queue import FairQueue
from dmsg.rmb.core.limiter import FixedWindow, Limit, parse_limit
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.peer.contents import Contents
from dmsg.rmb.relay.lanes import OUTGOING_BYTES, Lane, Outgoing, Room
from dmsg.rmb.relay.shares import Shares
from dmsg.rmb.relay.turns import AGAIN, PROMPT_S, Turns
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.tally import Tally
from dmsg.sansio.weights import Weights
from fuzz.choices import Choices
from fuzz.oracles import as_text, outcome

DICTIONARY = (b",", b" ", b"\t", b"\x1f", b"\xd9\xa3", b"100,1000000", b"999999999999999999", b"1000000000000000000")
_SPACE = " \t\n\r\f\v"
_TURNS, _CONTENTS, _SHARES = 0xFF, 0xFE, 0xFD
_TWIN = Twin(7, bytes(32))
_ENVELOPES = tuple(Envelope() for _ in range(3))
for _number, _envelope in enumerate(_ENVELOPES):
    _envelope.source.twin = 1 + _number


def one_input(data: bytes) -> None:
    """The first byte chooses one of them; the rest are its operations."""
    choices = Choices(data)
    kind = choices.byte()
    # Some came later, and have one byte each so that inputs found before mean what they meant.
    later = {_TURNS: _turns, _CONTENTS: _contents, _SHARES: _shares}
    later.get(kind, (_queue, _weights, _tally, _room, _window, _limit)[kind % 6])(choices)


def _queue(choices: Choices) -> None:
    """Sources take turns, each gives its oldest item. An overflow drops the latest item of a source with the most of what is
    too much; among equals, of the source that has put one."""
    count, size_bytes = 1 + choices.byte() % 16, choices.byte() * 4
    queue: FairQueue[int, int] = FairQueue(count, size_bytes)
    lines: dict[int, list[tuple[int, int]]] = {}  # in the order of the turns
    for number in range(400):
        if not choices.left:
            break
        if choices.below(4):
            source, size = choices.byte() % 6, choices.byte()
            lines.setdefault(source, []).append((number, size))
            for lost in queue.put(source, number, size):
                assert _count(lines) > count or _size(lines) > size_bytes
                [loser] = [one for one, line in lines.items() if line[-1][0] == lost]
                has = {one: len(line) if _count(lines) > count else _sum(line) for one, line in lines.items()}
                assert has[loser] == max(has.values()) and (loser == source or has.get(source, 0) < has[loser])
                lines[loser].pop()
                lines = {one: line for one, line in lines.items() if line}
        else:
            allowed = choices.byte()
            turn = next((source for source in lines if allowed >> source & 1), None)
            taken = queue.take(lambda source, allowed=allowed: bool(allowed >> source & 1))  # type: ignore[misc]
            if turn is None:
                assert taken is None
            else:
                line = lines.pop(turn)
                assert taken == line.pop(0)[0]
                if line:
                    lines[turn] = line
        assert len(queue) == _count(lines) <= count and queue.size_bytes == _size(lines) <= size_bytes
        assert len(queue._lines) == len(lines)
        if queue._ranks is not None:
            counts, sizes = queue._ranks
            assert len(counts) == len(lines) >= len(sizes) and sizes.total == _size(lines)
    left = [thing for line in lines.values() for thing, _ in line]
    assert sorted(queue.take() or 0 for _ in left) == sorted(left) and queue.take() is None


def _sum(line: list[tuple[int, int]]) -> int:
    return sum(size for _, size in line)


def _size(lines: dict[int, list[tuple[int, int]]]) -> int:
    return sum(map(_sum, lines.values()))


def _count(lines: dict[int, list[tuple[int, int]]]) -> int:
    return sum(map(len, lines.values()))


def _weights(choices: Choices) -> None:
    """The heaviest key; among equals, the one with this weight for longest. Memory of the past is bounded."""
    weights: Weights[int] = Weights()
    model: dict[int, tuple[int, int]] = {}  # what each key weighs, and since when
    for number in range(400):
        if not choices.left:
            break
        key = choices.byte() % 24
        before = model.get(key, (0, 0))[0]
        match choices.below(4):
            case 0:
                change = -before
            case 1:
                change = -1 - choices.byte()
            case _:
                change = 1 + choices.byte()
        kind, _ = outcome(lambda key=key, change=change: weights.add(key, change), ValueError)  # type: ignore[misc]
        assert (kind == "value") == (before + change >= 0)
        if kind == "value":
            model.pop(key, None)
            if before + change:
                model[key] = before + change, number
        assert weights.total == sum(weight for weight, _ in model.values()) and len(weights) == len(model)
        assert all(weights[one] == model.get(one, (0, 0))[0] for one in range(24))
        assert len(weights._heap) <= 2 * 24 + 64
        if choices.flag():
            kind, largest = outcome(weights.largest, KeyError)
            assert (kind == "value") == bool(model)
            assert not model or largest == min(model, key=lambda one: (-model[one][0], model[one][1]))


def _tally(choices: Choices) -> None:
    """The key with the most; among equals, the one that reached that count first."""
    tally: Tally[int] = Tally()
    model: dict[int, tuple[int, int]] = {}  # the count of each key, and since when
    for number in range(400):
        if not choices.left:
            break
        key = choices.byte() % 8
        count = model.get(key, (0, 0))[0]
        if choices.flag():
            kind, _ = outcome(lambda key=key: tally.remove(key), KeyError)  # type: ignore[misc]
            assert (kind == "value") == bool(count)
            count -= 1
        else:
            tally.add(key)
            count += 1
        model.pop(key, None)
        if count > 0:
            model[key] = count, number
        assert tally.most == max((one for one, _ in model.values()), default=0) and len(tally) == len(model)
        assert all(tally[one] == model.get(one, (0, 0))[0] for one in range(8))
        kind, largest = outcome(tally.largest, KeyError)
        assert (kind == "value") == bool(model)
        assert not model or largest == min(model, key=lambda one: (-model[one][0], model[one][1]))


def _room(choices: Choices) -> None:
    """A key may take as long as it then has no more than was free, so that something is left for later keys."""
    limit = choices.below(0x1000)
    room = Room(limit)
    taken: dict[int, list[int]] = {}
    for _ in range(400):
        if not choices.left:
            break
        key = choices.byte() % 6
        if choices.below(3):
            size = 1 + choices.below(0x1000) % (limit // 2 + 2)
            used = sum(map(sum, taken.values()))
            may = sum(taken.get(key, ())) + size <= limit - used
            assert room.has(key, size) is may
            if may:
                room.take(key, size)
                taken.setdefault(key, []).append(size)
        elif taken.get(key):
            size = taken[key].pop(choices.byte() % len(taken[key]))
            room.give_back(key, size)
        assert room.used == sum(map(sum, taken.values())) <= limit
        assert room._taken == {one: sum(sizes) for one, sizes in taken.items() if sizes}
    assert room.used == limit or room.has("a newcomer", limit - room.used)


def _window(choices: Choices) -> None:
    """No more than the limit passes in a window; refused amounts count, too, unless they exceed a window."""
    limit = Limit(choices.byte() % 16, choices.below(0x400))
    window_s = 1 + choices.byte() % 60
    window = FixedWindow(limit, window_s)
    now = 0.0
    tried: list[int] = []
    passed: list[int] = []
    number = 0
    for _ in range(400):
        if not choices.left:
            break
        now += choices.byte() / 8
        size = choices.below(0x200)
        if int(now) // window_s != number:
            number, tried, passed = int(now) // window_s, [], []
        if size <= limit.bytes:
            tried.append(size)
        may = size <= limit.bytes and len(tried) <= limit.count and sum(tried) <= limit.bytes
        assert window.admit(size, now) is may
        passed += [size] * may
        assert len(passed) <= limit.count and sum(passed) <= limit.bytes


def _limit(choices: Choices) -> None:
    """Two numbers of up to 18 digits with a comma or white space in between, and nothing else, are a limit."""
    text = as_text(choices.rest())
    kind, limit = outcome(lambda: parse_limit(text), InvalidLimit)
    for space in _SPACE:
        text = text.replace(space, " ")
    words = text.split(",") if "," in text else [word for word in text.split(" ") if word]
    words = [word.strip(" ") for word in words]
    good = len(words) == 2 and all(0 < len(word) <= 18 and not set(word) - set("0123456789") for word in words)
    assert (kind == "value") == good
    if good:
        assert limit == Limit(int(words[0]), int(words[1])) == parse_limit(f"{limit.count},{limit.bytes}")


def _turns(choices: Choices) -> None:
    """Posts stay within the limits, each kind of relay has its own line, and both take turns where both have room."""
    posts, others = 1 + choices.byte() % 6, 1 + choices.byte() % 4
    turns = Turns(posts, others)
    lane = Lane(3, Backoff(1.0, 2.0))
    owed: dict[str, int] = {}
    under_way: list[tuple[str, bool]] = []
    lines: dict[bool, list[str]] = {False: [], True: []}
    last: bool | None = None
    for _ in range(400):
        if not choices.left:
            break
        relay = str(choices.byte() % 6)
        is_prompt = owed.get(relay) == 0
        slow = sum(not was_prompt for _, was_prompt in under_way)
        room = {kind: len(under_way) < posts and (kind or slow < others) for kind in (False, True)}
        assert turns.has_room(relay) is room[is_prompt]
        match choices.below(4):
            case 0:
                if room[is_prompt]:
                    assert turns.begin(relay) is is_prompt
                    under_way.append((relay, is_prompt))
            case 1:
                if under_way:
                    relay, was_prompt = under_way.pop(choices.byte() % len(under_way))
                    took_s = (0.0, PROMPT_S, PROMPT_S + 1, None)[choices.byte() % 4]
                    turns.end(relay, was_prompt, took_s)
                    owed[relay] = AGAIN if took_s is None or took_s > PROMPT_S else max(0, owed.get(relay, 1) - 1)
            case 2:
                turns.wait(relay, lane)
                if relay in lines[not is_prompt]:
                    lines[not is_prompt].remove(relay)
                if relay not in lines[is_prompt]:
                    lines[is_prompt].append(relay)
            case _:
                ready = [kind for kind in (True, False) if lines[kind] and room[kind]]
                turn = turns.next()
                assert (turn is None) == (not ready)
                if turn is not None:
                    kind = ready[0] if len(ready) == 1 else not last
                    assert turn == (lines[kind].pop(0), lane)
                    last = kind
        assert turns.under_way == len(under_way) <= posts
        assert turns.waiting == sum(map(len, lines.values())) and bool(turns) == any(lines.values())


def _contents(choices: Choices) -> None:
    """What each twin has in a list, or is pushing to it: of what is in the list, the newest, and nothing that was taken."""
    contents = Contents()
    there: list[tuple[int, int]] = []
    under_way: list[tuple[int, int]] = []
    for _ in range(400):
        if not choices.left:
            break
        match choices.below(4):
            case 0:
                under_way.append((choices.byte() % 4, choices.byte()))
                contents.push(*under_way[-1])
            case 1 if under_way:
                there.append(under_way.pop(0))
                others = choices.byte() % 3  # pushed by a process before, and still there
                contents.pushed(*there[-1], len(there) + others)
            case 2 if under_way:
                contents.not_pushed(*under_way.pop(0))
            case _:
                del there[: choices.byte() % 4]
                contents.found(len(there))
        for twin in range(4):
            sizes = [size for one, size in (*there, *under_way) if one == twin]
            assert contents.of(twin) == (len(sizes), sum(sizes))
    contents.found(0)
    assert len(contents._numbers) == len({twin for twin, _ in under_way})


def _shares(choices: Choices) -> None:
    """A sender and a relay have half of the room at most; what makes room is of the one that has most of what is full."""
    limit = (4 + choices.byte() % 32) * OUTGOING_BYTES
    shares = Shares(limit)
    there: list[Outgoing] = []
    for _ in range(200):
        if not choices.left:
            break
        relay = "abc"[choices.byte() % 3]
        match choices.below(4):
            case 0 if there:
                shares.remove(there.pop(choices.byte() % len(there)))
            case 1 if there:
                shares.charge(there[choices.byte() % len(there)], relay)
            case _:
                envelope = _ENVELOPES[choices.byte() % len(_ENVELOPES)]
                new = Outgoing(envelope, bytes(choices.below(0x1000)), _TWIN, 0.0)
                for surplus in shares.room_for(new.source, relay, new.size):
                    if surplus is None:
                        break
                    own = Counter[str]()
                    for one in there:
                        own[one.charged] += one.size * (one.source == new.source)
                    if own.total() + new.size > limit // 2:
                        assert surplus.source == new.source and own[surplus.charged] == max(own.values())
                        assert own[surplus.charged] > own[relay] + new.size
                    else:
                        assert surplus.source != new.source
                    there.remove(surplus)
                    shares.remove(surplus)
                else:
                    there.append(new)
                    shares.add(new, relay)
                    assert sum(one.size for one in there if one.source == new.source) <= limit // 2
        of_relay = Counter[str]()
        for one in there:
            of_relay[one.charged] += one.size
        assert shares.held.used == of_relay.total() <= limit
        assert {one: held.used for one, held in shares.by_relay.items()} == of_relay
        for source, full in shares._full.items():
            assert full.used == shares.held.of(source)
    assert not there or shares._full.keys() <= {one.source for one in there}


def seeds() -> Iterator[bytes]:
    """A few operations of each."""
    put = b"".join(bytes((1, number % 3, 40 + number)) for number in range(9))
    yield b"\x00\x04\xff" + put + b"\x00\x02" + b"\x00\xff" * 4 + b"\x00\x00"
    yield b"\x00\x0f\x20" + put + b"\x01\x05\xff" + b"\x00\xff" * 9
    grow = b"".join(bytes((number % 24, 2, number % 7, 1)) for number in range(150))
    yield b"\x01" + grow + b"\x01\x00\x01" * 3 + b"\x02\x01\xff\x01"
    yield b"\x01\x01\x00\x01" + b"\x01\x02\x05\x01\x02\x02\x05\x01\x01\x01\x00\x01\x01\x00\x01"
    yield b"\x02" + b"\x01\x00\x02\x00\x01\x00\x02\x00\x01\x01\x02\x01\x01\x01\x01\x01\x02\x01"
    yield b"\x03\x01\x00" + b"\x01\x01\x00\x40" * 6 + b"\x02\x01\x00\x40" * 3 + b"\x01\x00\x00" * 8
    yield b"\x04\x03\x01\x00\x05" + b"\x01\x00\x40" * 5 + b"\xff\x00\xff" * 3 + b"\x01\x01\xff"
    for text in (
        b"10,20",
        b" 1\t2\n",
        b"1 , 2",
        b"1",
        b"1,2,3",
        b"1 2,",
        b"1\x1f2",
        "\u0663,1".encode(),
        b"9" * 19 + b",1",
    ):
        yield b"\x05" + text
    ask = b"\x00\x01\x09" + b"\x01\x00"
    yield (
        bytes((_CONTENTS,))
        + ask * 5
        + b"\x03\x02"
        + ask.replace(b"\x01\x09", b"\x02\x05") * 3
        + b"\x00\x03\x01\x02"
        + b"\x03\x03" * 3
    )
    fill = b"".join(bytes((relay, 3, 0, 0, 0)) for relay in (0, 0, 0, 0, 0, 0, 1, 2, 1, 2, 1))
    yield (
        bytes((_SHARES, 8))
        + fill
        + fill.replace(b"\x03\x00", b"\x03\x01")
        + b"\x00\x01\x02" * 3
        + b"\x00\x00\x01" * 9
        + fill
    )
    for which in (*range(5), _TURNS, _CONTENTS, _SHARES):
        yield bytes((which,)) + bytes((number * 7919) % 251 for number in range(300))
