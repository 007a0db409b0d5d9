"""A server's end of a TCP connection: a shell that takes its turn while it shakes hands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from twisted.internet.interfaces import IAddress
from twisted.internet.protocol import Factory

from dmsg.glue.shell import Shell
from dmsg.glue.throttle import ReadThrottle
from dmsg.mux.core.handshake import Handshake

if TYPE_CHECKING:
    from dmsg.mux.relay.admission import Origin
    from dmsg.mux.relay.server import DmsgServer

#: Why a stranger is not read from while what it sent waits for its turn.
_TURN: Final = "turn"


class ServerShell(Shell):
    """A shell whose handshake goes on in turns of its own, one step of all strangers' for every second turn."""

    server: DmsgServer
    number: int
    address: str
    origin: Origin
    opened_at: float
    answering = False
    throttle: ReadThrottle | None = None

    def connectionMade(self) -> None:
        self.server.take_stranger(self)
        super().connectionMade()

    def dataReceived(self, data: bytes) -> None:
        if isinstance(self.core, Handshake):
            self.core.heard()
            if not self.server.pacer.submit(lambda: self._in_turn(data)):
                # One read of each stranger waits and no more: it neither piles up nor is overtaken by what follows.
                self.hold(_TURN, True)
            return
        if self.throttle is not None:
            self.throttle.read(len(data))
        super().dataReceived(data)

    def flush(self) -> None:
        """Write what there is; the answer to a handshake is made in a turn of its own."""
        core = self.core
        if not isinstance(core, Handshake) or not core.answer_due:
            super().flush()
        elif not self.answering:
            self.answering = True
            self.server.pacer.later(self._answer)

    def _answer(self) -> bool:
        self.answering = False
        super().flush()
        return True

    def _in_turn(self, data: bytes) -> bool:
        """Go on with the handshake; tells whether that was more than taking in a piece of a message."""
        core = self.core
        before = core.messages if isinstance(core, Handshake) else 0
        Shell.dataReceived(self, data)
        self.hold(_TURN, False)
        return self.core is not core or not isinstance(core, Handshake) or core.messages != before


class ServerFactory(Factory):
    """Builds a shell for each connection."""

    noisy = False

    def __init__(self, server: DmsgServer) -> None:
        self.server = server

    def buildProtocol(self, addr: IAddress | None) -> Shell | None:
        return self.server.build_shell(addr)
