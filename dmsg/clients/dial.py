"""A dial: its request, its result, and its time limits (:ref:`spec-dialling`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import Deferred

from dmsg.clients.sessions import S
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.lookups import CallerLimits
from dmsg.sansio.rate import check_limits, check_more_than_zero


@dataclass(frozen=True, slots=True)
class DialConfig:
    """Times of a dial, in seconds."""

    #: For the whole dial.
    timeout_s: float = 10.0
    #: The next server is tried after this time, if the previous one has not answered.
    stagger_s: float = 0.25
    #: The same for a relay that has ended an earlier path of a transport that looks for a new one: enough for two round trips
    #: through any other relay. The dial waits for it even if the previous relay has failed, while another is still being tried.
    ended_stagger_s: float = 1.0
    #: Most servers of an entry that are tried, connected ones first, because a stranger writes the entry.
    servers: int = 8
    #: How long a looked-up entry is reused without asking discovery.
    entry_lifetime_s: float = 5.0
    #: The same when a transport looks for another path: the peer has probably just moved, with all its transports.
    resume_entry_lifetime_s: float = 0.2
    #: If discovery has not answered after this time, the dial begins with other relays it knows, if there are any.
    look_up_s: float = 1.0
    #: Age up to which such a dial uses an old entry: the same as for the client entries that discovery hands out.
    earlier_entry_lifetime_s: float = 21_600.0
    #: Entries cached for these purposes.
    entries: int = 1_024
    callers: CallerLimits = field(default_factory=CallerLimits)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a time in which no peer can answer, and for no server of an entry."""
        check_more_than_zero(self, "timeout_s")
        check_limits(self, "servers")


@dataclass(frozen=True, slots=True)
class OpenedStream(Generic[S]):
    """The result of a dial: the session, the open stream, and how long the peer took to answer."""

    session: S
    stream: Any
    accept_ms: float


R = TypeVar("R", bound=OpenedStream[Any])
S_contra = TypeVar("S_contra", contravariant=True)


class Dial(TypingProtocol[S_contra, R]):
    """The interface of a dial, which each protocol implements."""

    @property
    def target(self) -> PublicKey:
        """The peer."""

    @property
    def moves(self) -> bool:
        """Whether it looks for a new path for a transport that has lost its own."""

    @property
    def heeds_promise(self) -> bool:
        """Whether the peer's entry decides: the dial is in the clear unless the entry promises end-to-end security."""

    @property
    def ended_by(self) -> Sequence[PublicKey]:
        """The relays that have ended earlier paths of that transport, the last one at the end. Other relays are preferred."""

    def through(self, session: S_contra, *, promised: bool) -> Deferred[R]:
        """Open a stream through ``session``; ``promised`` is whether the peer's entry promises end-to-end security.

        Raises ``StageError``, or fails with it. Cancelling closes the stream.
        """


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A dial of a protocol without parameters of its own."""

    target: PublicKey
    service: str = ""
    moves: bool = False
    heeds_promise: bool = False
    ended_by: Sequence[PublicKey] = ()

    def through(self, session: Any, *, promised: bool) -> Deferred[Any]:
        """Ask the session: ``request(target, service)``."""
        opened: Deferred[Any] = session.request(self.target, self.service)
        return opened
