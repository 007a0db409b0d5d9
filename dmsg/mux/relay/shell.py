"""A relay's end of a TCP connection: a shell whose handshake takes turns with those of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory

from dmsg.glue.pacer import Pacer
from dmsg.glue.shell import Owner, Shell
from dmsg.glue.throttle import ReadThrottle
from dmsg.mux.core.handshake import Handshake
from dmsg.serving.admission import Origin

#: Why a stranger is not read from while what it sent waits for its turn.
_TURN: Final = "turn"


class Host(Owner, Protocol):
    """What a shell needs of its relay."""

    #: Gives the handshakes of all strangers their turns.
    pacer: Pacer

    def take_stranger(self, shell: RelayShell) -> None:
        """Let a connection that was just made shake hands."""


class RelayShell(Shell):
    """A shell whose handshake takes turns: one step of one stranger in every second turn of the reactor."""

    owner: Host

    def __init__(self, core: Handshake, owner: Host, clock: IReactorTime, *, number: int, address: str) -> None:
        super().__init__(core, owner, clock)
        self.number = number
        self.address = address
        self.origin = Origin.of(address)
        self.opened_at = clock.seconds()
        self.throttle: ReadThrottle | None = None
        self._answering = False

    def connectionMade(self) -> None:
        self.owner.take_stranger(self)
        super().connectionMade()

    def dataReceived(self, data: bytes) -> None:
        if isinstance(self.core, Handshake):
            self.core.heard()
            if not self.owner.pacer.submit(lambda: self._in_turn(data)):
                # One read of each stranger waits at most, so that reads neither pile up nor overtake each other.
                self.hold(_TURN, True)
            return
        if self.throttle is not None:
            self.throttle.read(len(data))
        super().dataReceived(data)

    def flush(self) -> None:
        """Write what the core has; the answer to a handshake is made in a turn of its own."""
        core = self.core
        if not isinstance(core, Handshake) or not core.answer_due:
            super().flush()
        elif not self._answering:
            self._answering = True
            self.owner.pacer.later(self._answer)

    def _answer(self) -> bool:
        self._answering = False
        super().flush()
        return True

    def _in_turn(self, data: bytes) -> bool:
        """Go on with the handshake; gives whether a whole message was handled, which is expensive."""
        core = self.core
        before = core.messages if isinstance(core, Handshake) else 0
        Shell.dataReceived(self, data)
        self.hold(_TURN, False)
        return self.core is not core or not isinstance(core, Handshake) or core.messages != before


class RelayFactory(Factory):
    """Gives each connection the shell that ``build`` makes for its address; with ``None`` the connection is closed."""

    noisy = False

    def __init__(self, build: Callable[[IAddress | None], RelayShell | None]) -> None:
        self._build = build

    def buildProtocol(self, addr: IAddress | None) -> RelayShell | None:
        return self._build(addr)
