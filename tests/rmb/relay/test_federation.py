"""Which relay an envelope is brought to, how often, what its sender is told, and who waits for whom."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from functools import partial
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock

from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import FederationAttempted, RelayRankChanged
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.ranker import Ranker
from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, outline
from dmsg.rmb.relay.errors import NotPosted
from dmsg.rmb.relay.federation import Federation, FederationLimits
from dmsg.rmb.relay.lanes import OUTGOING_BYTES, Lane, Outgoing, PairedRoom, Room
from dmsg.rmb.twins.errors import RegistryError
from dmsg.sansio.backoff import Backoff

UNIX = 1_700_000_000


class Relays:
    """Other relays: each answers with what ``answers`` says: a status, a list of them in turn, or no answer."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.known: set[str] = set()
        self.posts: list[tuple[str, list[str]]] = []
        self.connected_only: list[bool] = []
        #: Posts to relays that are in `slow`, until they are fired.
        self.slow: dict[str, list[tuple[Deferred[Any], int]]] = {}

    def knows(self, relay: str) -> bool:
        return relay in self.known

    def post(self, relay: str, envelopes: Any, connected_only: bool) -> Deferred[list[int]]:
        self.posts.append((relay, [Envelope.FromString(data).uid for data in envelopes]))
        self.connected_only.append(connected_only)
        done: Deferred[list[int]] = Deferred()
        if relay in self.slow and (self.knows(relay) or not connected_only):
            self.slow[relay].append((done, len(envelopes)))
            return done
        answer = self.answers.get(relay, 202)
        if isinstance(answer, list):
            answer = answer.pop(0)
        if connected_only and not self.knows(relay):
            done.callback([425] * len(envelopes))
        elif isinstance(answer, Reason):
            done.errback(NotPosted(answer))
        else:
            done.callback([answer] * len(envelopes))
        return done

    def answer_one(self, relay: str, status: int = 202) -> None:
        done, count = self.slow[relay].pop(0)
        done.callback([status] * count)

    def fail_one(self, relay: str, reason: Reason = Reason.TIMEOUT) -> None:
        done, _ = self.slow[relay].pop(0)
        done.errback(NotPosted(reason))

    @property
    def asked(self) -> list[str]:
        return [relay for relay, _ in self.posts]


class Registry:
    def __init__(self) -> None:
        self.twins: dict[int, Any] = {}
        self.asked = 0

    async def get(self, twin: int) -> Twin | None:
        self.asked += 1
        found = self.twins.get(twin)
        if isinstance(found, Exception):
            raise found
        return found


class Bench:
    """A federation on a fake clock with made-up relays; ``failed`` is what senders were told."""

    def __init__(self, **limits: Any) -> None:
        self.clock = Clock()
        self.relays = Relays()
        self.registry = Registry()
        self.failed: list[tuple[str, RelayProblem]] = []
        self.moved_here: list[tuple[str, bool]] = []
        self.events: list[Any] = []
        self.ranker = Ranker(random.Random(7))
        self.federation = Federation(
            self.relays,
            self.registry,
            self.ranker,
            self.clock,
            random.Random(7),
            unix_time=lambda: UNIX + self.clock.seconds(),
            domains=["Me.example"],
            failed=lambda envelope, problem: self.failed.append((envelope.uid, problem)),
            emit=self.events.append,
            limits=FederationLimits(**limits),
        )

    def submit(
        self,
        uid: str,
        *relays: str,
        source: int = 1,
        twin: int = 7,
        lifetime_s: float = 60,
        size: int = 0,
        tags: str | None = None,
    ) -> RelayProblem | None:
        envelope = Envelope(uid=uid, plain=bytes(size), tags=tags)
        envelope.source.twin, envelope.destination.twin = source, twin
        known = self.registry.twins.setdefault(twin, Twin(twin, bytes(32), relays))
        expires_at = UNIX + self.clock.seconds() + lifetime_s
        data = envelope.SerializeToString()
        return self.federation.submit(
            outline(envelope),
            data,
            known,
            expires_at,
            lambda in_doubt: self.moved_here.append((uid, in_doubt)),
        )

    def pass_time(self, seconds: float, step: float = 0.05) -> None:
        self.clock.pump([step] * round(seconds / step))


@pytest.fixture
def bench() -> Any:
    return Bench()


# --- one envelope --------------------------------------------------------------------------------------------------------


def test_an_accepted_envelope_is_posted_once(bench: Bench) -> None:
    assert bench.submit("x", "a", "b") is None
    assert len(bench.relays.posts) == 1
    bench.pass_time(120)
    assert len(bench.relays.posts) == 1
    assert bench.failed == []
    assert len(bench.federation) == 0
    assert bench.federation.accepted == 1
    assert bench.clock.getDelayedCalls() == []


def test_equal_relays_share_the_load(bench: Bench) -> None:
    for number in range(400):
        bench.submit(str(number), "a", "b", "c", "d")
    counted = Counter(bench.relays.asked)
    assert set(counted) == {"a", "b", "c", "d"}
    assert min(counted.values()) > 70


def test_a_relay_that_failed_is_asked_after_the_others_until_its_failures_are_forgotten(bench: Bench) -> None:
    bench.relays.answers["a"] = 500
    for number in range(20):
        bench.submit(str(number), "a", "b")
    assert bench.relays.asked.count("a") == 1  # the first time it was tried it fell behind
    assert bench.failed == []
    bench.relays.answers["a"] = 202
    bench.pass_time(3600, 10)
    for number in range(40):
        bench.submit(str(number), "a", "b")
    assert bench.relays.asked.count("a") > 10


@pytest.mark.parametrize("refusal", [400, 401, 403, 404, 413, 499])
def test_a_relay_that_refuses_does_not_keep_an_envelope_from_the_others(bench: Bench, refusal: int) -> None:
    bench.relays.answers.update(a=refusal, b=refusal, c=202)
    bench.submit("x", "a", "b", "c")
    bench.pass_time(60)
    assert bench.relays.asked[-1] == "c"
    assert len(bench.relays.posts) <= 3
    assert bench.failed == []


def test_an_envelope_all_relays_refuse_fails_at_once_and_none_is_asked_twice(bench: Bench) -> None:
    bench.relays.answers.update(a=404, b=413)
    bench.submit("x", "a", "b")
    assert bench.failed == [("x", RelayProblem.REJECTED)]
    bench.pass_time(60)
    assert sorted(bench.relays.asked) == ["a", "b"]
    assert bench.clock.getDelayedCalls() == []


def test_the_sender_of_an_envelope_that_is_too_long_for_all_relays_is_told_so(bench: Bench) -> None:
    bench.relays.answers.update(a=413, b=413)
    bench.submit("x", "a", "b")
    assert bench.failed == [("x", RelayProblem.TOO_LARGE)]
    bench.relays.answers["c"] = [Reason.TIMEOUT, 413]
    bench.submit("y", "c", twin=8)
    bench.pass_time(1)
    assert bench.failed[1:] == [("y", RelayProblem.NOT_STORED)]


@pytest.mark.parametrize("doubt", [Reason.TIMEOUT, 503])
def test_the_sender_is_not_told_that_it_was_refused_if_a_relay_may_have_taken_it(bench: Bench, doubt: Any) -> None:
    bench.relays.answers["a"] = [doubt, 404]
    bench.submit("x", "a")
    bench.pass_time(1)
    assert bench.failed == [("x", RelayProblem.NOT_STORED)]
    assert not RelayProblem.is_certain(RelayProblem.NOT_STORED.text)


