"""The shell keeps the times of its core."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from dmsg.errors import DmsgError
from dmsg.glue.shell import BULK_BYTES, Shell
from dmsg.sansio.core import Core


class Waiting(Core):
    """A core that waits for ``due`` and writes down when it was called."""

    def __init__(self, due: float | None) -> None:
        self.due = due
        self.called: list[float] = []

    def receive_data(self, data: bytes, now: float) -> Sequence[object]:
        return ()

    def data_to_send(self) -> bytes:
        return b""

    def next_timeout(self) -> float | None:
        return self.due

    def handle_timeout(self, now: float) -> Sequence[object]:
        self.called.append(now)
        self.due = None
        return ()


class Silent:
    """An owner that takes no part."""

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        raise AssertionError(events)

    def after_read(self, shell: Shell) -> None:
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        raise AssertionError("nothing is sent")

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: object) -> None:
        """The test is over."""


def shell_of(core: Core, clock: Clock) -> Shell:
    shell = Shell(core, Silent(), clock)
    shell.makeConnection(StringTransport())
    return shell


def test_a_time_that_moves_nearer_is_kept() -> None:
    clock, core = Clock(), Waiting(60.0)
    shell = shell_of(core, clock)
    core.due = 2.0
    shell.flush()
    clock.advance(2.0)
    assert core.called == [2.0]
    clock.advance(100.0)
    assert core.called == [2.0] and not clock.getDelayedCalls()


def test_a_time_that_is_over_when_it_is_asked_for_is_kept_at_once() -> None:
    clock, core = Clock(), Waiting(60.0)
    shell = shell_of(core, clock)
    clock.advance(5.0)
    core.due = 1.0
    shell.flush()
    clock.advance(0)
    assert core.called == [5.0]


def test_a_time_that_is_taken_back_is_forgotten() -> None:
    clock, core = Clock(), Waiting(60.0)
    shell = shell_of(core, clock)
    core.due = None
    shell.flush()
    assert not clock.getDelayedCalls()


def test_a_time_that_moves_nearer_costs_no_more_where_many_timed_calls_wait(crowded: Any) -> None:
    cores = [Waiting(crowded.seconds() + 60.0) for _ in range(200)]
    shells = [shell_of(core, crowded) for core in cores]
    crowded.runUntilCurrent()
    cpu = time.process_time()
    for core, shell in zip(cores, shells, strict=True):
        core.due = crowded.seconds()
        shell.flush()
    assert time.process_time() - cpu < 0.1
    crowded.runUntilCurrent()
    assert all(len(core.called) == 1 for core in cores)


class Mindful(Clock):
    """The clock of a reactor that wants to know of much data."""

    def __init__(self) -> None:
        super().__init__()
        self.bulk = 0

    def note_bulk(self) -> None:
        self.bulk += 1


class Saying(Waiting):
    """A core that has ``said`` to send."""

    def __init__(self, said: bytes) -> None:
        super().__init__(None)
        self.said = said

    def data_to_send(self) -> bytes:
        said, self.said = self.said, b""
        return said


class Calm(Silent):
    """An owner that does not mind what is sent."""

    def flushed(self, shell: Shell) -> None:
        """All is well."""


def test_the_reactor_hears_of_much_data_in_one_piece_read_or_written() -> None:
    clock = Mindful()
    for size, heard in ((BULK_BYTES, 0), (BULK_BYTES + 1, 1)):
        core = Saying(bytes(size))
        shell = Shell(core, Calm(), clock)
        shell.makeConnection(StringTransport())
        assert clock.bulk == heard
        clock.bulk = 0
        shell.dataReceived(bytes(size))
        assert clock.bulk == heard


def test_a_close_waits_for_what_the_network_does_not_take_yet() -> None:
    core, transport = Saying(b""), StringTransport()
    shell = Shell(core, Calm(), Clock())
    shell.makeConnection(transport)
    shell.pauseProducing()
    core.said = b"last words"
    shell.close()
    assert not transport.disconnecting and transport.producerState == "paused"
    shell.close()
    shell.resumeProducing()
    assert transport.value() == b"last words" and transport.disconnecting


def test_a_close_that_waits_ends_at_once_if_the_connection_fails() -> None:
    core, transport = Saying(b""), StringTransport()
    shell = Shell(core, Calm(), Clock())
    shell.makeConnection(transport)
    shell.pauseProducing()
    core.said = b"never sent"
    first = DmsgError("first")
    shell.close(first)
    shell.fail(DmsgError("second"))
    assert transport.disconnecting and transport.value() == b"" and shell.error is first


class Loaded(Saying):
    """A core that may have more answers waiting than it should."""

    overloaded = False


def test_reading_stops_only_while_answers_pile_up_in_front_of_a_network_that_takes_nothing() -> None:
    """Two ends that read nothing as soon as they cannot write would wait for each other for ever."""
    core, transport = Loaded(b""), StringTransport()
    shell = Shell(core, Calm(), Clock())
    shell.makeConnection(transport)
    shell.pauseProducing()
    for overloaded, state in ((False, "producing"), (True, "paused"), (False, "producing")):
        core.overloaded = overloaded  # type: ignore[misc]
        shell.flush()
        assert transport.producerState == state
    core.overloaded = True  # type: ignore[misc]
    shell.flush()
    shell.resumeProducing()
    assert transport.producerState == "producing"


class Noting(Calm):
    """An owner that notes what it is told, and answers each event."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        self.told += events
        assert isinstance(shell.core, Saying)
        shell.core.said = b"answer"
        shell.flush()
        self.told.append(shell.transport.value())  # type: ignore[union-attr]

    def after_read(self, shell: Shell) -> None:
        self.told.append("read")
        shell.flush()


class Eventful(Saying):
    """A core to which something happens whatever it is called for."""

    def receive_data(self, data: bytes, now: float) -> Sequence[object]:
        return ["came"]

    def handle_timeout(self, now: float) -> Sequence[object]:
        self.due = None
        return ["late"]


def test_what_events_lead_to_is_written_when_all_of_a_read_was_handled() -> None:
    owner, transport = Noting(), StringTransport()
    shell = Shell(Eventful(b""), owner, Clock())
    shell.makeConnection(transport)
    shell.dataReceived(b"data")
    assert owner.told == ["came", b"", "read"] and transport.value() == b"answer"


def test_what_happens_when_a_time_is_over_is_told() -> None:
    clock, core, owner = Clock(), Eventful(b""), Noting()
    core.due = 5.0
    shell = Shell(core, owner, clock)
    shell.makeConnection(StringTransport())
    clock.advance(5.0)
    assert [what for what in owner.told if isinstance(what, str)] == ["late", "read"]
