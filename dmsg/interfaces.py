"""The parts that an embedder may replace, as zope interfaces like Twisted's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zope.interface import Attribute, Interface

if TYPE_CHECKING:
    from collections.abc import Callable

    from twisted.internet.defer import Deferred

    from dmsg.address import HostPort
    from dmsg.crypto.keys import PublicKey
    from dmsg.discovery.entry import Entry
    from dmsg.discovery.ranks import Ranks
    from dmsg.eventlog.schema import Event


class IDiscovery(Interface):
    """Looks up and registers entries. Every method is ``async``; failures are ``DiscoveryError``.

    Returned entries are always verified: by signature and form of the address, and never older than one seen before.
    """

    async def get_entry(public_key: PublicKey) -> Entry:
        """The ``Entry`` of a ``PublicKey``; raises ``EntryNotFound``."""

    async def post_entry(entry: Entry) -> None:
        """Register a signed ``Entry``; raises ``Unauthorized``, ``WrongSequence`` and the other validation errors."""

    async def available_servers(protocol: str = "dmsg") -> list[Entry]:
        """Server ``Entry`` objects of relays that speak ``protocol``; empty when there are none."""


class IRankedDiscovery(IDiscovery):
    """A discovery that hands out relay ranks, too, signed by a key the client trusts."""

    async def relay_ranks() -> Ranks | None:
        """The newest verified ``Ranks``; ``None`` when no issuer is trusted or there are none.

        May be called often: the implementation caches the ranks.
        """


class IEntryStore(Interface):
    """Stores discovery's entries. Every method returns a Deferred.

    ``now_ns`` is Unix time in nanoseconds. In a durable store, entries that ``put`` has acknowledged survive the death of the
    process. Faults of the store itself are ``DiscoveryUnavailable``.
    """

    durable = Attribute("Whether acknowledged entries survive the process.")

    def get(public_key: PublicKey, now_ns: int) -> Deferred[Entry]:
        """Fires with the ``Entry``; fails with ``EntryNotFound``, also for an expired entry.

        For an expired entry, the exception's ``next_sequence`` and ``after_timestamp`` say what ``put`` will demand.
        """

    def get_json(public_key: PublicKey, now_ns: int) -> Deferred[bytes]:
        """As ``get``, but fires with the entry's canonical JSON (``bytes``), ready to be sent."""

    def put(entry: Entry, now_ns: int, poster: str = "") -> Deferred[bool]:
        """Check the iteration against the stored entry (or tombstone) and replace that, in one step.

        Fires with ``True`` for a first entry, ``False`` for an iteration; fails with ``NonZeroSequence``,
        ``WrongSequence`` or ``WrongTime``. ``poster`` is the address it was posted from, empty if that is not known: the
        entry counts for the poster's network when room is short, and the poster may bring new keys only at a limited rate
        (``RateLimitedByDiscovery``). ``StoreFull`` means that there is no room even with no other entry of its kind in the
        store. The caller checks signature and form. Cancelling the Deferred does not stop the write.
        """

    def available_servers(limit: int, now_ns: int, protocol: str = "dmsg") -> Deferred[list[Entry]]:
        """Fires with at most ``limit`` live server entries with connections available, drawn at random.

        ``protocol`` is the protocol of the servers, here and below (:attr:`~dmsg.discovery.entry.Entry.protocol`).
        """

    def close() -> Deferred[None]:
        """Finish writes that are under way and release all resources; fires when done."""


class IRankedStore(IEntryStore):
    """A store from which servers can be drawn with unequal weights."""

    def available_keys(limit: int, now_ns: int, protocol: str = "dmsg") -> Deferred[list[bytes]]:
        """Fires with the raw keys of live servers with connections available; a random ``limit`` of them if there are more."""

    def servers_of(keys: list[bytes], now_ns: int, protocol: str = "dmsg") -> Deferred[list[Entry]]:
        """Fires with the entries of raw ``keys``, in that order, without those that are not available servers now."""


class IWatchedStore(IRankedStore):
    """A store that reports the entries put through it, so that discovery need not query it for each list of servers."""

    def watch(changed: Callable[[Entry, int], None]) -> None:
        """Call ``changed(entry, now_ns)`` for each put from now on, before the Deferred of ``put`` fires.

        Both are the arguments of ``put``. Refused entries, and entries that other processes put, are left out.
        """


class IRelayProver(Interface):
    """Checks for discovery that a relay is at the address in its entry, and has the key of its entry."""

    def resolve(host: str) -> Deferred[list[str]]:
        """Fires with the IP addresses that a host name has now; an empty list when there are none.

        It may take as long as name resolution takes: the caller has a timeout of its own, and does not cancel.
        """

    def prove(public_key: PublicKey, address: HostPort) -> Deferred[None]:
        """Connect to ``address`` (an IP address and a port) and fire once the relay there has shown its key.

        Fails with ``ProofFailed``. The connection is closed in every case; cancelling closes it, too.
        """


class IAccessPolicy(Interface):
    """Decides who may open a transport to a listener, before ACCEPT is sent."""

    def allow(remote: PublicKey, service: str) -> object:
        """``True`` or ``False``, or a Deferred or coroutine of that, for a ``PublicKey`` and a service name.

        An answer at once needs none of the listener's places for offers; a Deferred or coroutine holds one until it fires.
        """


class IKeyPolicy(IAccessPolicy):
    """An access policy that knows, without asking elsewhere, that some keys are never admitted.

    A key that no listener of a client may admit is refused before anything is computed for it.
    """

    def admits_key(remote: PublicKey) -> bool:
        """``False`` when ``allow`` would refuse ``remote`` in any case; with ``True``, ``allow`` decides.

        Called for every offer of every stranger, so it answers from memory: no I/O, no Deferred.
        """


class IEventLog(Interface):
    """Takes structured events (:mod:`dmsg.eventlog.schema` declares them)."""

    def emit(event: Event) -> None:
        """Take one event; never blocks, never raises."""