@pytest.mark.parametrize(
    "problem", [Reason.HOST_NOT_FOUND, Reason.CONNECTION_REFUSED, Reason.TLS_FAILED, Reason.NO_DESCRIPTOR]
)
def test_a_relay_that_was_not_reached_has_certainly_taken_nothing(bench: Bench, problem: Reason) -> None:
    bench.relays.answers["a"] = [problem, 404]
    bench.submit("x", "a")
    bench.pass_time(1)
    assert bench.failed == [("x", RelayProblem.REJECTED)]


def test_a_refusal_does_not_lower_the_rank_of_a_relay_and_a_failure_does(bench: Bench) -> None:
    bench.relays.answers.update(a=404, b=503, c=Reason.TIMEOUT, d=Reason.NO_DESCRIPTOR)
    bench.submit("x", "a", "b", "c", "d")
    now = bench.clock.seconds()
    assert [bench.ranker.rate(relay, now) for relay in "abcd"] == [0, 1, 1, 0], "it is not the fault of the last one"


def test_three_passes_with_pauses_then_a_longer_one(bench: Bench) -> None:
    bench.relays.answers["a"] = 500
    bench.submit("x", "a", lifetime_s=10)
    times = []
    for _ in range(190):
        times += [bench.clock.seconds()] * (len(bench.relays.posts) - len(times))
        bench.clock.advance(0.05)
    assert len(times) >= 6
    first, second, third, fourth = times[:4]
    assert first == 0
    assert 0.1 <= second - first <= 0.2
    assert 0.2 <= third - second <= 0.35
    assert 3.0 <= fourth - third <= 4.6


def test_a_relay_that_comes_back_gets_what_waits(bench: Bench) -> None:
    bench.relays.answers["a"] = Reason.CONNECTION_REFUSED
    for number in range(50):
        bench.submit(str(number), "a", lifetime_s=120)
    bench.pass_time(20)
    bench.relays.answers["a"] = 202
    bench.pass_time(60)
    assert bench.failed == []
    assert bench.federation.accepted == 50


def test_the_sender_is_told_at_expiry_when_no_relay_answers(bench: Bench) -> None:
    bench.relays.answers["a"] = Reason.TIMEOUT
    bench.submit("x", "a", lifetime_s=20)
    bench.pass_time(19)
    assert bench.failed == []
    bench.pass_time(2)
    assert bench.failed == [("x", RelayProblem.EXPIRED)]
    assert bench.clock.getDelayedCalls() == []


def test_the_sender_is_told_that_it_expired_when_a_relay_refuses_it_because_of_that(bench: Bench) -> None:
    bench.relays.slow["a"] = []
    bench.submit("x", "a", lifetime_s=0.5)
    bench.pass_time(0.7)
    bench.relays.answer_one("a", 400)
    assert bench.failed == [("x", RelayProblem.EXPIRED)]


def test_an_envelope_expires_while_a_slow_relay_keeps_it_waiting(bench: Bench) -> None:
    bench.relays.slow["a"] = []
    for number in range(10):
        bench.submit(str(number), "a", lifetime_s=5)
    bench.pass_time(7)
    assert len(bench.failed) == 10
    bench.relays.answer_one("a")  # too late: it was told already, and is not told twice
    bench.pass_time(1)
    assert len(bench.failed) == 10
    assert bench.federation.accepted == 0


def test_a_relay_that_does_not_answer_is_left_alone_for_a_while(bench: Bench) -> None:
    bench.relays.answers["a"] = Reason.TIMEOUT
    for number in range(100):
        bench.submit(str(number), "a", lifetime_s=60)
    bench.pass_time(30)
    assert len(bench.relays.posts) < 40  # and not 100 envelopes times three passes times the rounds


def test_posts_that_fail_together_do_not_make_the_pause_of_a_relay_longer(bench: Bench) -> None:
    """Four posts at a time go to a relay. One that is back after some seconds is not left alone for half a minute."""
    bench.relays.slow["a"] = []

    def refuse() -> None:
        while bench.relays.slow["a"]:
            bench.relays.fail_one("a", Reason.CONNECTION_REFUSED)

    for second in range(9):  # the relay is away
        for number in range(8):
            bench.submit(f"{second}-{number}", "a")
        bench.pass_time(0.5)
        refuse()
        bench.pass_time(0.5)
    del bench.relays.slow["a"]
    for second in range(9):
        bench.submit(f"back-{second}", "a")
        bench.pass_time(1)
    assert bench.federation.accepted > 0


def test_passes_over_relays_that_may_not_be_tried_do_not_count(bench: Bench) -> None:
    """A relay was away for 8 s. Envelopes that came meanwhile made empty passes, and then rested for up to 24 s more."""
    bench.relays.answers["a"] = Reason.CONNECTION_REFUSED
    for second in range(8):
        bench.submit(str(second), "a", lifetime_s=60)
        bench.pass_time(1)
    bench.relays.answers["a"] = 202
    bench.pass_time(7)  # what is left of the second pause, of 6 to 9 s
    assert bench.federation.accepted == 8 and bench.failed == []


def test_what_rests_goes_on_when_the_first_of_its_relays_may_be_tried(bench: Bench) -> None:
    bench.relays.answers |= {"a": Reason.CONNECTION_REFUSED, "b": Reason.CONNECTION_REFUSED}
    for number in range(3):
        bench.submit(f"a{number}", "a")
    bench.pass_time(2.5)
    for number in range(3):
        bench.submit(f"b{number}", "b", twin=8)
    bench.submit("x", "a", "b", twin=9)
    bench.relays.answers |= {"a": 202, "b": 202}
    asked = len(bench.relays.asked)
    bench.pass_time(2.5)  # of a's 3 to 4.5 s, and a quarter
    assert "a" in bench.relays.asked[asked:] and bench.federation.accepted >= 4


def test_all_that_rests_goes_on_when_its_relay_answers_again_in_many_turns_of_the_reactor(bench: Bench) -> None:
    bench.relays.slow["late"] = []
    for number in range(2_000):
        bench.submit(str(number), "late", lifetime_s=600)
    late = bench.relays.slow["late"]
    for _ in range(3):
        bench.relays.fail_one("late")
    for _ in range(10):
        bench.clock.advance(0)
    assert len(late) == 3  # all others rest
    before = bench.registry.asked
    bench.relays.answer_one("late")
    assert 0 < bench.registry.asked - before <= 256
    del bench.relays.slow["late"]
    for _ in range(10):
        bench.clock.advance(0)
    for done, count in late:
        done.callback([202] * count)
    assert (
        bench.federation.accepted == 1_998
    )  # two failed before the relay was left alone, and wait for their second pass
    bench.pass_time(0.2)
    assert bench.federation.accepted == 2_000 and bench.failed == []


def test_of_all_that_rests_for_a_relay_that_hangs_some_a_second_go_on(bench: Bench) -> None:
    bench.relays.answers["late"] = Reason.TIMEOUT
    for number in range(2_000):
        bench.submit(str(number), "late", lifetime_s=600)
    bench.pass_time(1)  # three passes of the first one close the lane
    bench.relays.slow["late"] = []
    bench.pass_time(4.5)
    opened = bench.registry.asked
    assert 256 <= opened <= 512
    bench.pass_time(2)
    assert bench.registry.asked == opened + 512
    assert len(bench.relays.slow["late"]) == bench.federation.limits.posts_per_relay


