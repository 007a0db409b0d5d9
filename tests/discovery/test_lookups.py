"""What a dialer asks of discovery: once for however many want to know, and not longer than it is of use."""

from __future__ import annotations

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import Clock
from zope.interface import implementer

from benchmarks.census import census
from dmsg.clients.dial import DialConfig
from dmsg.clients.dialer import Dialer
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import ClientPart, Entry
from dmsg.discovery.errors import DiscoveryUnavailable, EntryNotFound
from dmsg.discovery.lookups import SILENCE_S, SILENT_AFTER_S, CallerLimits, Lookups
from dmsg.errors import DialError, StageError
from dmsg.interfaces import IDiscovery
from dmsg.mux.client.dial import DialRequest
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.relays.scores import RelayScores

PEER = SecretKey.generate()
RELAYS = [SecretKey.generate().public_key for _ in range(3)]


def entry(*relays, version="0.1.0"):
    return Entry(version, 0, 1, PEER.public_key, ClientPart(relays), None).sign(PEER)


@implementer(IDiscovery)
class SlowDiscovery:
    """Answers when it is told to."""

    def __init__(self):
        self.questions = []
        self.cancelled = 0

    async def get_entry(self, public_key):
        question = Deferred()
        self.questions.append(question)
        try:
            return await question
        except CancelledError:
            self.cancelled += 1
            raise


class Pool:
    """A pool whose every server is out of reach; notes which were tried."""

    def __init__(self, sessions=(), pinned=()):
        self.sessions = dict.fromkeys(sessions)
        self.pinned = dict.fromkeys(pinned)
        self.tried = []
        self.scores = RelayScores()

    def get(self, server):
        self.tried.append(server)
        failed = Deferred()
        failed.errback(StageError("connect", "connection refused"))
        return failed


@pytest.fixture
def discovery():
    return SlowDiscovery()


@pytest.fixture
def lookups(clock, discovery):
    return Lookups(clock, discovery, 2)


def test_however_many_ask_discovery_is_asked_once(lookups, discovery):
    answers = []
    for _ in range(50):
        lookups.ask(PEER.public_key).addCallback(answers.append)
    assert len(discovery.questions) == 1
    discovery.questions[0].callback(entry(*RELAYS))
    assert len(answers) == 50
    assert {one.servers for one in answers} == {tuple(RELAYS)} and answers[0].promised


def test_an_error_reaches_all_who_asked(lookups, discovery):
    waiting = [lookups.ask(PEER.public_key) for _ in range(2)]
    discovery.questions[0].errback(EntryNotFound())
    for one in waiting:
        one.addErrback(lambda failure: failure.trap(EntryNotFound))
    assert lookups.known(PEER.public_key, 1e9) is None
    lookups.ask(PEER.public_key)
    assert len(discovery.questions) == 2


def test_a_question_is_given_up_with_the_last_who_waits_and_not_before(lookups, discovery):
    waiting = [lookups.ask(PEER.public_key) for _ in range(2)]
    for count, one in enumerate(waiting):
        assert discovery.cancelled == 0, count
        one.addErrback(lambda failure: failure.trap(CancelledError))
        one.cancel()
    assert discovery.cancelled == 1
    lookups.ask(PEER.public_key)
    assert len(discovery.questions) == 2


def test_what_is_known_grows_old(clock, lookups, discovery):
    lookups.ask(PEER.public_key)
    discovery.questions[0].callback(entry(version="0.0.1"))
    clock.advance(3)
    assert lookups.known(PEER.public_key, 2.9) is None
    known = lookups.known(PEER.public_key, 3)
    assert known is not None and not known.promised
    lookups.doubt(PEER.public_key)
    assert lookups.known(PEER.public_key, 3) is None


def test_the_longest_known_is_forgotten_for_a_new_one(lookups, discovery):
    peers = [PEER.public_key, *RELAYS[:2]]
    for peer in (*peers[:2], peers[0], peers[2]):
        lookups.ask(peer)
        discovery.questions[-1].callback(entry())
    assert [lookups.known(peer, 1) is not None for peer in peers] == [True, False, True]


