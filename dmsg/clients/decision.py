"""A transport that a peer offers, until it is accepted or refused."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from twisted.internet.defer import CancelledError, Deferred
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.clients.access import ask
from dmsg.clients.listener import ListeningPort
from dmsg.clients.offers import Offer, Offers
from dmsg.crypto.keys import PublicKey

_log = Logger()
P = TypeVar("P", bound=ListeningPort[Any])


class PendingOffer(ABC):
    """An offer that holds a place (:mod:`dmsg.clients.offers`) while it waits for a decision or a proof."""

    def __init__(self, share: Hashable) -> None:
        #: Its share of the places is counted by key and relay, so that a hostile relay that replays recorded offers takes
        #: no places from the same key on another relay.
        self._share = share
        self._place: Offers[Offer] | None = None
        self._decision: Deferred[object] | None = None
        self._over = False

    @abstractmethod
    def deny(self) -> None:
        """Refuse the offer, because its key is not admitted."""

    @abstractmethod
    def crowded_out(self) -> None:
        """Refuse the offer, because there is no room, or because it has waited longest and a newer offer takes its place."""

    def _hold(self, places: Offers[Offer]) -> bool:
        """Hold one of ``places`` until everything is decided; refuses the offer if its key has used up its share."""
        if self._place is places:
            return True
        self._leave()
        if not places.has_room(self._share):
            self.crowded_out()
            return False
        self._place = places
        oldest = places.add(self, self._share)
        if oldest is not None:
            oldest.crowded_out()
        return True

    def _leave(self) -> None:
        places, self._place = self._place, None
        if places is not None:
            places.remove(self)

    def _ask(self, places: Offers[Offer], answer: Deferred[object], then: Callable[[object], None]) -> None:
        """Call ``then`` with the ``answer`` of an access policy; the offer holds one of ``places`` until the answer comes."""
        is_known = answer.called and not answer.paused
        if is_known or self._hold(places):
            self._decide(answer, then)
        else:
            answer.cancel()

    def _decide(self, decision: Deferred[Any], then: Callable[[object], None]) -> None:
        """Call ``then`` with the result of ``decision``, unless the offer has ended before."""
        self._decision = decision

        def answered(answer: object) -> None:
            self._decision = None
            if not self._over:
                then(answer)

        def failed(failure: Failure) -> None:
            self._decision = None
            if not self._over:
                if failure.check(CancelledError) is None:
                    _log.failure("The access policy failed; access is denied", failure=failure)
                self.deny()

        decision.addCallbacks(answered, failed)

    def _end(self) -> None:
        """End the offer, and cancel a decision under way."""
        self._over = True
        self._leave()
        if self._decision is not None:
            self._decision.cancel()


class ServiceOffer(PendingOffer, Generic[P]):
    """An offer of the key ``remote``, made over ``relay``, for a service: a listening port decides about it."""

    def __init__(self, relay: PublicKey, remote: PublicKey) -> None:
        super().__init__((relay.raw, remote.raw))  # bytes cache their hash, which is needed several times
        self._remote = remote
        self._port: P | None = None

    @abstractmethod
    def take(self, port: P) -> None:
        """``port`` admits the offer, and has room for it."""

    def _put_to(self, port: P) -> None:
        """Let ``port`` decide: the offer is taken, denied or crowded out."""
        if not port.may_admit(self._remote):
            self.deny()
        elif not port.offers.has_room(self._share):
            self.crowded_out()
        else:
            self._port = port
            if port.policy is None:
                self._admitted(True)
            else:
                self._ask(port.offers, ask(port.policy, self._remote, port.service), self._admitted)

    def _admitted(self, allowed: object) -> None:
        assert self._port is not None
        if allowed is not True:
            self.deny()
        elif not self._port.make_room():
            self.crowded_out()
        else:
            self.take(self._port)
