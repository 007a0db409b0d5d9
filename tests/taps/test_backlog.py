"""How many connections wait to be accepted where the endpoint string does not say."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import ensureDeferred

from dmsg.errors import ConfigError
from dmsg.glue.listening import BACKLOG
from dmsg.taps._service import BoundEndpoint

#: Where ``struct tcp_info`` of a listening socket has the length of its backlog (tcpi_sacked).
_SACKED_AT = 28


@pytest.fixture
def bind(reactor: Any) -> Iterator[Any]:
    """``bind(text)``: the port an endpoint string listens on, before anything is accepted."""
    endpoints = []

    def make(text: str) -> Any:
        endpoint = BoundEndpoint(reactor, "listen", text)
        endpoints.append(endpoint)
        endpoint.bind()
        ports: list[Any] = []
        endpoint._port.addCallback(lambda port: ports.append(port) or port)
        return ports[0]

    yield make
    for endpoint in endpoints:
        pytest_twisted.blockon(ensureDeferred(endpoint.close()))


def backlog(port: Any) -> int:
    """What the kernel has noted."""
    info = port.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    return int(struct.unpack_from("=I", info, _SACKED_AT)[0])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("tcp:0:interface=127.0.0.1", BACKLOG),
        ("tcp:port=0:interface=127.0.0.1", BACKLOG),
        ("tcp6:0:interface=\\:\\:1", BACKLOG),
        ("haproxy:tcp:0:interface=127.0.0.1", BACKLOG),
        ("tcp:0:interface=127.0.0.1:backlog=7", 7),
        ("tcp:backlog=7:port=0:interface=127.0.0.1", 7),
        ("tcp:0:127.0.0.1:7", 7),
    ],
)
def test_the_backlog_is_what_the_string_says_or_1024(bind: Any, text: str, wanted: int) -> None:
    most = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert backlog(bind(text)) == min(wanted, most)


def test_an_option_that_is_none_is_still_told() -> None:
    from twisted.internet import reactor

    with pytest.raises(ConfigError, match="is no endpoint to listen on"):
        BoundEndpoint(reactor, "listen", "tcp:0:colour=red")


def test_200_clients_that_come_within_one_turn_are_connected(bind: Any) -> None:
    """The reactor does not run here: nothing is accepted."""
    address = bind("tcp:0:interface=127.0.0.1").socket.getsockname()
    with contextlib.ExitStack() as opened:
        for _ in range(200):
            client = opened.enter_context(socket.socket())
            client.settimeout(0.5)
            client.connect(address)
