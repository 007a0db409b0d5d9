"""A relay's end of a connection: strangers take turns, and one that waits for its turn is not silent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure

from dmsg.errors import DmsgError, RemoteProtocolError
from dmsg.glue.pacer import Pacer
from dmsg.glue.shell import Shell
from dmsg.sansio.core import Core
from dmsg.serving.shell import RelayShell

#: A stranger that has sent nothing by this time is dropped.
SILENT_S = 5.0


class Turns(Clock):
    """A clock on which "in the next turn" takes a second: a plain Clock would go through all turns in one advance."""

    def callLater(self, delay: float, callable: Any, *args: object, **kw: object) -> IDelayedCall:
        return super().callLater(delay or 1.0, callable, *args, **kw)


class Stranger(Core):
    """A handshake of whole messages, ``m``; each has an answer, ``a``. Anything else is a part of a message."""

    def __init__(self) -> None:
        self.messages = 0
        self.answer_due = False
        self.received = b""
        self._silent_until: float | None = SILENT_S

    def heard(self) -> None:
        self._silent_until = None

    def receive_data(self, data: bytes, now: float) -> Sequence[object]:
        self.heard()
        self.received += data
        if data.endswith(b"m"):
            self.messages += 1
            self.answer_due = True
        return ()

    def data_to_send(self) -> bytes:
        due, self.answer_due = self.answer_due, False
        return b"a" if due else b""

    def next_timeout(self) -> float | None:
        return self._silent_until

    def handle_timeout(self, now: float) -> Sequence[object]:
        if self._silent_until is not None and now >= self._silent_until:
            raise RemoteProtocolError("handshake", "silent")
        return ()


class Relay:
    """What a shell needs of its relay, and how its connections ended."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.pacer = Pacer(clock)
        self.ends: list[DmsgError | None] = []

    def take_stranger(self, shell: RelayShell) -> None:
        """Everyone may come."""

    def handle_events(self, shell: Shell, events: Sequence[Any]) -> None:
        """There are none."""

    def after_read(self, shell: Shell) -> None:
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        """It does not matter."""

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        self.ends.append(error)

    def stranger(self) -> tuple[RelayShell, Stranger, Wire]:
        core, wire = Stranger(), Wire()
        shell = RelayShell(core, cast(Any, self), self.clock, number=1, address="10.0.0.1")
        wire.shell = shell
        shell.makeConnection(wire)
        return shell, core, wire


class Wire(StringTransport):
    """A connection that can be aborted."""

    shell: RelayShell

    def abortConnection(self) -> None:
        self.shell.connectionLost()


def test_data_of_strangers_waits_for_a_turn_and_the_answer_for_another() -> None:
    clock = Turns()
    relay = Relay(clock)
    one, first, first_wire = relay.stranger()
    two, second, second_wire = relay.stranger()
    one.dataReceived(b"m")
    assert first.messages == 1 and first_wire.value() == b"", "the answer has a turn of its own"
    two.dataReceived(b"part ")
    assert second.received == b"" and second_wire.producerState == "paused", "one read of each waits, and no more"
    assert first_wire.producerState == "producing"
    clock.pump([1.0] * 2)
    assert first_wire.value() == b"a" and second.received == b""
    clock.pump([1.0] * 2)
    assert second.received == b"part " and second_wire.producerState == "producing"
    two.dataReceived(b"m")
    clock.pump([1.0] * 4)
    assert (second.received, second_wire.value()) == (b"part m", b"a")
    assert relay.ends == []


def test_a_stranger_whose_data_waits_for_its_turn_is_not_silent() -> None:
    clock = Turns()
    relay = Relay(clock)
    silent, _, _ = relay.stranger()
    waiting, core, _ = relay.stranger()
    clock.advance(SILENT_S - 1)
    for _ in range(3):
        relay.pacer.later(lambda: True)  # others' work, which takes six turns
    waiting.dataReceived(b"m")
    clock.pump([1.0] * 3)
    assert silent.lost and not waiting.lost
    assert core.messages == 0, "it is still not its turn"
    clock.pump([1.0] * 6)
    assert core.messages == 1 and len(relay.ends) == 1


def test_what_waits_of_a_stranger_that_has_gone_is_forgotten() -> None:
    clock = Turns()
    relay = Relay(clock)
    one, _, _ = relay.stranger()
    two, second, _ = relay.stranger()
    one.dataReceived(b"m")
    two.dataReceived(b"m")
    two.connectionLost()
    clock.pump([1.0] * 8)
    assert second.received == b"" and relay.ends == [None]
