"""What strangers with free keys do to a listener: its friends get in all the same.

A stranger here speaks the secure extension, asks with a handshake message of its own, and never confirms. What it
learns from refusals, what its requests make Bob look up, and what a relay can do in the name of a listed key is below.
"""

from __future__ import annotations

from itertools import cycle, islice
from os import urandom

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import LoopingCall

from dmsg.clients.access import AllowKeys
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import BASE_VERSION, ClientPart, Entry
from dmsg.errors import DialError
from dmsg.mux.client.pending import StreamOwner
from dmsg.mux.core.e2e_handshake import Resume, SecureInitiator
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.errors import AccessDenied, NoSuchService
from dmsg.mux.core.wire import CLOSE, FWD, REQUEST, CloseReason, encode_frame
from dmsg.mux.relay.limits import RelayLimits
from dmsg.testing.hostile import RelayFrame, drop
from dmsg.testing.memory import Path
from dmsg.testing.network import MemoryDiscovery

sync = pytest_twisted.ensureDeferred
listeners = pytest.mark.parametrize("listed", [True, False], ids=["allow list", "open"])
#: From a client to the relay; a round trip between clients is four times as long.
DELAY_S = 0.025
#: How often and at what interval the friend comes.
VISITS, VISIT_S = 91, 0.11


class Answer(StreamOwner):
    """What became of a stranger's REQUEST: ``code`` is the reason of its CLOSE."""

    def __init__(self):
        self.was_accepted = False
        self.code = None

    def opened(self, stream, resume):
        self.was_accepted = True

    def ended(self, code, *, local, proven=False, detail=""):
        self.code = code


def knock(s, client, *, service="", resume=None, message=None):
    """Send Bob a REQUEST over the extended connection of ``client``, which never proves itself."""
    (session,) = client.pool.sessions.values()
    if message is None:
        message = SecureInitiator(client.key, s.bob.public_key, session.server, service=service, resume=resume).message
    core = session.connection
    request = client.public_key.raw + s.bob.public_key.raw + message
    stream = core._openings._new_stream(core._ids.take(core.streams), s.bob.public_key, request, initiator=True)
    core.send_control(encode_frame(REQUEST, stream.id, request))
    stream.owner = answer = Answer()
    session.flush_soon()
    return answer


async def strangers(s, count):
    return [await s.client(publish=False, config=s.CONFIG) for _ in range(count)]


def be_slow(s):
    for server in s.pinned:
        s.reactor.set_path(server.address.host, server.address.port, Path(DELAY_S))


def repeat(s, interval_s, call):
    """Call at intervals until ``stop``."""
    calling = LoopingCall(call)
    calling.clock = s.reactor
    calling.start(interval_s)
    return calling


async def visits(s, count=VISITS):
    """How many times Alice gets in when she comes ``count`` times, each time with two bytes for Bob."""
    dials = []

    async def visit():
        try:
            transport = await s.alice.dial(s.bob.public_key)
        except (CancelledError, DialError):
            return
        end = s.End()
        transport.attach(end)
        end.send(2)
        transport.loseConnection()

    for _ in range(count):
        dials.append(Deferred.fromCoroutine(visit()))
        s.reactor.advance(VISIT_S)
    s.reactor.advance(1.0)
    for dial in dials:
        dial.cancel()  # what has not got in by now counts as shut out
    return sum(len(end.received) == 2 for end in s.listener.built)


@listeners
@pytest.mark.parametrize("keys", [1, 130], ids=["one key", "a key each"])
@pytest.mark.parametrize("message", [None, b""], ids=["sealed", "plain"])
@sync
async def test_a_stranger_does_not_lock_a_listener(scene, message, keys, listed):
    """8.8 requests a second: a friend gets in 91 times of 91."""
    async with scene() as s:
        await s.set(listed=listed)
        crowd = cycle(await strangers(s, keys))
        be_slow(s)
        attack = repeat(s, 1 / 8.8, lambda: knock(s, next(crowd), message=message))
        s.reactor.advance(3.0)
        assert await visits(s) == VISITS
        attack.stop()


