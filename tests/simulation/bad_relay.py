"""A relay that an intruder owns: it attacks its traffic at random in every way a relay can."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Final, cast

from twisted.internet.endpoints import TCP4ServerEndpoint

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey
from dmsg.mux.core.hello import AnnouncedLimits, hello_payload
from dmsg.mux.core.tlv import Tlv, encode_tlvs
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    HEADER,
    OK,
    REQUEST,
    REQUEST_BYTES,
    encode_close,
    encode_frame,
)
from dmsg.mux.relay.member import Leg, Member
from dmsg.serving.events import SwitchEvent
from dmsg.testing.hostile import HostileRelay, HostileSwitch, RelayFrame
from tests.simulation.machine import Machine
from tests.simulation.world import RELAY_PORT, Relay, World

#: Fates of the two directions of a transport, independent of each other.
FATES: Final = ("stall", "cut", "split", "split", "mangle", "mangle", "slow", "noise", "deaf")
#: Attacks on one frame.
DEEDS: Final = (
    "drop",
    "repeat",
    "alter",
    "truncate",
    "extend",
    "invent",
    "swap",
    "late",
    "another kind",
    "another id",
    "older",
    "elsewhere",
    "close",
    "acknowledge",
)
#: Attacks on a client, whatever it does.
ATTACKS: Final = (
    "strays",
    "replay",
    "replay requests",
    "flood",
    "too long",
    "no such type",
    "ok again",
    "garbage",
    "half a record",
    "closes",
    "cut",
    "mute",
    "ask",
)
#: Answers to a REQUEST instead of passing it on.
ANSWERS: Final = ("silence", "refuse", "accept", "echo", "another", "twice", "unknown", "slow")
_REMEMBERED: Final = 300


class Intruder:
    """The owner of the relay: decides the fate of each frame."""

    def __init__(self, world: World, random: Random) -> None:
        self.world = world
        self.random = random
        self.active = True
        self.service: BadService
        self.seen: deque[RelayFrame] = deque(maxlen=_REMEMBERED)
        self._fates: dict[tuple[PublicKey, int], list[Any]] = {}
        self._held: dict[tuple[PublicKey, int], RelayFrame] = {}
        self._mute: set[PublicKey] = set()
        # Only some kinds in each run, so that no kind hides faults that another kind would show.
        self.fates = self._some(FATES)
        self.deeds = self._some(DEEDS)
        self.attacks = self._some(ATTACKS)
        self.answers = self._some(ANSWERS)
        self.share = random.choice([0.2, 0.5, 0.9])
        self.answering = random.choice([0.0, 0.1, 0.1, 0.4])
        self.refusing = random.choice([0.0, 0.0, 0.0, 0.1, 0.5])
        self.every_s = random.choice([1.0, 5.0, 20.0, 20.0])

    def _some(self, kinds: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(kind for kind in kinds if self.random.random() < 0.4) or kinds

    def __str__(self) -> str:
        return f"fates {self.fates}, deeds {self.deeds}, attacks {self.attacks}, answers {self.answers}"

    # --- frames on their way ---------------------------------------------------------------------------------------------

    def treat(self, frame: RelayFrame) -> list[RelayFrame]:
        """The frames to send instead of ``frame``."""
        if not self.active:
            return [frame]
        if frame.to in self._mute:
            return []
        self.seen.append(frame)
        if frame.kind == OK:
            return self._admit(frame)
        place = frame.to, frame.transport_id
        if frame.kind in (REQUEST, ACCEPT):
            self._fates.pop(place, None)
            if self.random.random() < self.share:
                self._fates[place] = [self.random.choice(self.fates), self.random.choice([0, 0, 1, 3, 30])]
                if frame.kind == ACCEPT and self._fates[place][0] == "split":
                    self._slow_other(frame)
            early = self.random.random() < 0.1 * self.share
            return self._do(frame) if early else [frame]
        fate = self._fates.get(place)
        if fate is None:
            return [frame]
        fate[1] -= 1
        if fate[1] >= 0:
            return [frame]
        what: Callable[[RelayFrame], list[RelayFrame]] = getattr(self, f"_{fate[0]}")
        return what(frame)

    def _admit(self, frame: RelayFrame) -> list[RelayFrame]:
        if self.random.random() >= self.refusing:
            return [frame]
        how = self.random.choice(["never", "twice", "reason", "nonsense"])
        reason = encode_tlvs({Tlv.REASON: self.random.choice([b"no", b"server_draining", b"\xff" * 900])})
        return {
            "never": [],
            "twice": [frame, frame],
            "reason": [replace(frame, payload=reason)],
            "nonsense": [replace(frame, payload=self.random.randbytes(50), transport_id=7)],
        }[how]

    def _stall(self, frame: RelayFrame) -> list[RelayFrame]:
        """Nothing arrives any more, and nobody is told."""
        return []

    def _deaf(self, frame: RelayFrame) -> list[RelayFrame]:
        """Acknowledgements do not arrive."""
        return [frame] if frame.kind == FWD else []

    def _cut(self, frame: RelayFrame) -> list[RelayFrame]:
        self._fates[frame.to, frame.transport_id] = ["stall", 0]
        self.later(0.0, self._close_other, frame)
        return [self._closed(frame)] if self.random.random() < 0.7 else []

    def _split(self, frame: RelayFrame) -> list[RelayFrame]:
        """One end is told that the transport has ended; its earlier data still reaches the other end, later."""
        self._slow_other(frame)
        self._fates[frame.to, frame.transport_id] = ["stall", 0]
        return [self._closed(frame)]

    def _slow_other(self, frame: RelayFrame) -> None:
        other = self._other_end(frame)
        if other is not None:
            self._fates.setdefault((other.to, other.transport_id), ["slow", 0, self.random.choice([0.1, 0.2, 0.3])])

    def _close_other(self, frame: RelayFrame) -> None:
        other = self._other_end(frame)
        if other is not None and self.random.random() < 0.7:
            self.service.say(self._closed(other))

    def _closed(self, frame: RelayFrame) -> RelayFrame:
        random = self.random
        size = random.choice([0, 1, 1, 1, 2, 18, 40])
        code = random.choice([0, 0, 1, 13, 13, 14, 12, random.randrange(256)])
        return replace(frame, kind=CLOSE, payload=(bytes((code,)) + random.randbytes(40))[:size])

    def _mangle(self, frame: RelayFrame) -> list[RelayFrame]:
        """Alter one frame, and pass the rest unchanged."""
        del self._fates[frame.to, frame.transport_id]
        return self._do(frame)

    def _noise(self, frame: RelayFrame) -> list[RelayFrame]:
        return self._do(frame) if self.random.random() < 0.1 else [frame]

    def _slow(self, frame: RelayFrame) -> list[RelayFrame]:
        # In order, which alone is no offence.
        fate = self._fates[frame.to, frame.transport_id]
        if len(fate) < 3:
            fate.append(self.random.choice([0.1, 0.2, 0.3, 0.5, 3.0]))
        self.later(fate[2], self.service.say, frame)
        return []

    def _do(self, frame: RelayFrame) -> list[RelayFrame]:
        """Alter one frame in some way."""
        random, payload = self.random, frame.payload
        deed = random.choice(self.deeds)
        self.world.note(f"{deed}: {frame.kind:x} of {frame.transport_id} to {str(frame.to)[:8]}")
        if deed == "drop":
            return []
        if deed == "repeat":
            return [frame] * random.choice([2, 2, 40])
        if deed == "alter" and payload:
            at = random.choice([0, 1, len(payload) - 1, random.randrange(len(payload))]) % len(payload)
            changed = payload[:at] + bytes((payload[at] ^ 1 << random.randrange(8),)) + payload[at + 1 :]
            return [replace(frame, payload=changed)]
        if deed == "truncate":
            return [replace(frame, payload=payload[: random.randrange(len(payload) + 1)])]
        if deed == "extend":
            return [replace(frame, payload=(payload + random.randbytes(random.choice([1, 16, 2_000])))[:65_510])]
        if deed == "invent":
            return [replace(frame, payload=random.randbytes(random.choice([0, 2, 22, len(payload)]))), frame]
        if deed == "swap":
            place = frame.to, frame.transport_id
            held = self._held.pop(place, None)
            if held is not None:
                return [frame, held]
            self._held[place] = frame
            self._fates[place] = ["mangle", 0]
            return []
        if deed == "late":
            self.later(random.expovariate(1.0), self.service.say, frame)
            return []
        if deed == "another kind":
            return [replace(frame, kind=random.choice([OK, REQUEST, ACCEPT, CLOSE, FWD, ACK, 4]))]
        if deed == "another id":
            return [replace(frame, transport_id=random.randrange(1 << 16))]
        if deed == "older":
            older = [one for one in self.seen if one.to == frame.to and one.kind == frame.kind]
            return [replace(random.choice(older), transport_id=frame.transport_id)]
        if deed == "elsewhere":
            others = [one for one in self.seen if one.kind == frame.kind]
            other = random.choice(others)
            self.later(0.0, self.service.say, replace(other, payload=payload))
            return [replace(frame, payload=other.payload)]
        if deed == "close":
            return [self._closed(frame)]
        if deed == "acknowledge":
            return [
                frame,
                replace(frame, kind=ACK, payload=random.choice([b"\0\0", payload[:2], random.randbytes(22)])),
            ]
        return [frame]

    def _other_end(self, frame: RelayFrame) -> RelayFrame | None:
        member = self.service.switch.members.get(frame.to.raw)
        leg = member.legs.get(frame.transport_id) if member is not None else None
        return None if leg is None else replace(frame, to=leg.other.member.remote, transport_id=leg.other.id)

    def end_all(self) -> None:
        """Close every transport, and let no further ones through."""
        self.answers, self.answering = ("silence", "unknown"), 1.0
        for member in list(self.service.switch.members.values()):
            for transport_id in list(member.legs):
                self.service.say(RelayFrame(member.remote, CLOSE, transport_id, b"\x0d"))

    # --- requests ----------------------------------------------------------------------------------------------------------

    def answer(self) -> str:
        """The answer to the next REQUEST; "" for that of an honest relay."""
        return self.random.choice(self.answers) if self.active and self.random.random() < self.answering else ""

    # --- attacks -----------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Attack now and then."""
        self.later(self.random.expovariate(1 / self.every_s), self._attack)

    def _attack(self) -> None:
        members = list(self.service.switch.members.values())
        if self.active and members:
            member = self.random.choice(members)
            what = self.random.choice(self.attacks)
            self.world.note(f"{what}: {str(member.remote)[:8]} at {self.service.reactor}")
            attack: Callable[[Member], None] = getattr(self, "_do_" + what.replace(" ", "_"))
            attack(member)
        self.begin()

    def later(self, after_s: float, do: Callable[..., object], *arguments: object) -> None:
        """Do it, unless the relay is off by then."""
        self.service.reactor.callLater(after_s, do, *arguments)

    def _do_strays(self, member: Member) -> None:
        random = self.random
        ids = [*member.legs, random.randrange(1 << 16)]
        kinds = [OK, REQUEST, ACCEPT, CLOSE, FWD, ACK]
        frames = [
            (random.choice(kinds[1:]), random.choice(ids), random.randbytes(random.choice([0, 1, 2, 16, 66, 400])))
            for _ in range(random.choice([1, 30, 3_000]))
        ]
        self.service.write(member, b"".join(encode_frame(*frame) for frame in frames))

    def _do_replay(self, member: Member) -> None:
        seen = [one for one in self.seen if one.to == member.remote] or list(self.seen)
        for frame in self.random.sample(seen, min(len(seen), 20)):
            self.service.say(replace(frame, to=member.remote))

    def _do_replay_requests(self, member: Member) -> None:
        requests = [one for one in self.seen if one.kind == REQUEST and one.to == member.remote]
        for frame in requests[-50:]:
            self.service.say(replace(frame, transport_id=self.random.randrange(1 << 15) * 2 + 1))

    def _do_flood(self, member: Member) -> None:
        random, frames = self.random, []
        names = [one.to.raw for one in self.seen] + [
            self.world.key(f"made up {number}").public_key.raw for number in range(3)
        ]
        for _ in range(random.choice([50, 1_500])):
            keys = random.choice([random.choice(names), random.randbytes(33)]) + member.remote.raw
            handshake = random.choice([b"", b"", random.randbytes(369)])
            frames.append(encode_frame(REQUEST, random.randrange(1 << 15) * 2 + 1, keys + handshake))
        self.service.write(member, b"".join(frames))

    def _do_ask(self, member: Member) -> None:
        """Send a request in the clear in the name of another client."""
        for one in list(self.service.switch.members.values()):
            transport_id = self.random.randrange(1 << 15) * 2 + 1
            keys = one.remote.raw + member.remote.raw
            data = self.random.choice([b"", encode_frame(FWD, transport_id, b"\0\0" + self.random.randbytes(400))])
            self.service.write(member, encode_frame(REQUEST, transport_id, keys) + data)
            if self.random.random() < 0.3:
                self.later(0.5, self.service.say, RelayFrame(member.remote, FWD, transport_id, b"\0\0in the clear"))

    def _do_too_long(self, member: Member) -> None:
        self.service.write(member, HEADER.pack(FWD, self.random.choice([0, *member.legs]), 65_511) + bytes(100))

    def _do_no_such_type(self, member: Member) -> None:
        self.service.write(member, encode_frame(self.random.randrange(4, 10), self.random.choice([0, *member.legs])))

    def _do_ok_again(self, member: Member) -> None:
        self.service.write(member, encode_frame(OK, 0))

    def _do_garbage(self, member: Member) -> None:
        self.service.write_bytes(member, self.random.randbytes(self.random.choice([1, 30, 70_000])))

    def _do_half_a_record(self, member: Member) -> None:
        self.service.write_bytes(member, b"\xff\xff" + self.random.randbytes(20))

    def _do_closes(self, member: Member) -> None:
        for transport_id in list(member.legs):
            if self.random.random() < 0.7:
                self.service.say(self._closed(RelayFrame(member.remote, CLOSE, transport_id, b"")))

    def _do_cut(self, member: Member) -> None:
        cast(Any, member.owner).transport.abortConnection()

    def _do_mute(self, member: Member) -> None:
        """Send nothing to this client for a while, or for ever."""
        self._mute.add(member.remote)
        self.later(self.random.choice([2.0, 30.0, 1e6]), self._mute.discard, member.remote)


