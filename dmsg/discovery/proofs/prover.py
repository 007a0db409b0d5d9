"""Proves relays before they are listed: a TCP connection to the address of the entry and a handshake with its key.

:ref:`spec-proofs`. Otherwise a stranger could fill the list with entries that cost nothing but keys, and send clients to any
hosts. :mod:`~dmsg.discovery.proofs.schedule` decides which relay is proved when; this module proves it, with an
:class:`~dmsg.interfaces.IRelayProver` for each protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from twisted.internet.defer import CancelledError, Deferred, DeferredList, TimeoutError
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import Entry, is_available
from dmsg.discovery.errors import DiscoveryError, ProofFailed
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.discovery.proofs.record import RelayRecord, RelayState
from dmsg.discovery.proofs.schedule import ProofSchedule
from dmsg.discovery.relay_addresses import RelayAddresses, is_ip
from dmsg.discovery.stores.rules import shielded
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IEntryStore, IRankedStore, IRelayProver
from dmsg.sansio.backoff import SHORTEST_PAUSE_S
from dmsg.sansio.jitter import RandomNumbers
from dmsg.sansio.rate import TokenBucket

#: Records handled in one turn of the reactor; the rest of a long queue waits for the next turn.
_PUMP_RECORDS: Final = 64
#: Entries read from the store at a time.
_SYNC_BATCH: Final = 250
#: Least time in seconds for the connection after a slow name resolution.
_SHORTEST_PROOF_S: Final = 0.5
#: Log lines of relays that leave the list, per second in the long run and at once.
_LOG_RATE_PER_S: Final = 0.2
_LOG_BURST: Final = 20.0
#: The result of a proof that succeeds; the others are the reasons of ``ProofFailed``.
_OK: Final = "ok"
#: The reasons that mean that the relay is not there. The others may be bad luck, or a flood of connections to it.
_CERTAIN: Final = ("refused", "wrong_key", "not_global")
#: No result: this discovery had no descriptor for the connection.
_NOT_TRIED: Final = "not_tried"
#: All results, as metrics name them.
RESULTS: Final = (_OK, "no_address", "not_global", "refused", "unreachable", "timeout", "closed", "wrong_key")


class RelayProofs:
    """Knows which relays of ``store`` are at the addresses in their entries.

    ``provers`` are by protocol of the relay (:attr:`~dmsg.discovery.entry.Entry.protocol`); a relay of any other protocol is
    never proved. Relays given to :meth:`offer` are proved at once, relays that other processes put into ``store`` when they
    are found there; then each again every ``limits.interval_s``. ``clock`` drives the proofs, ``now_ns()`` is Unix time in
    nanoseconds for the store. Discoveries that share a store each make their own proofs.
    """

    _log = Logger()

    def __init__(
        self,
        store: IEntryStore,
        provers: Mapping[str, IRelayProver],
        clock: IReactorTime,
        *,
        now_ns: Callable[[], int],
        random: RandomNumbers,
        addresses: RelayAddresses,
        limits: ProofLimits | None = None,
    ) -> None:
        self.limits = limits or ProofLimits()
        #: Number of proofs by result, one of :data:`RESULTS`.
        self.results: Counter[str] = Counter()
        self._store = store
        self._provers = provers
        self._clock = clock
        self._now_ns = now_ns
        self._random = random
        self._addresses = addresses
        self._schedule = ProofSchedule(self.limits, random, clock.seconds())
        self._proving: dict[RelayRecord, Deferred[None]] = {}
        self._timer: Any = None
        self._sync_timer: Any = None
        self._syncing: Deferred[None] | None = None
        self._synced_once = self._has_read = self._has_told = False
        self._started_at = 0.0
        self._waiters: Waiters[None] = Waiters()
        self._running = False
        self._log_rate = TokenBucket(_LOG_RATE_PER_S, _LOG_BURST, clock.seconds())

    # --- from start to end ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin with the relays in the store."""
        self._running = True
        self._started_at = self._clock.seconds()
        self._sync()

    async def stop(self) -> None:
        """Give up the proofs that are under way; returns when their connections are being closed."""
        self._running = False
        for timer in (self._timer, self._sync_timer):
            if timer is not None:
                timer.cancel()
        self._timer = self._sync_timer = None
        under_way = list(self._proving.values())
        if self._syncing is not None:
            under_way.append(self._syncing)
        for one in under_way:
            one.cancel()
        self._waiters.fire(None)
        await DeferredList(under_way, consumeErrors=True)

    # --- what is told --------------------------------------------------------------------------------------------

    def offer(self, entry: Entry, source_host: str = "") -> None:
        """``entry`` was registered by ``source_host`` (an IP address, "" if unknown): prove its claims if they are new."""
        if is_available(entry) and self._may_be_proved(entry):
            self._offer(entry, source_host)
            self._pump()
        else:
            self._schedule.withdraw(entry.static.raw)
            self._check_waiters()

    def _may_be_proved(self, entry: Entry) -> bool:
        server = entry.server
        return server is not None and entry.protocol in self._provers and self._addresses.takes(server.host_port.host)

    def _offer(self, entry: Entry, source_host: str) -> None:
        assert entry.server is not None
        now = self._clock.seconds()
        self._schedule.offer(entry.static, entry.server.host_port, source_host, now, entry.protocol)

    # --- what is asked -------------------------------------------------------------------------------------------

    def networks(self, protocol: str) -> Mapping[str, Mapping[bytes, object]]:
        """The raw keys of proved relays that are available and speak ``protocol``, by network (/24, /48)."""
        return self._schedule.networks.get(protocol, {})

    @property
    def version(self) -> int:
        """Goes up with every change of :meth:`networks`."""
        return self._schedule.version

    def holds_for(self, entry: Entry) -> bool:
        """Whether the proof is for the address and protocol in ``entry``, as the store has it now.

        Another process may have accepted a later entry with another address or protocol, which is proved then.
        """
        record = self._schedule.get(entry.static.raw)
        if record is None or entry.server is None:
            return False
        if _has_moved(record, entry):
            self.offer(entry)
        return record.proved and record.available  # not available: its address, or protocol, is none to be proved here

    @property
    def is_blind(self) -> bool:
        """Whether the store has not been read since the start, so that the relays in it are unknown."""
        return self._running and not self._has_read

    def is_proved(self, public_key: PublicKey) -> bool:
        """Whether the relay is listed."""
        record = self._schedule.get(public_key.raw)
        return record is not None and record.proved and record.available

    async def first_proofs(self, protocol: str) -> None:
        """Wait for first proofs under way if they may change the answer for ``protocol`` much.

        This is so when nothing is listed, or discovery has just started. Waits at most ``limits.first_proofs_s``.
        """
        just_started = self._clock.seconds() - self._started_at < self.limits.first_proofs_s
        if self._running and (just_started or not self.networks(protocol)) and not self._is_quiet():
            await self._waiters.wait_at_most(self.limits.first_proofs_s, self._clock)

    def quiet(self) -> Deferred[None]:
        """Fires when the first proofs of all relays have a result. Cancelling gives up waiting."""
        waiter = self._waiters.wait()
        self._check_waiters()
        return waiter

    def stats(self) -> dict[str, float]:
        """Numbers of relays listed, relays known and records waiting; ``proofs_RESULT`` is the number of each result."""
        schedule = self._schedule
        numbers: dict[str, float] = {
            "relays_listed": schedule.listed,
            "relays_known": len(schedule),
            "proofs_waiting": schedule.waiting,
        }
        return numbers | {f"proofs_{result}": self.results[result] for result in RESULTS}

    # --- waiting -------------------------------------------------------------------------------------------------

    def _is_quiet(self) -> bool:
        return self._synced_once and not self._schedule.first_proofs

    def _check_waiters(self) -> None:
        if self._is_quiet() or not self._running:
            self._waiters.fire(None)

    # --- proving -------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Begin as many proofs as the limits allow."""
        if not self._running:
            return
        now = self._clock.seconds()
        wait_s: float | None = 0.0
        for _ in range(_PUMP_RECORDS):
            if len(self._proving) >= self.limits.concurrent:
                return  # a proof that ends begins the next one
            record = self._schedule.next(now)
            if record is None:
                due = self._schedule.next_due(now)
                wait_s = None if due is None else max(SHORTEST_PAUSE_S, due - now)
                break
            proof = Deferred.fromCoroutine(self._prove(record, record.source))
            if not proof.called:
                self._proving[record] = proof
            proof.addBoth(self._ended, record)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wait_s is not None:
            self._timer = self._clock.callLater(wait_s, self._on_timer)
        self._check_waiters()

    def _on_timer(self) -> None:
        self._timer = None
        self._pump()

    def _ended(self, outcome: Any, record: RelayRecord) -> None:
        if self._proving.pop(record, None) is not None:
            self._pump()

    async def _prove(self, record: RelayRecord, source: str) -> None:
        was_listed, prover = record.proved, self._provers[record.protocol]
        address, began = record.address, self._clock.seconds()
        try:
            ip = await self._ip_of(record, source)
            wait_s = self._schedule.admit(record, ip, self._clock.seconds())
            if wait_s > 0:
                self._schedule.postponed(record, wait_s, self._clock.seconds())
                return
            left_s = self.limits.timeout_s - (self._clock.seconds() - began)
            running = prover.prove(record.static, HostPort(ip, address.port))
            await running.addTimeout(max(_SHORTEST_PROOF_S, left_s), self._clock)
            result = _OK
        except ProofFailed as error:
            result = error.reason
        except TimeoutError:
            result = "timeout"
        except CancelledError:
            return
        except Exception:  # a bug in a prover costs only this proof
            self._log.failure("a relay could not be proved")
            result = "unreachable"
        if result == _NOT_TRIED:
            self._schedule.postponed(record, self.limits.attempt_pause_s, self._clock.seconds())
            return
        self.results[result] += 1
        if result == _OK:
            self._schedule.succeeded(record, ip, self._clock.seconds())
            return
        self._schedule.failed(record, self._clock.seconds(), certain=result in _CERTAIN)
        if was_listed and not record.proved and self._log_rate.take(self._clock.seconds()):
            self._log.info(
                "relay {key} at {address} is listed no more: {reason}",
                key=str(record.static),
                address=str(address),
                reason=result,
            )

    async def _ip_of(self, record: RelayRecord, source: str) -> str:
        """The IP address to connect to; of a name, the one that was proved before, or after a failed proof the next."""
        host = record.address.host
        if is_ip(host):
            return host

        def ended(outcome: Any) -> Any:
            self._schedule.resolved(source)
            return outcome

        # A name resolution cannot be stopped: it holds its thread until it ends, and counts until then.
        running = self._provers[record.protocol].resolve(host).addBoth(ended)
        found: Sequence[str] = await shielded(running).addTimeout(self.limits.timeout_s / 2, self._clock)
        if not found:
            raise ProofFailed("no_address")
        if not all(map(self._addresses.takes, found)):
            raise ProofFailed("not_global")
        # resolvers give the addresses of a name in changing order
        return record.ip if record.ip in found else found[record.turn % len(found)]

    # --- what the store has --------------------------------------------------------------------------------------

    def _sync(self) -> None:
        self._sync_timer = None
        self._syncing = Deferred.fromCoroutine(self._read_store())
        self._syncing.addErrback(self._sync_failed).addBoth(self._synced)

    def _sync_failed(self, failure: Any) -> None:
        if not failure.check(CancelledError, DiscoveryError):
            self._log.failure("relays could not be read from the store", failure)
        elif failure.check(DiscoveryError) and self.is_blind and not self._has_told:
            self._has_told = True  # later failures of the store are told by the requests that need it
            self._log.warn("relays could not be read from the store: {error}", error=failure.value)

    def _synced(self, outcome: Any) -> None:
        self._syncing = None
        self._synced_once = True
        if self._running:
            self._sync_timer = self._clock.callLater(
                self.limits.sync_s * (0.9 + 0.2 * self._random.random()), self._sync
            )
        self._pump()

    async def _read_store(self) -> None:
        began, held, complete = self._clock.seconds(), set[bytes](), True
        for protocol in self._provers:
            keys = await self._read_servers(protocol)
            held.update(keys)
            complete = complete and len(keys) < self.limits.relays
        if complete:
            self._schedule.retain(held, began)
        self._has_read = True

    async def _read_servers(self, protocol: str) -> list[bytes]:
        """The keys of the servers that speak ``protocol``. Notes the new ones among them, and those that have moved."""
        most, began = self.limits.relays, self._clock.seconds()
        if not IRankedStore.providedBy(self._store):
            entries = await self._store.available_servers(most, self._now_ns(), protocol)
            self._found(entries, began)
            return [entry.static.raw for entry in entries]
        store: IRankedStore = self._store
        keys: list[bytes] = await store.available_keys(most, self._now_ns(), protocol)
        new = [key for key in keys if self._is_news(key)]
        if self._synced_once:
            del new[self.limits.sync_relays :]
            # Listed relays that have moved are found when they are drawn for a list. These never are.
            failing = [key for key in keys if self._is_failing(key, began)]
            new += self._random.sample(failing, min(len(failing), _SYNC_BATCH))
        for at in range(0, len(new), _SYNC_BATCH):
            self._found(await store.servers_of(new[at : at + _SYNC_BATCH], self._now_ns(), protocol), began)
        return keys

    def _is_news(self, key: bytes) -> bool:
        record = self._schedule.get(key)
        return record is None or not record.available

    def _is_failing(self, key: bytes, since: float) -> bool:
        """Whether its proofs fail, or it waits for a budget, and this discovery has had no entry of it after ``since``."""
        record = self._schedule.get(key)
        if record is None or not record.available or record.proved:
            return False
        return record.state is RelayState.RESTING and record.offered_at < since

    def _found(self, entries: Sequence[Entry], since: float) -> None:
        """Note ``entries``, which were read from the store after ``since``."""
        for entry in entries:
            key = entry.static.raw
            if self._is_news(key):
                if self._may_be_proved(entry):
                    self._offer(entry, "")
            elif self._is_failing(key, since) and _has_moved(self._schedule.get(key), entry):
                self.offer(entry)
        self._pump()


def _has_moved(record: RelayRecord | None, entry: Entry) -> bool:
    """Whether ``entry`` has another address or protocol than the record of its relay."""
    if record is None or entry.server is None:
        return False
    # Compare the texts first: they are mostly equal, and parsing costs ten times as much.
    moved = str(record.address) != entry.server.address and record.address != entry.server.host_port
    return moved or record.protocol != entry.protocol
