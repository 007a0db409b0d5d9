"""The places of a listener: offers, open transports, and the conversations and arrivals of a receiver of files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from dmsg.cli.files.arrivals import Arrival, Arrivals
from dmsg.cli.files.places import MAX_TRANSFERS, TRANSFERS_PER_SENDER, Places
from dmsg.clients.limits import ListenerLimits
from dmsg.clients.offers import Offers
from dmsg.clients.opened import OpenTransports
from dmsg.crypto.keys import PublicKey
from fuzz.choices import Choices
from fuzz.oracles import KEYS

_REMOTES = [key.public_key for key in KEYS[:4]]


def one_input(data: bytes) -> None:
    """The first byte chooses one of them; the rest are its operations."""
    choices = Choices(data)
    (_offers, _opened, _conversations, _arrivals)[choices.byte() % 4](choices)


# --- offers ----------------------------------------------------------------------------------------------------------


def _offers(choices: Choices) -> None:
    """No more offers than places, in order of arrival; the oldest is dropped, and never another one."""
    limit, per_key = choices.byte() % 8, choices.byte() % 5
    try:
        offers: Offers[int] = Offers(limit, per_key)
    except ValueError:
        assert not limit or not per_key
        return
    assert limit and per_key
    waiting: dict[int, int] = {}
    for number in range(200):
        if not choices.left:
            break
        what = choices.byte()
        key = what >> 1 & 3
        assert offers.has_room(key) is (sum(one == key for one in waiting.values()) < per_key)
        if what & 1:
            known = [*waiting, number]
            gone = known[(what >> 3) % len(known)]
            offers.remove(gone)
            waiting.pop(gone, None)
        elif offers.has_room(key):
            oldest = next(iter(waiting)) if len(waiting) >= limit else None
            assert offers.add(number, key) == oldest
            if oldest is not None:
                del waiting[oldest]
            waiting[number] = key
        assert len(offers) == len(waiting) <= limit
        assert max(Counter(waiting.values()).values(), default=0) <= per_key
    for one in waiting:
        offers.remove(one)
    assert not len(offers) and not offers._held


# --- open transports -------------------------------------------------------------------------------------------------


@dataclass
class _Stream:
    """The stream of a transport."""

    remote: PublicKey
    id: int = 0
    initiator: bool = False
    sent_bytes: int = 0
    acked_bytes: int = 0
    received_bytes: int = 0


@dataclass(eq=False)
class _Transport:
    """A transport. ``moved`` is its progress at the last check, ``since_s`` the time when that had changed."""

    stream: _Stream
    since_s: float
    moved: tuple[int, int] = field(default=(0, 0))
    connected: bool = True

    @property
    def is_used(self) -> bool:
        """Whether the peer has sent something, and the application has not closed."""
        return self.connected and self.stream.received_bytes > 0


class _Opened:
    """The open transports of a listener, and a list as their model."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        what = choices.byte()
        self.limits = ListenerLimits(
            open_transports=3 + (what & 15), crowd=what >> 4 & 7, crowd_idle_s=2.0, idle_timeout_s=4.0 * (what >> 7)
        )
        self.opened: OpenTransports[_Transport] = OpenTransports(self.limits)
        self.transports: list[_Transport] = []
        self.now = 0.0

    def run(self) -> None:
        """Transports are opened, used, resumed and closed; the listener checks them as usual."""
        for _ in range(150):
            if not self.choices.left:
                break
            what = self.choices.byte()
            match what % 8:
                case 0 | 1 | 2:
                    self.open(_REMOTES[what >> 3 & 3])
                case 3 if self.transports:
                    one = self.transports[(what >> 3) % len(self.transports)]
                    if what >> 7:  # the application has closed it, and its peer has not
                        one.connected = False
                    else:
                        self.close(one)
                case 4 | 5 if self.transports:
                    stream = self.transports[(what >> 3) % len(self.transports)].stream
                    if what & 1:
                        stream.received_bytes += self.choices.byte()
                    else:
                        stream.acked_bytes += self.choices.byte()
                case 6 if self.transports:  # it is resumed: another stream goes on where the old one was
                    one = self.transports[(what >> 3) % len(self.transports)]
                    old = one.stream
                    one.stream = _Stream(old.remote, old.id + 1, received_bytes=old.received_bytes)
                    one.stream.acked_bytes = old.acked_bytes
                case _:
                    self.now += (what >> 3) / 8
                    self.look()
            self.check()

    def open(self, remote: PublicKey) -> None:
        """A peer opens one; if there is no place, an unused one is closed for it."""
        if self.opened.is_full:
            chosen = self.opened.unused(1, self.now, 0.0)
            assert chosen == self.expected(1, 0.0)
            for one in chosen:
                self.close(one)
            if not chosen:
                assert all(one.is_used for one in self.transports)
                return
        one = _Transport(_Stream(remote), self.now)
        self.opened.add(one, self.now)
        self.transports.append(one)

    def close(self, one: _Transport) -> None:
        """A transport ends, which may be reported twice."""
        self.opened.remove(one)
        self.opened.remove(one)
        self.transports.remove(one)

    def look(self) -> None:
        """Those that are idle for too long end, and in a crowd those that are unused."""
        timeout_s, crowd = self.limits.idle_timeout_s, self.limits.crowd
        expired = []
        for one in self.transports:
            moved = (one.stream.received_bytes, one.stream.acked_bytes)
            if moved != one.moved:
                one.moved, one.since_s = moved, self.now
            elif timeout_s and self.now - one.since_s >= timeout_s:
                expired.append(one)
        excess = max(0, len(self.transports) - len(expired) - crowd)
        crowded = [one for one in self.expected(excess, self.limits.crowd_idle_s) if one not in expired]
        ended = self.opened.idle(self.now)
        assert ended == expired + crowded and len(set(ended)) == len(ended)
        for one in ended:
            self.close(one)

    def expected(self, count: int, idle_s: float) -> list[_Transport]:
        """The unused ones to end: each of the key with the most transports then, the one that is idle for longest."""
        left = list(self.transports)
        chosen: list[_Transport] = []
        while len(chosen) < count:
            held = Counter(one.stream.remote for one in left)
            unused = [one for one in left if not one.is_used and self.now - one.since_s >= idle_s]
            if not unused:
                break
            most = max(held[one.stream.remote] for one in unused)
            one = min((one for one in unused if held[one.stream.remote] == most), key=lambda one: one.since_s)
            left.remove(one)
            chosen.append(one)
        return chosen

    def check(self) -> None:
        """They are counted, bounded, and checked from half of the crowd on."""
        opened, limits, number = self.opened, self.limits, len(self.transports)
        assert len(opened) == number <= limits.open_transports
        assert opened.is_full is (number >= limits.open_transports)
        assert opened.needs_look is (number > 0 and (limits.idle_timeout_s > 0 or number > limits.crowd / 2))


