"""Several relays, any of which can carry an envelope: choice, failover, and waiting while none is connected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import Final
from typing import Protocol as TypingProtocol

from twisted.internet.defer import DeferredList, ensureDeferred
from twisted.internet.interfaces import IReactorTime

from dmsg.errors import ConfigError, InvalidAddress
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.connection import Connect, RelayConnection, relay_url
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.limits import MAX_OWN_RELAYS

#: A parcel sent this many seconds before the last data from its relay has arrived there, because a round trip is shorter.
_CERTAIN_S: Final = 2.0


class Again(Enum):
    """When a parcel of a lost connection is sent over another connection."""

    #: Always: until its answer comes it is not certain that it has arrived.
    ALWAYS = "always"
    #: If nothing was heard from the relay after it was sent.
    IF_UNCERTAIN = "if uncertain"
    #: Never: it must not arrive twice.
    NEVER = "never"


class Parcel:
    """An envelope as bytes, kept until it is answered or has expired, so that it can be sent over another relay.

    ``prefer`` are URLs, places or hosts of preferred relays, the best first. ``again`` says whether it is sent over another
    relay when the one that carried it is lost.
    """

    __slots__ = ("again", "data", "expires_at", "prefer", "refused_by", "relays", "sent_at", "too_long", "via", "waits")

    def __init__(self, data: bytes, expires_at: float, *, again: Again, prefer: Sequence[str] = ()) -> None:
        self.data = data
        #: On the clock of the relays.
        self.expires_at = expires_at
        self.again = again
        self.prefer = prefer
        #: The connection that carries it; ``None`` while it waits for one.
        self.via: RelayConnection | None = None
        self.sent_at = 0.0
        #: All connections that have carried it, and those that have answered with an error.
        self.relays: list[RelayConnection] = []
        self.refused_by: set[RelayConnection] = set()
        #: Called whenever it begins or ceases to wait for a relay.
        self.waits: Callable[[bool], object] = lambda waits: None
        #: Called if it is not sent because it is too long for all relays.
        self.too_long: Callable[[], object] = lambda: None

    def suits(self, connection: RelayConnection) -> bool:
        """Whether it may go over ``connection``, which has not refused it or another one of its length."""
        return connection not in self.refused_by and len(self.data) < connection.too_long_bytes


class RelaysOwner(TypingProtocol):
    """Is told about messages from the relays, and about their connections."""

    def received(self, connection: RelayConnection, message: bytes) -> None:
        """A message came over ``connection``."""

    def relay_connected(self, connection: RelayConnection) -> None:
        """A relay is connected."""

    def relay_lost(self, connection: RelayConnection, *, was_connected: bool) -> None:
        """A relay is no longer connected, or could not be connected."""


def check_relays(urls: Collection[str]) -> None:
    """Raise ``ConfigError`` unless ``urls`` are the URLs of one to four relays."""
    _check_count(len(urls))
    for url in urls:
        try:
            relay_url(url)
        except InvalidAddress as error:
            raise ConfigError("relay", str(error)) from None


def _check_count(count: int) -> None:
    if not 0 < count <= MAX_OWN_RELAYS:
        raise ConfigError("relay", f"1 to {MAX_OWN_RELAYS} relays, not {count}")


class Relays:
    """Up to four connections, and the parcels that they carry.

    A parcel goes over the first of its preferred connections that has room, otherwise over the first of all. When a
    connection is lost, its unanswered requests and the answers that may not have arrived are sent over another connection.
    """

    def __init__(
        self,
        clock: IReactorTime,
        urls: Iterable[str],
        owner: RelaysOwner,
        *,
        connect: Connect,
        token: Callable[[RelayConnection], str],
        uniform: Callable[[], float],
        config: RmbConfig,
    ) -> None:
        if isinstance(urls, str):
            raise TypeError(f'relays is a list of URLs, as ["wss://relay.example"], not {urls!r}')
        unique = list(dict.fromkeys(urls))
        _check_count(len(unique))
        self.connections = [
            RelayConnection(clock, url, self, connect=connect, token=token, uniform=uniform, config=config)
            for url in unique
        ]
        self._clock = clock
        self._owner = owner
        self._waiting: dict[Parcel, None] = {}
        self._carried: dict[RelayConnection, dict[Parcel, None]] = {one: {} for one in self.connections}

    def start(self) -> None:
        """Begin to connect to all."""
        for connection in self.connections:
            connection.start()

    async def stop(self) -> None:
        """End all connections."""
        await DeferredList([ensureDeferred(connection.stop()) for connection in self.connections])

    def problems(self) -> dict[str, str]:
        """The problem of each relay that takes nothing now, by URL: it is not connected, or too much waits for it."""
        return {one.url: one.problem or "takes nothing more" for one in self.connections if not one.has_room}

    def places(self) -> list[str]:
        """The hosts of the relays, with a port unless it is the default port."""
        return [one.place for one in self.connections]

    @property
    def is_connected(self) -> bool:
        """Whether at least one relay is connected."""
        return any(one.is_connected for one in self.connections)

    # --- parcels -----------------------------------------------------------------------------------------------------

    def post(self, parcel: Parcel) -> None:
        """Send ``parcel`` over a relay, now or as soon as one is connected and has room."""
        connection = self._choose(parcel)
        if connection is not None:
            self._send(parcel, connection)
        elif self._is_too_long(parcel):
            parcel.too_long()
        else:
            self._waiting[parcel] = None
            parcel.waits(True)
            for one in self.connections:
                one.hurry()

    def post_again(self, parcel: Parcel) -> bool:
        """Send ``parcel`` once more; ``False`` if it still waits for a relay."""
        if parcel in self._waiting:
            return False
        self.drop(parcel)
        self.post(parcel)
        return True

    def post_elsewhere(self, parcel: Parcel, refused_by: RelayConnection, problem: str) -> bool:
        """Send ``parcel``, which ``refused_by`` has refused with ``problem``, over another relay; returns whether it is sent.

        A parcel that must not arrive twice is sent only if ``refused_by`` has certainly not passed it on.
        """
        if parcel.again is Again.NEVER and not RelayProblem.is_certain(problem):
            return False
        parcel.refused_by.add(refused_by)
        if parcel.via is not None and parcel.via is not refused_by and parcel.via not in parcel.refused_by:
            return True  # it is on its way over another relay already
        if not any(one.is_connected and parcel.suits(one) for one in self.connections):
            return False
        self.drop(parcel)
        self.post(parcel)
        return True

    def drop(self, parcel: Parcel) -> None:
        """Forget ``parcel``: it has arrived, or is no longer wanted."""
        if parcel in self._waiting:
            self._begone(parcel)
        if parcel.via is not None:
            self._carried[parcel.via].pop(parcel, None)
            parcel.via = None

    def _choose(self, parcel: Parcel) -> RelayConnection | None:
        free = [one for one in self.connections if one.has_room and parcel.suits(one)]
        if len(free) > 1:
            free = [one for one in free if not one.is_doubtful] or free
        if len(free) > 1:
            for wanted in parcel.prefer:
                for one in free:
                    if wanted in (one.url, one.place, one.host):
                        return one
        return free[0] if free else None

    def _is_too_long(self, parcel: Parcel) -> bool:
        return all(len(parcel.data) >= one.too_long_bytes for one in self.connections)

    def _send(self, parcel: Parcel, connection: RelayConnection) -> None:
        parcel.via = connection
        parcel.sent_at = self._clock.seconds()
        parcel.relays.append(connection)
        self._carried[connection][parcel] = None
        connection.send(parcel.data)

    def _post_waiting(self) -> None:
        now = self._clock.seconds()
        for parcel in list(self._waiting):
            if parcel not in self._waiting:  # sending another parcel has ended this one
                continue
            if parcel.expires_at <= now:
                self._begone(parcel)
                continue
            connection = self._choose(parcel)
            if connection is not None:
                self._send(parcel, connection)
                self._begone(parcel)
            elif self._is_too_long(parcel):
                self._begone(parcel)
                parcel.too_long()
            elif not any(one.has_room for one in self.connections):
                return

    def _begone(self, parcel: Parcel) -> None:
        """Take ``parcel`` out of those that wait."""
        del self._waiting[parcel]
        parcel.waits(False)

    # --- from the connections ----------------------------------------------------------------------------------------

    @property
    def in_haste(self) -> bool:
        """Whether something waits for a relay."""
        return bool(self._waiting)

    def received(self, connection: RelayConnection, message: bytes) -> None:
        """See :class:`~dmsg.rmb.client.connection.ConnectionOwner`."""
        self._owner.received(connection, message)

    def connected(self, connection: RelayConnection) -> None:
        """See :class:`~dmsg.rmb.client.connection.ConnectionOwner`."""
        if connection.too_long_bytes < float("inf"):
            # It may close again at the next message that is too long. The shortest go first, so that these arrive before.
            self._waiting = dict.fromkeys(sorted(self._waiting, key=lambda parcel: len(parcel.data)))
        self._post_waiting()
        self._owner.relay_connected(connection)

    def failed(self, connection: RelayConnection) -> None:
        """See :class:`~dmsg.rmb.client.connection.ConnectionOwner`."""
        self._owner.relay_lost(connection, was_connected=False)

    def lost(self, connection: RelayConnection) -> None:
        """See :class:`~dmsg.rmb.client.connection.ConnectionOwner`."""
        self._post_again_of(connection)
        for parcel in self._carried[connection]:
            parcel.via = None
        self._carried[connection].clear()
        self._owner.relay_lost(connection, was_connected=True)

    def doubted(self, connection: RelayConnection) -> None:
        """See :class:`~dmsg.rmb.client.connection.ConnectionOwner`."""
        if any(one.is_connected and not one.is_doubtful for one in self.connections):
            self._post_again_of(connection)

    def _post_again_of(self, connection: RelayConnection) -> None:
        """Send again those parcels of ``connection`` that may not have arrived."""
        certain_until = connection.heard_at - _CERTAIN_S
        now = self._clock.seconds()
        for parcel in list(self._carried[connection]):
            if parcel.via is not connection:  # sending another parcel has ended this one
                continue
            if len(parcel.data) >= connection.too_long_bytes:
                again = True  # it has certainly not arrived
            elif parcel.again is Again.IF_UNCERTAIN:
                again = parcel.sent_at >= certain_until
            else:
                again = parcel.again is Again.ALWAYS
            if again and parcel.expires_at > now:
                self.drop(parcel)
                self.post(parcel)

    def writable(self, connection: RelayConnection) -> None:
        """See :class:`~dmsg.rmb.client.connection.ConnectionOwner`."""
        if self._waiting and connection.has_room:
            self._post_waiting()
