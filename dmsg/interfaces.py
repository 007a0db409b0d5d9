"""The seams an embedder may replace. zope interfaces, as Twisted's own are."""

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
    """Where entries are looked up and registered. Every method is ``async``; failures are ``DiscoveryError``.

    Entries given back are always verified: signature, address form, and never older than one seen before.
    """

    async def get_entry(public_key: PublicKey) -> Entry:
        """The ``Entry`` of a ``PublicKey``; raises ``EntryNotFound``."""

    async def post_entry(entry: Entry) -> None:
        """Register a signed ``Entry``; raises ``Unauthorized``, ``WrongSequence`` and the other validation errors."""

    async def available_servers(protocol: str = "dmsg") -> list[Entry]:
        """Server ``Entry`` objects of relays that speak ``protocol``; empty when there is none."""


class IRankedDiscovery(IDiscovery):
    """A discovery that hands out relay ranks, too, signed by a key the client trusts."""

    async def relay_ranks() -> Ranks | None:
        """The newest ``Ranks`` that were verified; ``None`` when no issuer is trusted or there are none.

        May be asked often: what was fetched a moment ago is given again.
        """


class IEntryStore(Interface):
    """Where discovery keeps entries. Every method gives a Deferred.

    ``now_ns`` is Unix time in nanoseconds. What ``put`` acknowledged survives the death of the process in stores that
    are durable at all. A store that fails for reasons of its own fails with ``DiscoveryUnavailable``.
    """

    durable = Attribute("Whether acknowledged entries survive the process.")

    def get(public_key: PublicKey, now_ns: int) -> Deferred[Entry]:
        """Fires with the ``Entry``; fails with ``EntryNotFound``, also for an entry that has expired.

        In the latter case the exception's ``next_sequence`` and ``after_timestamp`` say what ``put`` will demand.
        """

    def get_json(public_key: PublicKey, now_ns: int) -> Deferred[bytes]:
        """As ``get``, but fires with the entry's canonical JSON (``bytes``), ready to be sent."""

    def put(entry: Entry, now_ns: int, poster: str = "") -> Deferred[bool]:
        """Check iteration against what is stored (expired entries and tombstones included) and replace it, in one step.

        Fires with ``True`` for a first entry, ``False`` for an iteration; fails with ``NonZeroSequence``,
        ``WrongSequence`` or ``WrongTime``. ``poster`` is the address it was posted from, empty if that is not known: the
        entry counts for its network when room is short, and it may bring new keys at a limited rate only
        (``RateLimitedByDiscovery``). ``StoreFull`` means that there is no room even with nothing else of its kind in the
        store. Signature and form are the caller's business. Cancelling the Deferred does not stop the write.
        """

    def available_servers(limit: int, now_ns: int, protocol: str = "dmsg") -> Deferred[list[Entry]]:
        """Fires with at most ``limit`` live server entries with connections available, drawn at random.

        ``protocol`` is what the servers speak, here and below (:attr:`~dmsg.discovery.entry.Entry.protocol`).
        """

    def close() -> Deferred[None]:
        """Release what the store holds open, after writes that are under way; fires when done."""


class IRankedStore(IEntryStore):
    """A store from which servers can be drawn with other chances than equal ones."""

    def available_keys(limit: int, now_ns: int, protocol: str = "dmsg") -> Deferred[list[bytes]]:
        """Fires with the raw keys of the live servers with connections available; at random if more than ``limit``."""

    def servers_of(keys: list[bytes], now_ns: int, protocol: str = "dmsg") -> Deferred[list[Entry]]:
        """Fires with the entries of raw ``keys``, in that order, without those that are no available servers now."""


class IWatchedStore(IRankedStore):
    """A store that says what is put through it, so that discovery need not ask it anew for each list of servers."""

    def watch(changed: Callable[[Entry, int], None]) -> None:
        """Call ``changed(entry, now_ns)`` for each put from now on, before the Deferred of ``put`` fires.

        Both are what ``put`` was called with. Refused entries are left out, and so is what other processes put.
        """


class IRelayProver(Interface):
    """How discovery finds out that a relay is where its entry says, and has the key its entry has."""

    def resolve(host: str) -> Deferred[list[str]]:
        """Fires with the IP addresses that a host name has now; an empty list when there are none.

        It may take as long as name resolution takes: the caller has a time limit of its own, and does not cancel.
        """

    def prove(public_key: PublicKey, address: HostPort) -> Deferred[None]:
        """Connect to ``address`` (an IP address and a port) and fire once the relay there has shown its key.

        Fails with ``ProofFailed``. The connection is closed in every case; cancelling closes it, too.
        """


class IAccessPolicy(Interface):
    """Who may open a transport to a listener; asked before ACCEPT is sent."""

    def allow(remote: PublicKey, service: str) -> object:
        """``True`` or ``False``, or a Deferred or coroutine of that, for a ``PublicKey`` and a service name.

        What is answered at once costs a stranger's offer no place; what takes its time is waited for in one.
        """


class IKeyPolicy(IAccessPolicy):
    """An access policy that knows of some keys, without asking elsewhere, that they are never admitted.

    A key that no listener of a client may admit is refused before anything is calculated for it.
    """

    def admits_key(remote: PublicKey) -> bool:
        """``False`` when ``allow`` would refuse ``remote`` in any case; with ``True``, ``allow`` decides.

        Answers from memory, for every offer of every stranger: no I/O, no Deferred.
        """


class IEventLog(Interface):
    """Where structured events go (:mod:`dmsg.eventlog.schema` declares them)."""

    def emit(event: Event) -> None:
        """Take one event; never blocks, never raises."""
