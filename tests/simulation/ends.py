"""The ends of transports: protocols that write, read, pause and close at random, and record what happens to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any, Final

from twisted.internet.error import ConnectionAborted, ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol, IPullProducer, IPushProducer
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure
from zope.interface import alsoProvides, implementer

from dmsg.discovery.entry import DMSG, MESSAGING
from dmsg.glue.stream_transport import TransportLost
from dmsg.glue.transport_state import IN_USE, WRITABLE, TransportState
from dmsg.mux.core.errors import DeadlineExceeded, Refused
from tests.simulation.machine import Machine
from tests.simulation.world import Wanted, World, is_documented

#: Source of written data: an end writes its number, then this text from a place that depends on the number.
_TEXT: Final = Random(0).randbytes(1 << 18)
_HEAD_BYTES: Final = 4
#: Bytes that the peer of a steady end writes.
ANSWER_BYTES: Final = 30_000


def content(number: int, start: int, size: int) -> bytes:
    """The bytes of end ``number`` from ``start`` on."""
    head = number.to_bytes(_HEAD_BYTES, "big")
    at = (number * 7919 + start) % len(_TEXT)
    text = (_TEXT[at:] + _TEXT * (size // len(_TEXT) + 1))[:size]
    return (head[start:] + text[max(0, _HEAD_BYTES - start) :])[:size] if start < _HEAD_BYTES else text


@dataclass
class Habits:
    """The behaviour of an end. Sizes are bytes written or read."""

    total: int = 1000
    piece: int = 1000
    pause_s: float = 0.0  # between two pieces
    producer: str = ""  # "", "push" or "pull"
    half_closeable: bool = False
    closes: str = "lose"  # when all is written: "lose", "half", "never" or "abort"
    gives_up_at: int | None = None  # after reading this much ...
    gives_up_by: str = "lose"  # "lose", "abort", "half", "raise" or "stop"
    pauses_at: int | None = None  # reads nothing for a while after this much
    pauses_for_s: float = 1.0
    gulp: int | None = None  # reads nothing for a while each time after this much
    gulp_s: float = 1.0
    closes_on_resume: bool = False
    dials_when_lost: bool = False
    echoes: bool = False  # writes what it reads, and nothing else
    at_once: str = ""  # what is done in connectionMade: "lose", "abort", "half" or nothing
    deadline_s: float | None = None  # for reading and writing
    meddles: bool = False  # gives up a dial or another transport of its program, when it begins or may write again
    is_steady: bool = False

    @classmethod
    def drawn(cls, random: Random, *, streaming: float = 0.3) -> Habits:
        """Random habits; ``streaming`` is the share of long streams."""
        if random.random() < streaming:
            return cls.streaming(random)
        total = random.choice([0, random.randrange(100), random.randrange(1_000), random.randrange(30_000)])
        if random.random() < 0.1:
            total = random.choice([300_000, 300_000, 2_000_000])
        one = cls(
            total=max(total, _HEAD_BYTES) if random.random() < 0.9 else total,
            piece=1 + total // random.choice([1, 3, 30]),
            pause_s=random.choice([0.0, 0.0, random.expovariate(20.0), random.expovariate(1.0)]),
            producer=random.choice(["", "", "push", "pull"]),
            half_closeable=random.random() < 0.4,
            closes=random.choice(
                ["lose", "half", "half", "never", "never", "abort" if random.random() < 0.3 else "lose"]
            ),
            closes_on_resume=random.random() < 0.05,
            dials_when_lost=random.random() < 0.1,
            meddles=random.random() < 0.1,
        )
        if random.random() < 0.1:
            one.echoes, one.producer, one.total = True, random.choice(["", "itself"]), 0
        if random.random() < 0.05:
            one.at_once = random.choice(["lose", "abort", "half"])
        if random.random() < 0.05:
            one.deadline_s = random.expovariate(0.3)
        if random.random() < 0.25:
            one.gives_up_at = random.choice([1, random.randrange(1, 2_000), random.randrange(1, 200_000)])
            one.gives_up_by = random.choice(["lose", "lose", "abort", "half", "raise", "stop"])
        if random.random() < 0.3:
            one.pauses_at = random.choice([0, random.randrange(2_000), random.randrange(200_000)])
            one.pauses_for_s = random.choice([0.0, random.expovariate(1.0), random.expovariate(0.05)])
        return one

    @classmethod
    def streaming(cls, random: Random) -> Habits:
        """Writes for long, whatever happens."""
        return cls(
            total=random.choice([20_000, 400_000]),
            piece=random.choice([300, 4_000]),
            pause_s=random.choice([0.02, 0.2]),
            producer=random.choice(["", "push", "push", "pull"]),
            half_closeable=True,
            closes="half",
            meddles=random.random() < 0.1,
            pauses_at=random.choice([None, 1_000, 50_000]),
            pauses_for_s=random.choice([1.0, 10.0]),
            gulp=random.choice([None, 2_000, 20_000]),
            gulp_s=random.choice([0.1, 1.0, 10.0]),
        )

    @classmethod
    def steady(cls, total: int) -> Habits:
        """Writes ``total`` bytes, and closes once it has read :data:`ANSWER_BYTES`."""
        return cls(total=total, piece=20_000, closes="never", gives_up_at=ANSWER_BYTES, is_steady=True)

    @classmethod
    def answering(cls) -> Habits:
        """Writes :data:`ANSWER_BYTES` and leaves the end to the peer."""
        return cls(total=ANSWER_BYTES, piece=7_000, closes="never")


@implementer(IPushProducer, IPullProducer)
class _Producer:
    """Writes for an end on demand."""

    def __init__(self, end: End, *, pulled: bool) -> None:
        self.end = end
        self.pulled = pulled
        self.paused = self.stopped = False

    def pauseProducing(self) -> None:
        if self.stopped:
            self.end.violation("a producer was paused after it was stopped")
        self.paused = True

    def resumeProducing(self) -> None:
        if self.stopped:
            self.end.violation("a producer was resumed after it was stopped")
        self.paused = False
        self.end.resumed(self)

    def stopProducing(self) -> None:
        if self.stopped:
            self.end.violation("a producer was stopped twice")
        self.paused, self.stopped = False, True


@dataclass
class Fate:
    """The progress of an end, kept beyond its life."""

    written: int = 0
    received: int = 0
    lost: list[Failure] = field(default_factory=list)
    told_peer_ended: int = 0
    told_peer_has_all: int = 0
    closed: bool = False  # by loseConnection
    ended: bool = False  # by loseWriteConnection
    aborted: bool = False
    raised: bool = False
    stopped: bool = False  # its client was stopped


class End(Protocol):
    """One end of a transport, with ``habits``, on ``machine``."""

    _numbers = count(1)

    def __init__(self, world: World, owner: Any, machine: Machine, habits: Habits, number: int) -> None:
        self.world = world
        self.owner = owner
        self.machine = machine
        self.habits = habits
        self.number = number
        self.fate = Fate()
        self.made = 0
        self.head = b""
        self.peer: End | None = None
        self.producer: _Producer | None = None
        self._call: Any = None
        self._waits = False
        self.reads = self.reads_always = True
        self.sealed = False
        if habits.half_closeable:
            alsoProvides(self, IHalfCloseableProtocol)

    def __repr__(self) -> str:
        return f"<end {self.number} of {self.machine.name}>"

    def violation(self, text: str) -> None:
        """Report a broken promise to this end."""
        self.world.violation(f"{self}: {text}; {self.told()}")

    def told(self) -> str:
        """Its progress, for people."""
        fate, peer = self.fate, self.peer
        lost = ", ".join(repr(one.value) for one in fate.lost) or "open"
        text = f"{self} {self.habits} wrote {fate.written}, read {fate.received}, {lost}"
        flags = [name for name in ("closed", "ended", "aborted", "raised", "stopped") if getattr(fate, name)]
        text += f" [{' '.join(flags)}]" + (" sealed" if self.sealed else " plain")
        return text + (f" <-> end {peer.number}" if peer is not None else "")

    # --- from the transport ----------------------------------------------------------------------------------------------

    def connectionMade(self) -> None:
        """See ``IProtocol``."""
        self.made += 1
        self.sealed = self.world.protocol == DMSG and self.transport.security == "e2e"
        if self.made != 1 or self.fate.lost:
            self.violation("connectionMade was called twice, or after the end")
        if self.habits.pauses_at == 0:
            self._pause_reading(self.habits.pauses_for_s)
        self.fate.stopped |= self.machine.is_stopping
        if self.habits.deadline_s is not None:
            self.set_deadline(self.habits.deadline_s)
        if self.habits.echoes:
            if self.habits.producer:
                self.transport.registerProducer(self.transport, True)
        elif self.habits.producer:
            self.producer = _Producer(self, pulled=self.habits.producer == "pull")
            self.transport.registerProducer(self.producer, not self.producer.pulled)
            if not self.producer.pulled:
                self._write_soon(0.0)
        else:
            self._write()
        if self.habits.meddles and self.owner.chaos:
            self.owner.meddle(self)
        if self.habits.at_once:
            self._give_up(self.habits.at_once)

    def dataReceived(self, data: bytes) -> None:
        """See ``IProtocol``."""
        fate, habits = self.fate, self.habits
        if self.made != 1 or fate.lost:
            self.violation("data came before connectionMade or after connectionLost")
        if fate.told_peer_ended:
            self.violation("data came after readConnectionLost")
        if not data:
            self.violation("dataReceived without data")
        before = fate.received
        fate.received += len(data)
        if len(self.head) < _HEAD_BYTES:
            self.head = (self.head + data)[:_HEAD_BYTES]
            if len(self.head) == _HEAD_BYTES:
                self._meet(int.from_bytes(self.head, "big"))
        if self.peer is not None:
            author = self if self.peer.habits.echoes else self.peer
            if before >= _HEAD_BYTES and data != content(author.number, before, len(data)):
                self.violation(f"other bytes came than were written, from {before} on")
            if fate.received > self.peer.fate.written:
                self.violation("more came than was written")
        if habits.echoes and self._may_write and not self.transport.disconnecting:
            fate.written += len(data)
            self.transport.write(data)
        if habits.pauses_at is not None and before <= habits.pauses_at < fate.received:
            self._pause_reading(habits.pauses_for_s)
        elif habits.gulp and before // habits.gulp < fate.received // habits.gulp and self.owner.chaos:
            self._pause_reading(habits.gulp_s)
        if habits.gives_up_at is not None and before < habits.gives_up_at <= fate.received:
            self._give_up(habits.gives_up_by)

    def readConnectionLost(self) -> None:
        """See ``IHalfCloseableProtocol``."""
        self.fate.told_peer_ended += 1
        if self.habits.echoes:
            self.machine.callLater(0.0, self.close)
        if self.fate.told_peer_ended > 1 or self.fate.lost:
            self.violation("readConnectionLost was called twice, or after the end")
        if self.peer is not None and not self.peer.machine.is_off and self.fate.received != self.peer.fate.written:
            self.violation("readConnectionLost before all that was written")

    def writeConnectionLost(self) -> None:
        """See ``IHalfCloseableProtocol``."""
        self.fate.told_peer_has_all += 1
        if self.fate.told_peer_has_all > 1 or self.fate.lost:
            self.violation("writeConnectionLost was called twice, or after the end")

    def connectionLost(self, reason: Failure) -> None:  # type: ignore[override]
        """See ``IProtocol``."""
        self.fate.lost.append(reason)
        self.world.note(f"{self} is over: {reason.value!r}")
        if self._call is not None and self._call.active():
            self._call.cancel()
        if len(self.fate.lost) > 1 or not self.made:
            self.violation("connectionLost was called twice, or without connectionMade")
        if self.producer is not None and not self.producer.stopped and self.transport.producer is self.producer:
            self.violation("the producer was not stopped before connectionLost")
        value = reason.value
        known = isinstance(value, TransportLost) and is_documented(value.cause)
        if not (known or isinstance(value, ConnectionDone | ConnectionAborted | Wanted)):
            self.violation(f"an end for a reason that is not documented: {value!r}")
        lasts = self.sealed and self.world.gentle and not self.fate.stopped
        # An ended side cannot tell the other, which may have no path. Only the first to end needs a reason.
        lasts = lasts and self.peer is not None and not self.peer.broke_off and not self.peer.fate.lost
        if lasts and isinstance(value, TransportLost) and not isinstance(value.cause, Refused | DeadlineExceeded):
            self.violation("an end-to-end transport was lost")
        self._check_clean()
        self.owner.end_lost(self)

    # --- promises ----------------------------------------------------------------------------------------------------------

    @property
    def left(self) -> bool:
        """Whether it did not want to read to the end."""
        return self.fate.closed or self.broke_off

    @property
    def broke_off(self) -> bool:
        """Whether it ended by itself, and not in order: without a path, the peer cannot be told."""
        fate = self.fate
        late = any(isinstance(getattr(one.value, "cause", None), DeadlineExceeded) for one in fate.lost)
        return late or fate.aborted or fate.raised or fate.stopped or self.machine.is_off

    @property
    def is_clean(self) -> bool:
        """Whether it was told a clean end that it did not make itself."""
        if self.world.protocol == MESSAGING:
            return False  # an orderly end looks like a cut there
        return bool(self.fate.lost and self.fate.lost[0].check(ConnectionDone)) and not self.fate.aborted

    def _check_clean(self) -> None:
        """An end that has not closed and is told of a clean end has received everything, and knows it if it can."""
        if not self.is_clean or self.left:
            return
        if self.peer is not None and self.fate.received != self.peer.fate.written:
            self.violation(f"told a clean end, and has not all the peer wrote; {self.peer.told()}")
        if self.sealed and self.habits.half_closeable and not self.fate.told_peer_ended:
            self.violation("told a clean end, and not before that the peer had ended")

    def check_counts(self) -> None:
        """Unread data is counted, over any paths, and is no more than the peer may send."""
        if not self.sealed or self.transport.state not in IN_USE or self.transport.detached:
            return
        stream, waits = self.transport.stream, self.transport.unread_bytes
        if stream.unread_bytes != waits:
            self.violation(f"{stream.unread_bytes} bytes are counted as not read, and {waits} wait")
        if self.peer is not None:
            window = max(stream._window.most_given_bytes, self.peer.transport.stream._window.least_bytes)
            if waits > window + stream._ack_limit_bytes:
                self.violation(f"{waits} bytes wait to be read, and the window is {window}")

    def check_pair(self) -> None:
        """Once both have ended: an end that was told that the peer has everything is right, if the peer kept reading."""
        if not self.fate.lost or self.peer is None or self.peer.left:
            return
        fate, peer = self.fate, self.peer
        if self.habits.producer and not self.habits.half_closeable and peer.fate.ended:
            return  # as with TCP, the peer's half-close ends a protocol without half-close
        # An end that neither reads nor writes is told at once, and never gets its waiting data.
        told_at_once = not peer.is_clean and peer.habits.producer and (peer.habits.echoes or not peer.reads_always)
        if (self.is_clean or fate.told_peer_has_all) and peer.fate.received != fate.written and not told_at_once:
            self.violation(f"told that the peer has all, which it has not; {peer.told()}")

    # --- what it does ------------------------------------------------------------------------------------------------------

    def _meet(self, number: int) -> None:
        if number == self.number:
            return  # an echo, which knows its peer
        peer = self.owner.ends.get(number)
        if peer is None or (peer.peer is not None and peer.peer is not self):
            self.violation(f"bytes of end {number} came")
            return
        self.peer, peer.peer = peer, self

    def resumed(self, producer: _Producer) -> None:
        """The producer may write."""
        if self.habits.meddles and self.owner.chaos and self.fate.written:
            self.owner.meddle(self)
        if self.habits.closes_on_resume and self.fate.written and not self.fate.closed:
            self.close()
        elif self.fate.ended and self.transport.state is TransportState.FINISHING:
            self._written_all()  # it said that it writes nothing more, and the close waits for its word
        elif producer.pulled:
            self._write_piece()
        else:
            self._write_soon(0.0)

    def _write_soon(self, after_s: float) -> None:
        if self._call is None or not self._call.active():
            self._call = self.machine.callLater(after_s, self._write)

    @property
    def _may_write(self) -> bool:
        fate = self.fate
        if fate.ended or fate.aborted or fate.raised or fate.lost:
            return False
        # A close waits for a producer that writes on demand.
        return not fate.closed or (self.producer is not None and self.transport.state is TransportState.FINISHING)

    def _write(self) -> None:
        while self._may_write:
            if self.producer is not None and self.producer.paused:
                return
            if not self._write_piece():
                return
            if self.habits.pause_s:
                self._write_soon(self.habits.pause_s)
                return

    def _write_piece(self) -> bool:
        """Write the next piece; gives whether there is more."""
        if not self._may_write:
            self._written_all()
            return False
        if self.transport.disconnecting and self.transport.state not in WRITABLE:
            self._written_all()  # as with TCP, the peer's half-close ends a protocol without half-close
            return False
        size = min(self.habits.piece, self.habits.total - self.fate.written)
        if size > 0:
            start, self.fate.written = self.fate.written, self.fate.written + size
            self.transport.write(content(self.number, start, size))
        if self.fate.written < self.habits.total and self._may_write:
            return True
        self._written_all()
        return False

    def _written_all(self) -> None:
        if self._waits:
            return
        self._waits = True
        if self.producer is not None:
            self.transport.unregisterProducer()
        if not self._may_write:
            return
        if self.habits.closes == "half":
            self._end_half()
        elif self.habits.closes == "abort":
            self._abort()
        elif self.habits.closes == "lose" and self.habits.gives_up_at is None:
            self.close()

    def close(self) -> None:
        """Close the transport."""
        if not self.fate.closed and not self.fate.lost:
            self.fate.closed = True
            self.transport.loseConnection()

    def _end_half(self) -> None:
        if not self.sealed:
            self.close()
        elif self._may_write:
            self.fate.ended = True
            self.transport.loseWriteConnection()

    def _abort(self) -> None:
        if not self.fate.lost:
            self.fate.aborted = True
            self.transport.abortConnection()

    def _give_up(self, how: str) -> None:
        if how == "lose":
            self.close()
        elif how == "abort":
            self._abort()
        elif how == "half":
            self._end_half()
        elif how == "stop":
            self.owner.stop_client(self.machine)
        else:
            self.fate.raised = True
            raise Wanted("as the program likes")

    def _pause_reading(self, for_s: float) -> None:
        self.reads = self.reads_always = False
        self.transport.pauseProducing()
        self.machine.callLater(for_s, self.read_on)

    def read_on(self) -> None:
        """Read again."""
        if not self.reads and not self.fate.lost:
            self.reads = True
            self.transport.resumeProducing()

    def set_deadline(self, after_s: float) -> None:
        """Neither read nor write later than ``after_s`` from now."""
        self.transport.set_deadline(self.machine.seconds() + after_s)

    def act(self, how: str) -> None:
        """Suddenly "lose", "half" or "abort", or set a "deadline"."""
        if self.made and not self.fate.lost and not self.machine.is_off:
            if how == "deadline":
                self.set_deadline(0.05)
            else:
                self._give_up(how)

    @property
    def waits_to_write(self) -> bool:
        """Whether it has more to write, its producer is paused, and the peer would take it: else it waits for the peer's end."""
        waits = self.producer is not None and (self.producer.paused or self.producer.pulled)
        more = self._may_write and not self._waits and self.fate.written < self.habits.total
        drops = self.world.protocol == DMSG and self.transport.stream.was_cut
        return waits and more and not drops

    def finish(self) -> None:
        """Come to an end: read on, write nothing more and close."""
        self.read_on()
        if self.producer is not None and not self._waits:
            self._waits = True
            self.transport.unregisterProducer()
        self.close()
