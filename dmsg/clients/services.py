"""The services of a client: its listening ports by name, and offers whose service is not known yet."""

from __future__ import annotations

from typing import Generic, TypeVar
from typing import Protocol as TypingProtocol

from dmsg.clients.access import ask
from dmsg.clients.limits import ListenerLimits
from dmsg.clients.offers import Offer, Offers
from dmsg.crypto.keys import PublicKey
from dmsg.interfaces import IAccessPolicy


class Listener(TypingProtocol):
    """The interface of a listening port for :class:`Services`."""

    service: str
    policy: IAccessPolicy | None

    def may_admit(self, remote: PublicKey) -> bool:
        """Whether ``remote`` could be admitted, as far as its key alone can say: ``False`` is final."""

    def is_open_to(self, remote: PublicKey) -> bool:
        """Whether ``remote`` may know that there is this listener."""


L = TypeVar("L", bound=Listener)


class Services(Generic[L]):
    """The listening ports of a client. False while there is none."""

    def __init__(self, limits: ListenerLimits) -> None:
        self._ports: dict[str, L] = {}
        #: Offers that have not named their service: plain ones, and resumptions of unknown transports. They have places of
        #: their own, so that they take none from any listener.
        self.arrivals: Offers[Offer] = Offers(limits.offers, limits.offers_per_key)
        #: How many factories are being asked for a protocol at the moment.
        self.building = 0

    def __bool__(self) -> bool:
        return bool(self._ports)

    def add(self, port: L) -> None:
        """Register a listening port; raises ``ValueError`` when its service is taken."""
        if port.service in self._ports:
            raise ValueError(f"service {port.service!r} is listened on already")
        self._ports[port.service] = port

    def remove(self, port: L) -> None:
        """Forget a listening port."""
        if self._ports.get(port.service) is port:
            del self._ports[port.service]

    def port(self, service: str) -> L | None:
        """The listening port of a service."""
        return self._ports.get(service)

    def ports(self) -> list[L]:
        """Every listening port."""
        return list(self._ports.values())

    def may_admit(self, remote: PublicKey) -> bool:
        """Whether ``remote`` may ask at all: ``False`` when no listener could ever admit its key."""
        return not self._ports or any(port.may_admit(remote) for port in self._ports.values())

    def are_open_to(self, remote: PublicKey) -> bool:
        """Whether ``remote`` may be told that a service does not exist, because no listener is hidden from it."""
        return all(port.is_open_to(remote) for port in self._ports.values())

    async def admit(self, remote: PublicKey) -> bool:
        """Whether any listener admits ``remote``; fails with the error of a policy that fails."""
        for port in self.ports():
            if port.policy is None or (port.may_admit(remote) and await ask(port.policy, remote, port.service) is True):
                return True
        return False
