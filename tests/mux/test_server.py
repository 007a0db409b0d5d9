"""The server as a service: what the tests of its rules and of its weaknesses do not touch."""

from __future__ import annotations

import pytest
import pytest_twisted
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import CannotListenError
from twisted.internet.protocol import Factory

from dmsg.crypto.keys import SecretKey
from dmsg.mux.server import DmsgServer


@pytest_twisted.ensureDeferred
async def test_listening_on_a_port_that_is_taken(reactor, logged_errors):
    taken = await TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1").listen(Factory())
    endpoint = TCP4ServerEndpoint(reactor, taken.getHost().port, interface="127.0.0.1")
    server = DmsgServer(reactor, SecretKey.generate(), endpoint)
    server.startService()
    with pytest.raises(CannotListenError):
        await server.listening()
    assert not server.ready
    assert len(logged_errors.flush(CannotListenError)) == 1
    await server.stopService()
    await taken.stopListening()
