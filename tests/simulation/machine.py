"""A machine of the simulated network: the reactor of one relay or client, which can be switched off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.error import ConnectionAborted
from twisted.internet.protocol import Protocol
from twisted.python.failure import Failure

from dmsg.testing.link import Link
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.pipe import Pipe, PipeEnd

#: A call of a machine that is off: it never comes due.
_NEVER_S = 1e9


class Nothing(Protocol):
    """In place of a killed program."""


class Machine(MemoryNetwork):
    """One machine's view of ``network``, behind ``link`` if there is one: time, listeners and pipes are the network's.

    It knows its pending calls and open connections. ``listens_at`` is the host of a relay.
    """

    def __init__(self, network: MemoryNetwork, name: str, *, link: Link | None = None, listens_at: str = "") -> None:
        self.__dict__.update(network.__dict__)
        self.name = name
        self.link = link
        self.is_off = False
        #: Whether the service here is being stopped.
        self.is_stopping = False
        self._listens_at = listens_at
        self._calls: list[Any] = []
        self._most_calls = 64
        self._connectors: list[Any] = []

    def __repr__(self) -> str:
        return f"<{self.name}>"

    # --- time --------------------------------------------------------------------------------------------------------

    def callLater(self, delay: float, callable: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        """See ``IReactorTime``."""
        if self.is_off:
            return self.clock.callLater(_NEVER_S, callable, *args, **kwargs)
        call = super().callLater(delay, callable, *args, **kwargs)
        self._calls.append(call)
        if len(self._calls) > self._most_calls:
            self._calls = self.pending()
            self._most_calls = 64 + 2 * len(self._calls)
        return call

    def pending(self) -> list[Any]:
        """The calls of this machine that have not come due."""
        return [call for call in self._calls if call.active()]

    # --- connections -------------------------------------------------------------------------------------------------

    def connectTCP(self, *args: Any, **kwargs: Any) -> Any:
        """See ``IReactorTCP``."""
        connector = super().connectTCP(*args, **kwargs)
        self._connectors = [one for one in self._connectors if one.state != "disconnected"]
        self._connectors.append(connector)
        return connector

    def ends(self) -> list[PipeEnd]:
        """This machine's ends of open connections."""
        if self._listens_at:
            return [pipe.b for pipe in self.pipes if pipe.b.getHost().host == self._listens_at]
        ours = {id(one.transport) for one in self._connectors if one.state == "connected"}
        return [pipe.a for pipe in self.pipes if id(pipe.a) in ours]

    def open_pipes(self) -> list[Pipe]:
        """The connections of this machine."""
        return [end._pipe for end in self.ends()]

    # --- off ---------------------------------------------------------------------------------------------------------

    def switch_off(self, *, silently: bool) -> list[Pipe]:
        """Stop the program; ``silently``, its connections are not reset. Gives these connections."""
        self.is_off = True
        for key in [key for key, port in self._listeners.items() if port._network is self]:
            del self._listeners[key]
        for call in self.pending():
            call.cancel()
        for connector in self._connectors:
            if connector.state == "connecting" and connector.transport._call.active():
                connector.transport._call.cancel()
        ends = self.ends()
        for end in ends:
            end.protocol, end.producer = Nothing(), None
            if silently:
                end._pipe.freeze()
            else:
                end.connectionLost(Failure(ConnectionAborted()))
        return [end._pipe for end in ends] if silently else []