def test_what_was_said_before_is_there_when_it_is_doubted_or_old_and_of_callers_too(clock, lookups, discovery):
    lookups.ask(PEER.public_key)
    discovery.questions[0].callback(entry(*RELAYS))
    lookups.doubt(PEER.public_key)
    clock.advance(3)
    assert lookups.known(PEER.public_key, 3) is None
    earlier = lookups.earlier(PEER.public_key, 3)
    assert earlier is not None and earlier.servers == tuple(RELAYS)
    assert lookups.earlier(PEER.public_key, 2.9) is None and lookups.earlier(STRANGERS[0], 3) is None
    promised(lookups, STRANGERS[0])
    discovery.questions[1].callback(entry(RELAYS[0]))
    earlier = lookups.earlier(STRANGERS[0], 3)
    assert earlier is not None and earlier.servers == (RELAYS[0],)


def test_of_what_was_said_for_a_dial_and_for_a_caller_the_later_counts(clock, lookups, discovery):
    lookups.ask(PEER.public_key)
    discovery.questions[0].callback(entry(RELAYS[0]))
    for asks, relay in ((promised, RELAYS[1]), (Lookups.ask, RELAYS[2])):
        clock.advance(10)
        asks(lookups, PEER.public_key)
        discovery.questions[-1].callback(entry(relay))
        earlier = lookups.earlier(PEER.public_key, 5)
        assert earlier is not None and earlier.servers == (relay,)


def test_where_a_peer_was_reached_counts_until_discovery_says_more(clock, lookups, discovery):
    key = PEER.public_key
    lookups.reached(key, RELAYS[1])
    assert lookups.earlier(key, 5) is None  # nothing is known of it
    lookups.ask(key)
    discovery.questions[0].callback(entry(RELAYS[0]))
    for _ in range(2):
        lookups.reached(key, RELAYS[1])
        for known in (lookups.earlier(key, 5), lookups.known(key, 5)):
            assert known is not None and known.servers == (RELAYS[1], RELAYS[0]) and known.promised
    told = []
    lookups.ask(key).addCallback(told.append)
    lookups.reached(key, RELAYS[0])
    assert [(one.servers, one.promised) for one in told] == [((RELAYS[0], RELAYS[1]), True)]
    known = lookups.earlier(key, 5)
    assert known is not None and known.servers == (RELAYS[0], RELAYS[1])
    discovery.questions[1].callback(entry(RELAYS[2]))
    known = lookups.earlier(key, 5)
    assert known is not None and known.servers == (RELAYS[2],) and len(told) == 1


def test_what_is_asked_about_a_caller_is_not_answered_by_where_it_was_reached(clock, lookups, discovery):
    answers = promised(lookups, PEER.public_key)
    lookups.reached(PEER.public_key, RELAYS[0])
    assert not answers


def test_a_question_that_is_held_goes_on_for_who_asks_next(clock, lookups, discovery):
    with lookups.holding(PEER.public_key):
        with lookups.holding(PEER.public_key):
            first = lookups.ask(PEER.public_key).addErrback(lambda _: None)
            first.cancel()
        clock.advance(2)
        assert not discovery.cancelled and lookups.asked_for_s(PEER.public_key) == 2
        second = lookups.ask(PEER.public_key).addErrback(lambda _: None)
        second.cancel()
        discovery.questions[0].callback(entry(*RELAYS))
        assert lookups.known(PEER.public_key, 1) is not None
        lookups.ask(PEER.public_key).addErrback(lambda _: None).cancel()
        assert not discovery.cancelled
    assert discovery.cancelled == 1 and len(discovery.questions) == 2
    assert not lookups._holders and lookups.asked_for_s(PEER.public_key) == 0