@listeners
@sync
async def test_a_thousand_keys_at_a_thousand_requests_a_second(scene, listed):
    """An offer has 256 ms then before its place goes to another one; a friend needs a round trip of 100."""
    async with scene() as s:
        s.limits = RelayLimits(strays_per_s=1e9, stray_burst=10**9)  # it is the relay that makes the requests up
        await s.set(listed=listed)
        be_slow(s)
        bob, relay = s.bob.public_key, s.relay.key.public_key
        keys = [SecretKey.generate() for _ in range(1_000)]
        requests = cycle(key.public_key.raw + bob.raw + SecureInitiator(key, bob, relay).message for key in keys)

        def attack():
            member = s.relay.switch.members[bob.raw]
            for payload in islice(requests, 20):
                s.relay.send(RelayFrame(bob, REQUEST, member.free_id(urandom), payload))

        attacking = repeat(s, 0.02, attack)
        s.reactor.advance(0.5)
        assert await visits(s, 20) == 20
        attacking.stop()


# --- made-up tokens, and transports nothing is done with -----------------------------------------------------------------

MADE_UP = Resume(b"no such token...", 0)


@sync
async def test_a_made_up_token_does_not_pass_by_an_access_list(scene):
    async with scene() as s:
        await s.set(listed=True)
        (stranger,) = await strangers(s, 1)
        answer = knock(s, stranger, resume=MADE_UP)
        await s.settle()
        assert (answer.was_accepted, answer.code) == (False, CloseReason.ACCESS_DENIED)
        (session,) = s.bob.pool.sessions.values()
        assert not session.connection.streams


@sync
async def test_made_up_tokens_have_no_more_places_than_other_offers(scene):
    async with scene() as s:
        await s.set()
        (stranger,) = await strangers(s, 1)
        answers = []
        for _ in range(6):
            answers += [knock(s, stranger, resume=MADE_UP) for _ in range(50)]
            await s.settle()
        assert sum(answer.was_accepted for answer in answers) == 128
        assert [answer.code for answer in answers].count(CloseReason.BUSY) == 300 - 128
        assert await visits(s, 5) == 5
        s.reactor.advance(3.0)
        (session,) = s.bob.pool.sessions.values()
        assert not session.connection.streams


@sync
async def test_transports_that_strangers_do_nothing_with_are_closed_in_a_crowd(scene):
    """420 of them over seven keys and 60 of one more; what is used, and what a key with few transports has, stays."""
    async with scene() as s:
        await s.set()
        used, _ = await s.open()
        used.send(1)
        unused, _ = await s.open()
        crowd = await strangers(s, 8)
        for stranger in crowd:
            for _ in range(60):
                transport = await s.wait(stranger.dial(s.bob.public_key))
                transport.attach(s.End())
        (session,) = s.bob.pool.sessions.values()
        assert len(session.connection.streams) == 482
        s.reactor.advance(12.0)
        await s.settle()
        assert len(session.connection.streams) == 384
        assert not used.lost and not unused.lost
        held = [len(session.connection.streams) for one in crowd for session in one.pool.sessions.values()]
        assert max(held) - min(held) <= 1, "the key that holds the most gives first"
        assert await visits(s, 20) == 20


# --- what a stranger's request makes Bob look up ----------------------------------------------------------------------------


class Asked(MemoryDiscovery):
    """A discovery that counts what it is asked for, and with ``silent`` does not answer."""

    silent = False

    def __init__(self, now_ns):
        super().__init__(now_ns)
        self.peers = []
        self.waiting = 0

    async def get_entry(self, public_key):
        self.peers.append(public_key)
        if self.silent:
            self.waiting += 1
            try:
                await Deferred()
            finally:
                self.waiting -= 1
        return await super().get_entry(public_key)


async def watched(s, **options):
    s.discovery = Asked(s.now_ns)
    s.limits = RelayLimits(strays_per_s=1e9, stray_burst=10**9)
    await s.set(**options)
    s.discovery.peers.clear()
    return s.discovery


def ask_in_the_clear(s, *keys):
    """REQUESTs without a handshake, from the relay, as they would come in from as many clients."""
    member = s.relay.switch.members[s.bob.public_key.raw]
    for key in keys:
        request = key.raw + s.bob.public_key.raw
        s.relay.send(RelayFrame(s.bob.public_key, REQUEST, member.free_id(urandom), request))


