"""A peer that speaks the protocol well enough to get in, and then breaks it at random steps."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.protocol import Factory, Protocol

from dmsg.crypto.keys import PublicKey
from dmsg.mux.client.service import ClientConfig, DmsgClient
from dmsg.mux.client.session import ServerSession
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Carrier, Security
from dmsg.mux.core.openings import Openings
from dmsg.mux.core.sealed_frames import SealedFrames
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import StreamState
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    FWD,
    RECORD_PLAINTEXT_LIMIT_BYTES,
    REQUEST,
    encode_close,
    encode_frame,
    split_frames,
)
from tests.simulation.machine import Machine
from tests.simulation.programs import SERVICE
from tests.simulation.world import World, start

#: Ways in which such a peer's stream breaks the rules, under its seal.
VICES: Final = (
    "no ack",
    "ack too far",
    "ack another hash",
    "ack not taken",
    "ack large window",
    "ack small window",
    "ack nonsense",
    "ack marker",
    "ack again",
    "gap",
    "early end",
    "short",
    "never ends",
    "bare close",
    "lying close",
    "no close",
    "goes on",
    "silent",
    "window",
)
#: Its attacks on whole connections and peers.
ACTS: Final = ("dial", "dial", "dial", "resume", "resume", "resume all", "half", "half", "strays", "raw", "restart")
_TOKENS: Final = 64
#: More than anybody who does not read has to buffer.
_TOO_MUCH_BYTES: Final = 7_000_000


class Vice:
    """How one peer breaks the rules."""

    def __init__(self, world: World, random: Random) -> None:
        self.world = world
        self.random = random
        #: A friend behaves at first.
        self.active = False
        self.vices = tuple(kind for kind in VICES if random.random() < 0.4) or VICES
        self.acts = tuple(kind for kind in ACTS if random.random() < 0.6) or ACTS
        #: (peer, token) of present and former transports.
        self.tokens: list[tuple[PublicKey, bytes]] = []
        self.half = False  # whether the next handshake is abandoned
        self.frames_share = random.choice([0.0, 0.0, 0.002, 0.05])

    def draw(self) -> str:
        """The behaviour of a new stream."""
        if not self.active:
            return ""
        if self.half:
            self.half = False
            return "silent"
        return self.random.choice(self.vices) if self.random.random() < 0.7 else ""


def _disguised(one: Any, kind: type, **attributes: Any) -> Any:
    """``one``, which has only slots, as a ``kind`` with further attributes."""
    other = kind.__new__(kind)
    for base in type(one).__mro__:
        for name in getattr(base, "__slots__", ()):
            if hasattr(one, name):
                setattr(other, name, getattr(one, name))
    other.__dict__.update(attributes)
    return other


class _Frames(SealedFrames):
    """Seals forbidden frames."""

    vice: Vice
    how: str
    after: int
    last_ack: bytes

    def _now(self, *kinds: str) -> bool:
        return self.vice.active and self.how in kinds and self.after <= 0

    def seal(self, kind: int, inner: bytes) -> tuple[bytes, bytes]:
        """See :class:`~dmsg.mux.core.sealed_frames.SealedFrames`."""
        self.after -= 1
        if self._now("silent"):
            return b"", b""
        if kind == ACK and self.after <= 0:
            if self._now("no ack"):
                return super().seal(FWD, inner[7:]) if len(inner) > 7 else (b"", b"")
            inner = self._changed_ack(inner)
        elif kind == FWD and self.after <= 0:
            sequence, data = int.from_bytes(inner[:2], "big"), inner[2:]
            if self._now("gap"):
                self.how = ""
                inner = ((sequence + self.vice.random.choice([1, -1, 7])) & 0xFFFF).to_bytes(2, "big") + data
            elif self._now("early end"):
                inner = inner[:2]  # and goes on with the next frame
            elif self._now("short"):
                inner = inner[:1]
            elif self._now("never ends") and not data:
                return b"", b""
        return super().seal(kind, inner)

    def _changed_ack(self, inner: bytes) -> bytes:
        random, how = self.vice.random, self.how
        if not how.startswith("ack"):
            return inner
        sequence, digest, rest = int.from_bytes(inner[:2], "big"), inner[2:6], inner[6:]
        if how == "ack too far":
            sequence = (sequence + random.choice([1, 5, 0x8000, -3])) & 0xFFFF
        elif how == "ack another hash":
            digest = random.randbytes(4)
        elif how == "ack not taken":
            rest = b"\x01" + rest[1:] if len(rest) < 2 else rest
        elif how == "ack large window":
            rest = b"\x19" if len(rest) < 2 else rest
        elif how == "ack small window":
            rest = b"\x14" if len(rest) < 2 else rest
        elif how == "ack nonsense":
            return random.randbytes(random.choice([1, 5, 6, 7, 8, 9, 10, 300]))
        elif how == "ack marker":
            return b""
        elif how == "ack again":
            self.last_ack = self.last_ack or inner[:6]
            return self.last_ack
        return sequence.to_bytes(2, "big") + digest + rest

    def seal_close(self, reason: int) -> bytes:
        """See :class:`~dmsg.mux.core.sealed_frames.SealedFrames`."""
        if self._now("no close", "silent"):
            return b""
        if self._now("bare close"):
            return encode_close(self._stream_id, reason)
        if self._now("lying close"):
            frame = super().seal_close(reason)
            return frame[:5] + bytes((frame[5] ^ 1,)) + frame[6:]
        if self._now("goes on"):
            return super().seal_close(reason) + b"".join(
                encode_frame(FWD, self._stream_id, self.vice.random.randbytes(40)) for _ in range(3)
            )
        return super().seal_close(reason)


class _Openings(Openings):
    """Makes streams that misbehave."""

    vice: Vice

    def _seal(self, *arguments: Any) -> SealedStream:
        sealed = super()._seal(*arguments)
        vice = self.vice
        how = vice.draw()
        if how:
            after = 0 if how == "silent" else vice.random.choice([0, 0, 2, 20])
            sealed.frames = _disguised(sealed.frames, _Frames, vice=vice, how=how, after=after, last_ack=b"")
            if how == "window":
                sealed._window.bytes = 1 << 30
                sealed._path = None
        vice.tokens.append((sealed.remote, sealed.token))
        del vice.tokens[:-_TOKENS]
        return sealed


class _Records:
    """Changes frames before it seals them."""

    def __init__(self, vice: Vice, inner: Any) -> None:
        self._vice = vice
        self._inner = inner

    @property
    def near_exhaustion(self) -> bool:
        return bool(self._inner.near_exhaustion)

    def open(self, data: bytes) -> list[bytes]:
        plaintexts: list[bytes] = self._inner.open(data)
        return plaintexts

    def seal(self, plaintext: bytes, limit: int = RECORD_PLAINTEXT_LIMIT_BYTES) -> bytes:
        vice, random = self._vice, self._vice.random
        sealed: bytes
        if vice.active and vice.frames_share:
            frames, parts = split_frames(plaintext)[0], []
            for kind, transport_id, begin, end in frames:
                frame = encode_frame(kind, transport_id, plaintext[begin:end])
                if random.random() < vice.frames_share:
                    stray = encode_frame(
                        random.choice([REQUEST, ACCEPT, CLOSE, FWD, ACK]), transport_id, random.randbytes(22)
                    )
                    parts += random.choice([[], [frame, frame], [frame, stray], [stray, frame]])
                else:
                    parts.append(frame)
            plaintext = b"".join(parts)
        sealed = self._inner.seal(plaintext, limit)
        return sealed


class _Session(ServerSession):
    vice: Vice

    def handle_events(self, shell: Any, events: Sequence[object]) -> None:
        """See :class:`~dmsg.mux.client.session.ServerSession`."""
        super().handle_events(shell, events)
        connection = self.connection
        if isinstance(connection, Connection) and not isinstance(connection._openings, _Openings):
            connection._openings = _disguised(connection._openings, _Openings, vice=self.vice)
            connection._records = _Records(self.vice, connection._records)  # type: ignore[assignment]


class _Machine(Machine):
    """A machine in a network of its own: relays count by addresses."""

    def connectTCP(self, *arguments: Any, **options: Any) -> Any:
        """See ``IReactorTCP``."""
        return super().connectTCP(*arguments, **options | {"bindAddress": ("10.66.6.6", 0)})


class _Client(DmsgClient):
    vice: Vice

    def make_session(self, relay: PublicKey) -> ServerSession:
        """See :class:`~dmsg.clients.service.RelayClient`."""
        session = super().make_session(relay)
        session.__class__ = _Session
        session.vice = self.vice  # type: ignore[attr-defined]
        return session


class _End(Protocol):
    """A dishonest program's end of a transport: writes, reads or not, ends in some way or not at all."""

    def __init__(self, peer: BadPeer) -> None:
        self.peer = peer

    def connectionMade(self) -> None:
        """See ``IProtocol``."""
        random = self.peer.random
        if random.random() < 0.3:
            self.transport.pauseProducing()  # type: ignore[union-attr]
        size = random.choice([0, 1, 5, 100, 30_000])
        if self.transport.stream.security == "e2e" and getattr(self.transport.stream.frames, "how", "") == "window":  # type: ignore[union-attr]
            size = _TOO_MUCH_BYTES
        self.transport.write(random.randbytes(4) + bytes(size))  # type: ignore[union-attr]
        for _ in range(random.randint(0, 3)):
            self.peer.machine.callLater(random.expovariate(0.5), self._act)

    def _act(self) -> None:
        random, transport = self.peer.random, self.transport
        if transport is None or not transport.connected:
            return
        what = random.choice(["write", "half", "lose", "abort", "read"])
        if what == "write":
            transport.write(random.randbytes(random.choice([1, 3_000])))
        elif what == "half" and transport.security == "e2e":  # type: ignore[attr-defined]
            transport.loseWriteConnection()  # type: ignore[attr-defined]
        elif what == "lose":
            transport.loseConnection()
        elif what == "abort":
            transport.abortConnection()
        else:
            transport.resumeProducing()  # type: ignore[attr-defined]