@pytest.mark.parametrize("others", [0, 7])
def test_what_rests_for_several_relays_goes_to_the_one_that_comes_back(others: int) -> None:
    """Of thousands for two relays, some were tried each time that the one could be that was away longer; it stayed away."""
    bench = Bench(backoff=Backoff(3.0, 30.0, 1.0, 0.0))
    relays = ["away", "back", *(f"other{number}" for number in range(others))]
    for number, relay in enumerate(relays):
        bench.relays.answers[relay] = Reason.CONNECTION_REFUSED
        for uid in range(3):
            bench.submit(f"{relay}{uid}", relay, twin=100 + number, lifetime_s=600)
        bench.pass_time(0.1)
    for number in range(2_000):
        bench.submit(str(number), *relays[::-1], twin=9, lifetime_s=600)
    bench.relays.answers["back"] = 202
    bench.pass_time(5)
    assert bench.federation.accepted == 2_003 and bench.failed == []


def test_what_rests_goes_on_after_the_failures_of_its_relay_are_forgotten(bench: Bench) -> None:
    """The lane was forgotten with its failures, and another one was made: the answer did not wake what rested."""
    bench.ranker = bench.federation._ranker = Ranker(random.Random(7), 2)
    bench.relays.slow["late"] = []
    for number in range(5_000):
        bench.submit(str(number), "late", lifetime_s=600)
    for _ in range(3):
        bench.relays.fail_one("late", Reason.CONNECTION_REFUSED)
    looked_up: list[Deferred[None]] = []
    known = bench.registry.twins[7]

    async def get(twin: int) -> Twin:
        looked_up.append(Deferred())
        await looked_up[-1]
        return known

    bench.registry.get = get  # type: ignore[method-assign]
    while bench.relays.slow["late"]:
        bench.relays.fail_one("late", Reason.CONNECTION_REFUSED)
    del bench.relays.slow["late"]
    bench.pass_time(15)  # no failure counts any more, and the first envelopes are being looked up
    bench.registry.get = Registry.get.__get__(bench.registry)  # type: ignore[method-assign]
    for one in looked_up:
        one.callback(None)
    for _ in range(20):
        bench.clock.advance(0)
    assert bench.federation.accepted == 5_000


def test_what_rests_for_a_relay_ends_when_its_twin_has_moved_to_another(bench: Bench) -> None:
    bench.relays.answers["gone"] = Reason.CONNECTION_REFUSED
    for number in range(5):
        bench.submit(str(number), "gone", lifetime_s=600)
    bench.pass_time(1)
    bench.registry.twins[7] = Twin(7, bytes(32), ("new",))
    bench.pass_time(4)
    assert bench.federation.accepted == 5 and bench.relays.asked.count("new") == 5


def test_one_sender_whose_envelopes_rest_does_not_keep_those_of_others_waiting(bench: Bench) -> None:
    bench.relays.answers["gone"] = Reason.TIMEOUT
    for number in range(2_000):
        bench.submit(str(number), "gone", lifetime_s=600)
    for number in range(2):
        bench.submit(f"other{number}", "gone", source=2, twin=8, lifetime_s=600)
    bench.pass_time(1)
    bench.relays.slow["gone"] = []
    bench.registry.twins[8] = Twin(8, bytes(32), ("new",))
    bench.pass_time(4)  # until the relay may be tried
    assert bench.relays.asked.count("new") == 2


def test_what_rests_and_is_given_up_is_not_woken(bench: Bench) -> None:
    bench.relays.slow["late"] = []
    for number in range(20):
        bench.submit(str(number), "late", lifetime_s=2)
    for _ in range(3):
        bench.relays.fail_one("late")
    bench.pass_time(2.9)
    assert len(bench.failed) == 20
    bench.relays.answer_one("late")
    bench.pass_time(5)
    assert bench.federation.accepted == 0 and len(bench.federation) == 0 and bench.clock.getDelayedCalls() == []


def test_what_waits_for_a_dead_relay_goes_over_another_one(bench: Bench) -> None:
    bench.relays.slow["dead"] = []
    bench.relays.answers["good"] = 202
    bench.ranker.failed("good", 0.0)  # so that the dead one comes first
    for number in range(50):
        bench.submit(str(number), "dead", "good")
    assert set(bench.relays.asked) == {"dead"}
    while bench.relays.slow["dead"]:
        done, _ = bench.relays.slow["dead"].pop(0)
        done.errback(NotPosted(Reason.TIMEOUT))
    assert bench.federation.accepted == 50
    assert bench.relays.asked.count("dead") <= 6  # and not 50 times


def test_a_twin_that_moved_is_found_at_its_new_relay(bench: Bench) -> None:
    bench.relays.answers["old"] = Reason.CONNECTION_REFUSED
    bench.submit("x", "old")
    bench.registry.twins[7] = Twin(7, bytes(32), ("new",))
    bench.pass_time(10)
    assert bench.relays.posts[-1] == ("new", ["x"])
    assert bench.failed == []


@pytest.mark.parametrize("relays", [("ME.example",), ("other", "me.example")])
@pytest.mark.parametrize(("why", "in_doubt"), [(Reason.CONNECTION_REFUSED, False), (Reason.TIMEOUT, True)])
def test_an_envelope_for_a_twin_that_moved_to_this_relay_is_given_back(
    bench: Bench, relays: tuple[str, ...], why: Reason, in_doubt: bool
) -> None:
    bench.relays.answers["old"] = why
    bench.submit("x", "old")
    bench.registry.twins[7] = Twin(7, bytes(32), relays)
    bench.pass_time(10)
    assert bench.moved_here == [("x", in_doubt)]
    assert bench.failed == [] and set(bench.relays.asked) == {"old"} and len(bench.federation) == 0


def test_a_relay_that_may_have_an_envelope_is_not_forgotten_when_it_cannot_be_reached_later(bench: Bench) -> None:
    bench.relays.answers["a"] = [Reason.TIMEOUT, Reason.CONNECTION_REFUSED, 404]
    bench.submit("x", "a")
    bench.pass_time(5)
    assert bench.failed == [("x", RelayProblem.NOT_STORED)]


@pytest.mark.parametrize("status", [408, 425, 429])
def test_a_relay_that_refuses_an_envelope_for_now_is_asked_again(bench: Bench, status: int) -> None:
    bench.relays.answers["a"] = [status, 202]
    bench.submit("x", "a")
    bench.pass_time(1)
    assert (bench.relays.asked, bench.failed, bench.federation.accepted) == (["a", "a"], [], 1)


@pytest.mark.parametrize(
    "later", [None, Twin(7, bytes(32), ("a",)), Twin(7, bytes(32), ("me.example",))], ids=["none", "same", "here"]
)
def test_an_envelope_that_expires_while_its_twin_is_looked_up_fails_once(bench: Bench, later: Twin | None) -> None:
    look_ups: list[Deferred[Twin | None]] = []

    async def get(twin: int) -> Twin | None:
        look_ups.append(Deferred())
        return await look_ups[-1]

    bench.relays.answers["a"] = 500
    bench.submit("x", "a", lifetime_s=20)
    bench.registry.get = get  # type: ignore[method-assign]
    bench.pass_time(30)
    posts, told = len(bench.relays.posts), list(bench.failed)
    assert look_ups and len(told) == 1
    look_ups[0].callback(later)
    bench.pass_time(30)
    assert (len(bench.relays.posts), bench.failed, bench.moved_here) == (posts, told, [])


