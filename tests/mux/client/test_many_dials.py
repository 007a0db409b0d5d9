"""Dials of many transports at once do not wait for each other in turn."""

from __future__ import annotations

import pytest_twisted
from twisted.internet.defer import DeferredList, ensureDeferred
from twisted.internet.protocol import Factory, Protocol

from dmsg.mux.core.e2e_negotiation import Security
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.stream import Stream
from dmsg.mux.core.wire import FWD
from dmsg.testing.hostile import drop
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork
from tests.worlds import AliceAndBob

sync = pytest_twisted.ensureDeferred
DIALS = 32


@sync
async def test_what_accepted_transports_lead_to_goes_out_before_all_of_them_are_handled() -> None:
    async with LocalNetwork(MemoryNetwork(), relays=1) as network:
        bob = await network.client()
        bob.listen(Factory.forProtocol(Protocol))
        alice = await network.client()
        (session,) = alice.pool.sessions.values()
        opened = 0
        opened_at_writes: list[int] = []
        write = session.shell.transport.write

        def spy(data: bytes) -> None:
            opened_at_writes.append(opened)
            write(data)

        session.shell.transport.write = spy

        async def dial_and_close() -> None:
            nonlocal opened
            transport = await alice.dial(bob.public_key)
            opened += 1
            transport.attach(Protocol())
            transport.loseConnection()

        await network.wait(
            DeferredList([ensureDeferred(dial_and_close()) for _ in range(DIALS)], fireOnOneErrback=True)
        )
        assert opened == DIALS
        while_handling = {count for count in opened_at_writes if 0 < count < DIALS}
        assert len(while_handling) >= 2, opened_at_writes


@sync
async def test_dials_through_a_base_relay_do_not_wait_for_others_whose_peer_is_silent() -> None:
    """All ACCEPTs come in one read. Of the handshake messages that follow them, the first eight do not arrive."""
    async with AliceAndBob(extended=False) as net:
        net.serve()
        silent = net.relay.rule(drop, kind=FWD, to=net.bob.public_key, times=8)
        dials = [ensureDeferred(net.alice.dial(net.bob.public_key, security=Security.E2E)) for _ in range(DIALS)]
        net.reactor.advance(1.0)
        assert silent.hits == 8
        assert [dial.called for dial in dials] == 8 * [False] + (DIALS - 8) * [True]
        DeferredList(dials[:8], consumeErrors=True)


@sync
async def test_answers_to_dials_through_a_base_relay_go_out_before_all_of_them_are_made() -> None:
    async with AliceAndBob(extended=False) as net:
        net.serve()
        (session,) = net.bob.pool.sessions.values()
        accept, write = session.connection.accept, session.shell.transport.write
        accepted = 0
        accepted_at_writes: list[int] = []

        def count(stream: PlainStream) -> Stream:
            nonlocal accepted
            accepted += 1
            return accept(stream)

        def spy(data: bytes) -> None:
            accepted_at_writes.append(accepted)
            write(data)

        session.connection.accept, session.shell.transport.write = count, spy
        dials = [ensureDeferred(net.alice.dial(net.bob.public_key, security=Security.E2E)) for _ in range(DIALS)]
        await net.wait(DeferredList(dials, fireOnOneErrback=True))
        while_accepting = {count for count in accepted_at_writes if 0 < count < DIALS}
        assert len(while_accepting) >= 2, accepted_at_writes
