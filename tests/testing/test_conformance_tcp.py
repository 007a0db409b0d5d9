"""TCP over loopback passes the whole kit: nothing is asked of a transport that Twisted's own does not do."""

from __future__ import annotations

import pytest
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint

from dmsg.testing.conformance import TransportConformance


@pytest.mark.system
class TestTCP(TransportConformance):
    @pytest.fixture(autouse=True)
    def _flush(self, logged_errors):
        self.flush_logged_errors = logged_errors.flush

    def make_endpoints(self):
        server = TCP4ServerEndpoint(self.reactor, 0, interface="127.0.0.1")
        return server, lambda port: TCP4ClientEndpoint(self.reactor, "127.0.0.1", port.getHost().port)