@pytest.mark.parametrize(
    ("later", "problem"),
    [
        (None, RelayProblem.UNKNOWN_TWIN_LATER),
        (Twin(7, bytes(32), ()), RelayProblem.NO_RELAYS_LATER),
        (RegistryError("unavailable"), RelayProblem.EXPIRED),
    ],
)
def test_what_the_registry_says_later_is_told(bench: Bench, later: Any, problem: RelayProblem) -> None:
    bench.relays.answers["a"] = Reason.CONNECTION_REFUSED
    bench.submit("x", "a", lifetime_s=15)
    bench.registry.twins[7] = later
    bench.pass_time(16)
    assert bench.failed == [("x", problem)]


def test_an_envelope_is_never_posted_to_the_relay_itself(bench: Bench) -> None:
    assert bench.submit("x", "me.example") is RelayProblem.NO_RELAYS
    assert bench.submit("y", "ME.EXAMPLE", "other", twin=8) is None
    assert bench.relays.asked == ["other"]


# --- to where the session is ---------------------------------------------------------------------------------------------


def elsewhere(bench: Bench, *relays: str) -> tuple[bool, list[bool]]:
    """Whether one is asked; and when the envelope stays here, whether one of them may have taken it."""
    parked: list[bool] = []
    envelope = Envelope(uid="x")
    envelope.source.twin = 1
    twin = Twin(7, bytes(32), relays)
    data = envelope.SerializeToString()
    return bench.federation.elsewhere(envelope, data, twin, UNIX + 60, parked.append), parked


def test_an_envelope_goes_to_the_known_relay_that_has_the_session(bench: Bench) -> None:
    bench.relays.known = {"a", "b"}
    bench.relays.answers.update(a=404, b=202, c=202)
    started, parked = elsewhere(bench, "me.example", "a", "b", "c")
    assert started is True
    assert parked == []
    assert bench.relays.asked[-1] == "b"
    assert set(bench.relays.connected_only) == {True}


@pytest.mark.parametrize(
    ("answer", "in_doubt"), [(404, False), (500, True), (Reason.TIMEOUT, True), (Reason.CONNECTION_REFUSED, False)]
)
def test_an_envelope_no_known_relay_has_the_session_for_stays_here(bench: Bench, answer: Any, in_doubt: bool) -> None:
    bench.relays.known = {"a"}
    bench.relays.answers["a"] = answer
    assert elsewhere(bench, "me.example", "a") == (True, [in_doubt])
    assert bench.relays.asked == ["a"]
    assert bench.failed == []
    assert len(bench.federation) == 0


def test_a_known_relay_may_have_taken_what_is_given_up_while_it_is_posted_there(bench: Bench) -> None:
    bench.relays.known = {"a"}
    bench.relays.slow["a"] = []
    posted = [elsewhere(bench, "me.example", "a")[1] for _ in range(bench.federation.limits.posts_per_relay)]
    _, waiting = elsewhere(bench, "me.example", "a")
    bench.pass_time(61.5)
    assert [*posted, waiting] == [*[[True]] * len(posted), [False]]


def test_relays_that_do_not_know_this_one_are_not_asked_for_sessions(bench: Bench) -> None:
    assert elsewhere(bench, "me.example", "c") == (False, [])
    assert bench.relays.posts == []


def test_of_several_relays_those_that_know_this_one_are_asked_for_the_session_before_one_keeps_the_envelope(
    bench: Bench,
) -> None:
    """Any of them would keep it, and the twin may be connected to another one only."""
    bench.relays.known = {"a", "b", "c"}
    bench.relays.answers.update(a=404, b=202, c=404)
    for number in range(20):
        bench.submit(str(number), "a", "b", "c")
    assert bench.federation.accepted == 20 and bench.failed == []
    assert {relay for relay, uids in bench.relays.posts if uids == ["19"]} >= {"b"} and bench.relays.asked[-1] == "b"
    assert set(bench.relays.connected_only) == {True}


@pytest.mark.parametrize("first", [404, 400, 425, 503, Reason.TIMEOUT])
def test_an_envelope_for_a_session_that_none_of_several_relays_has_is_kept_by_one(bench: Bench, first: Any) -> None:
    bench.relays.known = {"a", "b"}
    bench.relays.answers.update(a=[first, 202], b=[404, 202])
    bench.submit("x", "a", "b")
    bench.pass_time(1)
    assert bench.relays.connected_only == [True, True, False]
    assert set(bench.relays.asked[:2]) == {"a", "b"}
    assert bench.federation.accepted == 1 and bench.failed == []


def test_a_session_that_is_not_at_the_relay_that_knows_this_one_is_looked_for_at_the_other(bench: Bench) -> None:
    bench.relays.known = {"a"}
    bench.relays.answers["a"] = 404
    for number in range(20):
        bench.submit(str(number), "a", "b")
    assert bench.relays.asked == ["a", "b"] * 20 and bench.relays.connected_only == [True, False] * 20


def test_the_only_relay_of_a_twin_is_not_asked_for_the_session_first(bench: Bench) -> None:
    bench.relays.known = {"a"}
    bench.submit("x", "a")
    assert bench.relays.connected_only == [False]


def test_an_envelope_that_several_relays_do_not_take_fails_once_and_as_that_of_one_does(bench: Bench) -> None:
    bench.relays.known = {"a", "b"}
    bench.relays.answers.update(a=404, b=404)
    bench.submit("x", "a", "b")
    assert bench.failed == [("x", RelayProblem.REJECTED)]
    assert bench.relays.connected_only == [True, True, False, False]
    assert len(bench.federation) == 0


def test_relays_that_a_twin_has_by_the_time_it_is_looked_up_again_are_asked_for_the_session_too(bench: Bench) -> None:
    bench.relays.known = {"b", "c"}
    bench.relays.answers.update(a=Reason.TIMEOUT, b=404, c=202)
    bench.submit("x", "a")
    bench.pass_time(1)
    bench.registry.twins[7] = Twin(7, bytes(32), ("b", "c"))
    bench.pass_time(10)
    assert bench.relays.asked[-1] == "c" and bench.federation.accepted == 1
    asked = [only for relay, only in zip(bench.relays.asked, bench.relays.connected_only, strict=True) if relay != "a"]
    assert asked and all(asked), "either of them would keep it"


@pytest.mark.parametrize(
    ("a", "b", "failures"),
    [
        (404, 202, []),
        ([404, 202], [404, 202], []),
        ([404, 503], [503, 202], 2 * [Reason.ANSWERED_5XX]),
        (404, 404, 2 * [Reason.ANSWERED_4XX]),  # from where it could have waited
    ],
)
def test_a_relay_that_is_asked_for_a_session_and_does_not_have_it_has_not_failed(
    bench: Bench, a: Any, b: Any, failures: list[Reason]
) -> None:
    """There may be an alarm for relays that refuse envelopes."""
    bench.relays.known = {"a", "b"}
    bench.relays.answers.update(a=a, b=b)
    bench.submit("x", "a", "b")
    attempts = [one for one in bench.events if isinstance(one, FederationAttempted)]
    assert [one.reason for one in attempts if not one.ok] == failures
    assert sum(one.count for one in attempts if one.ok) == bench.federation.accepted


# --- many ----------------------------------------------------------------------------------------------------------------