@sync
async def test_a_key_without_an_entry_is_looked_up_once(scene):
    async with scene() as s:
        discovery = await watched(s)
        stranger = SecretKey.generate().public_key
        for _ in range(50):
            ask_in_the_clear(s, stranger)
            await s.settle()
        assert discovery.peers == [stranger]


@pytest.mark.parametrize("silent", [False, True], ids=["discovery answers", "discovery is silent"])
@sync
async def test_a_thousand_keys_make_few_look_ups(scene, silent):
    async with scene() as s:
        discovery = await watched(s)
        discovery.silent = silent
        keys = [SecretKey.generate().public_key for _ in range(1_000)]
        for number in range(0, 1_000, 100):
            ask_in_the_clear(s, *keys[number : number + 100])
            await s.settle()
            assert discovery.waiting <= 8
            s.reactor.advance(0.1)
        assert len(discovery.peers) <= 25 + 10 + 1
        discovery.silent = False


@sync
async def test_a_stranger_off_the_list_makes_no_look_up(scene):
    async with scene() as s:
        discovery = await watched(s, listed=True, asks=Security.PREFER)
        ask_in_the_clear(s, SecretKey.generate().public_key)
        await s.settle()
        assert not discovery.peers


# --- lists of keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("security", [None, Security.PREFER], ids=["default", "prefer"])
@sync
async def test_a_relay_that_speaks_for_a_listed_key_with_a_base_entry(scene, security):
    """It gets in only where a listener with a list has said by name that it prefers, and does not insist on, security."""
    async with scene() as s:
        listed = SecretKey.generate()
        await s.set(listed=listed.public_key, asks=security)
        entry = Entry(BASE_VERSION, 0, s.now_ns(), listed.public_key, ClientPart((s.relay.key.public_key,)))
        await s.wait(s.discovery.post_entry(entry.sign(listed)))
        bob = s.bob.public_key
        number = s.relay.switch.members[bob.raw].free_id(urandom)
        s.relay.rule(drop, kind=CLOSE, to=bob, times=None)  # what an honest switch says to an ACCEPT it has no rule for
        s.relay.send(RelayFrame(bob, REQUEST, number, listed.public_key.raw + bob.raw))
        await s.settle()
        s.relay.send(RelayFrame(bob, FWD, number, b"\0\0made up"))
        await s.settle()
        assert [bytes(end.received) for end in s.listener.built] == ([] if security is None else [b"made up"])


async def refusal(s, client, service):
    with pytest.raises(DialError) as caught:
        await s.wait(client.dial(s.bob.public_key, service))
    return caught.value.attempts[-1].error


@pytest.mark.parametrize("also_open", [False, True], ids=["lists only", "one is open"])
@pytest.mark.parametrize("extended", [True, False], ids=["carrier A", "carrier B"])
@sync
async def test_a_stranger_cannot_tell_which_services_exist(scene, extended, also_open):
    async with scene() as s:
        await s.set(extended=extended, listed=True)
        s.bob.listen(s.Listener(), "ssh", policy=AllowKeys([s.alice.public_key]))
        if also_open:
            s.bob.listen(s.Listener(), "web")
        (stranger,) = await strangers(s, 1)
        refusals = [await refusal(s, stranger, name) for name in ("", "ssh", "missing")]
        assert {type(error) for error in refusals} == {AccessDenied}
        assert "or nothing listens there" in str(refusals[1]) and "or nothing listens there" in str(refusals[2])
        friend = s.alice
        assert isinstance(await refusal(s, friend, "missing"), NoSuchService), "from her nothing is kept"


@sync
async def test_a_stranger_off_every_list_is_refused_before_anything_is_calculated(scene):
    """The answer to every request is the same: neither it nor its time says anything about a service."""
    async with scene() as s:
        await s.set(listed=True)
        (stranger,) = await strangers(s, 1)
        answers = [knock(s, stranger, message=message) for message in (b"", b"no handshake", bytes(500), None)]
        await s.settle()
        assert [(answer.was_accepted, answer.code) for answer in answers] == [(False, CloseReason.ACCESS_DENIED)] * 4
