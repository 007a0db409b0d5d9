"""The schedule in which a discovery proves relays, among strangers with any registrations and unwitting hosts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from dmsg.address import HostPort, address_group, is_global, network_group
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.discovery.proofs.queue import FairQueue
from dmsg.discovery.proofs.record import RelayRecord, RelayState
from dmsg.discovery.proofs.schedule import ProofSchedule
from dmsg.discovery.relay_addresses import is_ip
from fuzz.choices import Choices

#: Limits small enough for a short input to reach every one of them. Rates and times are such that floats are exact.
_LIMITS = ProofLimits(
    interval_s=16.0,
    attempts=2,
    attempt_pause_s=2.0,
    proofs_per_s=4.0,
    proof_burst=8.0,
    retry_first_s=2.0,
    failures_per_address=2.0,
    failures_per_address_per_s=1 / 64,
    failures_per_network=3.0,
    failures_per_network_per_s=1 / 32,
    failures_per_source=4.0,
    failures_per_source_per_s=1 / 16,
    relays=12,
    relays_per_network=4,
    resolving=2,
    resolving_per_source=1,
)
_KEYS = [SecretKey(bytes((number,)) * 32).public_key for number in range(1, 17)]
#: Of no more networks than the budgets hold, so that none is forgotten.
_IPS = ("9.9.1.1", "9.9.1.2", "9.9.2.1", "9.9.3.1", "2600:1:2::1", "2600:1:2:1::1", "10.0.0.1")
_HOSTS = (*_IPS, "a.relay.example", "b.relay.example", "relay.test")
_SOURCES = ("", "9.9.1.1", "9.9.1.7", "9.9.2.1", "9.8.1.1", "9.8.2.1", "2600:1:2::1", "10.0.0.1")
_PROTOCOLS = ("dmsg", "messaging")


class _Budget:
    """Remaining failures by name; each number grows with time."""

    def __init__(self, burst: float, rate_per_s: float) -> None:
        self.burst, self.rate_per_s = burst, rate_per_s
        self._spent: dict[str, tuple[float, float]] = {}

    def left(self, name: str, now: float) -> float:
        tokens, at = self._spent.get(name, (self.burst, now))
        return min(self.burst, tokens + (now - at) * self.rate_per_s)

    def spend(self, name: str, now: float, number: float) -> None:
        self._spent[name] = (min(self.burst, self.left(name, now) - number), now)


def _is_due_to_go(record: RelayRecord, idle: list[RelayRecord]) -> bool:
    """Whether ``record`` is one of ``idle`` (relays of one target that are not proved) that makes room for another."""
    sources = Counter(one.source for one in idle)
    largest = [one for one in idle if sources[one.source] == max(sources.values())]
    failed = [one for one in largest if one.failures]
    return record in largest and record.offered_at == min(one.offered_at for one in failed or largest)


@dataclass(eq=False)
class _Proof:
    """A proof in progress. ``ip`` is "" while the name is being resolved, and ``spent`` is its cost so far."""

    record: RelayRecord
    source: str
    address: HostPort
    protocol: str
    ip: str = ""
    admitted: bool = False
    spent: list[tuple[_Budget, str]] = field(default_factory=list)


class _World:
    """A schedule and its driver, and a model of each relay."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.now = 100.0
        self.schedule = ProofSchedule(_LIMITS, random.Random(1), self.now)
        self.proofs: list[_Proof] = []
        #: Names that are being resolved, by source: they may take longer than the proof.
        self.resolving: list[str] = []
        #: Where each listed relay was proved.
        self.proved: dict[RelayRecord, tuple[HostPort, str]] = {}
        #: Relays that are not proved, in the order of registration.
        self.unproved: dict[RelayRecord, None] = {}
        self.rate = _Budget(_LIMITS.proof_burst, _LIMITS.proofs_per_s)
        self.addresses = _Budget(_LIMITS.failures_per_address, _LIMITS.failures_per_address_per_s)
        self.networks = _Budget(_LIMITS.failures_per_network, _LIMITS.failures_per_network_per_s)
        self.sources = _Budget(_LIMITS.failures_per_source, _LIMITS.failures_per_source_per_s)
        self.listed: tuple[int, object] = (0, {})
        self.passed: Counter[int] = Counter()

    # --- registrations ---------------------------------------------------------------------------------------------

    def offer(self) -> None:
        """A relay registers, for the first time, again or from elsewhere; another relay may lose its place."""
        choices, schedule = self.choices, self.schedule
        key, what = choices.pick(_KEYS), choices.byte()
        known = schedule.get(key.raw)
        host, port = choices.pick(_HOSTS), 80 + (what & 1)
        protocol, source = _PROTOCOLS[what >> 1 & 1], choices.pick(_SOURCES)
        address = HostPort(host, port)
        if known is not None and what & 4:
            address, protocol = known.address, known.protocol
        before = dict(schedule._records)
        target = _target(address.host)
        elsewhere = known is not None and known.target != target
        peers = [one for one in before.values() if one.target == target]
        schedule.offer(key, address, source, self.now, protocol)
        record = schedule.get(key.raw)
        if known is None:
            self.make_room(before, record, host)
        else:
            self.make_room_at(before, peers if elsewhere else [], known)
        if record is None:
            return
        if known is None:
            self.unproved[record] = None
        assert record is not None and record.available
        assert (record.address, record.protocol) == (address, protocol)
        if record in self.unproved or self.proved.get(record) != (address, protocol):
            self.proved.pop(record, None)
            self.unproved.pop(record, None)
            self.unproved[record] = None

    def make_room(self, before: dict[bytes, RelayRecord], record: RelayRecord | None, host: str) -> None:
        """Check which relay was evicted for a new one at ``host``, or that the new one was refused."""
        target = _target(host)
        gone = [one for key, one in before.items() if key not in self.schedule]
        peers = [one for one in before.values() if one.target == target]
        others = Counter(one.target for one in before.values())
        assert len(gone) <= 1 and all(one.state is RelayState.GONE for one in gone)
        if len(peers) >= _LIMITS.relays_per_network:
            idle = [one for one in peers if one not in self.proved]
            assert bool(gone) is (record is not None) is bool(idle)
            assert all(_is_due_to_go(one, idle) for one in gone)
        elif len(before) >= _LIMITS.relays:
            largest = max(others.values())
            if self.unproved:
                sources = Counter(one.source for one in self.unproved)
                assert sources[gone[0].source] == max(sources.values())
                assert gone[0] is next(one for one in self.unproved if one.source == gone[0].source)
            elif largest > len(peers) + 1:
                assert others[gone[0].target] == largest
            else:
                assert not gone and record is None
            assert bool(gone) is (record is not None)
        else:
            assert not gone and record is not None
        for one in gone:
            self.forget(one)

    def make_room_at(self, before: dict[bytes, RelayRecord], peers: list[RelayRecord], moved: RelayRecord) -> None:
        """Check which relay was evicted for one that moved to where ``peers`` are, or that it was evicted itself."""
        gone = [one for key, one in before.items() if key not in self.schedule]
        assert all(one.state is RelayState.GONE for one in gone)
        if len(peers) < _LIMITS.relays_per_network:
            assert not gone
            return
        idle = [one for one in peers if one not in self.proved]
        assert len(gone) == 1 and (_is_due_to_go(gone[0], idle) if idle else gone[0] is moved)
        self.forget(gone[0])

    def forget(self, record: RelayRecord) -> None:
        """A relay is forgotten."""
        self.proved.pop(record, None)
        self.unproved.pop(record, None)

    def withdraw(self) -> None:
        """A relay is withdrawn, or the store has only some relays left."""
        if self.choices.flag():
            self.schedule.withdraw(self.choices.pick(_KEYS).raw)
            return
        kept = {key.raw for key in _KEYS if self.choices.flag()}
        since = self.now - self.choices.byte() / 8
        before = {one for one in self.schedule._records.values() if one.available}
        self.schedule.retain(kept, since)
        for one in before:
            assert one.available is (one.key in kept or one.offered_at >= since)

    # --- proofs ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the next proof, if there is one: of a relay that has been waiting and is available."""
        schedule = self.schedule
        before = dict(schedule._records)
        waiting = [one for one in before.values() if one.state is RelayState.WAITING]
        waiting += [one for one in before.values() if one.state is RelayState.RESTING and one.due <= self.now]
        kinds = {_kind(one) for one in waiting}
        record = schedule.next(self.now)
        for key, one in before.items():
            if key not in schedule:
                assert not one.available
                self.forget(one)
        if record is None:  # those that are not available had the turns
            self.passed.clear()
            self.check_none(kinds)
            return
        assert record in waiting and record.available and record.state is RelayState.PROVING
        assert self.rate.left("", self.now) >= 1
        if all(one.available for one in waiting):
            self.check_turns(kinds, _kind(record))
        else:  # those that are not available have turns, too
            self.passed.clear()
        proof = _Proof(record, record.source, record.address, record.protocol)
        if is_ip(record.address.host):
            proof.ip = record.address.host
        else:
            self.resolving.append(record.source)
            assert len(self.resolving) <= _LIMITS.resolving
            assert self.resolving.count(record.source) <= _LIMITS.resolving_per_source
        self.proofs.append(proof)

    def check_turns(self, kinds: set[int], served: int) -> None:
        """Proved relays, new relays and names take turns: no kind waits longer than two turns."""
        self.passed = Counter({kind: self.passed[kind] + 1 for kind in kinds - {served, _NAMES}})
        assert all(number <= 2 for number in self.passed.values())

    def check_none(self, kinds: set[int]) -> None:
        """No proof starts only because of the rate, or because only names wait that have to."""
        schedule, left = self.schedule, self.rate.left("", self.now)
        waiting = [one for one in schedule._records.values() if one.state is RelayState.WAITING]
        resting = [one.due for one in schedule._records.values() if one.state is RelayState.RESTING]
        due = schedule.next_due(self.now)
        assert due is None or due > self.now
        assert not resting or (due is not None and due <= max(min(resting), self.now + 1 / _LIMITS.proofs_per_s))
        if left < 1:
            assert not waiting or due is not None
            return
        assert all(_kind(one) == _NAMES for one in waiting)
        if waiting and len(self.resolving) < _LIMITS.resolving:
            assert all(self.resolving.count(one.source) >= _LIMITS.resolving_per_source for one in waiting)

    def admit(self, proof: _Proof) -> None:
        """Connect exactly if the budgets cover everything it may cost others."""
        record, network = proof.record, network_group(proof.ip)
        claims: list[tuple[_Budget, str]] = []
        if record.network != network:
            is_own = bool(record.source_host) and address_group(record.source_host) == address_group(proof.ip)
            if is_global(record.source_host):
                source = address_group(proof.ip) if is_own else network_group(record.source_host)
                claims.append((self.sources, source))
            if not is_own:
                claims += [(self.addresses, address_group(proof.ip)), (self.networks, network)]
        affordable = all(budget.left(name, self.now) >= 1 for budget, name in claims)
        wait_s = self.schedule.admit(record, proof.ip, self.now)
        assert (wait_s == 0) is affordable
        if affordable:
            proof.admitted, proof.spent = True, claims
            for budget, name in claims:
                budget.spend(name, self.now, 1)
            if self.rate.left("", self.now) >= 1:
                self.rate.spend("", self.now, 1)
            return
        longest_s = max((1 - budget.left(name, self.now)) / budget.rate_per_s for budget, name in claims)
        assert 0.05 <= wait_s <= max(180.0, longest_s)
        self.proofs.remove(proof)
        self.schedule.postponed(record, wait_s, self.now)

    def go_on(self) -> None:
        """A proof in progress is resolved, admitted, or ends."""
        proof = self.proofs[self.choices.byte() % len(self.proofs)]
        record, how = proof.record, self.choices.byte()
        if not proof.ip:
            if how & 1:
                self.resolved(proof.source)
                proof.ip = _IPS[how >> 1 & 3]
            else:
                self.fail(proof, certain=False)  # its resolution goes on
        elif not proof.admitted:
            self.admit(proof)
        elif how % 4 == 0:
            self.fail(proof, certain=bool(how & 4))
        elif how % 4 == 1:
            self.proofs.remove(proof)
            self.schedule.postponed(record, how / 8, self.now)
        else:
            self.succeed(proof)

    def resolved(self, source: str) -> None:
        """The name of a relay of ``source`` has addresses, or none."""
        self.resolving.remove(source)
        self.schedule.resolved(source)

    def succeed(self, proof: _Proof) -> None:
        """The relay was there: the cost of the proof is given back."""
        self.proofs.remove(proof)
        for budget, name in proof.spent:
            budget.spend(name, self.now, -1)
        record = proof.record
        counts = record.state is RelayState.PROVING and not record.moved
        assert not counts or (record.address, record.protocol) == (proof.address, proof.protocol)
        self.schedule.succeeded(record, proof.ip, self.now)
        if counts:
            self.unproved.pop(record, None)
            self.proved[record] = (proof.address, proof.protocol)
            assert record.proved and record.network == network_group(proof.ip)
            self.check_pause(record, 0.8 * _LIMITS.interval_s, 1.2 * _LIMITS.interval_s)

    def fail(self, proof: _Proof, *, certain: bool) -> None:
        """The relay was not there. A listed relay has another attempt if it may have been bad luck."""
        self.proofs.remove(proof)
        record = proof.record
        counts = record.state is RelayState.PROVING and not record.moved
        again = record in self.proved and not certain and record.misses < _LIMITS.attempts - 1
        self.schedule.failed(record, self.now, certain=certain)
        if not counts:
            return
        assert record.proved is again
        if again:
            self.check_pause(record, 0.8 * _LIMITS.attempt_pause_s, 1.2 * _LIMITS.attempt_pause_s)
            return
        if self.proved.pop(record, None) is not None:
            self.unproved[record] = None
        longest = min(_LIMITS.interval_s, _LIMITS.retry_first_s * 2 ** (record.failures - 1))
        if record.offered_again:  # after the proof had begun
            self.check_pause(record, 0.8 * _LIMITS.retry_first_s, _LIMITS.retry_first_s)
        else:
            self.check_pause(record, 0.8 * longest, 1.2 * longest)

    def check_pause(self, record: RelayRecord, least_s: float, most_s: float) -> None:
        """The relay pauses between ``least_s`` and ``most_s``."""
        assert record.state is RelayState.RESTING and least_s <= record.due - self.now <= most_s

    # --- what must hold --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every relay is in one place, and the listed relays are exactly those proved and available."""
        schedule = self.schedule
        records = schedule._records
        assert len(schedule) == len(records) <= _LIMITS.relays
        assert {*self.proved, *self.unproved} == set(records.values()) and not self.proved.keys() & self.unproved.keys()
        ordered = {source: list(held.values()) for source, held in schedule._unproved._records.items()}
        assert {one.key for one in self.unproved} == set(schedule._unproved)
        assert ordered == {
            source: [one for one in self.unproved if one.source == source]
            for source in {one.source for one in self.unproved}
        }
        targets = Counter(one.target for one in records.values())
        assert max(targets.values(), default=0) <= _LIMITS.relays_per_network
        assert {name: len(one) for name, one in schedule._targets.items()} == targets
        under_way = {one.record for one in self.proofs}
        queues = (schedule._again, schedule._fresh, schedule._names)
        listed: dict[tuple[str, str], set[bytes]] = {}
        for key, record in records.items():
            assert record.key == key and record.target == _target(record.address.host)
            queued = [queue for queue in queues if key in queue]
            assert len(queued) == (record.state is RelayState.WAITING)
            assert (record in under_way) is (record.state is RelayState.PROVING)
            assert record.proved is (record in self.proved)
            if record.proved and record.available:
                assert self.proved[record] == (record.address, record.protocol)
                listed.setdefault((record.protocol, record.network), set()).add(key)
        assert schedule.waiting == sum(one.state is RelayState.WAITING for one in records.values())
        assert schedule.first_proofs <= sum(one.available for one in self.unproved)
        found = {
            (protocol, network): set(relays)
            for protocol, networks in schedule.networks.items()
            for network, relays in networks.items()
        }
        assert found == listed and schedule.listed == sum(map(len, listed.values()))
        version, before = self.listed
        assert schedule.version >= version and (schedule.version > version or found == before)
        self.listed = schedule.version, found

    def end(self) -> None:
        """However much strangers have registered, each available relay has its turn, and first proofs end."""
        schedule = self.schedule
        for source in list(self.resolving):
            self.resolved(source)
        for proof in list(self.proofs):
            self.fail(proof, certain=True)
        assert not schedule._budgets._under_way and not schedule._budgets._busy and not schedule._resolving
        left = {one.key for one in schedule._records.values() if one.available}
        for _ in range(9 * _LIMITS.relays):
            record = schedule.next(self.now)
            if record is None:
                if not left:
                    break
                due = schedule.next_due(self.now)
                assert due is not None and due > self.now
                self.now = due
                continue
            left.discard(record.key)
            if not is_ip(record.address.host):
                schedule.resolved(record.source)
            schedule.succeeded(record, "9.9.1.1", self.now)
            schedule.withdraw(record.key)
        assert not left and not schedule.first_proofs