def test_a_known_relay_gets_several_at_once_and_others_one_by_one(bench: Bench) -> None:
    bench.relays.known = {"a"}
    bench.relays.slow.update(a=[], b=[])
    for number in range(600):
        bench.submit(f"a{number}", "a", twin=7)
        bench.submit(f"b{number}", "b", twin=8)
    assert len(bench.relays.slow["a"]) == len(bench.relays.slow["b"]) == 4
    for _ in range(4):
        bench.relays.answer_one("a")
        bench.relays.answer_one("b")
    sizes = {relay: max(len(uids) for to, uids in bench.relays.posts if to == relay) for relay in "ab"}
    assert sizes == {"a": 256, "b": 1}


def test_a_known_relay_gets_several_at_once_though_it_is_only_asked_for_some_of_them(bench: Bench) -> None:
    """Those are posts of their own, and a sender has both kinds in any order."""
    bench.relays.known = {"a"}
    bench.relays.slow["a"] = []
    for number in range(600):
        bench.submit(f"kept {number}", "a", twin=7)
        bench.submit(f"asked {number}", "a", "b", twin=8)
    for _ in range(4):
        bench.relays.answer_one("a")
    assert [len(uids) for _, uids in bench.relays.posts[4:]] == 4 * [256]
    assert sum(bench.relays.connected_only[4:]) == 2
    for _ in range(6):
        bench.relays.answer_one("a")
    assert bench.federation.accepted == 1200 and len(bench.federation) == 0
    for kind in ("kept", "asked"):
        uids = [uid for _, uids in bench.relays.posts for uid in uids if uid.startswith(kind)]
        assert uids == [f"{kind} {number}" for number in range(600)]


def test_a_batch_is_bounded_in_bytes(bench: Bench) -> None:
    bench.relays.known = {"a"}
    bench.relays.slow["a"] = []
    for number in range(20):
        bench.submit(str(number), "a", size=100_000)
    bench.relays.answer_one("a")
    assert len(bench.relays.posts[-1][1]) == 5


def test_a_flood_of_one_sender_does_not_delay_another(bench: Bench) -> None:
    bench.relays.slow["a"] = []
    for number in range(500):
        bench.submit(f"flood {number}", "a", source=666)
    bench.submit("mine", "a", source=1)
    for _ in range(3):
        bench.relays.answer_one("a")
    assert "mine" in [uid for _, uids in bench.relays.posts for uid in uids]


def test_a_slow_relay_does_not_delay_what_goes_to_others(bench: Bench) -> None:
    bench.relays.slow["slow"] = []
    for number in range(100):
        bench.submit(f"slow {number}", "slow", twin=7)
    bench.submit("x", "quick", twin=8)
    assert bench.relays.posts[-1] == ("quick", ["x"])


def test_a_sender_may_have_half_of_the_room_and_others_the_rest() -> None:
    bench = Bench(outstanding_bytes=100 * (OUTGOING_BYTES + 1100))
    bench.relays.slow.update(a=[], b=[])
    outcomes = [bench.submit("x", "a", source=666, size=1000) for _ in range(100)]
    assert 45 <= outcomes.count(None) <= 52
    assert outcomes[-1] is RelayProblem.OVERLOADED
    assert bench.submit("mine", "b", source=1, twin=8, size=1000) is None
    while bench.relays.slow["a"]:
        bench.relays.answer_one("a")
    assert bench.submit("again", "a", source=666, size=1000) is None


def test_the_room_of_senders_that_send_one_envelope_each_is_what_these_take() -> None:
    bench = Bench(outstanding_bytes=1 << 30)
    bench.relays.slow["a"] = []
    bench.submit("first", "a")
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(2_000):
            bench.submit(f"{number}", "a", source=100 + number)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    parsed = 1_000  # which is not traced
    assert taken + 2_000 * parsed < bench.federation._shares.held.used


def test_envelopes_that_rest_for_many_relays_take_no_more_room_than_they_count_for() -> None:
    bench = Bench(outstanding_bytes=1 << 30)
    relays = [f"relay{number}" for number in range(16)]
    bench.relays.answers |= dict.fromkeys(relays, Reason.CONNECTION_REFUSED)
    for number in range(3):
        bench.submit(f"{number}", *relays)
    before = bench.federation._shares.held.used
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(2_000):
            bench.submit(f"{number}", *relays, source=100 + number)
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(bench.relays.posts) == 3 * len(relays)
    parsed = 1_000  # which is not traced
    assert taken + 2_000 * parsed < bench.federation._shares.held.used - before


def test_texts_that_are_kept_twice_take_more_room() -> None:
    bench = Bench(outstanding_bytes=2_000_000)
    bench.relays.slow["a"] = []
    outcomes = [bench.submit("x", "a", tags=100_000 * "t") for _ in range(10)]
    assert outcomes.count(None) == 3


def test_a_dead_relay_does_not_take_the_room_of_others() -> None:
    bench = Bench(outstanding_bytes=100 * (OUTGOING_BYTES + 1100))
    bench.relays.answers["dead"] = Reason.TIMEOUT
    outcomes = [bench.submit("x", "dead", source=number, size=1000) for number in range(1, 101)]
    assert outcomes.count(None) <= 52
    bench.relays.slow["good"] = []
    assert bench.submit("mine", "good", source=200, twin=8, size=1000) is None


def test_many_senders_together_do_not_take_the_room_of_one_who_sends_little() -> None:
    bench = Bench(outstanding_bytes=100 * (OUTGOING_BYTES + 1100))
    for sender in range(1000, 1030):
        bench.relays.slow[f"dead{sender}"] = []
        while (
            bench.submit(str(sender), f"dead{sender}", source=sender, twin=sender, lifetime_s=1800, size=1000) is None
        ):
            if len(bench.failed) > 500:
                raise AssertionError("they push each other out without end")
    before = list(bench.failed)
    for number in range(3):
        assert bench.submit(f"mine {number}", "good", source=1, twin=8, size=1000) is None
    assert bench.relays.asked.count("good") == 3 and len(bench.failed) == len(before) + 1
    assert bench.failed[-1][1] is RelayProblem.OVERLOADED


def test_one_sender_does_not_take_all_the_room_for_a_relay() -> None:
    bench = Bench(outstanding_bytes=100 * (OUTGOING_BYTES + 1100))
    bench.relays.slow["busy"] = []
    refused = 0
    for number in range(200):  # as fast as the relay takes them, and faster
        refused += bench.submit(f"flood {number}", "busy", source=666, twin=6, size=1000) is not None
        if not number % 10 and bench.relays.slow["busy"]:
            bench.relays.answer_one("busy")
    assert refused > 100 and not bench.failed
    for number in range(3):
        assert bench.submit(f"mine {number}", "busy", source=1, twin=8, size=1000) is None
    assert [problem for _, problem in bench.failed] == 3 * [RelayProblem.OVERLOADED]
    assert all(uid.startswith("flood") for uid, _ in bench.failed)
    for _ in range(6):
        bench.relays.answer_one("busy")
    assert {f"mine {number}" for number in range(3)} <= {uid for _, uids in bench.relays.posts for uid in uids}