class _Switch(HostileSwitch):
    """A switch that asks the intruder."""

    intruder: Intruder

    def pass_on(self, to: PublicKey, kind: int, transport_id: int, payload: bytes) -> list[RelayFrame]:
        """See :class:`~dmsg.testing.hostile.HostileSwitch`."""
        return self.intruder.treat(RelayFrame(to, kind, transport_id, payload))

    def _on_request(
        self, member: Member, leg: Leg | None, transport_id: int, payload: bytes, events: list[SwitchEvent]
    ) -> None:
        how, random = self.intruder.answer(), self.intruder.random
        if how == "silence":
            return
        if how == "refuse":
            member.send_control(encode_close(transport_id, random.randrange(256)))
        elif how == "unknown":
            member.send_control(encode_close(transport_id, 2))
        elif how == "accept":
            made_up = random.choice([b"", random.randbytes(113), random.randbytes(1_200)])
            member.send_control(encode_frame(ACCEPT, transport_id, payload[:REQUEST_BYTES] + made_up))
        elif how == "echo":
            member.send_control(encode_frame(ACCEPT, transport_id, payload) * random.choice([1, 2]))
        elif how == "slow":
            later = random.choice([1.0, 9.9, 15.0])
            self.intruder.later(later, self._on_late_request, member, transport_id, payload)
        else:
            if how == "another":
                other = random.choice(list(self.members.values()))
                payload = payload[:33] + other.remote.raw + payload[REQUEST_BYTES:]
            super()._on_request(member, leg, transport_id, payload, events)
            target = self.members.get(payload[33:REQUEST_BYTES])
            if how == "twice" and target is not None:
                frame = RelayFrame(target.remote, REQUEST, random.randrange(1 << 15) * 2 + 1, payload)
                self.intruder.later(0.0, self.intruder.service.say, frame)

    def _on_late_request(self, member: Member, transport_id: int, payload: bytes) -> None:
        if member.owner is not None:
            events: list[SwitchEvent] = []
            super()._on_request(member, member.legs.get(transport_id), transport_id, payload, events)
            self.intruder.service._act(events)


