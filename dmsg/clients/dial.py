"""A dial: what is asked for, what it comes to, and how long it may take (:ref:`spec-dialling`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred

from dmsg.clients.sessions import S
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.lookups import CallerLimits


@dataclass(frozen=True, slots=True)
class DialConfig:
    """Times of a dial, in seconds."""

    #: For the whole dial.
    timeout_s: float = 10.0
    #: The next server is tried when the one before has not answered for so long.
    stagger_s: float = 0.25
    #: The same for a relay that has ended an earlier path of the transport that looks for one: enough for two round trips
    #: through any other. It is waited also when the one before has failed and another one has not.
    ended_stagger_s: float = 1.0
    #: So many of the servers an entry names are tried, those connected already above all: an entry is a stranger's word.
    servers: int = 8
    #: How long an entry that was looked up is used again without asking.
    entry_lifetime_s: float = 5.0
    #: The same when a transport looks for another path: the peer has probably just moved, but all its transports have.
    resume_entry_lifetime_s: float = 0.2
    #: Where there is something else to go by, the dial begins with that when discovery has not answered for so long.
    look_up_s: float = 1.0
    #: How old an entry may be that such a dial goes by: as old as the entries of clients that discovery hands out.
    earlier_entry_lifetime_s: float = 21_600.0
    #: Entries kept for all this.
    entries: int = 1_024
    callers: CallerLimits = field(default_factory=CallerLimits)


@dataclass(frozen=True, slots=True)
class OpenedStream(Generic[S]):
    """What a dial came to: the session, the open stream, and how long the peer took to answer."""

    session: S
    stream: Any
    accept_ms: float


R = TypeVar("R", bound=OpenedStream[Any])
S_contra = TypeVar("S_contra", contravariant=True)


class Dial(TypingProtocol[S_contra, R]):
    """One dial, as its protocol makes it."""

    @property
    def target(self) -> PublicKey:
        """The peer."""

    @property
    def moves(self) -> bool:
        """Whether it looks for another path of a transport that has lost its own."""

    @property
    def heeds_promise(self) -> bool:
        """Whether the peer's entry decides: it is spoken to in the clear unless that promises end-to-end security."""

    @property
    def ended_by(self) -> Sequence[PublicKey]:
        """The relays that have ended earlier paths of that transport, the last one at the end: any other is preferred."""

    def through(self, session: S_contra, *, promised: bool) -> Deferred[R]:
        """Open a stream through ``session``; ``promised`` is whether the peer's entry promises end-to-end security.

        Raises ``StageError``, or fails with it. Cancelling undoes it.
        """


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A dial of a protocol of which nothing more can be said."""

    target: PublicKey
    service: str = ""
    moves: bool = False
    heeds_promise: bool = False
    ended_by: Sequence[PublicKey] = ()

    def through(self, session: Any, *, promised: bool) -> Deferred[Any]:
        """Ask the session: ``request(target, service)``."""
        opened: Deferred[Any] = session.request(self.target, self.service)
        return opened