def test_discovery_is_silent_when_it_has_left_a_question_without_an_answer_until_it_answers(clock, lookups, discovery):
    lookups.ask(PEER.public_key).addErrback(lambda _: None).cancel()
    assert not lookups.is_silent  # it had no time
    for end in (lambda asking: asking.cancel(), lambda _: discovery.questions[-1].errback(DiscoveryUnavailable())):
        asking = lookups.ask(PEER.public_key).addErrback(lambda _: None)
        clock.advance(SILENT_AFTER_S)
        end(asking)
        assert lookups.is_silent
        clock.advance(SILENCE_S)
        assert not lookups.is_silent
    asking = lookups.ask(PEER.public_key).addErrback(lambda _: None)
    clock.advance(SILENT_AFTER_S)
    asking.cancel()
    lookups.ask(PEER.public_key).addErrback(lambda _: None)
    discovery.questions[-1].errback(EntryNotFound())
    assert not lookups.is_silent


async def dial(dialer, *, resume):
    request = DialRequest(PEER.public_key, security=Security.E2E, resume=Resume(bytes(16), 0) if resume else None)
    attempts = []
    with pytest.raises(DialError):
        await dialer.dial(request, None, attempts)
    return [one.stage for one in attempts]


def started(dialer, *, resume):
    return Deferred.fromCoroutine(dial(dialer, resume=resume))


@pytest.mark.parametrize("silent", [False, True])
@pytest_twisted.ensureDeferred
async def test_a_transport_finds_another_path_although_discovery_is_gone(discovery, silent):
    clock = Clock()
    pool = Pool(sessions=RELAYS[:1], pinned=RELAYS[1:2])
    dialer = Dialer(clock, pool, discovery, DialConfig(), lambda: 0.5)
    first = started(dialer, resume=True)
    discovery.questions[0].callback(entry(RELAYS[2]))
    assert await first == ["connect"] and pool.tried == [RELAYS[2]]
    clock.advance(7 * 24 * 3600.0)
    second = started(dialer, resume=True)
    if silent:
        clock.advance(dialer.config.look_up_s)
    else:
        discovery.questions[1].errback(DiscoveryUnavailable())
    assert (await second)[0] == "discovery"
    assert set(pool.tried[1:]) == set(RELAYS)
    assert not clock.getDelayedCalls()


@pytest_twisted.ensureDeferred
async def test_many_transports_that_look_for_another_path_ask_once_and_those_that_try_again_ask_anew(discovery):
    clock = Clock()
    dialer = Dialer(clock, Pool(), discovery, DialConfig(), lambda: 0.5)
    searching = [started(dialer, resume=True) for _ in range(20)]
    discovery.questions[0].callback(entry(RELAYS[0]))
    for search in searching:
        await search
    await started(dialer, resume=True)  # it found no path, but what discovery says is not older for that
    assert len(discovery.questions) == 1
    clock.advance(dialer.config.resume_entry_lifetime_s + 0.01)
    again = started(dialer, resume=True)
    discovery.questions[1].callback(entry(RELAYS[1]))
    await again
    assert len(discovery.questions) == 2


# --- callers ----------------------------------------------------------------------------------------------------------

STRANGERS = [SecretKey.generate().public_key for _ in range(100)]


def promised(lookups, peer):
    """Whether ``peer`` is taken to promise end-to-end security: a list with the answer, once there is one."""
    answers = []
    Deferred.fromCoroutine(lookups.promised(peer, 5.0)).addCallback(answers.append)
    return answers


@pytest.fixture
def callers(clock, discovery):
    return Lookups(clock, discovery, 2, CallerLimits(entries=50, at_once=4, per_s=2.0, burst=10))


@pytest.mark.parametrize(("version", "expected"), [("0.0.1", False), ("0.1.0", True)])
def test_what_is_known_of_a_caller_is_remembered_for_a_while(clock, discovery, callers, version, expected):
    answers = promised(callers, PEER.public_key)
    discovery.questions[0].callback(entry(version=version))
    assert answers == promised(callers, PEER.public_key) == [expected]
    assert len(discovery.questions) == 1
    clock.advance(5.1)
    assert promised(callers, PEER.public_key) == []
    assert len(discovery.questions) == 2


