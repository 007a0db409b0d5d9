"""Ports that hold the client they listen on."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import CannotListenError
from twisted.internet.interfaces import IAddress, IListeningPort
from zope.interface import implementer

from dmsg.endpoints.client import ClientSource, Port


@implementer(IListeningPort)
class HeldPort:
    """A listening port that holds the client it listens on until it is stopped."""

    def __init__(self, port: Port, source: ClientSource[Any]) -> None:
        self._port = port
        self._source: ClientSource[Any] | None = source

    def startListening(self) -> None:
        """Listen again when the client was stopped and started again; nothing happens while it listens.

        Raises ``CannotListenError`` when :meth:`stopListening` was called: the endpoint's ``listen`` gives another port.
        """
        if self._source is None:
            scheme, _, where = str(self.getHost()).partition(":")
            raise CannotListenError(scheme, where, "a port of an endpoint that was stopped cannot listen again")
        self._port.startListening()

    def stopListening(self) -> Deferred[None]:
        """Accept no more connections; open ones go on. Fires when the client has stopped, if nothing else holds it."""
        source, self._source = self._source, None
        if source is None:
            return succeed(None)
        return self._port.stopListening().addCallback(lambda _: source.release())

    def getHost(self) -> IAddress:
        """The address under which it can be reached."""
        return cast(IAddress, self._port.getHost())