_AGAIN, _FRESH, _NAMES = range(3)


def _kind(record: RelayRecord) -> int:
    """The kind of queue in which a relay waits."""
    if not is_ip(record.address.host):
        return _NAMES
    return _AGAIN if record.proved else _FRESH


def _target(host: str) -> str:
    return network_group(host) if is_ip(host) else ".".join(host.split(".")[-2:])


def _queue(choices: Choices) -> None:
    """A queue, and lists as its model: of sources, of each source's targets, and of waiting items."""
    queue: FairQueue[int] = FairQueue()
    sources: list[str] = []
    targets: dict[str, list[str]] = {}
    waiting: list[tuple[int, str, str]] = []

    def remove(number: int) -> None:
        for one in [one for one in waiting if one[0] == number]:
            waiting.remove(one)
            if not any(other[1:] == one[1:] for other in waiting):
                targets[one[1]].remove(one[2])
            if not targets[one[1]]:
                sources.remove(one[1])

    for _ in range(100):
        if not choices.left:
            break
        number, what = choices.byte() % 16, choices.byte()
        if what % 8 < 5:
            source, target, again = "abcd"[what >> 3 & 3], "xyz"[(what >> 5) % 3], what % 8 == 4
            queue.put(bytes((number,)), number, source, target, again=again)
            moved = [one for one in waiting if one[0] == number]
            if moved == [(number, source, target)]:  # it keeps its turn
                waiting.remove(moved[0])
                waiting.append(moved[0])
                continue
            waiting.append((-1, source, target))
            if source not in sources:
                sources.append(source)
            order = targets.setdefault(source, [])
            if target in order:
                order.remove(target)
            order.insert(len(order) if again else 0, target)
            remove(number)
            waiting[-1] = (number, source, target)
        elif what % 8 == 5:
            queue.remove(bytes((number,)))
            remove(number)
        else:
            busy = {name for name in "abcd" if what % 8 == 7 and number >> "abcd".index(name) & 1}
            turn = next((one for one in sources if one not in busy), None)
            taken = queue.take(busy)
            if turn is None:
                assert taken is None
            else:
                target = targets[turn][0]
                newest = next(one for one in reversed(waiting) if one[1:] == (turn, target))
                assert taken == newest[0]
                remove(newest[0])
                for order, name in ((targets[turn], target), (sources, turn)):
                    if name in order:
                        order.remove(name)
                        order.append(name)
        assert len(queue) == len(waiting) and all(bytes((one[0],)) in queue for one in waiting)


