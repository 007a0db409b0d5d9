"""WebSockets between a limited HTTP site and clients, on connections in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.web.resource import Resource
from twisted.web.server import NOT_DONE_YET

from dmsg.errors import DmsgError
from dmsg.glue.shell import Shell
from dmsg.glue.websocket import WebSocketShell, WebSocketUrl, accept_websocket, asks_for_websocket, connect_websocket
from dmsg.http.limits import HttpLimits
from dmsg.http.server import LimitedSite
from dmsg.sansio.websocket import WebSocketConfig
from dmsg.sansio.websocket_frames import Closed
from dmsg.sansio.websocket_handshake import WebSocketRefused
from dmsg.testing.memory import MemoryNetwork


class Party:
    """An owner that writes down what it is told."""

    def __init__(self) -> None:
        self.messages: list[object] = []
        self.closed: Closed | None = None
        self.error: DmsgError | None = None
        self.lost = False

    def handle_events(self, shell: Shell, events: Sequence[object]) -> None:
        for event in events:
            if isinstance(event, Closed):
                assert self.closed is None
                self.closed = event
            else:
                self.messages.append(event)

    def after_read(self, shell: Shell) -> None:
        shell.flush()

    def flushed(self, shell: Shell) -> None:
        """Nobody waits."""

    def connection_lost(self, shell: Shell, error: DmsgError | None, reason: object) -> None:
        assert not self.lost
        self.lost, self.error = True, error


class Door(Resource):
    """Agrees to every WebSocket, at once or, with ``gate``, when that fires; refuses with status and text."""

    isLeaf = True

    def __init__(self, network: MemoryNetwork, config: WebSocketConfig) -> None:
        super().__init__()
        self.network, self.config = network, config
        self.gate: Deferred[None] | None = None
        self.parties: list[Party] = []
        self.shells: list[WebSocketShell] = []

    def render(self, request: Any) -> bytes | int:
        if not asks_for_websocket(request):
            return b"no WebSocket"
        if self.gate is None:
            return self.accept(request)
        self.gate.addCallback(lambda _: self.accept(request))
        return NOT_DONE_YET

    def accept(self, request: Any) -> bytes | int:
        self.parties.append(Party())
        try:
            self.shells.append(accept_websocket(request, self.parties[-1], self.network, self.config))
        except WebSocketRefused as refused:
            request.setResponseCode(refused.status)
            return refused.text.encode()
        return NOT_DONE_YET


class World:
    """A site at ``relay:80`` whose resource is ``door``."""

    def __init__(self, **config: Any) -> None:
        self.network = MemoryNetwork(hosts={"relay": "192.0.2.1"})
        self.door = Door(self.network, WebSocketConfig(**config))
        self.site: Any = LimitedSite(self.door, reactor=self.network, limits=HttpLimits(body_bytes=100))
        self.port = self.network.listenTCP(80, self.site)

    def dial(self, url: str = "ws://relay/", **options: Any) -> tuple[Party, Deferred[WebSocketShell]]:
        party = Party()
        opened = connect_websocket(self.network, WebSocketUrl.parse(url), party, **options)
        self.network.advance(0)
        return party, opened

    def connected(self, **options: Any) -> tuple[Party, WebSocketShell, Party, WebSocketShell]:
        """The client's side and then the server's."""
        party, opened = self.dial(**options)
        shell = result_of(opened)
        return party, shell, self.door.parties[-1], self.door.shells[-1]

    def is_empty(self) -> bool:
        """Whether nothing is left of what was."""
        self.port.stopListening()
        return not self.network.pipes and not self.network.getDelayedCalls() and self.site.connections == 0


def result_of(deferred: Deferred[Any]) -> Any:
    results: list[Any] = []
    deferred.addCallback(results.append)
    [result] = results
    return result


@pytest.fixture
def world() -> World:
    return World()


def test_messages_go_both_ways_and_a_close_ends_it(world: World) -> None:
    ours, our_shell, theirs, their_shell = world.connected()
    our_shell.send(b"ping")
    our_shell.flush()
    their_shell.send(b"pong")
    their_shell.flush()
    world.network.advance(0)
    assert (ours.messages, theirs.messages) == ([b"pong"], [b"ping"])
    their_shell.close(code=4001, reason="taken over")
    world.network.advance(0)
    assert ours.closed == Closed(4001, "taken over") and theirs.closed is None
    assert ours.lost and theirs.lost and world.is_empty()
