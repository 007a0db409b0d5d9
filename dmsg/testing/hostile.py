"""A hostile relay for tests: a real one that does to the frames of its clients what a test says.

It is the adversary of :ref:`spec-extension`: it reads every frame in the clear of the hop and may drop, repeat,
reorder, alter, cut, hold back, redirect and make up any of them. What it may not do is break the cryptography, and
tests show that this is all its clients rely on::

    relay = await network.add_relay()
    relay.rule(kind=FrameType.FWD, to=bob.public_key, skip=3, act=drop)
    ...
    assert isinstance(protocol.reason.cause, IntegrityError)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from twisted.internet.defer import Deferred

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.wire import RECORD_PLAINTEXT_LIMIT_BYTES, REQUEST_BYTES, FrameType, encode_frame, split_frames
from dmsg.mux.relay.member import Member
from dmsg.mux.relay.service import DmsgRelay
from dmsg.mux.relay.switch import Switch
from dmsg.serving.events import SwitchEvent
from dmsg.testing.network import LocalNetwork


@dataclass(frozen=True, slots=True)
class RelayFrame:
    """A frame on its way from the relay to one of its clients, as the relay sees it.

    ``to`` is who gets it, ``transport_id`` the id there; ``peer`` is the other end of the transport, if it is known.
    """

    to: PublicKey
    kind: int
    transport_id: int
    payload: bytes
    peer: PublicKey | None = None


#: What becomes of a frame: the frames to be sent instead.
Action = Callable[[RelayFrame], Iterable[RelayFrame]]


def drop(frame: RelayFrame) -> list[RelayFrame]:
    """Nothing arrives."""
    return []


def repeat(frame: RelayFrame) -> list[RelayFrame]:
    """It arrives twice."""
    return [frame, frame]


def alter(frame: RelayFrame, at: int = -1) -> list[RelayFrame]:
    """One bit of one byte is turned over; the last byte belongs to the seal."""
    payload = bytearray(frame.payload)
    payload[at] ^= 1
    return [replace(frame, payload=bytes(payload))]


def truncate(frame: RelayFrame) -> list[RelayFrame]:
    """The last byte is missing."""
    return [replace(frame, payload=frame.payload[:-1])]


def insert(frame: RelayFrame) -> list[RelayFrame]:
    """A frame of the relay's own making, as long as the real one, arrives first."""
    return [replace(frame, payload=bytes(len(frame.payload))), frame]


class Swap:
    """An action for a rule that applies twice: two frames arrive in the other order."""

    def __init__(self) -> None:
        self._first: RelayFrame | None = None

    def __call__(self, frame: RelayFrame) -> list[RelayFrame]:
        if self._first is None:
            self._first = frame
            return []
        return [frame, self._first]


@dataclass(slots=True)
class Rule:
    """The frames that a rule applies to: those of ``kind`` on their way ``to`` a node, from ``peer``, if given.

    The first ``skip`` of them pass; the next ``times`` (``None``: all) are handed to ``act``. ``hits`` counts those.
    """

    act: Action
    kind: int | None = None
    to: PublicKey | None = None
    peer: PublicKey | None = None
    skip: int = 0
    times: int | None = 1
    hits: int = 0

    def takes(self, frame: RelayFrame) -> bool:
        """Whether ``frame`` is to be handed to ``act``; counts."""
        if self.kind not in (None, frame.kind) or self.to not in (None, frame.to):
            return False
        if self.peer not in (None, frame.peer) or (self.times is not None and self.hits >= self.times):
            return False
        if self.skip:
            self.skip -= 1
            return False
        self.hits += 1
        return True


class _Tap(RecordLayer):
    """Stands between the switch and the records of one client: the plaintext of every frame passes here."""

    __slots__ = ("inner", "remote", "switch")

    def __init__(self, switch: HostileSwitch, remote: PublicKey, inner: RecordLayer) -> None:
        self.switch = switch
        self.remote = remote
        self.inner = inner

    @property
    def held_bytes(self) -> int:
        """What was received of a packet that is not complete."""
        return self.inner.held_bytes

    def open(self, data: bytes | memoryview) -> list[bytes]:
        """What the client sends is taken as it is."""
        return self.inner.open(data)

    def seal(self, plaintext: bytes, limit: int = RECORD_PLAINTEXT_LIMIT_BYTES) -> bytes:
        """What goes to the client is what the rules leave of it."""
        frames, used = split_frames(plaintext)
        assert used == len(plaintext)
        sent = [
            encode_frame(after.kind, after.transport_id, after.payload)
            for kind, transport_id, start, end in frames
            for after in self.switch.pass_on(self.remote, kind, transport_id, plaintext[start:end])
        ]
        return self.inner.seal(b"".join(sent), limit) if sent else b""


