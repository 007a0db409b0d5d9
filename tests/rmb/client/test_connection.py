"""A connection to one relay can be ended at any moment, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import ensureDeferred

from dmsg.rmb.client.errors import CallError

CALLER, SERVICE = 1, 2


@pytest.mark.parametrize("state", ["up", "silent", "refusing", "mute", "dropping"])
@pytest.mark.parametrize("wait_s", [0.0, 0.005, 0.011, 0.015, 0.021, 0.025, 0.035, 0.3, 0.6, 2.0, 9.9, 12.0])
def test_stopping_at_any_moment_leaves_nothing_behind(world: Any, state: str, wait_s: float) -> None:
    relay = world.relay()
    if state == "silent":
        world.network.silence("127.0.0.1", relay.port)
    elif state == "refusing":
        relay.answer = b"HTTP/1.1 500 No\r\nContent-Length: 1000\r\n\r\nno"
    elif state == "mute":
        relay.enter = lambda session, shell: shell.transport.stopReading()
    world.registry.add(SERVICE)
    client = world.make(CALLER, relay)
    client.startService()
    call = ensureDeferred(client.call(SERVICE, "echo", timeout=60))
    world.settle(wait_s)
    if state == "dropping":
        relay.drop_connections()
    stopped = client.stopService()
    with pytest.raises(CallError):
        world.result(call)
    world.result(stopped, 10)
    world.settle(30)
    assert not world.network.pipes