def test_twins_whose_relays_hang_do_not_take_the_share_of_one_that_answers_them() -> None:
    """They ask it as often as they like; what it answers others goes out all the same."""
    bench = Bench(outstanding_bytes=200 * (OUTGOING_BYTES + 1100))
    for twin in (66, 67, 68):
        bench.relays.slow[f"hangs{twin}"] = []
        for number in range(200):
            bench.submit(f"{twin} {number}", f"hangs{twin}", source=1, twin=twin, lifetime_s=1800, size=1000)
    assert bench.submit("once more", "hangs66", source=1, twin=66, size=1000) is RelayProblem.OVERLOADED
    before = len(bench.failed)
    for number in range(20):
        assert bench.submit(f"good {number}", "good", source=1, twin=7, size=1000) is None
    assert bench.relays.asked.count("good") == 20
    assert len(bench.failed) == before + 1 and bench.failed[-1][1] is RelayProblem.OVERLOADED
    held = bench.federation._shares.by_relay
    assert sum(held[f"hangs{twin}"].used for twin in (66, 67, 68)) > 90 * (OUTGOING_BYTES + 1000)
    assert min(held[f"hangs{twin}"].used for twin in (66, 67, 68)) > 20 * (OUTGOING_BYTES + 1000)


def test_what_a_dead_relay_leaves_to_another_one_does_not_fail_for_the_next_envelope() -> None:
    bench = Bench(outstanding_bytes=100 * (OUTGOING_BYTES + 1100))
    bench.relays.slow.update(dead=[], alive=[])
    bench.ranker.failed("alive", 0.0)  # "dead" is the first choice where there are both
    for number in range(40):
        assert bench.submit(f"{number:04}", "alive", source=number % 4, twin=6, size=1000) is None
        assert bench.submit(f"{number:04}", "dead", "alive", source=10 + number % 4, twin=7, size=1000) is None
    bench.relays.answers["dead"] = Reason.CONNECTION_REFUSED
    for done, _ in bench.relays.slow.pop("dead"):
        done.errback(NotPosted(Reason.CONNECTION_REFUSED))
    assert len(bench.federation) == 80 and not bench.failed
    assert bench.submit("next", "alive", source=6, twin=6, size=1000) is None
    assert len(bench.federation) == 80 and [problem for _, problem in bench.failed] == [RelayProblem.OVERLOADED]


def test_what_waits_for_a_relay_that_dies_goes_another_way_in_many_turns_of_the_reactor(bench: Bench) -> None:
    """30,000 envelopes may: all other connections waited for half a second."""
    bench.relays.slow["dead"] = []
    bench.ranker.failed("good", 0.0)  # so that the dead one is asked first
    for number in range(2_000):
        bench.submit(str(number), "dead", "good")
    bench.clock.advance(0.5)
    dead = bench.relays.slow["dead"]
    for _ in range(3):
        bench.relays.fail_one("dead")
    assert 200 < bench.relays.asked.count("good") < 300
    assert len(dead) == 3  # and no more is posted to the dead one
    for _ in range(10):
        bench.clock.advance(0)
    while dead:
        bench.relays.fail_one("dead")
    assert bench.federation.accepted == bench.relays.asked.count("good") == 2_000
    bench.clock.advance(2)
    assert bench.clock.getDelayedCalls() == []


def test_a_relay_that_is_not_asked_for_sessions_any_more_is_passed_over_in_many_turns_of_the_reactor(
    bench: Bench,
) -> None:
    bench.relays.known = {"a"}
    posts = bench.relays.slow["a"] = []
    parked = [elsewhere(bench, "me.example", "a")[1] for _ in range(4_000)]
    bench.relays.known.clear()
    bench.relays.fail_one("a", Reason.CONNECTION_REFUSED)
    assert 256 <= sum(map(len, parked)) <= 512 + 1
    for _ in range(20):
        bench.clock.advance(0)
    assert len(posts) == 3 and sum(map(len, parked)) >= 4_000 - 3 * 256
    assert {tuple(one) for one in parked} == {(False,), ()}


def test_a_relay_that_was_not_asked_has_not_answered(bench: Bench) -> None:
    bench.relays.known = {"a"}
    bench.relays.slow["a"] = []
    for _ in range(2_000):
        elsewhere(bench, "me.example", "a")
    bench.relays.fail_one("a", Reason.CONNECTION_REFUSED)
    bench.relays.known.clear()
    for _ in range(2):
        bench.relays.fail_one("a", Reason.CONNECTION_REFUSED)
    asked = len(bench.relays.posts)
    bench.submit("x", "a", twin=8)
    assert len(bench.relays.posts) == asked  # it is left alone after three failures in a row


def test_a_relay_that_answers_again_gets_what_still_waits_for_it(bench: Bench) -> None:
    bench.relays.slow["late"] = []
    for number in range(1_000):
        bench.submit(str(number), "late", lifetime_s=600)
    late = bench.relays.slow["late"]
    for _ in range(3):
        bench.relays.fail_one("late")
    bench.relays.answer_one("late")
    bench.clock.advance(0)
    assert len(late) == bench.federation.limits.posts_per_relay
    del bench.relays.slow["late"]
    for done, count in late:
        done.callback([202] * count)
    bench.pass_time(1)
    assert bench.federation.accepted == 1_000 and bench.failed == []


def test_what_expires_at_once_is_given_up_in_many_turns_of_the_reactor(bench: Bench) -> None:
    bench.relays.slow["slow"] = []
    for number in range(1_000):
        bench.submit(str(number), "slow", lifetime_s=5)
    bench.failed = failed = Failed(bench.clock)
    bench.pass_time(7)
    assert 0 < failed.in_first_turn < 300
    assert bench.failed == [(str(number), RelayProblem.EXPIRED) for number in range(1_000)]


class Failed(list[tuple[str, RelayProblem]]):
    """Knows how many came in the turn of the first one."""

    in_first_turn = 0

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def append(self, one: tuple[str, RelayProblem]) -> None:
        super().append(one)
        if len(self) == 1:  # before anything else is put off until the next turn
            self._clock.callLater(0, self._note)

    def _note(self) -> None:
        self.in_first_turn = len(self)


def test_one_relay_is_one_in_whatever_letters_twins_write_its_name() -> None:
    bench = Bench(outstanding_bytes=100 * (OUTGOING_BYTES + 1100))
    names = ["busy.example", "Busy.example", "bUsy.example", "BUSY.EXAMPLE"]
    bench.relays.slow = {name: [] for name in names}
    for number in range(40):
        bench.submit(str(number), *names, size=1000)
        bench.submit(str(number), names[number % 4], source=2, twin=100 + number % 4, size=1000)
    assert len(bench.relays.posts) == bench.federation.limits.posts_per_relay
    bench = Bench()
    bench.relays.answers = dict.fromkeys(names, 404)
    bench.submit("x", *names)
    assert len(bench.relays.posts) == 1 and bench.failed == [("x", RelayProblem.REJECTED)]


def test_what_a_relay_refused_and_waits_for_another_takes_no_room_from_what_is_for_the_first() -> None:
    bench = Bench(outstanding_bytes=100 * (OUTGOING_BYTES + 1100))
    bench.relays.answers["good"] = 404
    bench.relays.slow["slow"] = []
    bench.ranker.failed("slow", 0.0)  # so that the good one is asked first
    for number in range(60):
        bench.submit(str(number), "good", "slow", source=666, twin=6, lifetime_s=1800, size=1000)
    bench.relays.answers["good"] = 202
    assert bench.submit("mine", "good", source=1, twin=8, size=1000) is None
    assert bench.federation.accepted == 1