class BadService(HostileRelay):
    """The service of such a relay."""

    def __init__(self, *arguments: Any, intruder: Intruder, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.switch = _Switch(self.limits, random=self._random)
        self.switch.intruder = self.intruder = intruder
        intruder.service = self
        random = intruder.random
        if self._hello and random.random() < 0.3:
            numbers = [0, 1, 3, 1_024, 65_510, 0xFFFFFFFF]
            limits = AnnouncedLimits(random.choice(numbers[2:]), random.choice(numbers), random.choice(numbers))
            self._hello = random.choice(
                [hello_payload(limits, random.choice(numbers), aes=True), random.randbytes(60), bytes(1_200)]
            )

    def say(self, frame: RelayFrame) -> None:
        """Send a frame past the intruder, if its client is there."""
        member = self.switch.members.get(frame.to.raw)
        if member is not None:
            self.write(member, encode_frame(frame.kind, frame.transport_id, frame.payload))

    def write(self, member: Member, plaintext: bytes) -> None:
        """Send frames, or what passes for frames."""
        if member.owner is not None:
            self.write_bytes(member, cast(Any, member.records).inner.seal(plaintext))

    @staticmethod
    def write_bytes(member: Member, data: bytes) -> None:
        """Send bytes as they are."""
        shell = cast(Any, member.owner)
        if shell is not None and not shell.lost:
            shell.transport.write(data)

    def refuses(self, shell: Any, remote: PublicKey) -> str | None:
        """See :class:`~dmsg.serving.service.RelayService`."""
        if self.intruder.active and self.intruder.random.random() < self.intruder.refusing:
            self.admission.left(shell)
            return self.intruder.random.choice(["too many connections", "server_draining", "as I like"])
        return super().refuses(shell, remote)


class BadRelay(Relay):
    """A relay and its machine, which an intruder owns."""

    intruder: Intruder

    def start(self, *, new_key: bool = False) -> None:
        """Start, unless it runs."""
        if self.service is not None:
            return
        self.lives += 1
        world = self._world
        self.machine = Machine(world.network, f"bad relay {self.number}.{self.lives}", listens_at=self.host)
        self.intruder = Intruder(world, world.random(f"intruder {self.number} {self.lives}"))
        world.note(f"{self.machine} starts: {self.intruder}")
        endpoint = TCP4ServerEndpoint(self.machine, RELAY_PORT, interface=self.host)
        self.service = BadService(
            self.machine,
            self._key,
            endpoint,
            intruder=self.intruder,
            public_address=HostPort(self.host, RELAY_PORT),
            discovery=world.discovery_of(self.machine),
            random=world.random(f"relay {self.number} {self.lives}").randbytes,
            now_ns=world.now_ns,
            extended=self.extended,
            aes=False,
        )
        self.service.startService()
        self.intruder.begin()
