"""A connect of a client that is cancelled while its protocol is made."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import CancelledError, ensureDeferred
from twisted.internet.protocol import Factory

from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from dmsg.testing.probes import ConformanceProtocol


@pytest.mark.parametrize("kind", ["dmsg", "messaging"])
@pytest.mark.parametrize("then", ["builds", "builds none", "fails", "connectionMade"])
@pytest_twisted.ensureDeferred
async def test_a_connect_is_cancelled_while_its_protocol_is_made(then: str, kind: str, logged_errors: Any) -> None:
    protocol = ConformanceProtocol()

    class Asking(Factory):
        noisy = False

        def buildProtocol(self, addr: Any) -> ConformanceProtocol | None:
            if then == "connectionMade":
                protocol.on_made = lambda _: connecting.cancel()
                return protocol
            connecting.cancel()
            if then == "fails":
                raise ZeroDivisionError
            return protocol if then == "builds" else None

    messaging = kind == "messaging"
    async with LocalNetwork(
        MemoryNetwork(), relays=not messaging, messaging_relays=messaging, discovery=None
    ) as network:
        make = network.messaging_client if messaging else network.client
        alice, bob = await make(), await make()
        bob.listen(Factory.forProtocol(lambda: theirs))
        theirs = ConformanceProtocol()
        connecting = ensureDeferred(alice.connect(Asking(), bob.public_key))
        with pytest.raises(CancelledError):
            await network.wait(connecting)
        await network.settle()
        assert not list(alice.transports) and len(theirs.lost) == theirs.made
        assert (protocol.made, len(protocol.lost)) == ((1, 1) if then == "connectionMade" else (0, 0))
    assert len(logged_errors.flush(ZeroDivisionError)) == (1 if then == "fails" else 0)


@pytest_twisted.ensureDeferred
async def test_a_connect_is_cancelled_while_it_dials() -> None:
    async with LocalNetwork(MemoryNetwork(delay_s=0.1), relays=1, discovery=None) as network:
        alice, bob = await network.client(), await network.client()
        bob.listen(Factory.forProtocol(ConformanceProtocol))
        connecting = ensureDeferred(alice.connect(Factory.forProtocol(ConformanceProtocol), bob.public_key))
        network.reactor.advance(0.15)
        connecting.cancel()
        with pytest.raises(CancelledError):
            await network.wait(connecting)
        network.reactor.advance(5.0)
        assert not list(alice.transports) and not list(bob.transports)
