"""Places for transports at a relay's client: who gets one, and which transport or request ends for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from dmsg.serving.limits import ServingLimits
from dmsg.serving.member import Leg, Member
from dmsg.serving.place_rules import PlaceRules
from fuzz.choices import Choices
from fuzz.oracles import KEYS

#: Limits small enough for a short input to reach every one of them.
_LIMITS = ServingLimits(
    transports_per_connection=12, transports_per_source=2, transports_per_pair=2, unanswered_per_target=5
)
_ROOM = _LIMITS.transports_per_connection // 2
_GROUPS = ("192.0.2.1", "192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.2.2", "192.0.2.3")
_SAMPLE_S = 5.0

_Member: TypeAlias = Member[Any]
_Leg: TypeAlias = Leg[Any]


class _Router:
    """The part of a switch that a member needs."""

    def __init__(self) -> None:
        self.dirty: list[Any] = []
        self.limits = _LIMITS

    def route(self, member: Any, data: bytes, now: float) -> Sequence[object]:
        """Nothing is routed."""
        return ()

    def drain(self, member: Any) -> None:
        """Nothing waits."""


class _World:
    """Clients of a relay, and their transports as a list of the asking legs."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.rules = PlaceRules(_LIMITS)
        self.now = 0.0
        self.count = 0
        router = _Router()
        keys = (key.public_key for key in KEYS)
        self.members = [Member[Any](router, key, 0.0, group=group) for key, group in zip(keys, _GROUPS, strict=False)]
        self.transports: list[_Leg] = []
        #: The time of each member's last check; for each transport, when it last carried bytes, and how many.
        self.looked: dict[_Member, float] = dict.fromkeys(self.members, 0.0)
        self.seen: dict[_Leg, tuple[float, int]] = {}

    # --- what happens ----------------------------------------------------------------------------------------------

    def request(self) -> None:
        """A client sends a request to another one or to itself; an unanswered request of a third one may end for it."""
        newcomer, target = self.choices.pick(self.members), self.choices.pick(self.members)
        may_ask = self.expected(newcomer, target)
        assert self.rules.may_ask(newcomer, target, self.now) is may_ask
        if not may_ask:
            return
        waiting = self.at(target, opened=False)
        ended = self.rules.request_for(newcomer, target)
        assert (ended is not None) is (len(waiting) >= _LIMITS.unanswered_per_target)
        if ended is not None:
            self.is_fair(ended, newcomer, waiting)
            of_source = [one for one in waiting if one.member is ended.target]
            assert ended.other is min(of_source, key=lambda one: one.since)
            self.end(ended.other)
        self.count += 1
        asking = Leg[Any](newcomer, 2 * self.count, initiator=True)
        asking.join(Leg[Any](target, 2 * self.count + 1, initiator=False), self.now)
        self.transports.append(asking)

    def expected(self, newcomer: _Member, target: _Member) -> bool:
        """Whether a request has a place, by the rules of the specification."""
        taken, waiting = self.at(target, opened=True), self.at(target, opened=False)
        dialled = [one for one in self.transports if one.member is newcomer]
        if len(dialled) + len(self.at(newcomer, opened=True)) >= _LIMITS.transports_per_connection:
            return False
        room = self.room(target)
        if 4 * len(taken) >= 3 * room and self.now - self.looked[target] >= _SAMPLE_S:
            self.look(target)
        if len(taken) >= room and not _yields(taken, newcomer):
            return False
        return len(waiting) < _LIMITS.unanswered_per_target or _yields(waiting, newcomer)

    def accept(self, asking: _Leg) -> None:
        """A request is accepted. Its transport gets a free place, or that of another transport, or does not open."""
        newcomer, target = asking.member, asking.other.member
        taken = self.at(target, opened=True)
        is_full = self.rules.is_full(target)
        assert is_full is (len(taken) >= self.room(target))
        if is_full:
            ended = self.rules.transport_for(newcomer, target, self.now)
            assert (ended is not None) is _yields(taken, newcomer)
            if ended is None:
                self.end(asking)
                return
            self.look(target)
            self.is_fair(ended, newcomer, taken)
            of_source = [one for one in taken if one.member is ended.target]
            assert self.seen[ended.other][0] == min(self.seen[one][0] for one in of_source)
            self.end(ended.other)
        asking.open_both(self.now)
        self.seen[asking] = (self.now, asking.other.sampled_bytes)

    def is_fair(self, ended: _Leg, newcomer: _Member, legs: list[_Leg]) -> None:
        """The transport that ends for ``newcomer`` is of the largest source, which has at least two more of ``legs``."""
        assert not ended.initiator and ended.other in legs
        source = ended.target
        groups = Counter(one.member.group for one in legs)
        members = Counter(one.member for one in legs if one.member.group == source.group)
        assert members[source] == max(members.values())
        if source.group != newcomer.group:
            assert groups[source.group] == max(groups.values()) >= groups[newcomer.group] + 2
            assert groups[newcomer.group] < _LIMITS.transports_per_source
        else:
            assert members[source] >= members[newcomer] + 2 and members[newcomer] < _LIMITS.transports_per_pair

    def end(self, asking: _Leg) -> None:
        """A transport or a request is over."""
        if not asking.open:
            asking.member.pending_requests -= 1
        asking.close()
        asking.other.close()
        self.transports.remove(asking)
        self.seen.pop(asking, None)

    # --- what there is ---------------------------------------------------------------------------------------------

    def at(self, target: _Member, *, opened: bool) -> list[_Leg]:
        """The transports that others opened to a client, or their requests."""
        return [one for one in self.transports if one.other.member is target and one.open is opened]

    def room(self, target: _Member) -> int:
        """How many may be opened to it."""
        dials = sum(one.member is target for one in self.transports)
        return min(_ROOM, _LIMITS.transports_per_connection - dials)

    def look(self, target: _Member) -> None:
        """Check which transports to a client have carried data since the last check."""
        self.looked[target] = self.now
        for one in self.at(target, opened=True):
            size = one.bytes + one.other.bytes
            if size != self.seen[one][1]:
                self.seen[one] = (self.now, size)

    def check(self) -> None:
        """Places are counted correctly, and no limit is exceeded."""
        for member in self.members:
            opened, waiting = self.at(member, opened=True), self.at(member, opened=False)
            dials = sum(one.member is member for one in self.transports)
            assert member.incoming.count == len(opened) <= _ROOM
            assert member.unanswered.count == len(waiting) <= _LIMITS.unanswered_per_target
            assert member.dials == dials and dials + len(opened) <= _LIMITS.transports_per_connection
            for places, legs in ((member.incoming, opened), (member.unanswered, waiting)):
                held = Counter(one.member for one in legs)
                assert places._held == dict(held)  # a Counter is equal to one with zeros in it
                assert all((one in places) is (one in held) for one in self.members)


