"""A relay's end of a TCP connection: a shell whose handshake takes turns with those of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory

from dmsg.errors import DmsgError
from dmsg.glue.listening import Refused
from dmsg.glue.pacer import Pacer
from dmsg.glue.shell import Owner, Shell
from dmsg.glue.throttle import ReadThrottle
from dmsg.sansio.core import Core
from dmsg.serving.admission import Origin
from dmsg.serving.member import Member

#: The reason for not reading from a stranger while data of it waits for its turn.
_TURN: Final = "turn"


class StrangerCore(Core, Protocol):
    """The relay's side of a handshake, as a core."""

    #: How many whole messages of the stranger were handled: the expensive part.
    messages: int
    #: Whether :meth:`data_to_send` makes an answer, which is expensive as well.
    answer_due: bool

    def heard(self) -> None:
        """The stranger has sent something: it is not silent, even if its data is handled only later."""


class Host(Owner, Protocol):
    """What a shell needs of its relay."""

    #: Gives the handshakes of all strangers their turns.
    pacer: Pacer

    def take_stranger(self, shell: RelayShell) -> None:
        """Let a connection that was just made begin its handshake."""


class RelayShell(Shell):
    """A shell whose handshake takes turns with those of others (:class:`~dmsg.glue.pacer.Pacer`)."""

    owner: Host

    def __init__(self, core: StrangerCore, owner: Host, clock: IReactorTime, *, number: int, address: str) -> None:
        super().__init__(core, owner, clock)
        self.number = number
        self.address = address
        self.origin = Origin.of(address)
        self.opened_at = clock.seconds()
        self.throttle: ReadThrottle | None = None
        #: The core of its handshake, until another core replaces it.
        self.stranger: StrangerCore | None = core
        #: Its member in the switch, once it is admitted.
        self.member: Member[Any] | None = None
        self._answering = False

    def connectionMade(self) -> None:
        self.owner.take_stranger(self)
        super().connectionMade()

    def dataReceived(self, data: bytes | memoryview) -> None:
        if self.stranger is not None:
            self.stranger.heard()
            kept = bytes(data)
            if not self.owner.pacer.submit(lambda: self._in_turn(kept)):
                # One read of each stranger waits at most, so that reads neither pile up nor overtake each other.
                self.hold(_TURN, True)
            return
        if self.throttle is not None:
            self.throttle.read(len(data))
        super().dataReceived(data)

    def become(self, core: Core, leftover: bytes) -> None:
        """Go on with ``core``, which takes no turns."""
        self.stranger = None
        super().become(core, leftover)

    def say_last(self, data: bytes, error: DmsgError) -> None:
        """Write ``data``, then end the connection for ``error``."""
        self.stranger = None
        super().say_last(data, error)

    def flush(self) -> None:
        """Write what the core has; the answer to a handshake is made in a turn of its own."""
        if self.stranger is None or not self.stranger.answer_due:
            super().flush()
        elif not self._answering:
            self._answering = True
            self.owner.pacer.later(self._answer)

    def _answer(self) -> bool:
        self._answering = False
        super().flush()
        return True

    def _in_turn(self, data: bytes) -> bool:
        """Go on with the handshake; ``True`` if a whole message was handled, which is expensive."""
        stranger = self.stranger
        before = 0 if stranger is None else stranger.messages
        Shell.dataReceived(self, data)
        self.hold(_TURN, False)
        return stranger is None or self.stranger is None or stranger.messages != before


def shell_of(member: Member[Any]) -> RelayShell:
    """The connection of a client that is admitted."""
    shell = member.owner
    assert isinstance(shell, RelayShell)
    return shell


class RelayFactory(Factory):
    """Gives each connection the shell that ``build`` makes for its address; with ``None`` the connection is closed,
    whatever the endpoint wraps it in."""

    noisy = False

    def __init__(self, build: Callable[[IAddress | None], RelayShell | None]) -> None:
        self._build = build

    def buildProtocol(self, addr: IAddress | None) -> RelayShell | Refused:
        return self._build(addr) or Refused()
