"""The schedule of discovery's proofs: which relays are to be proved, when, and which are proved. Pure.

:ref:`spec-proofs`. Time is an argument, in seconds on any clock. Three limits bound the work for strangers: sources of
registrations take turns, each target and each source has a budget of failures, and the number of records is limited; the
source with the most gives them up.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection
from itertools import count

from dmsg.address import HostPort, network_group
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG
from dmsg.discovery.proofs.budgets import ProofBudgets
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.discovery.proofs.queue import FairQueue
from dmsg.discovery.proofs.record import RelayRecord, RelayState
from dmsg.discovery.proofs.unproved import Unproved
from dmsg.discovery.relay_addresses import is_ip
from dmsg.sansio.backoff import Backoff
from dmsg.sansio.jitter import RandomNumbers
from dmsg.sansio.rate import TokenBucket


class ProofSchedule:
    """The relays that a discovery knows, those that are proved, and which one is proved next.

    A driver takes records from :meth:`next`, resolves the IP address, asks :meth:`admit` for permission, and reports with
    one of :meth:`succeeded`, :meth:`failed` and :meth:`postponed`.
    """

    def __init__(self, limits: ProofLimits, random: RandomNumbers, now: float) -> None:
        self.limits = limits
        #: Raw keys of proved relays that are available, by protocol and by the network in which they were proved.
        self.networks: defaultdict[str, dict[str, dict[bytes, RelayRecord]]] = defaultdict(dict)
        #: Goes up with every change of ``networks``.
        self.version = 0
        self._random = random
        self._backoff = Backoff(limits.retry_first_s, limits.interval_s, least=0.8, spread=0.4)
        self._records: dict[bytes, RelayRecord] = {}
        self._targets: dict[str, dict[bytes, RelayRecord]] = {}
        self._unproved = Unproved()
        #: Those of them that have not had their first proof yet.
        self._new: set[bytes] = set()
        self._due: list[tuple[float, int, RelayRecord]] = []
        self._ties = count()
        self._again: FairQueue[RelayRecord] = FairQueue()
        self._fresh: FairQueue[RelayRecord] = FairQueue()
        self._names: FairQueue[RelayRecord] = FairQueue()
        self._turn = 0
        self._rate = TokenBucket(limits.proofs_per_s, limits.proof_burst, now)
        self._budgets = ProofBudgets(limits)
        self._resolving: Counter[str] = Counter()

    # --- what is known -------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: object) -> bool:
        return key in self._records

    @property
    def waiting(self) -> int:
        """Records whose turn has not come yet."""
        return len(self._again) + len(self._fresh) + len(self._names)

    @property
    def first_proofs(self) -> int:
        """Relays whose first proof has no result yet."""
        return len(self._new)

    @property
    def listed(self) -> int:
        """Relays that are proved and available."""
        return sum(len(relays) for networks in self.networks.values() for relays in networks.values())

    def get(self, key: bytes) -> RelayRecord | None:
        """The record of a raw public key."""
        return self._records.get(key)

    # --- from registrations --------------------------------------------------------------------------------------

    def offer(self, static: PublicKey, address: HostPort, source_host: str, now: float, protocol: str = DMSG) -> None:
        """A relay claims that it is at ``address``, speaks ``protocol`` and is available.

        ``source_host`` has registered it, "" if unknown.
        """
        record = self._records.get(static.raw)
        if record is None:
            record = RelayRecord(static, address, source_host, now, protocol)
            record.source, record.target = _source(source_host), _target(address.host)
            if not self._make_room(record):
                return
            self._records[record.key] = record
            self._targets.setdefault(record.target, {})[record.key] = record
            self._unproved.put(record)
            self._new.add(record.key)
            self._enqueue(record)
            return
        record.offered_at = now
        if source_host:
            record.source_host, record.source = source_host, _source(source_host)
        if not record.proved:
            self._unproved.put(record)
            if not record.available and not record.failures and record.state is not RelayState.RESTING:
                self._new.add(record.key)
        if (record.address, record.protocol) != (address, protocol):
            self._move(record, address, protocol)
            if record.state is RelayState.GONE:
                return
        elif record.state is RelayState.WAITING:
            self._enqueue(record)  # as the newest, and by the source known now
        elif record.state is RelayState.RESTING and record.due_if_offered < record.due:
            self._set_due(record, record.due_if_offered)  # it may have been down for hours, and is back
        elif record.state is RelayState.PROVING:
            record.offered_again = True
        if not record.available:
            record.available = True
            self._index(record)

    def _move(self, record: RelayRecord, address: HostPort, protocol: str) -> None:
        """The relay claims another address or protocol. At a new target it needs a place like a new relay, or is forgotten."""
        self._lose_proof(record)
        record.address, record.protocol, record.failures = address, protocol, 0
        target = _target(address.host)
        if target != record.target:
            if not self._make_room_at(target):
                self._forget(record)
                return
            self._leave_target(record)
            record.target = target
            self._targets.setdefault(target, {})[record.key] = record
        self._new.add(record.key)
        if record.state is RelayState.PROVING:
            record.moved = True
        else:
            self._enqueue(record)

    def withdraw(self, key: bytes) -> None:
        """A relay is not available any more. Its proof is remembered until the next one is due."""
        record = self._records.get(key)
        if record is not None and record.available:
            self._unindex(record)
            record.available = False
            self._new.discard(key)

    def retain(self, keys: Collection[bytes], since: float) -> None:
        """Withdraw all relays but ``keys`` that were last offered before ``since``: the store does not have them any more."""
        for key in [one.key for one in self._records.values() if one.offered_at < since and one.key not in keys]:
            self.withdraw(key)

    # --- to the driver -------------------------------------------------------------------------------------------

    def next(self, now: float) -> RelayRecord | None:
        """The relay to be proved now, or ``None``; then :meth:`next_due` says when to ask again."""
        self._wake(now)
        if self._rate.wait_s(now) > 0:
            return None
        while (record := self._take()) is not None and not record.available:
            self._forget(record)
        if record is not None:
            record.move(RelayState.PROVING)
            record.offered_again = False
            if not is_ip(record.address.host):
                self._resolving[record.source] += 1
        return record

    def _take(self) -> RelayRecord | None:
        """The next record, from the three queues in turn, so that no queue waits until another one is empty."""
        for _ in range(3):
            self._turn = (self._turn + 1) % 3
            if self._turn == 0:
                record = self._again.take()
            elif self._turn == 1:
                record = self._fresh.take()
            elif sum(self._resolving.values()) < self.limits.resolving:
                most = self.limits.resolving_per_source
                record = self._names.take({source for source, number in self._resolving.items() if number >= most})
            else:
                record = None
            if record is not None:
                return record
        return None

    def next_due(self, now: float) -> float | None:
        """When :meth:`next` may have a relay, if nothing else happens before; ``None`` if never."""
        if len(self._again) or len(self._fresh) or len(self._names):
            wait_s = self._rate.wait_s(now)
            if wait_s > 0:
                return now + wait_s
        return self._due[0][0] if self._due else None

    def resolved(self, source: str) -> None:
        """A name resolution for a record of ``source`` has ended, in time or not."""
        self._resolving[source] -= 1
        if not self._resolving[source]:
            del self._resolving[source]

    def admit(self, record: RelayRecord, ip: str, now: float) -> float:
        """Permission to connect to ``ip`` for ``record``: 0, or how many seconds to wait."""
        wait_s = self._budgets.take(record, ip, now)
        if wait_s == 0:
            self._rate.take(now)
        return wait_s

    # --- outcomes ------------------------------------------------------------------------------------------------

    def succeeded(self, record: RelayRecord, ip: str, now: float) -> None:
        """The relay at ``ip`` has shown its key."""
        self._end_proof(record, give_back=True)
        if self._go_on(record):
            return
        self._unindex(record)
        record.failures = record.postponements = record.misses = 0
        record.ip, record.network = ip, network_group(ip)
        self._unproved.discard(record.key)
        self._index(record)
        self._rest(record, now + self.limits.interval_s * (0.8 + 0.4 * self._random.random()))

    def failed(self, record: RelayRecord, now: float, *, certain: bool = True) -> None:
        """The relay has not shown its key. It leaves the list, and is tried again after a pause that grows with each failure.

        If the failure is not ``certain``, a listed relay is tried again soon, ``limits.attempts`` times in all, before it
        leaves the list.
        """
        self._end_proof(record)
        if self._go_on(record):
            return
        if record.proved and not certain and record.misses < self.limits.attempts - 1:
            record.misses += 1
            self._rest(record, now + self.limits.attempt_pause_s * (0.8 + 0.4 * self._random.random()))
            return
        self._lose_proof(record)
        record.failures += 1
        record.ip, record.turn = "", record.turn + 1
        record.postponements = 0
        pause_s = self._backoff.pause_s(record.failures, self._random.random)
        shortest_s = min(pause_s, self.limits.retry_first_s)
        self._rest(record, now + (shortest_s if record.offered_again else pause_s), now + shortest_s)

    def postponed(self, record: RelayRecord, wait_s: float, now: float) -> None:
        """The relay was not tried: :meth:`admit` said to wait, or no descriptor was left."""
        self._end_proof(record)
        if not self._go_on(record):
            self._rest(record, now + wait_s * (1.0 + 0.5 * self._random.random()))

    def _end_proof(self, record: RelayRecord, *, give_back: bool = False) -> None:
        self._budgets.end(record, give_back=give_back)
        if record.state is not RelayState.GONE:
            self._new.discard(record.key)

    def _go_on(self, record: RelayRecord) -> bool:
        """Whether the result is useless: the record is gone, or has moved, and then waits for another proof."""
        if record.state is RelayState.GONE:
            return True
        if not record.moved:
            return False
        record.moved = False
        record.move(RelayState.WAITING)
        if record.available:
            self._new.add(record.key)
        self._enqueue(record)
        return True

    # --- inside --------------------------------------------------------------------------------------------------

    def _enqueue(self, record: RelayRecord) -> None:
        if record.state is RelayState.RESTING:
            record.move(RelayState.WAITING)
        again = record.key not in self._new
        if not is_ip(record.address.host):
            queue, source = self._names, record.source
        elif record.proved:
            queue, source, again = self._again, "", True
        else:
            queue, source = self._fresh, record.source
        for other in (self._again, self._fresh, self._names):
            if other is not queue:
                other.remove(record.key)
        queue.put(record.key, record, source, record.target, again=again)

    def _rest(self, record: RelayRecord, due: float, due_if_offered: float | None = None) -> None:
        record.move(RelayState.RESTING)
        record.due_if_offered = due if due_if_offered is None else due_if_offered
        self._set_due(record, due)

    def _set_due(self, record: RelayRecord, due: float) -> None:
        record.due = due
        heapq.heappush(self._due, (due, next(self._ties), record))

    def _wake(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            due, _, record = heapq.heappop(self._due)
            if record.state is not RelayState.RESTING or record.due != due:
                continue
            if record.available:
                self._enqueue(record)
            else:
                self._forget(record)

    def _index(self, record: RelayRecord) -> None:
        if record.proved and record.available:
            self.networks[record.protocol].setdefault(record.network, {})[record.key] = record
            self.version += 1

    def _unindex(self, record: RelayRecord) -> None:
        networks = self.networks[record.protocol]
        relays = networks.get(record.network)
        if relays is not None and relays.pop(record.key, None) is not None:
            self.version += 1
            if not relays:
                del networks[record.network]

    def _lose_proof(self, record: RelayRecord) -> None:
        self._unindex(record)
        if record.proved:
            record.network = ""
            self._unproved.put(record)

    def _leave_target(self, record: RelayRecord) -> None:
        relays = self._targets[record.target]
        del relays[record.key]
        if not relays:
            del self._targets[record.target]

    def _forget(self, record: RelayRecord) -> None:
        record.move(RelayState.GONE)
        self._unindex(record)
        self._leave_target(record)
        for queue in (self._again, self._fresh, self._names):
            queue.remove(record.key)
        self._unproved.discard(record.key)
        self._new.discard(record.key)
        del self._records[record.key]

    def _make_room(self, record: RelayRecord) -> bool:
        """Whether there is a place for one more record; records that could not be proved lose their places first."""
        peers = self._targets.get(record.target, {})
        if len(peers) >= self.limits.relays_per_network:
            return self._make_room_at(record.target)
        if len(self._records) < self.limits.relays:
            return True
        victim = self._unproved.victim()
        if victim is None:
            largest = max(self._targets.values(), key=len)
            victim = next(iter(largest.values())) if len(largest) > len(peers) + 1 else None
        return self._give_way(victim)

    def _make_room_at(self, target: str) -> bool:
        """Whether ``target`` has a place for one more record, perhaps after evicting another."""
        peers = self._targets.get(target, {})
        if len(peers) < self.limits.relays_per_network:
            return True
        unproved = [one for one in peers.values() if not one.proved]
        if not unproved:
            return False
        sources = Counter(one.source for one in unproved)
        most = max(sources.values())
        # of the source that has the most there, so that strangers do not push out the relay that is there
        largest = [one for one in unproved if sources[one.source] == most]
        return self._give_way(min(largest, key=lambda one: (not one.failures, one.offered_at)))

    def _give_way(self, victim: RelayRecord | None) -> bool:
        if victim is not None:
            self._forget(victim)
        return victim is not None


def _source(host: str) -> str:
    """The source that takes turns for a registration from ``host``: its network; "" for relays found in the store."""
    return network_group(host) if host else ""


def _target(host: str) -> str:
    """The target for which a relay at ``host`` counts before it is proved: its network, or the domain of its name.

    A domain is the last two labels, because subdomains cost nothing.
    """
    if is_ip(host):
        return network_group(host)
    return ".".join(host.lower().rstrip(".").split(".")[-2:])
