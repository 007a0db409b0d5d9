"""Who is proved when: in turn by source, within budgets, in bounded memory."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.address import HostPort, network_group
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.errors import AddressNotGlobal
from dmsg.discovery.proofs.budgets import ProofBudgets
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.discovery.proofs.queue import FairQueue
from dmsg.discovery.proofs.record import RelayRecord, RelayState
from dmsg.discovery.proofs.schedule import ProofSchedule
from dmsg.discovery.relay_addresses import RelayAddresses

LIMITS = ProofLimits()


def key(name: object) -> PublicKey:
    """A key that is only compared: 33 bytes made from ``name``."""
    made: PublicKey = object.__new__(PublicKey)
    object.__setattr__(made, "raw", b"\x02" + hashlib.sha256(str(name).encode()).digest())
    return made


class Driver:
    """Proves by a rule instead of a network, on a clock of its own.

    ``answers(record, ip)`` says how many seconds the proof takes and whether it succeeds.
    """

    def __init__(self, answers: Any, limits: ProofLimits = LIMITS) -> None:
        self.now = 0.0
        self.answers = answers
        self.schedule = ProofSchedule(limits, Random(1), 0.0)
        self.connections: Counter[str] = Counter()
        self.running: list[tuple[float, bool, RelayRecord, str]] = []
        self.names: dict[str, str] = {}
        #: How long resolving a name takes.
        self.slow_names: dict[str, float] = {}

    def offer(self, name: object, address: str, source: str = "") -> None:
        self.schedule.offer(key(name), HostPort.parse(address), source, self.now)
        self.pump()

    def pump(self) -> None:
        while len(self.running) < self.schedule.limits.concurrent:
            record = self.schedule.next(self.now)
            if record is None:
                return
            host = record.address.host
            ip = self.names.get(host, host)
            if host in self.names:
                self.schedule.resolved(record.source)
            wait_s = self.schedule.admit(record, ip, self.now)
            if wait_s > 0:
                self.schedule.postponed(record, wait_s, self.now)
                continue
            self.connections[ip] += 1
            takes_s, succeeds = self.answers(record, ip)
            self.running.append((self.now + takes_s, succeeds, record, ip))

    def advance(self, seconds: float, step_s: float = 0.05) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += step_s
            due = [one for one in self.running if one[0] <= self.now]
            self.running = [one for one in self.running if one[0] > self.now]
            for _, succeeds, record, ip in due:
                if succeeds:
                    self.schedule.succeeded(record, ip, self.now)
                else:
                    self.schedule.failed(record, self.now)
            self.pump()

    def is_listed(self, name: object) -> bool:
        return any(key(name).raw in relays for relays in self.schedule.networks["dmsg"].values())


def good(record: RelayRecord, ip: str) -> tuple[float, bool]:
    return 0.02, True


def dead(record: RelayRecord, ip: str) -> tuple[float, bool]:
    return LIMITS.timeout_s, False


def only(*honest: str) -> Any:
    """Those addresses answer, all others are silent."""
    return lambda record, ip: good(record, ip) if str(record.address) in honest else dead(record, ip)


# --- the queue ---------------------------------------------------------------------------------------------------------


def test_sources_and_targets_take_turns_and_the_newest_comes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    for at in range(4):
        queue.put(b"a%d" % at, f"a{at}", "a", "net 1" if at < 3 else "net 2")
    queue.put(b"b", "b", "b", "net 1")
    assert [queue.take() for _ in range(6)] == ["a3", "b", "a2", "a1", "a0", None]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.sampled_from("xyz"), st.booleans()), max_size=60)
)
def test_a_queue_holds_each_key_once_and_gives_all_back(steps: list[tuple[int, str, str, bool]]) -> None:
    queue: FairQueue[int] = FairQueue()
    model = set()
    for number, source, target, remove in steps:
        if remove:
            queue.remove(b"%d" % number)
            model.discard(number)
        else:
            queue.put(b"%d" % number, number, source, target, again=number % 2 == 0)
            model.add(number)
        assert len(queue) == len(model)
        assert all((b"%d" % one in queue) is (one in model) for one in range(6))
    assert queue.take(busy="abc") is None or not model
    taken = [queue.take() for _ in model]
    assert set(taken) == model and queue.take() is None


# --- fairness ----------------------------------------------------------------------------------------------------------


def test_an_honest_relay_does_not_wait_for_ten_thousand_sybils() -> None:
    """10,000 registrations from 50 networks wait, each for another silent host; one from elsewhere is proved in seconds."""
    driver = Driver(only("203.0.114.7:80"))
    for at in range(10_000):
        address = f"{11 + at % 50}.{at // 250}.{at % 250}.9:80"
        driver.schedule.offer(key(at), HostPort.parse(address), f"{70 + at % 50}.1.1.1", 0.0)
    driver.pump()
    driver.advance(20.0)
    assert driver.schedule.waiting > 5000
    driver.offer("honest", "203.0.114.7:80", "203.0.114.7")
    driver.advance(8.0)
    assert driver.is_listed("honest")


def test_a_relay_that_registers_again_while_it_waits_keeps_its_turn() -> None:
    """A relay registers whenever the number of its free connections changes; sybils of 150 networks wait beside it."""
    driver = Driver(only("203.0.114.7:80"))
    for network in range(150):
        for at in range(20):
            address = HostPort.parse(f"{20 + at}.0.{network}.9:80")
            driver.schedule.offer(key((network, at)), address, f"100.{network}.1.1", 0.0)
    driver.advance(3.0)
    for _ in range(4):
        driver.offer("honest", "203.0.114.7:80", "203.0.114.7")
        driver.advance(4.0)
    assert driver.is_listed("honest")


def test_what_waits_for_the_rate_has_a_time_at_which_it_goes_on() -> None:
    schedule = ProofSchedule(replace(LIMITS, proofs_per_s=10.0, proof_burst=2.0), Random(1), 0.0)
    for at in range(4):
        schedule.offer(key(at), HostPort.parse(f"198.51.{at}.1:80"), f"198.51.{at}.1", 0.0)
    now, begun = 0.0, []
    for _ in range(8):  # asked no more often than the schedule says
        while (record := schedule.next(now)) is not None:
            assert schedule.admit(record, record.address.host, now) == 0
            begun.append(now)
        if len(begun) < 4:
            due = schedule.next_due(now)
            assert due is not None
            now = due
    assert begun == pytest.approx([0.0, 0.0, 0.1, 0.2])
    assert schedule.next_due(now) is None


def test_a_relay_that_had_its_turn_lets_new_ones_of_its_source_go_first() -> None:
    schedule, source = ProofSchedule(LIMITS, Random(1), 0.0), "203.0.113.1"
    schedule.offer(key("old"), HostPort.parse("198.51.1.1:80"), source, 0.0)
    record = schedule.next(0.0)
    assert record is not None and schedule.admit(record, "198.51.1.1", 0.0) == 0
    schedule.failed(record, 1.0)
    due = schedule.next_due(1.0)
    assert due is not None
    for name, host in (("first", "198.51.2.1"), ("second", "198.51.3.1")):
        schedule.offer(key(name), HostPort.parse(f"{host}:80"), source, due)
    taken = [one.key for _ in range(3) if (one := schedule.next(due)) is not None]
    assert taken == [key(name).raw for name in ("second", "first", "old")]


def test_sybils_of_one_source_delay_another_by_one_turn_even_when_they_are_proved() -> None:
    driver = Driver(good)
    for at in range(10_000):
        driver.schedule.offer(key(at), HostPort.parse(f"20.0.{at % 50}.{at % 250}:{at + 1}"), "20.0.0.1", 0.0)
    driver.offer("honest", "203.0.114.7:80", "203.0.114.7")
    driver.advance(3.0)
    assert driver.is_listed("honest")
    assert driver.schedule.listed < 600, "and the rate is bounded"


def test_relays_that_are_proved_again_take_turns_with_new_ones() -> None:
    limits = ProofLimits(interval_s=10.0, proofs_per_s=20.0, proof_burst=20.0, retry_first_s=5.0)
    driver = Driver(good, limits)
    for at in range(50):
        driver.offer(at, f"20.0.{at}.1:80")
    driver.advance(5.0)
    proved = {record.key for relays in driver.schedule.networks["dmsg"].values() for record in relays.values()}
    assert len(proved) == 50
    seen: Counter[bytes] = Counter()
    driver.answers = lambda record, ip: (seen.update([record.key]), good(record, ip))[1]
    for at in range(2000):
        driver.schedule.offer(key(f"sybil {at}"), HostPort.parse(f"30.{at % 200}.0.1:80"), "30.0.0.1", driver.now)
    driver.advance(15.0)
    assert all(seen[one] >= 1 for one in proved)


# --- budgets -----------------------------------------------------------------------------------------------------------


def test_a_third_party_sees_few_connections() -> None:
    """180 keys name one service of a third party: 3 connections, then one a minute; so for all sources together."""
    driver = Driver(dead)
    for at in range(180):
        driver.offer(at, f"198.18.0.1:{at + 1}", f"{20 + at % 60}.0.0.1")
    driver.advance(40.0)
    assert driver.connections["198.18.0.1"] <= 4
    driver.advance(600.0, step_s=0.5)
    assert driver.connections["198.18.0.1"] <= 3 + 640 / 60 + 1


def test_who_waits_for_a_budget_waits_until_there_is_one_and_longer_each_time() -> None:
    schedule = ProofSchedule(LIMITS, Random(1), 0.0)
    for at in range(4):
        schedule.offer(key(at), HostPort.parse(f"198.51.100.1:{80 + at}"), f"203.0.{at}.1", 0.0)
    records = [record for _ in range(4) if (record := schedule.next(0.0)) is not None]
    for record in records[:3]:
        assert schedule.admit(record, "198.51.100.1", 0.0) == 0
        schedule.failed(record, 0.0)
    waits = [schedule.admit(records[3], "198.51.100.1", 0.0) for _ in range(3)]
    one = 1 / LIMITS.failures_per_address_per_s  # 60 s
    assert waits == pytest.approx([one, 2 * one, 180.0])
    assert schedule.admit(records[3], "198.51.100.1", one + 0.001) == 0


def test_a_third_partys_network_sees_few_connections() -> None:
    driver = Driver(dead)
    for at in range(250):
        driver.offer(at, f"198.18.0.{at}:80", f"{20 + at % 60}.0.0.1")
    driver.advance(40.0)
    assert sum(driver.connections.values()) <= 16 + 5


def test_one_source_causes_few_connections_in_vain() -> None:
    driver = Driver(dead)
    for at in range(2000):
        driver.schedule.offer(key(at), HostPort.parse(f"{20 + at % 50}.{at // 50}.0.1:80"), "9.9.9.9", 0.0)
    driver.pump()
    driver.advance(40.0)
    assert sum(driver.connections.values()) <= 64 + 20 + 1


def test_many_relays_of_one_honest_host_are_proved_at_once() -> None:
    """What succeeds is given back: the budgets are of failures."""
    driver = Driver(good)
    for at in range(200):
        driver.offer(at, f"20.0.0.1:{at + 1}")
    driver.advance(15.0)
    assert driver.schedule.listed == 200


def budget_record(name: str, ip: str, source_host: str = "8.8.8.8") -> RelayRecord:
    record = RelayRecord(key(name), HostPort(ip, 80), source_host, 0.0)
    record.source = network_group(record.source_host)
    return record


def test_a_budget_that_is_used_up_takes_no_token_of_the_others() -> None:
    budgets = ProofBudgets(ProofLimits(failures_per_source=3, failures_per_network=1, failures_per_source_per_s=0.001))
    assert budgets.take(budget_record("first", "198.51.100.1"), "198.51.100.1", 0.0) == 0
    for number in range(2, 9):
        ip = f"198.51.100.{number}"
        assert budgets.take(budget_record(ip, ip), ip, 0.0) > 0
    for ip in ("192.0.2.1", "198.18.0.1"):
        assert budgets.take(budget_record(ip, ip), ip, 0.0) == 0


@pytest.mark.parametrize(("source_host", "proofs"), [("8.8.8.8", 2), ("10.0.0.1", 9), ("", 9)])
def test_a_source_on_a_private_network_has_no_budget_of_its_own(source_host: str, proofs: int) -> None:
    """It may be a web server in front of discovery, and stand for all relays that there are."""
    budgets = ProofBudgets(ProofLimits(failures_per_source=2))
    places = [f"198.51.{number}.1" for number in range(9)]
    assert [budgets.take(budget_record(ip, ip, source_host), ip, 0.0) for ip in places].count(0.0) == proofs


def test_a_proof_under_way_at_an_address_is_no_reason_to_ask_often_for_the_budget_of_a_source() -> None:
    limits = ProofLimits(failures_per_source=1, failures_per_source_per_s=0.01, failures_per_address=1)
    budgets = ProofBudgets(limits)
    first, second = (budget_record(name, "198.51.100.1") for name in ("first", "second"))
    assert budgets.take(first, "198.51.100.1", 0.0) == 0
    assert budgets.take(second, "198.51.100.1", 0.0) >= 100
    elsewhere = budget_record("third", "198.51.100.1", "9.9.9.9")
    assert budgets.take(elsewhere, "198.51.100.1", 0.0) == 1.0, "the token may come back soon"
    budgets.end(first, give_back=False)
    assert budgets.take(elsewhere, "198.51.100.1", 0.0) > 10


def test_strangers_cannot_use_up_the_budget_of_a_relay_that_registers_itself() -> None:
    driver = Driver(only("203.0.114.7:80"))
    for at in range(200):
        driver.offer(at, "203.0.114.7:80" if at % 2 else "203.0.114.7:22", f"{20 + at % 60}.0.0.1")
    driver.answers = lambda record, ip: (0.02, record.key == key("honest").raw)
    driver.advance(30.0)
    driver.offer("honest", "203.0.114.7:80", "203.0.114.7")
    driver.advance(1.0)
    assert driver.is_listed("honest")
    driver.advance(1000.0, step_s=0.5)
    assert driver.is_listed("honest"), "and is proved there again without a budget"


def test_neighbours_cannot_use_up_the_budget_of_a_relay_that_registers_itself() -> None:
    """One in the same /24 registers silent hosts, and goes on with that for half an hour."""
    driver = Driver(only("203.0.114.7:80"))
    for at in range(1_800):
        driver.offer(at, f"{20 + at % 150}.{at % 250}.0.1:80", "203.0.114.9")
        if at == 60:
            driver.offer("honest", "203.0.114.7:80", "203.0.114.7")
        driver.advance(1.0, step_s=0.5)
        assert driver.is_listed("honest") is (at >= 60)


def test_an_address_that_registers_itself_causes_few_proofs_in_vain() -> None:
    driver = Driver(dead)
    for at in range(250):
        driver.offer(at, f"203.0.114.7:{at + 1}", "203.0.114.7")
    driver.advance(40.0)
    assert driver.connections["203.0.114.7"] <= 64 + 20 + 1


def test_one_source_cannot_keep_names_from_being_resolved() -> None:
    driver = Driver(good, ProofLimits(resolving=4, resolving_per_source=2))
    stuck = []
    for at in range(50):
        driver.schedule.offer(key(at), HostPort.parse(f"slow{at}.example.com:80"), "9.9.9.9", 0.0)
    while (record := driver.schedule.next(0.0)) is not None:
        stuck.append(record)
    assert len(stuck) == 2
    driver.names["relay.example.org"] = "203.0.114.7"
    driver.offer("honest", "relay.example.org:80", "8.8.8.8")
    driver.advance(1.0)
    assert driver.is_listed("honest")
    assert driver.schedule.networks["dmsg"].keys() == {"203.0.114.0/24"}, "a name's network is the one that was reached"
    driver.schedule.resolved("9.9.9.0/24")
    assert driver.schedule.next(driver.now) is not None


def test_names_from_many_sources_hold_a_bounded_number_of_threads() -> None:
    schedule = ProofSchedule(ProofLimits(resolving=4, resolving_per_source=2), Random(1), 0.0)
    for at in range(10):
        schedule.offer(key(at), HostPort.parse(f"slow.example{at}.com:80"), f"9.9.{at}.9", 0.0)
    stuck = [record for _ in range(10) if (record := schedule.next(0.0)) is not None]
    assert len(stuck) == 4
    schedule.resolved(stuck[0].source)
    assert schedule.next(0.0) is not None and schedule.next(0.0) is None


def test_a_name_that_was_proved_is_given_no_leave_to_point_elsewhere() -> None:
    """Proved at its own host, then pointed at a third party's: that is a stranger's word again."""
    limits = ProofLimits(interval_s=10.0)
    driver = Driver(good, limits)
    for at in range(100):
        driver.names[f"r{at}.example.com"] = "20.0.0.1"
        driver.offer(at, f"r{at}.example.com:80", "20.0.0.1")
    driver.advance(10.0)
    assert driver.schedule.listed == 100
    driver.names = dict.fromkeys(driver.names, "198.18.0.1")
    driver.answers = dead
    driver.advance(40.0)
    assert driver.connections["198.18.0.1"] <= 4


# --- outcomes ----------------------------------------------------------------------------------------------------------


def test_a_dead_relay_leaves_the_list_at_its_next_proof_and_comes_back() -> None:
    driver = Driver(good)
    driver.offer("relay", "20.0.0.1:80", "20.0.0.1")
    driver.advance(1.0)
    assert driver.is_listed("relay")
    driver.answers = dead
    while driver.is_listed("relay"):
        assert driver.now < LIMITS.interval_s * 1.2 + LIMITS.timeout_s + 2.0
        driver.advance(0.5, step_s=0.5)
    driver.answers = good
    driver.advance(LIMITS.retry_first_s * 1.2 + 1.0)
    assert driver.is_listed("relay")


def test_a_listed_relay_has_three_attempts_unless_it_is_certainly_gone() -> None:
    driver = Driver(good)
    driver.offer("relay", "20.0.0.1:80")
    driver.advance(1.0)
    [record] = driver.schedule.networks["dmsg"]["20.0.0.0/24"].values()
    for attempt in range(LIMITS.attempts):
        assert driver.is_listed("relay"), attempt
        while driver.schedule.next(driver.now) is None:
            driver.now += 0.5
        assert driver.schedule.admit(record, "20.0.0.1", driver.now) == 0.0
        began = driver.now
        driver.schedule.failed(record, driver.now, certain=False)
    assert not driver.is_listed("relay")
    while driver.schedule.next(driver.now) is None:
        driver.now += 0.5
    assert driver.now - began >= 0.8 * LIMITS.retry_first_s
    driver.schedule.succeeded(record, "20.0.0.1", driver.now)
    while driver.schedule.next(driver.now) is None:
        driver.now += 0.5
    driver.schedule.failed(record, driver.now)
    assert not driver.is_listed("relay")


def test_a_success_forgets_what_came_before_it() -> None:
    schedule = ProofSchedule(ProofLimits(attempts=3), Random(1), 0.0)
    schedule.offer(key("relay"), HostPort("198.51.100.1", 80), "", 0.0)
    for number, succeeds in enumerate((True, False, False, True, False, False, True)):
        now = 1_000.0 * number
        record = schedule.next(now)
        assert record is not None and schedule.admit(record, "198.51.100.1", now) == 0
        if succeeds:
            record.postponements = 5
            schedule.succeeded(record, "198.51.100.1", now)
            assert (record.postponements, record.failures) == (0, 0)
        else:
            schedule.failed(record, now, certain=False)
        assert schedule.listed == 1
    record = schedule.next(10_000.0)
    assert record is not None
    record.postponements = 5
    schedule.failed(record, 10_000.0)
    assert (record.postponements, record.failures) == (0, 1)


def test_pauses_grow_with_each_failure() -> None:
    driver = Driver(dead)
    driver.offer("relay", "20.0.0.1:80", "20.0.0.1")
    driver.advance(600.0, step_s=0.25)
    # after 10, 20, 40, 80, 160 seconds and more, each up to a fifth longer or shorter
    assert 4 <= driver.connections["20.0.0.1"] <= 8


def test_a_relay_that_was_down_for_hours_is_listed_as_soon_as_it_registers_again() -> None:
    driver = Driver(dead)
    driver.offer("relay", "20.0.0.1:80", "20.0.0.1")
    driver.advance(3600.0, step_s=1.0)
    failed = driver.connections["20.0.0.1"]
    while driver.connections["20.0.0.1"] == failed:  # the next pause has just begun
        driver.advance(1.0)
    driver.advance(LIMITS.timeout_s + LIMITS.retry_first_s, step_s=0.5)
    driver.answers = good
    driver.advance(20.0, step_s=0.5)
    assert not driver.is_listed("relay"), "the pauses have grown"
    driver.offer("relay", "20.0.0.1:80", "20.0.0.1")
    driver.advance(0.1)
    assert driver.is_listed("relay")


def test_a_relay_that_registers_while_a_proof_fails_does_not_wait_for_hours_that_it_was_down() -> None:
    driver = Driver(dead)
    driver.offer("relay", "20.0.0.1:80", "20.0.0.1")
    driver.advance(3600.0, step_s=1.0)
    while driver.running:
        driver.advance(0.5)
    while not driver.running:  # the pause is over, and the next proof has just begun
        driver.advance(0.5)
    driver.answers = good
    driver.offer("relay", "20.0.0.1:80", "20.0.0.1")
    driver.advance(LIMITS.timeout_s - 1.0)
    assert driver.running, "that proof knows nothing of it"
    driver.advance(1.0 + LIMITS.retry_first_s + 0.5)
    assert driver.is_listed("relay")
    # the next failure is another matter
    driver.answers = dead
    driver.advance(1.2 * LIMITS.interval_s + 30.0, step_s=0.5)
    assert not driver.is_listed("relay")
    failed = driver.connections["20.0.0.1"]
    driver.advance(600.0, step_s=0.5)
    assert driver.connections["20.0.0.1"] <= failed + 8


def test_a_relay_that_registers_every_second_is_tried_every_ten() -> None:
    driver = Driver(dead)
    for _ in range(600):
        driver.offer("relay", "20.0.0.1:80", "20.0.0.1")
        driver.advance(1.0, step_s=0.25)
    assert 35 <= driver.connections["20.0.0.1"] <= 600 / LIMITS.retry_first_s
    assert len(driver.schedule._due) <= 1 + 1.2 * LIMITS.interval_s / LIMITS.retry_first_s


def test_a_relay_that_registers_again_after_many_failures_is_not_tried_at_once() -> None:
    schedule = ProofSchedule(ProofLimits(retry_first_s=10.0, interval_s=180.0), Random(1), 0.0)
    offer = partial(schedule.offer, key("dead"), HostPort("198.51.100.1", 80), "")
    offer(0.0)
    for failures in range(5):
        now = 1_000.0 * failures
        record = schedule.next(now)
        assert record is not None
        schedule.failed(record, now)
    offer(now + 1.0)
    assert schedule.next(now + 7.9) is None
    assert schedule.next(now + 10.1) is record


def test_a_relay_that_waits_for_a_budget_does_not_wait_less_when_it_registers_again() -> None:
    asked, tries = [0, 0], 600
    for often in (False, True):
        driver = Driver(dead)
        admit = driver.schedule.admit

        def counted(record: RelayRecord, ip: str, now: float, often: bool = often, admit: Any = admit) -> float:
            asked[often] += 1
            found: float = admit(record, ip, now)
            return found

        driver.schedule.admit = counted  # type: ignore[method-assign]
        for at in range(tries):
            if often or not at:
                driver.offer("relay", "20.0.0.1:80", "9.9.9.9")
            driver.advance(1.0, step_s=0.25)
        # three failures at once, then one a minute
        assert driver.connections["20.0.0.1"] <= 3 + tries / 60
    assert asked[True] <= 4 * asked[False]


def test_another_address_is_another_proof() -> None:
    driver = Driver(only("20.0.0.1:80"))
    driver.offer("relay", "20.0.0.1:80")
    driver.advance(1.0)
    driver.offer("relay", "20.0.0.2:80")
    assert not driver.is_listed("relay")
    driver.offer("relay", "20.0.0.1:80")  # while a proof of the other is under way
    driver.advance(LIMITS.timeout_s + 1.0)
    assert driver.is_listed("relay")
    assert driver.schedule.get(key("relay").raw).address == HostPort("20.0.0.1", 80)


def test_a_relay_whose_proofs_failed_is_proved_at_once_at_another_address() -> None:
    driver = Driver(only("20.0.0.1:81", "21.0.0.1:80"))
    driver.offer("port", "20.0.0.1:80", "20.0.0.1")
    driver.offer("host", "20.0.0.9:80", "20.0.0.9")
    driver.advance(LIMITS.timeout_s + 1.0)
    driver.offer("port", "20.0.0.1:81", "20.0.0.1")
    driver.offer("host", "21.0.0.1:80", "21.0.0.1")
    assert driver.schedule.first_proofs == 2, "who waits for first proofs waits for these"
    driver.advance(0.1)
    assert driver.is_listed("port") and driver.is_listed("host")


def test_pauses_begin_anew_at_another_address() -> None:
    driver = Driver(dead)
    driver.offer("relay", "20.0.0.1:80", "20.0.0.1")
    driver.advance(3600.0, step_s=1.0)
    failed = driver.connections["20.0.0.1"]
    driver.offer("relay", "20.0.0.1:81", "20.0.0.1")
    driver.advance(3 * LIMITS.timeout_s + (1 + 2) * 1.2 * LIMITS.retry_first_s)
    assert driver.connections["20.0.0.1"] >= failed + 3


def test_a_relay_that_is_found_in_the_store_still_counts_for_the_source_that_registered_it() -> None:
    schedule = ProofSchedule(ProofLimits(), Random(1), 0.0)
    address = HostPort("198.51.100.1", 80)
    for source_host, source in (("8.8.8.8", "8.8.8.0/24"), ("", "8.8.8.0/24"), ("9.9.9.9", "9.9.9.0/24")):
        schedule.offer(key("relay"), address, source_host, 0.0)
        record = schedule.get(key("relay").raw)
        assert record is not None and record.source == source


def test_what_is_withdrawn_is_listed_no_more_and_comes_back_at_once() -> None:
    driver = Driver(good)
    driver.offer("relay", "20.0.0.1:80")
    driver.advance(1.0)
    driver.schedule.withdraw(key("relay").raw)
    assert not driver.is_listed("relay")
    driver.offer("relay", "20.0.0.1:80")
    assert driver.is_listed("relay") and driver.connections["20.0.0.1"] == 1
    driver.schedule.withdraw(key("relay").raw)
    driver.schedule.withdraw(key("nothing").raw)
    driver.advance(LIMITS.interval_s * 1.2, step_s=1.0)
    assert len(driver.schedule) == 0, "and is forgotten when it would be proved again"


def test_what_the_store_does_not_have_any_more_is_withdrawn() -> None:
    driver = Driver(good)
    driver.offer("old", "20.0.0.1:80")
    driver.offer("kept", "20.0.1.1:80")
    driver.advance(1.0)
    began = driver.now
    driver.advance(0.1)
    driver.offer("new", "20.0.2.1:80")
    driver.advance(1.0)
    driver.schedule.retain({key("kept").raw}, began)
    assert [driver.is_listed(name) for name in ("old", "kept", "new")] == [False, True, True]


def test_one_that_is_withdrawn_before_its_turn_is_not_proved() -> None:
    driver = Driver(good)
    driver.schedule.offer(key("relay"), HostPort("20.0.0.1", 80), "", 0.0)
    driver.schedule.withdraw(key("relay").raw)
    assert driver.schedule.first_proofs == 0
    assert driver.schedule.next(0.0) is None and len(driver.schedule) == 0


# --- memory ------------------------------------------------------------------------------------------------------------


def test_records_are_bounded_and_what_cannot_be_proved_goes_first() -> None:
    limits = ProofLimits(relays=100, relays_per_network=20)
    driver = Driver(only(*(f"20.0.{at}.1:80" for at in range(10))), limits)
    for at in range(10):
        driver.offer(f"honest {at}", f"20.0.{at}.1:80", f"20.0.{at}.1")
    driver.advance(1.0)
    for at in range(1000):
        driver.offer(at, f"30.{at % 200}.0.{at % 250}:80", f"{40 + at % 3}.0.0.1")
        assert len(driver.schedule) <= 100
        driver.advance(0.05)
    assert all(driver.is_listed(f"honest {at}") for at in range(10))
    late = ["20.0.77.1:80"]
    driver.answers = only(*late)
    driver.offer("late", late[0], "20.0.77.1")
    driver.advance(8.0)
    assert driver.is_listed("late")


@pytest.mark.parametrize("flooded", ["the table", "the relay's network"])
def test_a_flood_of_many_sources_does_not_make_a_relay_lose_its_place_before_its_turn(flooded: str) -> None:
    limits = ProofLimits(relays=400, relays_per_network=40, concurrent=1)
    driver = Driver(lambda record, ip: (0.1, True) if ip == "20.0.0.1" else (1.0, False), limits)
    numbers, sources = iter(range(100_000)), 40

    def flood(seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            for _ in range(4):
                at = next(numbers)
                near = flooded == "the relay's network" and at % 2
                driver.offer(
                    at,
                    f"20.0.0.{2 + at % 250}:80" if near else f"30.{at % 250}.{at // 250}.1:80",
                    f"40.0.{at % sources}.1",
                )
            driver.advance(0.1)

    flood(10.0)
    driver.offer("honest", "20.0.0.1:80", "20.0.0.1")
    flood(1.5 * sources)  # a turn of each source, and some more
    assert driver.is_listed("honest")


@pytest.mark.parametrize("full", ["the table", "the target"])
def test_what_is_registered_again_gives_its_place_up_last(full: str) -> None:
    limits = ProofLimits(relays=3) if full == "the table" else ProofLimits(relays_per_network=3)
    schedule = ProofSchedule(limits, Random(1), 0.0)
    names = ["first", "second", "third", "first", "fourth"]
    for now, name in enumerate(names):
        network = names.index(name) if full == "the table" else 0
        schedule.offer(key(name), HostPort(f"20.0.{network}.{names.index(name) + 1}", 80), "40.0.0.1", now)
    assert {name for name in names if key(name).raw in schedule} == {"first", "third", "fourth"}


def test_a_newcomer_takes_no_place_of_a_proved_relay_whose_network_has_as_few() -> None:
    schedule = ProofSchedule(ProofLimits(relays=3), Random(1), 0.0)
    for ip in ("198.51.100.1", "198.51.100.2", "203.0.113.1"):
        schedule.offer(key(ip), HostPort(ip, 80), "", 0.0)
        record = schedule.next(0.0)
        assert record is not None and schedule.admit(record, ip, 0.0) == 0
        schedule.succeeded(record, ip, 0.0)
    schedule.offer(key("second"), HostPort("203.0.113.2", 80), "", 0.0)
    assert key("second").raw not in schedule and schedule.listed == 3
    schedule.offer(key("alone"), HostPort("192.0.2.1", 80), "", 0.0)
    assert key("alone").raw in schedule and schedule.listed == 2, "there a network has two more"
    assert key("203.0.113.1").raw in schedule


def test_in_a_full_network_a_relay_that_was_not_found_makes_room_first() -> None:
    schedule = ProofSchedule(ProofLimits(relays_per_network=2), Random(1), 0.0)
    schedule.offer(key("failed"), HostPort("198.51.100.2", 80), "", 1.0)
    record = schedule.next(1.0)
    assert record is not None and schedule.admit(record, "198.51.100.2", 1.0) == 0
    schedule.failed(record, 1.0)
    schedule.offer(key("waits"), HostPort("198.51.100.1", 80), "", 0.0)
    schedule.offer(key("newcomer"), HostPort("198.51.100.3", 80), "", 2.0)
    assert [key(name).raw in schedule for name in ("failed", "waits", "newcomer")] == [False, True, True]


def test_one_network_has_a_bounded_number_of_records() -> None:
    limits = ProofLimits(relays_per_network=20)
    driver = Driver(good, limits)
    for at in range(50):
        driver.offer(at, f"20.0.0.{at}:80", "20.0.0.1")
        driver.advance(0.1)
    assert len(driver.schedule) == driver.schedule.listed == 20
    driver.answers = dead
    driver.advance(LIMITS.interval_s * 1.2 + 10.0, step_s=0.5)
    driver.answers = good
    driver.offer("new", "20.0.0.200:80", "20.0.0.200")
    driver.advance(1.0)
    assert driver.is_listed("new"), "one that failed has made room"


def test_relays_that_move_into_a_network_are_bounded_as_new_ones_are() -> None:
    driver = Driver(good, ProofLimits(relays_per_network=4))
    for at in range(10):
        driver.offer(at, f"20.0.{at}.1:80")
    driver.advance(1.0)
    for at in range(10):
        driver.offer(at, f"30.0.0.{at}:80")
        driver.advance(0.1)
    assert len(driver.schedule) == driver.schedule.listed == 4
    driver.offer(0, "30.0.0.77:80")
    driver.advance(1.0)
    assert driver.is_listed(0), "within its network it moves as it likes"


def test_a_relay_that_moves_or_comes_back_during_its_first_proof_still_has_it_before_it() -> None:
    driver = Driver(good)
    driver.offer("moves", "20.0.0.1:80")
    driver.offer("comes back", "21.0.0.1:80")
    assert driver.schedule.first_proofs == 2
    driver.schedule.withdraw(key("comes back").raw)
    assert driver.schedule.first_proofs == 1
    driver.offer("comes back", "21.0.0.1:80")
    driver.offer("moves", "22.0.0.1:80")
    driver.advance(0.02, step_s=0.02)
    assert driver.is_listed("comes back") and not driver.is_listed("moves") and driver.schedule.first_proofs == 1
    driver.advance(1.0)
    assert driver.is_listed("moves") and driver.schedule.first_proofs == 0


def test_a_table_full_of_proved_relays_makes_room_from_its_largest_network() -> None:
    driver = Driver(good, ProofLimits(relays=30))
    for at in range(29):
        driver.offer(at, f"20.0.0.{at}:80")
    driver.offer("small", "21.0.0.1:80")
    driver.advance(1.0)
    driver.offer("honest", "22.0.0.1:80")
    driver.advance(1.0)
    assert driver.is_listed("honest") and driver.is_listed("small") and len(driver.schedule) == 30


@settings(max_examples=50)
@given(st.data())
def test_whatever_happens_the_books_agree(data: st.DataObject) -> None:
    limits = ProofLimits(
        relays=6, relays_per_network=3, concurrent=3, interval_s=5.0, proofs_per_s=2.0, proof_burst=4.0
    )
    outcomes = Random(data.draw(st.integers(0, 1000)))
    driver = Driver(lambda record, ip: (outcomes.random() * 2, outcomes.random() < 0.6), limits)
    driver.names = {"a.example": "20.0.0.1", "b.example": "21.0.0.1"}
    hosts = ("20.0.0.1", "20.0.1.1", "2001:db8::1", "a.example", "b.example")
    for _ in range(data.draw(st.integers(1, 40))):
        name = data.draw(st.integers(0, 9))
        match data.draw(st.integers(0, 3)):
            case 0 | 1:
                host = data.draw(st.sampled_from(hosts))
                driver.offer(name, str(HostPort(host, 80)), data.draw(st.sampled_from(("", "20.0.0.1", "9.9.9.9"))))
            case 2:
                driver.schedule.withdraw(key(name).raw)
            case 3:
                driver.advance(data.draw(st.sampled_from((0.3, 3.0, 20.0))), step_s=0.3)
        schedule = driver.schedule
        assert len(schedule) <= 6
        records = list(schedule._records.values())
        listed = {record.key for relays in schedule.networks["dmsg"].values() for record in relays.values()}
        assert listed == {record.key for record in records if record.proved and record.available}
        assert {one.key for one in records if one.state is RelayState.WAITING} == {
            *schedule._fresh._places, *schedule._again._places, *schedule._names._places
        }  # fmt: skip
        assert set(schedule._unproved) == {record.key for record in records if not record.proved}
        assert schedule._new <= set(schedule._unproved)
        assert sum(map(len, schedule._targets.values())) == len(records)
        assert len(driver.running) <= 3
    driver.advance(30.0, step_s=0.3)
    for record in list(schedule._records.values()):
        schedule.withdraw(record.key)
    driver.advance(400.0, step_s=4.0)
    assert (dict(schedule._records), schedule._targets, schedule._budgets._busy, schedule._resolving) == (
        {},
        {},
        {},
        {},
    )


def test_a_record_goes_only_where_its_table_says() -> None:
    record = RelayRecord(SecretKey.generate().public_key, HostPort("20.0.0.1", 80), "", 0.0)
    with pytest.raises(ValueError, match="from resting to proving"):
        record.move(RelayState.PROVING)


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="list_unproven"):
        ProofLimits(interval_s=0.0)


# --- addresses ---------------------------------------------------------------------------------------------------------

PUBLIC = ("20.0.0.1", "2600::1", "::ffff:20.0.0.1", "64:ff9b::20.0.0.1", "relay.example.org")
LOOPBACK = ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")
PRIVATE = ("10.0.0.1", "192.168.1.1", "172.18.0.2", "100.64.0.1", "fd00::1")
NEVER = ("169.254.169.254", "fe80::1", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255")
#: Private addresses in other words, which a translator or a tunnel in the same network understands.
EMBEDDED = ("64:ff9b::10.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b:1::10.0.0.1", "::ffff:0:10.0.0.1", "::10.0.0.1")


@pytest.mark.parametrize(
    ("private", "listening", "expected"),
    [
        (None, "", PUBLIC),
        (None, "0.0.0.0", PUBLIC),
        (None, "::", PUBLIC),
        (None, "20.0.0.9", PUBLIC),
        (None, "127.0.0.1", PUBLIC + LOOPBACK),
        (None, "::1", PUBLIC + LOOPBACK),
        (None, "10.1.1.1", PUBLIC + LOOPBACK + PRIVATE),
        (False, "127.0.0.1", PUBLIC),
        (True, "20.0.0.9", PUBLIC + LOOPBACK + PRIVATE),
    ],
)
def test_which_addresses_are_taken(private: bool | None, listening: str, expected: tuple[str, ...]) -> None:
    addresses = RelayAddresses(private)
    addresses.listens_on(listening)
    assert [host for host in PUBLIC + LOOPBACK + PRIVATE + NEVER + EMBEDDED if addresses.takes(host)] == list(expected)


@pytest.mark.parametrize("host", ["2002:a00:1::1", "2002:7f00:1::1", "fec0::1"])
def test_a_tunnel_into_a_private_network_is_not_taken(host: str) -> None:
    assert not RelayAddresses().takes(host)


def test_an_entry_with_an_address_that_is_not_taken_is_refused(make_entry: Any) -> None:
    addresses = RelayAddresses()
    addresses.check(make_entry("client"))
    addresses.check(make_entry("relay", address="20.0.0.1:80"))
    with pytest.raises(AddressNotGlobal) as caught:
        addresses.check(make_entry("relay", address="10.0.0.1:80"))
    assert caught.value.address == "10.0.0.1"
    assert network_group("10.0.0.1") == "10.0.0.0/24"