@dataclass(slots=True)
class _Waiter:
    wanted: Callable[[RelayFrame], bool]
    fired: Deferred[RelayFrame] = field(default_factory=Deferred)


class HostileSwitch(Switch):
    """A switch whose every outgoing frame is subject to ``rules``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rules: list[Rule] = []
        #: Every frame that was to be sent, before the rules; OK frames excepted.
        self.seen: list[RelayFrame] = []
        #: Clients whose hop counts as base although it is not: they get ``unsupported``, and so do their peers.
        self.treat_as_base: set[PublicKey] = set()
        self.waiters: list[_Waiter] = []
        self._peers: dict[tuple[PublicKey, int], PublicKey] = {}

    def add_member(
        self, remote: PublicKey, records: RecordLayer, now: float, *, extended: bool = False, group: str = ""
    ) -> tuple[Member, list[SwitchEvent]]:
        """Admit a connection, and listen in on it."""
        extended = extended and remote not in self.treat_as_base
        return super().add_member(remote, _Tap(self, remote, records), now, extended=extended, group=group)

    def pass_on(self, to: PublicKey, kind: int, transport_id: int, payload: bytes) -> list[RelayFrame]:
        """What is sent instead of one frame. The first rule that takes it decides."""
        if kind == FrameType.REQUEST:
            self._peers[to, transport_id] = PublicKey(payload[:33])
        elif kind == FrameType.ACCEPT:
            self._peers[to, transport_id] = PublicKey(payload[33:REQUEST_BYTES])
        frame = RelayFrame(to, kind, transport_id, payload, self._peers.get((to, transport_id)))
        if kind != FrameType.OK:
            self.seen.append(frame)
            for waiter in [one for one in self.waiters if one.wanted(frame)]:
                self.waiters.remove(waiter)
                waiter.fired.callback(frame)
        for rule in self.rules:
            if rule.takes(frame):
                return list(rule.act(frame))
        return [frame]


class HostileRelay(DmsgRelay):
    """A relay under a test's control: honest until told otherwise. Takes what :class:`DmsgRelay` takes."""

    switch: HostileSwitch

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.switch = HostileSwitch(self.limits, random=self._random)

    @property
    def seen(self) -> list[RelayFrame]:
        """Every frame that was to be sent so far, in order, before any rule applied."""
        return self.switch.seen

    def rule(self, act: Action, **match: Any) -> Rule:
        """From now on, do ``act`` to the frames that match (see :class:`Rule`). Rules made earlier come first."""
        rule = Rule(act, **match)
        self.switch.rules.append(rule)
        return rule

    def be_honest(self) -> None:
        """Forget all rules."""
        self.switch.rules.clear()

    def send(self, frame: RelayFrame) -> None:
        """Send a frame of one's own making, or one of :attr:`seen` again, past all rules."""
        member = self.switch.members[frame.to.raw]
        records = member.records
        assert isinstance(records, _Tap)
        plaintext = encode_frame(frame.kind, frame.transport_id, frame.payload)
        cast(Any, member.owner).transport.write(records.inner.seal(plaintext))

    def frames(self, kind: int | None = None, to: PublicKey | None = None) -> list[RelayFrame]:
        """Those of :attr:`seen` of a kind, to a client."""
        return [one for one in self.seen if kind in (None, one.kind) and to in (None, one.to)]

    def next_frame(self, kind: int | None = None, to: PublicKey | None = None) -> Deferred[RelayFrame]:
        """Fires with the next frame of a kind to a client."""
        waiter = _Waiter(lambda frame: kind in (None, frame.kind) and to in (None, frame.to))
        self.switch.waiters.append(waiter)
        return waiter.fired

    def cut(self, client: PublicKey) -> None:
        """Reset the connection of one client."""
        cast(Any, self.switch.members[client.raw].owner).transport.abortConnection()


class HostileNetwork(LocalNetwork):
    """A :class:`~dmsg.testing.network.LocalNetwork` whose relays may be hostile: begin with ``relays=0``, add relays."""

    async def add_relay(self, key: SecretKey | None = None, **options: Any) -> HostileRelay:
        """One relay more; returns when clients can find it. ``options`` go to :class:`HostileRelay`."""
        return cast(HostileRelay, await super().add_relay(key, kind=HostileRelay, **options))
