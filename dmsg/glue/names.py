"""Host names and their IP addresses."""

from __future__ import annotations

from typing import Any

from twisted.internet.address import IPv4Address, IPv6Address
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IAddress, IHostResolution, IReactorPluggableNameResolver, IResolutionReceiver
from zope.interface import implementer


@implementer(IResolutionReceiver)
class _Receiver:
    """Gathers the addresses of one resolution."""

    def __init__(self) -> None:
        self.done: Deferred[list[str]] = Deferred()
        self._found: list[str] = []

    def resolutionBegan(self, resolutionInProgress: IHostResolution) -> None:
        """Nothing to note: it cannot be stopped."""

    def addressResolved(self, address: IAddress) -> None:
        if isinstance(address, (IPv4Address, IPv6Address)) and address.host not in self._found:
            self._found.append(address.host)

    def resolutionComplete(self) -> None:
        self.done.callback(self._found)


def resolve(reactor: Any, host: str) -> Deferred[list[str]]:
    """The IP addresses of ``host``, in the resolver's order; empty when there are none.

    ``reactor`` is an ``IReactorPluggableNameResolver``. Its resolver holds a thread until there is an answer.
    """
    receiver = _Receiver()
    resolver = IReactorPluggableNameResolver(reactor).nameResolver
    resolver.resolveHostName(receiver, host, 0, [IPv4Address, IPv6Address])
    return receiver.done