def _opened(choices: Choices) -> None:
    _Opened(choices).run()


# --- conversations of a receiver of files ------------------------------------------------------------------------------


def _conversations(choices: Choices) -> None:
    """A sender with few places always gets one, if need be from the conversation with the lowest rate."""
    places: Places[int] = Places()
    held: dict[int, tuple[str, float, int]] = {}
    now = 0.0
    for number in range(200):
        if not choices.left:
            break
        what = choices.byte()
        known = [*held, -1]
        one = known[(what >> 2) % len(known)]
        match what % 4:
            case 0 | 1:
                sender = f"{what >> 1 & 31:02x}"
                is_open = sum(of == sender for of, _, _ in held.values()) < TRANSFERS_PER_SENDER
                assert places.is_open_to(sender) is is_open
                if is_open:
                    loser = places.take(number, sender, now)
                    assert (loser is not None) is (len(held) >= MAX_TRANSFERS)
                    if loser is not None:
                        rates = {name: size / max(now - began, 0.001) for name, (_, began, size) in held.items()}
                        for name, (_, began, _) in held.items():
                            if now - began < 3:
                                rates[name] = max(rates[name], 4_096)
                        assert rates[loser] == min(rates.values())
                        alike = [began for name, (_, began, _) in held.items() if rates[name] == rates[loser]]
                        assert held.pop(loser)[1] == min(alike)
                    held[number] = (sender, now, 0)
            case 2:
                size = choices.byte()
                places.received(one, size)
                if one in held:
                    sender, began, before = held[one]
                    held[one] = (sender, began, before + size)
            case _:
                if what & 4:
                    now += choices.byte() / 16
                else:
                    places.leave(one)
                    held.pop(one, None)
        assert set(places._places) == set(held) and len(held) <= MAX_TRANSFERS