@pytest.mark.parametrize("error", [EntryNotFound, DiscoveryUnavailable])
def test_a_caller_that_is_not_found_promises_and_is_remembered_too(clock, discovery, callers, error):
    answers = promised(callers, PEER.public_key)
    discovery.questions[0].errback(error())
    assert answers == promised(callers, PEER.public_key) == [True]
    clock.advance(5.1)
    promised(callers, PEER.public_key)
    assert len(discovery.questions) == 2


def test_callers_that_were_not_found_are_forgotten_when_that_no_longer_counts(clock, discovery, callers):
    for _ in range(40):
        assert promised(callers, SecretKey.generate().public_key) == []
        discovery.questions[-1].errback(EntryNotFound())
        clock.advance(1.0)
    assert census(callers)["tables"]["_Table._things"] <= 7


def test_only_so_many_callers_are_looked_up_at_one_time(discovery, callers):
    answers = [promised(callers, peer) for peer in STRANGERS[:6]]
    assert len(discovery.questions) == 4
    assert answers == [[], [], [], [], [True], [True]]
    discovery.questions[0].errback(EntryNotFound())
    assert promised(callers, STRANGERS[6]) == []


def test_many_requests_of_one_caller_are_one_look_up(discovery, callers):
    answers = [promised(callers, PEER.public_key) for _ in range(20)]
    assert [promised(callers, peer) for peer in STRANGERS[:3]] == [[]] * 3, "they take one of the places at one time"
    discovery.questions[0].callback(entry(version="0.0.1"))
    assert answers == [[False]] * 20


def test_only_so_many_callers_are_looked_up_in_a_second(clock, discovery, callers):
    for peer in STRANGERS[:50]:
        promised(callers, peer)
        if discovery.questions and not discovery.questions[-1].called:
            discovery.questions[-1].errback(EntryNotFound())
    assert len(discovery.questions) == 10
    clock.advance(1.0)
    assert [promised(callers, peer) for peer in STRANGERS[50:53]] == [[], [], [True]]


def test_strangers_take_nothing_from_callers_with_an_entry(clock, discovery, callers):
    """Neither their turn nor their place in memory."""
    promised(callers, PEER.public_key)
    discovery.questions[0].callback(entry(version="0.0.1"))
    for _ in range(20):
        clock.advance(0.5)
        for peer in [SecretKey.generate().public_key for _ in range(5)]:
            promised(callers, peer)
            if not discovery.questions[-1].called:
                discovery.questions[-1].errback(EntryNotFound())
    assert promised(callers, STRANGERS[0]) == [True], "there is no turn left for them"
    answers = promised(callers, PEER.public_key)
    discovery.questions[-1].callback(entry(version="0.0.1"))
    assert answers == [False]


def test_callers_do_not_push_out_what_was_dialled(discovery, callers):
    callers.ask(PEER.public_key)
    discovery.questions[0].callback(entry(*RELAYS))
    for number, peer in enumerate(STRANGERS[:10]):
        promised(callers, peer)
        if number % 2:
            discovery.questions[-1].errback(EntryNotFound())
        else:
            discovery.questions[-1].callback(entry())
    assert callers.known(PEER.public_key, 5.0).servers == tuple(RELAYS)
    assert promised(callers, PEER.public_key) == [True]


def test_what_a_dial_asks_is_kept_for_dials_also_if_a_caller_was_asked_for_first(discovery, callers):
    promised(callers, PEER.public_key)
    callers.ask(PEER.public_key)
    assert len(discovery.questions) == 1
    discovery.questions[0].callback(entry(*RELAYS))
    assert callers.known(PEER.public_key, 5.0).servers == tuple(RELAYS)
