"""Ports that hold the client they listen on."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.defer import Deferred, succeed
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
        """Nothing: it listens already, and once stopped it is gone."""

    def stopListening(self) -> Deferred[None]:
        """Take no more connections; those that are open go on. Fires when a client that nothing else holds has stopped."""
        source, self._source = self._source, None
        if source is None:
            return succeed(None)
        return self._port.stopListening().addCallback(lambda _: source.release())

    def getHost(self) -> IAddress:
        """The address it is reached under."""
        return cast(IAddress, self._port.getHost())