def one_input(data: bytes) -> None:
    """An odd first byte: a queue. Else registrations of a few keys and sources, proofs and their outcomes, and time."""
    choices = Choices(data)
    if choices.flag():
        _queue(choices)
        return
    world = _World(choices)
    for number in range(100):
        if not choices.left:
            break
        match choices.below(8):
            case 0 | 1:
                world.offer()
            case 2:
                world.withdraw()
            case 3 | 4:
                world.begin()
            case 5 | 6 if world.proofs:
                world.go_on()
            case 7 if choices.flag() and world.resolving:
                late = [one.source for one in world.proofs if not one.ip]
                free = [one for one in world.resolving if world.resolving.count(one) > late.count(one)]
                if free:
                    world.resolved(free[0])
            case _:
                world.now += choices.byte() / 8
        if number % 8 == 7:
            world.check()
    world.check()
    world.end()


def seeds() -> Iterator[bytes]:
    """Relays that are proved, fail, move and go; too many of a network and in total; names; used-up budgets."""

    def offer(key: int, host: int, source: int, what: int = 0) -> bytes:
        return bytes((0, key, what, host, source))

    def offers(count: int, hosts: int, sources: int, first_host: int = 0) -> bytes:
        return b"".join(offer(key, first_host + key % hosts, key % sources) for key in range(count))

    begin, withdraw, connect, pause = b"\x03", b"\x02\x01", b"\x05\x00\x00", b"\x07\x00"
    good, certain, unlucky, none = b"\x05\x00\x02", b"\x05\x00\x04", b"\x05\x00\x00", b"\x05\x00\x09"
    name, no_name, late = b"\x05\x00\x01", b"\x05\x00\x00", b"\x07\x01"
    proof, failure, misfortune = begin + connect + good, begin + connect + certain, begin + connect + unlucky
    one = b"\x00" + offer(0, 0, 1)
    yield one + proof + (pause + b"\xff" + misfortune) * 3 + pause + b"\xff" + proof
    yield one + begin + offer(0, 2, 1) + connect + good + proof + offer(0, 2, 1, 2) + proof
    yield one + proof + offer(0, 3, 4) + offer(0, 3, 4, 4) + failure + offer(0, 0, 1) + pause + b"\xff" + begin
    yield one + proof + withdraw + b"\x00" + offer(0, 0, 1, 4) + withdraw + b"\x00" + pause + b"\xff" + begin
    yield one + withdraw + b"\x00" + begin + offer(1, 1, 2) + pause + b"\x10" + b"\x02\x00" + bytes(17) + proof
    yield (
        one + begin + withdraw + b"\x00" + connect + good + offer(0, 0, 1, 4) + pause + b"\xff" + begin + connect + none
    )
    yield one + begin + connect + pause + b"\x08" + offers(6, 1, 8) + good + failure * 6
    yield b"\x00" + offers(6, 1, 8) + (begin * 2 + connect + b"\x05\x01\x00" + certain * 2) * 3
    yield b"\x00" + offers(4, 1, 8) + proof * 4 + offer(4, 0, 0) + offer(5, 1, 0) + offer(5, 2, 0)
    yield b"\x00" + offers(16, 10, 8) + failure * 12 + pause + b"\xff" + begin * 6
    yield b"\x00" + offers(14, 7, 8) + (proof + pause + b"\x04") * 14 + offer(14, 2, 0) + offer(15, 3, 0)
    yield (
        b"\x00"
        + offers(12, 4, 2)
        + (proof + pause + b"\x04") * 12
        + offer(12, 6, 0)
        + offer(13, 6, 0)
        + offer(14, 6, 7)
    )
    names = b"\x00" + offers(6, 3, 4, 7)
    yield names + begin * 4 + (name + connect + good) * 3 + no_name + late + begin * 3
    yield names + begin * 2 + no_name * 2 + begin * 2 + late * 2 + begin * 2
    yield names + (begin + name + connect + certain) * 6 + (pause + b"\xff") + (begin + name + connect + good) * 6
    yield b"\x00" + offer(0, 0, 4) + (misfortune + pause + b"\x60") * 8
    yield b"\x00" + offers(4, 1, 1, 2) + (begin * 2 + connect + b"\x05\x01\x00" + none * 2) * 6
    yield b"\x00" + offers(12, 4, 8) + begin * 12 + b"".join(bytes((5, at, 0)) for at in range(12)) * 2 + begin
    for step in (3, 37, 101):
        yield b"\x01" + b"".join(bytes((at * 7 % 256, at * step % 256)) for at in range(150))
