"""Clients and relays with and without AES, in all mixtures, from outside (:ref:`spec-ciphers`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone

from dmsg.crypto.aead import Cipher
from dmsg.eventlog import schema as ev
from dmsg.mux.core.e2e_negotiation import Security

sync = pytest_twisted.ensureDeferred


def carries(relay: Any, end: Any) -> bool:
    """Whether the transport of ``end`` goes through ``relay``."""
    return bool(relay.key.public_key == end.transport.getPeer().server_public_key)


def check_ciphers(s: Any, relay: Any, have_aes: tuple[bool, bool, bool], security: Security) -> None:
    """What seals the records between each client and ``relay``, and the frames of the transport that it carries.

    ``have_aes`` is of who dials, the relay, who listens.
    """
    dials, relays, listens = have_aes

    def wanted(*sides: bool) -> Cipher:
        return Cipher.AES if all(sides) else Cipher.CHACHA

    for client, aes in ((s.alice, dials), (s.bob, listens)):
        connection = client.pool.sessions[relay.key.public_key].connection
        assert connection._records._cipher is wanted(aes, relays)
        if security is Security.E2E:
            [stream] = connection.streams.values()
            assert stream.frames._sender._cipher is stream.frames._receiver._cipher is wanted(dials, listens)


@pytest.mark.parametrize("security", [Security.E2E, Security.HOP])
@pytest.mark.parametrize(("dials", "relays", "listens"), list(product([True, False], repeat=3)))
@sync
async def test_any_mixture_carries_data_and_outlives_its_relay(
    scene: Any, dials: bool, relays: bool, listens: bool, security: Security
) -> None:
    """Of the two relays one has AES, so that a sealed transport that outlives its relay gets records of another cipher."""
    async with scene() as s:
        both = [await s.add_relay(aes=aes) for aes in (relays, not relays)]
        configs = (replace(s.CONFIG, aes=aes) for aes in (dials, listens))
        s.alice, s.bob = [
            await s.client(config=config, events=log, min_servers=2, security=security)
            for config, log in zip(configs, (s.alice_log, s.bob_log), strict=True)
        ]
        s.bob.listen(s.listener)
        a, b = await s.open()
        first, second = both if carries(both[0], a) else both[::-1]
        aes = relays if first is both[0] else not relays
        check_ciphers(s, first, (dials, aes, listens), security)
        for end in (a, b):
            end.send(200_000)
        await s.wait(a.when_received(len(b.sent)))
        await s.wait(b.when_received(len(a.sent)))
        if security is Security.E2E:
            await s.wait(first.stopService())
            a.send(100_000)
            await s.wait(b.when_received(len(a.sent)))
            assert len(s.alice_log.of(ev.TransportResumed)) == 1
            check_ciphers(s, second, (dials, not aes, listens), security)
        assert bytes(a.received) == b.sent and bytes(b.received) == a.sent
        a.transport.loseConnection()
        await s.over(a, b)
        assert isinstance(a.reason, ConnectionDone) and isinstance(b.reason, ConnectionDone)
