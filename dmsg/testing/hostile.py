"""A hostile relay for tests: a real relay that manipulates the frames of its clients as a test says.

It is the adversary of :ref:`spec-extension`: it reads every frame in the clear of the hop and may drop, repeat,
reorder, alter, cut, hold back, redirect and forge frames. It cannot break the cryptography, and tests show that its clients
rely on nothing else::

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

    ``to`` is the receiving client, ``transport_id`` the id there; ``peer`` is the other end of the transport, if known.
    """

    to: PublicKey
    kind: int
    transport_id: int
    payload: bytes
    peer: PublicKey | None = None


#: Returns the frames to send instead of a frame.
Action = Callable[[RelayFrame], Iterable[RelayFrame]]


def drop(frame: RelayFrame) -> list[RelayFrame]:
    """The frame does not arrive."""
    return []


def repeat(frame: RelayFrame) -> list[RelayFrame]:
    """The frame arrives twice."""
    return [frame, frame]


def alter(frame: RelayFrame, at: int = -1) -> list[RelayFrame]:
    """One bit of one byte is flipped; the last byte belongs to the seal."""
    payload = bytearray(frame.payload)
    payload[at] ^= 1
    return [replace(frame, payload=bytes(payload))]


def truncate(frame: RelayFrame) -> list[RelayFrame]:
    """The last byte is missing."""
    return [replace(frame, payload=frame.payload[:-1])]


def insert(frame: RelayFrame) -> list[RelayFrame]:
    """A forged frame, as long as the real one, arrives before it."""
    return [replace(frame, payload=bytes(len(frame.payload))), frame]


class Swap:
    """An action for a rule that applies twice: two frames arrive in reverse order."""

    def __init__(self) -> None:
        self._first: RelayFrame | None = None

    def __call__(self, frame: RelayFrame) -> list[RelayFrame]:
        if self._first is None:
            self._first = frame
            return []
        return [frame, self._first]


@dataclass(slots=True)
class Rule:
    """A rule for frames of ``kind`` on their way ``to`` a node, from ``peer``; each of these is optional.

    The first ``skip`` matching frames pass; the next ``times`` (``None``: all) are handed to ``act``. ``hits`` counts those.
    """

    act: Action
    kind: int | None = None
    to: PublicKey | None = None
    peer: PublicKey | None = None
    skip: int = 0
    times: int | None = 1
    hits: int = 0

    def takes(self, frame: RelayFrame) -> bool:
        """Whether ``frame`` is to be handed to ``act``; counts matching frames."""
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
    """A layer between the switch and the records of one client, which sees the plaintext of every frame."""

    __slots__ = ("inner", "remote", "switch")

    def __init__(self, switch: HostileSwitch, remote: PublicKey, inner: RecordLayer) -> None:
        self.switch = switch
        self.remote = remote
        self.inner = inner

    @property
    def held_bytes(self) -> int:
        """Received bytes of an incomplete packet."""
        return self.inner.held_bytes

    def open(self, data: bytes | memoryview) -> list[bytes]:
        """Open data from the client unchanged."""
        return self.inner.open(data)

    def seal(self, plaintext: bytes, limit: int = RECORD_PLAINTEXT_LIMIT_BYTES) -> bytes:
        """Seal the frames for the client after the rules have been applied."""
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
        #: Every frame that was to be sent, before the rules, except OK frames.
        self.seen: list[RelayFrame] = []
        #: Clients that are treated as base clients although they are not: they and their peers get ``unsupported``.
        self.treat_as_base: set[PublicKey] = set()
        self.waiters: list[_Waiter] = []
        self._peers: dict[tuple[PublicKey, int], PublicKey] = {}

    def add_member(
        self, remote: PublicKey, records: RecordLayer, now: float, *, extended: bool = False, group: str = ""
    ) -> tuple[Member, list[SwitchEvent]]:
        """Admit a connection, and tap it."""
        extended = extended and remote not in self.treat_as_base
        return super().add_member(remote, _Tap(self, remote, records), now, extended=extended, group=group)

    def pass_on(self, to: PublicKey, kind: int, transport_id: int, payload: bytes) -> list[RelayFrame]:
        """The frames to send instead of a frame. The first matching rule decides."""
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
    """A relay under a test's control, honest by default. It takes the same arguments as :class:`DmsgRelay`."""

    switch: HostileSwitch

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.switch = HostileSwitch(self.limits, random=self._random)

    @property
    def seen(self) -> list[RelayFrame]:
        """Every frame that was to be sent so far, in order, before the rules."""
        return self.switch.seen

    def rule(self, act: Action, **match: Any) -> Rule:
        """From now on, apply ``act`` to matching frames (see :class:`Rule`). Earlier rules come first."""
        rule = Rule(act, **match)
        self.switch.rules.append(rule)
        return rule

    def be_honest(self) -> None:
        """Forget all rules."""
        self.switch.rules.clear()

    def send(self, frame: RelayFrame) -> None:
        """Send a forged frame, or a frame of :attr:`seen` again, past all rules."""
        member = self.switch.members[frame.to.raw]
        records = member.records
        assert isinstance(records, _Tap)
        plaintext = encode_frame(frame.kind, frame.transport_id, frame.payload)
        cast(Any, member.owner).transport.write(records.inner.seal(plaintext))

    def frames(self, kind: int | None = None, to: PublicKey | None = None) -> list[RelayFrame]:
        """The frames in :attr:`seen` of ``kind`` to the client ``to``, if given."""
        return [one for one in self.seen if kind in (None, one.kind) and to in (None, one.to)]

    def next_frame(self, kind: int | None = None, to: PublicKey | None = None) -> Deferred[RelayFrame]:
        """Fires with the next frame of ``kind`` to the client ``to``, if given."""
        waiter = _Waiter(lambda frame: kind in (None, frame.kind) and to in (None, frame.to))
        self.switch.waiters.append(waiter)
        return waiter.fired

    def cut(self, client: PublicKey) -> None:
        """Reset the connection of one client."""
        cast(Any, self.switch.members[client.raw].owner).transport.abortConnection()


class HostileNetwork(LocalNetwork):
    """A :class:`~dmsg.testing.network.LocalNetwork` whose relays may be hostile: begin with ``relays=0``, add relays."""

    async def add_relay(self, key: SecretKey | None = None, **options: Any) -> HostileRelay:
        """Add a relay; returns when clients can find it. ``options`` go to :class:`HostileRelay`."""
        return cast(HostileRelay, await super().add_relay(key, kind=HostileRelay, **options))
