"""What strangers with free keys do to a listener: its friends get in all the same.

A stranger here speaks the secure extension, asks with a handshake message of its own, and never confirms.
"""

from __future__ import annotations

from itertools import cycle, islice
from os import urandom

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.task import LoopingCall

from dmsg.crypto.keys import SecretKey
from dmsg.errors import DialError
from dmsg.mux.pending import StreamOwner
from dmsg.mux.secure import SecureInitiator
from dmsg.mux.switch import ServerLimits
from dmsg.mux.wire import REQUEST
from dmsg.testing.hostile import RelayFrame
from dmsg.testing.memory import Path

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

    def accepted(self, message):
        self.was_accepted = True

    def ended(self, code, *, local, proven=False):
        self.code = code


def knock(s, client, *, service="", resume=None, message=None):
    """Send Bob a REQUEST over the extended connection of ``client``."""
    (session,) = client.pool.sessions.values()
    if message is None:
        message = SecureInitiator(client.key, s.bob.public_key, session.server, service=service, resume=resume).message
    stream = session.connection.open(s.bob.public_key, message)
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
        s.limits = ServerLimits(strays_per_s=1e9, stray_burst=10**9)  # it is the relay that makes the requests up
        await s.set(listed=listed)
        be_slow(s)
        bob, relay = s.bob.public_key, s.relay.key.public_key
        keys = [SecretKey.generate() for _ in range(1_000)]
        requests = cycle(key.public_key.raw + bob.raw + SecureInitiator(key, bob, relay).message for key in keys)

        def attack():
            port = s.relay.switch.ports[bob.raw]
            for payload in islice(requests, 20):
                s.relay.send(RelayFrame(bob, REQUEST, port.free_id(urandom), payload))

        attacking = repeat(s, 0.02, attack)
        s.reactor.advance(0.5)
        assert await visits(s, 20) == 20
        attacking.stop()