def test_what_has_expired_is_not_kept_until_a_slow_relay_has_answered_to_what_came_before_it(bench: Bench) -> None:
    bench.relays.slow["slow"] = []
    for _ in range(20):
        for number in range(100):
            bench.submit(str(number), "slow", lifetime_s=3600 if number == 0 else 1)
        bench.pass_time(2.1)
    gc.collect()
    assert len(bench.federation) == 20
    assert sum(type(one) is Outgoing for one in gc.get_objects()) <= 20 + bench.federation.limits.posts_per_relay


def test_nothing_is_kept_of_relays_that_have_taken_what_was_for_them(bench: Bench) -> None:
    """Also where one envelope at a time is under way, and never for a second."""
    for number in range(100):
        bench.submit(str(number), f"r{number}", twin=number + 1)
        bench.pass_time(0.5)
    gc.collect()
    assert bench.federation.accepted == 100
    assert sum(type(one) is Lane for one in gc.get_objects()) <= 1


def test_relays_that_have_failed_cost_nothing_for_envelopes_to_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each envelope is the only one under way. Twins may have named thousands of relays that do not exist."""
    for number in range(500):
        bench.relays.answers[f"r{number}"] = Reason.HOST_NOT_FOUND
        bench.submit(str(number), f"r{number}", twin=number + 1, lifetime_s=1)
    bench.pass_time(20)
    asked: list[str] = []
    rate = Ranker.rate

    def note(self: Ranker, relay: str, now: float) -> float:
        asked.append(relay)
        return rate(self, relay, now)

    monkeypatch.setattr(Ranker, "rate", note)
    for number in range(100):
        bench.submit(str(number), "good", twin=1_000)
    assert bench.federation.accepted == 100
    assert len(asked) < 2_000


def test_posts_to_all_relays_are_bounded_and_relays_take_turns() -> None:
    bench = Bench(posts=8)
    names = [f"slow{number}" for number in range(20)]
    for twin, name in enumerate([*names, "good"], 100):
        bench.relays.slow[name] = []
        for number in range(10):
            assert bench.submit(f"{name} {number}", name, twin=twin) is None
    assert len(bench.relays.posts) == 8
    answered = 0
    while "good" not in bench.relays.asked:
        bench.clock.advance(1.5)
        bench.relays.answer_one(next(name for name in names if bench.relays.slow[name]))
        answered += 1
    assert answered <= 21
    while any(bench.relays.slow.values()):
        assert sum(map(len, bench.relays.slow.values())) <= 8
        bench.relays.answer_one(next(name for name, open_ones in bench.relays.slow.items() if open_ones))
    assert bench.federation.accepted == 210 and len(bench.federation) == 0


def test_hundreds_of_relays_that_hang_do_not_hold_up_one_that_is_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twins choose the names of their relays, and all may lead to one host."""
    bench = Bench(posts=16, other_posts=12)
    answer = bench.relays.post

    def post(relay: str, envelopes: Any, connected_only: bool) -> Deferred[list[int]]:
        if relay == "good":
            return answer(relay, envelopes, connected_only)
        hangs: Deferred[list[int]] = Deferred()
        bench.clock.callLater(3, hangs.errback, NotPosted(Reason.TIMEOUT))
        return hangs

    monkeypatch.setattr(bench.relays, "post", post)
    bench.submit("before", "good")
    for number in range(300):
        assert bench.submit(f"hangs{number}", f"hangs{number}", twin=100 + number, lifetime_s=600) is None
    for number in range(60):
        bench.submit(str(number), "good")
        assert bench.relays.posts[-1] == ("good", [str(number)])
        bench.clock.advance(1)
    assert bench.federation.accepted == 61