def _yields(legs: list[_Leg], newcomer: _Member) -> bool:
    """Whether some source of ``legs`` has to give up a place for ``newcomer``."""
    groups = Counter(one.member.group for one in legs)
    own = Counter(one.member for one in legs if one.member.group == newcomer.group)
    most = max(groups.values(), default=0)
    if groups[newcomer.group] < _LIMITS.transports_per_source and most >= groups[newcomer.group] + 2:
        return True
    return own[newcomer] < _LIMITS.transports_per_pair and max(own.values(), default=0) >= own[newcomer] + 2


def one_input(data: bytes) -> None:
    """Operations of six clients of three address groups: ask, accept, carry bytes, end; and time."""
    choices = Choices(data)
    world = _World(choices)
    for number in range(150):
        if not choices.left:
            break
        what = choices.byte() % 8
        if what < 3 or not world.transports:
            world.request()
        elif what == 7:
            world.now += choices.byte() / 8
        else:
            asking = world.transports[choices.byte() % len(world.transports)]
            match what:
                case 3 | 4 if not asking.open:
                    world.accept(asking)
                case 5:
                    side = asking if choices.flag() else asking.other
                    side.bytes += choices.byte()
                case 6:
                    world.end(asking)
        if number % 8 == 7:
            world.check()
    world.check()
    for one in list(world.transports):
        world.end(one)
    world.check()


def seeds() -> Iterator[bytes]:
    """A source that takes everything, and others that come; transports that carry something; too many requests and dials."""

    def ask(source: int, target: int) -> bytes:
        return bytes((0, source, target))

    last = [bytes((3, at)) for at in range(24)]
    taken = b"".join(ask(0, 5) + last[at] + b"\x07\x08" for at in range(6))
    yield taken + (ask(3, 5) + last[6] + ask(1, 5) + last[6] + ask(0, 5) + last[6]) * 3
    yield taken + b"\x05\x00\x01\x09\x05\x02\x00\x09\x07\x30" + (ask(3, 5) + last[6] + b"\x07\x30") * 4
    yield taken + b"\x07\x30" + (ask(1, 5) + b"\x05\x01\x01\x05" + last[6]) * 4 + ask(2, 5) * 3
    for other in (1, 3):
        yield b"".join(ask(0 if at < 4 else other, 5) + last[at] for at in range(6)) + (ask(other, 5) + last[6]) * 2
        yield b"".join(ask(0 if at < 4 else other, 5) + b"\x07\x08" for at in range(6)) + (ask(other, 5) + last[2]) * 2
    yield ask(0, 5) * 6 + ask(1, 5) * 4 + ask(3, 5) * 4 + ask(4, 5) * 4
    yield (
        b"".join(ask(0, 5) + b"\x07\x04" for _ in range(5))
        + b"".join(last[4:])
        + ask(3, 5) * 2
        + b"\x06\x00"
        + ask(1, 5)
    )
    yield (
        b"".join(ask(0, at % 5 + 1) for at in range(14))
        + b"".join(last)
        + b"".join(ask(at % 5 + 1, 0) for at in range(9))
    )
    yield (
        b"".join(ask(0, at % 3 + 1) for at in range(10))
        + b"".join(ask(at % 3 + 1, 0) for at in range(4))
        + last[10] * 4
    )
    yield (
        b"".join(ask(at % 3 + 1, 0) for at in range(5))
        + b"".join(last[:5])
        + b"".join(ask(0, at % 5 + 1) for at in range(9))
    )
    yield (ask(0, 0) + last[0]) * 4 + ask(1, 0) + ask(0, 1) + last[4] * 2 + b"\x06\x00" * 6
    requests = b"".join(ask(at % 2, 5) for at in range(5)) + b"".join(ask(3 + at % 2, 5) for at in range(5))
    yield (requests + b"".join(last[:10])) * 4