class BadPeer:
    """A dishonest program and its machine; ``victims`` are the keys it knows.

    A friend behaves for the first seconds. A ``double`` has the key and the tokens of another peer.
    """

    def __init__(
        self,
        world: World,
        number: int,
        victims: Sequence[PublicKey],
        *,
        friend: bool = False,
        double: BadPeer | None = None,
    ) -> None:
        self.world = world
        self.number = number
        self.random = world.random(f"bad peer {number}")
        self.key = double.key if double is not None else world.key(f"bad peer {number}")
        self.vice = Vice(world, self.random)
        if double is not None:
            self.vice.tokens = double.vice.tokens
        self.friend = friend
        #: Transports of others by token; tokens are no secret.
        self.stolen: dict[bytes, Any] = {}
        self.machine: Machine
        self.client: _Client | None = None
        self.every_s = self.random.choice([0.3, 1.0, 3.0])
        self._victims = victims
        self._lives = 0
        self._gone = self._rests = False

    def start(self) -> None:
        """Begin a new life."""
        self._gone = self._rests = False
        self._lives += 1
        world, random = self.world, self.random
        self.machine = _Machine(world.network, f"bad peer {self.number}.{self._lives}")
        world.note(f"{self.machine} starts: {self.vice.vices}")
        self.client = _Client(
            self.machine,
            self.key,
            discovery=world.discovery_of(self.machine),
            min_servers=random.choice([None, 1, 3]),
            random=world.random(f"bad peer {self.number} {self._lives}").randbytes,
            now_ns=world.now_ns,
            security=random.choice([Security.PREFER, Security.PREFER, Security.HOP, Security.E2E]),
            config=ClientConfig(extended=random.random() < 0.8, aes=random.random() < 0.3),
        )
        self.client.vice = self.vice
        self.client.startService()
        self.client.when_ready().addErrback(lambda _: None)
        factory = Factory.forProtocol(lambda: _End(self))
        factory.noisy = False
        for service in ("", SERVICE):
            self.client.listen(factory, service)
        self.machine.callLater(random.uniform(5.0, 10.0) if self.friend else 0.0, self._turn_bad)
        self.machine.callLater(random.expovariate(1 / self.every_s), self._act)

    def _turn_bad(self) -> None:
        self.vice.active = True

    def rest(self) -> None:
        """Do nothing more, and stay."""
        self._rests = True

    def end(self) -> None:
        """Switch the machine off for good."""
        self._gone = True
        self._kill()

    def _kill(self) -> None:
        if self.client is not None:
            self.client = None
            self.machine.switch_off(silently=False)

    # --- what it does ------------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        client, random = self.client, self.random
        if client is None or self._rests:
            return
        self.machine.callLater(random.expovariate(1 / self.every_s), self._act)
        what = random.choice(self.vice.acts) if self.vice.active else "dial"
        sessions = [session for session in client.pool.sessions.values() if session.is_ready]
        if what == "restart":
            if random.random() < 0.1:
                self._kill()
                self.world.clock.callLater(1.0, self._again)
        elif what == "dial":
            self._dial(client)
        elif sessions:
            session = random.choice(sessions)
            if what == "half":
                self.vice.half = True
                self._ask(session, random.choice(self._victims), None)
            elif what.startswith("resume"):
                for _ in range(20 if what == "resume all" else 1):
                    self._resume(session)
            else:
                self._send(session, what)

    def _again(self) -> None:
        if self.client is None and not self._gone and not self._rests:
            self.start()

    def _dial(self, client: _Client) -> None:
        random = self.random
        service = random.choice(["", "", SERVICE, "nothing"])
        asked = start(client.dial(random.choice(self._victims), service))
        asked.addCallbacks(lambda transport: transport.attach(_End(self)), lambda _: None)
        if random.random() < 0.1:
            self.machine.callLater(random.expovariate(5.0), asked.cancel)

    def _resume(self, session: ServerSession) -> None:
        random = self.random
        count = random.choice([0, 0, 4, 1_000, 1 << 63, (1 << 64) - 1])
        # The last end is the one that was called.
        known = [(token, ends[-1].transport) for token, ends in self.stolen.items() if not ends[-1].fate.lost]
        if known and random.random() < 0.5:
            token, transport = random.choice(known)
            peer, count = transport.getHost().public_key, random.choice([count, transport.stream.acked_bytes])
        elif self.vice.tokens and random.random() < 0.9:
            peer, token = random.choice(self.vice.tokens)
        else:
            peer, token = random.choice(self._victims), random.randbytes(16)
        self.vice.half = random.random() < 0.3
        self._ask(session, peer, Resume(token, count))

    def _ask(self, session: ServerSession, peer: PublicKey, resume: Resume | None) -> None:
        try:
            asked: Deferred[Any] = session.request(
                peer, self.random.choice([Carrier.REQUEST, Carrier.FORWARD]), resume=resume
            )
        except Exception:  # it has no room, or is not there
            return
        asked.addCallbacks(self._opened, lambda _: None)

    def _opened(self, opened: Any) -> None:
        connection = opened.session.connection
        if self.random.random() < 0.5:
            opened.session.abort_stream(opened.stream)
        elif opened.stream.state is StreamState.OPEN:
            connection.send_data(opened.stream, self.random.randbytes(1_000))
            opened.session.flush_soon()

    def _send(self, session: ServerSession, what: str) -> None:
        random = self.random
        ids = [*session.connection.streams, random.randrange(1 << 16)]
        for _ in range(random.choice([1, 10, 90])):
            kind, transport_id = random.choice([REQUEST, ACCEPT, CLOSE, FWD, ACK]), random.choice(ids)
            payload = random.randbytes(random.choice([0, 1, 2, 20, 66, 400]))
            if kind == REQUEST:
                who = self.key.public_key if random.random() < 0.7 else random.choice(self._victims)
                payload = who.raw + random.choice(self._victims).raw + random.choice([b"", payload])
                transport_id = transport_id & 0xFFFE if random.random() < 0.8 else transport_id
            if what == "raw" and random.random() < 0.02:
                session.shell.transport.write(payload)  # type: ignore[union-attr]
            session.connection.send_control(encode_frame(kind, transport_id, payload))
        session.flush_soon()