# --- arrivals of a receiver of files -----------------------------------------------------------------------------------


def _arrivals(choices: Choices) -> None:
    """With too many, the oldest of a sender with the most is forgotten; an arrival that is told again is its newest."""
    limit = 1 + choices.byte() % 8
    arrivals = Arrivals(limit)
    known: list[Arrival] = []
    for _ in range(200):
        if not choices.left:
            break
        what = choices.byte()
        new = Arrival(f"{what & 3}", f"{what >> 2 & 7}", what >> 5 & 1, f"{what >> 6}")
        if new in known:
            known.remove(new)
        known.append(new)
        arrivals.add(new)
        gone = [one for one in known if one not in arrivals]
        assert len(gone) == (len(known) > limit)
        for one in gone:
            counts = Counter(each.sender for each in known)
            assert counts[one.sender] == max(counts.values())
            assert one == next(each for each in known if each.sender == one.sender)
            known.remove(one)
        assert len(arrivals) == len(known) <= limit
        assert set(arrivals._of_sender) == {each.sender for each in known}


def seeds() -> Iterator[bytes]:
    """Each overfull, with one key and with many; transports that move, rest, end and never existed."""
    for limit, per_key in ((0, 1), (1, 0), (3, 2), (7, 4), (2, 4)):
        head = bytes((0, limit, per_key))
        yield head + b"\x00\x02\x04\x06" * 6 + b"\x01\x11\x21\x31" * 3
        yield head + b"\x00" * 8 + b"\x01\x39" + b"\x02" * 8 + b"\x01" * 9
        yield head + bytes(range(0, 256, 3))
    for kind in (0x00, 0x15, 0x24, 0xA2, 0x97, 0x3F):
        head = bytes((1, kind))
        yield head + b"\x00" * 12 + b"\x08\x10\x18" * 4 + b"\x87\xff"
        yield head + b"\x00\x00\x08\x10" * 4 + b"\x05\x01\x0c\x09\x3f\x05\x00\x4f" + b"\x7f" * 3 + b"\x00\x08" * 6
        yield head + b"".join(bytes((at % 4 * 8, 0x0F)) for at in range(12)) + b"\x0e\x15\x05\x7f\x0b\x03" + b"\xff" * 3
        yield head + b"".join(bytes((0, at * 8 + 5, 1)) for at in range(12)) + b"\x08" * 4
        yield head + b"".join(bytes((0, at * 8 + 4, 1)) for at in range(8)) + b"\x0f" + b"\xff\x08" * 9
    fill = b"".join(bytes((at * 4 % 128,)) for at in range(40))
    yield b"\x02" + fill + b"\x07\x20" + b"".join(bytes((2 + 4 * at, at * 7)) for at in range(32)) + fill
    yield b"\x02" + b"\x00" * 6 + b"\x03\x00" + b"\x0b" + b"\x00" + b"\x02\x05" + b"\x07\x00"
    yield b"\x02" + b"".join(bytes((at * 4 % 128, 7, 8)) for at in range(40)) + b"\xfe\x09" + fill
    yield b"\x02" + b"".join(bytes((at * 4 % 128, 2 + 4 * (at % 32), 9, 7, 4)) for at in range(36)) + fill[:8]
    for limit in (0, 3, 7):
        yield bytes((3, limit)) + bytes(range(0, 40, 4)) + bytes(range(1, 41, 4)) + b"\x00\x04\x01\xff\xfe" * 3
