"""TCP over loopback passes the whole kit: nothing is asked of a transport that Twisted's own does not do."""

from __future__ import annotations

import pytest
import pytest_twisted
from twisted.internet.endpoints import TCP4ClientEndpoint, TCP4ServerEndpoint

from dmsg.testing.conformance import TransportConformance
from dmsg.testing.harness import TransportHarness, case


@pytest.mark.system
class TestTCP(TransportConformance):
    @pytest.fixture(autouse=True)
    def _flush(self, logged_errors):
        self.flush_logged_errors = logged_errors.flush

    def make_endpoints(self):
        server = TCP4ServerEndpoint(self.reactor, 0, interface="127.0.0.1")
        return server, lambda port: TCP4ClientEndpoint(self.reactor, "127.0.0.1", port.getHost().port)


@pytest_twisted.ensureDeferred
async def test_what_cannot_be_cleaned_up_keeps_nothing_else_from_it():
    cleaned = []

    class Harness(TransportHarness):
        @case
        async def go(self):
            self.add_cleanup(lambda: cleaned.append("first"))
            self.add_cleanup(lambda: {}["missing"])
            self.add_cleanup(lambda: cleaned.append("last"))

    with pytest.raises(KeyError, match="missing"):
        await Harness().go()
    assert cleaned == ["last", "first"]
