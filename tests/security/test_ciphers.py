"""Clients and relays with and without AES, in all mixtures, from outside (:ref:`spec-ciphers`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.error import ConnectionDone

from dmsg.eventlog import schema as ev
from dmsg.mux.core.e2e_negotiation import Security

sync = pytest_twisted.ensureDeferred


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
        for end in (a, b):
            end.send(200_000)
        await s.wait(a.when_received(len(b.sent)))
        await s.wait(b.when_received(len(a.sent)))
        if security is Security.E2E:
            server = a.transport.getPeer().server_public_key
            [used] = [relay for relay in both if relay.key.public_key == server]
            await s.wait(used.stopService())
            a.send(100_000)
            await s.wait(b.when_received(len(a.sent)))
            assert len(s.alice_log.of(ev.TransportResumed)) == 1
        assert bytes(a.received) == b.sent and bytes(b.received) == a.sent
        a.transport.loseConnection()
        await s.over(a, b)
        assert isinstance(a.reason, ConnectionDone) and isinstance(b.reason, ConnectionDone)
