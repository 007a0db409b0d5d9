"""Every core keeps the contract the shell relies on."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Sequence

import pytest
from twisted.internet.task import Clock
from twisted.python.failure import Failure

from dmsg.errors import DmsgError
from dmsg.glue.shell import Shell
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.handshake import Handshake
from dmsg.mux.relay.member import Member
from dmsg.sansio.core import Core
from dmsg.testing.pipe import Pipe
from dmsg.testing.probes import ConformanceProtocol

METHODS = [name for name, value in vars(Core).items() if inspect.isfunction(value) and not name.startswith("_")]

PURE = [
    "dmsg.errors",
    "dmsg.address",
    "dmsg.crypto.keys",
    "dmsg.crypto.noise",
    "dmsg.sansio.buffer",
    "dmsg.sansio.core",
    "dmsg.sansio.rate",
    "dmsg.mux.core.window",
    "dmsg.mux.core.wire",
    "dmsg.mux.core.tlv",
    "dmsg.mux.core.record",
    "dmsg.mux.core.handshake",
    "dmsg.mux.core.events",
    "dmsg.mux.core.stream",
    "dmsg.mux.core.connection",
    "dmsg.mux.relay.member",
    "dmsg.mux.relay.switch",
    "dmsg.serving.events",
]


class Answer(Core):
    """Gives back what it gets; of the contract it has bytes in and bytes out alone."""

    def __init__(self) -> None:
        self.waiting = b""

    def receive_data(self, data: bytes, now: float) -> Sequence[object]:
        self.waiting += data
        return ()

    def data_to_send(self) -> bytes:
        data, self.waiting = self.waiting, b""
        return data


class Flusher:
    """The owner of a shell, which flushes it after each read."""

    def __init__(self) -> None:
        self.losses = 0

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        raise AssertionError("this core has none")

    def after_read(self, shell: Shell) -> None:
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        pass

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: Failure) -> None:
        self.losses += 1


def test_the_contract_has_six_methods() -> None:
    assert set(METHODS) == {"receive_data", "data_to_send", "next_timeout", "handle_timeout", "pause", "resume"}


def test_a_core_without_timeouts_and_flow_control_can_be_driven(clock: Clock) -> None:
    """More is sent than the pipe takes at once; the shell waits for it, and leaves nothing on the clock."""
    owner, far = Flusher(), ConformanceProtocol()
    Pipe(clock, high_water_bytes=1_000).connect(Shell(Answer(), owner, clock), far)
    far.transport.write(b"x" * 100_000)
    clock.pump([0] * 20)
    assert far.received == b"x" * 100_000
    far.transport.loseConnection()
    clock.pump([0] * 20)
    assert owner.losses == 1
    assert not clock.getDelayedCalls()


@pytest.mark.parametrize("core", [Handshake, Connection, Member])
@pytest.mark.parametrize("name", METHODS)
def test_cores_have_the_methods_of_the_contract(core: type, name: str) -> None:
    wanted = list(inspect.signature(getattr(Core, name)).parameters)
    assert list(inspect.signature(getattr(core, name)).parameters) == wanted


def test_cores_work_where_there_is_no_twisted() -> None:
    program = f"""
import sys
for name in ("twisted", "zope", "klein", "treq"):
    sys.modules[name] = None
import importlib
for name in {PURE!r}:
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=25)
