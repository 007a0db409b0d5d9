"""WebSocket frames, messages and closes, without a socket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dmsg.sansio.websocket import Role, WebSocket, WebSocketConfig
from dmsg.sansio.websocket_frames import Closed, WebSocketViolation

MASK = b"\x01\x02\x03\x04"


def fixed(size: int) -> bytes:
    return (MASK * size)[:size]


def server(**config: Any) -> WebSocket:
    return WebSocket(Role.SERVER, WebSocketConfig(**config), now=0.0)


def client(**config: Any) -> WebSocket:
    return WebSocket(Role.CLIENT, WebSocketConfig(**config), now=0.0, random=fixed)


@pytest.mark.parametrize(("sender", "receiver"), [(client, server), (server, client)])
@pytest.mark.parametrize("size", [0, 1, 125, 126, 767, 768, 65_535, 65_536, 1024 * 1024])
def test_a_message_of_any_length_arrives(
    sender: Callable[[], WebSocket], receiver: Callable[[], WebSocket], size: int
) -> None:
    message = bytes(range(256)) * (size // 256) + bytes(size % 256)
    one = sender()
    one.send(message)
    assert receiver().receive_data(one.data_to_send(), 0.0) == [message]


def test_a_close_is_told_and_answered() -> None:
    ours, theirs = server(), client()
    ours.close(4001, "taken over")
    assert theirs.receive_data(ours.data_to_send(), 0.0) == [Closed(4001, "taken over")]
    assert ours.receive_data(theirs.data_to_send(), 0.0) == []
    assert ours.state.value == theirs.state.value == "closed"


def test_an_endless_message_is_cut_at_the_first_byte_over_the_limit() -> None:
    ours = server(max_message_bytes=1000)
    fragment = b"\x02\x80" + MASK
    ours.receive_data(fragment, 0.0)
    for _ in range(10):
        ours.receive_data(b"\x00\xe4" + MASK + bytes(100), 0.0)
    with pytest.raises(WebSocketViolation, match="too long") as caught:
        ours.receive_data(b"\x00\x81", 0.0)
    assert caught.value.code == 1009