def test_envelopes_that_go_on_to_another_relay_do_not_overtake_relays_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A twin may name 16 relays."""
    bench = Bench(posts=16, other_posts=12)
    asked: list[str] = []

    def post(relay: str, envelopes: Any, connected_only: bool) -> Deferred[list[int]]:
        asked.append(relay)
        hangs: Deferred[list[int]] = Deferred()
        bench.clock.callLater(3, hangs.errback, NotPosted(Reason.TIMEOUT))
        return hangs

    monkeypatch.setattr(bench.relays, "post", post)
    for number in range(60):
        names = [f"hangs{number}-{at}" for at in range(10)]
        assert bench.submit(f"hangs{number}", *names, twin=100 + number, lifetime_s=600) is None
    bench.submit("waits", "good")
    bench.pass_time(18, 0.5)
    assert asked.index("good") == 60


def test_hundreds_of_relays_that_fail_at_once_do_not_overflow_the_stack() -> None:
    bench = Bench(posts=1, failures_to_close=10**9)
    bench.relays.slow["slow"] = []
    bench.submit("slow", "slow", twin=1)
    for number in range(2, 500):
        bench.relays.answers[f"r{number}"] = Reason.OTHER
        bench.submit(str(number), f"r{number}", twin=number, lifetime_s=3)
    bench.relays.answer_one("slow")
    assert len(bench.relays.posts) == 499
    bench.pass_time(5, 1)
    assert len(bench.failed) == 498 and len(bench.federation) == 0


def test_thousands_of_posts_that_fail_at_once_do_not_overflow_the_stack() -> None:
    bench = Bench(failures_to_close=10**9)
    bench.relays.slow["a"] = []
    for number in range(2000):
        bench.submit(str(number), "a")
    waiting = bench.relays.slow.pop("a")
    bench.relays.answers["a"] = Reason.OTHER
    for done, _ in waiting:
        done.errback(NotPosted(Reason.OTHER))
    assert len(bench.relays.posts) == 2000
    bench.relays.answers["a"] = 202
    bench.pass_time(1)
    assert bench.federation.accepted == 2000


@pytest.mark.parametrize("seed", range(20))
def test_every_envelope_is_accepted_once_or_fails_once_before_its_end(seed: int) -> None:
    chance = random.Random(seed)
    bench = Bench(outstanding_bytes=200 * OUTGOING_BYTES, posts=chance.choice([3, 512]))
    bench.relays.known = {"a", "b"}
    accepted: Counter[str] = Counter()

    def post(relay: str, envelopes: Any, connected_only: bool) -> Deferred[list[int]]:
        done: Deferred[list[int]] = Deferred()
        statuses = [chance.choice((202, 202, 404, 429, 503)) for _ in envelopes]
        uids = [Envelope.FromString(data).uid for data in envelopes]
        silent = relay == "c" or chance.random() < 0.2

        def answer() -> None:
            if silent:
                done.errback(NotPosted(Reason.TIMEOUT))
                return
            accepted.update(uid for uid, status in zip(uids, statuses, strict=True) if status == 202)
            done.callback(statuses)

        if chance.random() < 0.3:
            answer()
        else:
            bench.clock.callLater(chance.random() * 3, answer)
        return done

    bench.relays.post = post  # type: ignore[method-assign]
    ends: dict[str, float] = {}
    parked: list[str] = []

    def park(uid: str, in_doubt: bool) -> None:
        parked.append(uid)

    for number in range(300):
        uid, relays = str(number), chance.sample("abcd", chance.randrange(1, 4))
        lifetime_s = chance.choice((1, 5, 60))
        if chance.random() < 0.2 and {"a", "b"} & set(relays):
            envelope = Envelope(uid=uid)
            twin = Twin(number + 1, bytes(32), tuple(relays))
            expires_at = UNIX + bench.clock.seconds() + lifetime_s
            parking = partial(park, uid)
            if bench.federation.elsewhere(envelope, envelope.SerializeToString(), twin, expires_at, parking):
                ends[uid] = bench.clock.seconds() + lifetime_s
        elif bench.submit(uid, *relays, source=chance.randrange(1, 9), twin=number + 1, lifetime_s=lifetime_s) is None:
            ends[uid] = bench.clock.seconds() + lifetime_s
        bench.pass_time(chance.random() / 2)
    over = {*accepted, *parked, *(uid for uid, _ in bench.failed)}
    assert {uid for uid, end_s in ends.items() if end_s + 1.1 < bench.clock.seconds()} <= over
    bench.pass_time(65)
    assert len(bench.federation) == 0
    outcomes = Counter(uid for uid, _ in bench.failed) + Counter(parked)
    assert set(outcomes.values()) <= {1}
    assert {*outcomes, *accepted} == set(ends)
    assert bench.federation._shares.held.used == 0 and not bench.federation._shares.by_relay
    assert bench.clock.getDelayedCalls() == []


# --- the end -------------------------------------------------------------------------------------------------------------


@pytest_twisted.ensureDeferred
async def test_stopping_waits_for_what_is_under_way_and_takes_no_more(bench: Bench) -> None:
    bench.relays.slow["a"] = []
    bench.submit("x", "a")
    stopping = Deferred.fromCoroutine(bench.federation.stop(5))
    assert bench.submit("late", "a") is RelayProblem.OVERLOADED
    assert not stopping.called
    bench.relays.answer_one("a")
    await stopping
    assert bench.failed == []
    assert bench.clock.getDelayedCalls() == []


@pytest_twisted.ensureDeferred
async def test_stopping_gives_up_after_its_time(bench: Bench) -> None:
    bench.relays.slow["a"] = []
    bench.submit("x", "a")
    stopping = Deferred.fromCoroutine(bench.federation.stop(5))
    bench.pass_time(5.1)
    await stopping
    assert bench.failed == [("x", RelayProblem.OVERLOADED)]
    assert bench.clock.getDelayedCalls() == []


@pytest_twisted.ensureDeferred
async def test_stopping_gives_up_what_is_left_in_many_turns_of_the_reactor(bench: Bench) -> None:
    """Sessions are still open then: all of them waited for more than a second."""
    bench.relays.slow["a"] = []
    for number in range(1_000):
        bench.submit(str(number), "a", lifetime_s=600)
    bench.failed = failed = Failed(bench.clock)
    stopping = Deferred.fromCoroutine(bench.federation.stop(0))
    bench.pass_time(1)
    await stopping
    assert 0 < failed.in_first_turn < 300
    assert bench.failed == [(str(number), RelayProblem.OVERLOADED) for number in range(1_000)]
    assert bench.clock.getDelayedCalls() == []


@pytest_twisted.ensureDeferred
async def test_what_rests_may_expire_while_it_is_given_up_in_many_turns(bench: Bench) -> None:
    bench.relays.answers["a"] = Reason.CONNECTION_REFUSED
    for number in range(1_000):
        bench.submit(str(number), "a", lifetime_s=2.99)
    bench.pass_time(2.99)  # all rest; those that have expired are looked for at 3 s
    stopping = Deferred.fromCoroutine(bench.federation.stop(5))
    bench.pass_time(1)
    await stopping
    assert sorted(uid for uid, _ in bench.failed) == sorted(map(str, range(1_000)))
    assert {problem for _, problem in bench.failed} == {RelayProblem.OVERLOADED, RelayProblem.EXPIRED}
    assert bench.clock.getDelayedCalls() == []


@pytest_twisted.ensureDeferred
async def test_stopping_does_not_wait_for_relays_that_do_not_answer(bench: Bench) -> None:
    bench.relays.answers["a"] = Reason.TIMEOUT
    bench.submit("long", "a")
    bench.pass_time(1)
    bench.submit("short", "b", twin=8)
    bench.relays.answers["b"] = Reason.TIMEOUT
    bench.submit("new", "b", twin=8)
    stopping = Deferred.fromCoroutine(bench.federation.stop(5))
    assert bench.failed == [("long", RelayProblem.OVERLOADED)]
    bench.pass_time(1)
    await stopping
    assert bench.failed[1:] == [("new", RelayProblem.OVERLOADED)]


# --- events --------------------------------------------------------------------------------------------------------------


def test_attempts_and_changed_ranks_are_told(bench: Bench) -> None:
    bench.relays.answers["a"] = [503, Reason.TIMEOUT, 404]
    bench.submit("x", "a")
    bench.pass_time(2)
    attempts = [(one.ok, one.reason) for one in bench.events if isinstance(one, FederationAttempted)]
    assert attempts == [(False, Reason.ANSWERED_5XX), (False, Reason.TIMEOUT), (False, Reason.ANSWERED_4XX)]
    ranks = [one.failures_per_hour for one in bench.events if isinstance(one, RelayRankChanged)]
    assert ranks == [1.0]  # the second is told some seconds later


def test_a_relay_that_heals_is_told(bench: Bench) -> None:
    bench.relays.answers["a"] = 503
    bench.submit("x", "a", "b")
    while not bench.relays.asked.count("a"):
        bench.submit("x", "a", "b")
    bench.pass_time(3700, 10)
    bench.relays.slow["c"] = []
    bench.submit("y", "c", twin=8, lifetime_s=20)
    bench.pass_time(30)
    ranks = [one.failures_per_hour for one in bench.events if isinstance(one, RelayRankChanged) and one.relay == "a"]
    assert ranks == [1.0, 0.0]


# --- lanes and rooms -----------------------------------------------------------------------------------------------------


def test_a_lane_closes_after_failures_in_a_row_and_longer_each_time() -> None:
    lane = Lane(3, Backoff(3.0, 30.0, 1.0, 0.0))
    for _ in range(2):
        lane.failed(0.0, lambda: 0.0)
    assert not lane.closed(0.0)
    lane.answered()
    for _ in range(4):  # the last one was under way when the lane closed
        lane.failed(0.0, lambda: 0.0)
    assert lane.closed(2.9)
    assert not lane.closed(3.0)
    for _ in range(4):
        lane.failed(3.0, lambda: 0.0)
    assert lane.closed(8.9)
    assert not lane.closed(9.0)
    lane.answered()
    assert not lane.closed(9.0)


def test_room_is_shared_and_given_back() -> None:
    room = Room(100)
    room.take("a", 50)
    assert not room.has("a", 1)
    room.take("b", 25)
    assert not room.has("b", 1)
    assert room.has("c", 25)
    room.give_back("a", 50)
    room.give_back("b", 25)
    assert room.used == 0
    assert room.has("a", 100)


def test_room_for_pairs_is_shared_by_receivers_and_in_each_share_by_senders() -> None:
    room = PairedRoom(800)
    assert room.take("a", "x", 200) and not room.take("a", "x", 1)
    assert room.take("a", "y", 100) and not room.take("a", "y", 1)
    assert room.take("a", "z", 50) and room.used == 350
    assert room.take("b", "x", 200) and room.take("b", "y", 25) and not room.take("b", "z", 200)
    room.give_back("a", "x", 200)
    assert room.take("a", "y", 10) and not room.take("a", "x", 241)
    for receiver, sender, size in (("a", "y", 110), ("a", "z", 50), ("b", "x", 200), ("b", "y", 25)):
        room.give_back(receiver, sender, size)
    assert room.used == 0 == len(room._of)
