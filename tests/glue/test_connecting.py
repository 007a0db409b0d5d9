"""A place is connected to by its IPv4 address, its IPv6 address or its name, within whole seconds."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from twisted.internet import error
from twisted.internet.error import TimeoutError
from twisted.internet.protocol import Factory, Protocol

from dmsg.address import HostPort
from dmsg.glue.connecting import client_endpoint, connect_reason
from dmsg.testing.memory import MemoryNetwork

HOSTS = {"relay.example": "192.0.2.2", "my_relay_1": "192.0.2.3", "2001:db8::1": "2001:db8::1"}


def factory_of() -> Factory:
    factory = Factory.forProtocol(Protocol)
    factory.noisy = False
    return factory


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("192.0.2.1:80", "192.0.2.1"),
        ("[2001:db8::1]:80", "2001:db8::1"),
        ("relay.example:80", "192.0.2.2"),
        ("my_relay_1:80", "192.0.2.3"),
    ],
)
def test_each_kind_of_address_is_connected_to(text: str, host: str) -> None:
    memory = MemoryNetwork(hosts=HOSTS)
    memory.listenTCP(80, factory_of(), interface=host)
    connected: list[object] = []
    client_endpoint(memory, HostPort.parse(text), 10.0).connect(factory_of()).addCallback(connected.append)
    memory.advance(0.1)
    assert isinstance(connected[0], Protocol)
    assert len(memory.pipes_to(80, host)) == 1


@pytest.mark.parametrize("host", ["a..example", "a" * 64, "a b", ""])
def test_what_is_no_name_is_not_looked_up(host: str) -> None:
    outcome: list[Any] = []
    memory = MemoryNetwork(hosts={host: "192.0.2.2"})
    client_endpoint(memory, HostPort(host, 80), 10.0).connect(factory_of()).addErrback(outcome.append)
    memory.advance(0.1)
    assert outcome[0].check(ValueError)


def test_a_silent_place_is_given_up() -> None:
    memory = MemoryNetwork()
    memory.silence("192.0.2.1")
    outcome: list[object] = []
    client_endpoint(memory, HostPort.parse("192.0.2.1:80"), 2.5).connect(factory_of()).addErrback(outcome.append)
    memory.advance(2.9)
    assert not outcome
    memory.advance(0.1)
    assert outcome[0].check(TimeoutError)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (error.ConnectionRefusedError(), "connection refused"),
        (error.TimeoutError(), "timeout"),
        (error.NoRouteError(), "unreachable"),
        (error.ConnectBindError(errno.EMFILE, "Too many open files"), "no file descriptor is free"),
        (error.ConnectBindError(errno.EADDRNOTAVAIL, "Cannot assign"), "unreachable"),
        (error.DNSLookupError(), "host not found"),
        (error.ConnectionLost(), "ConnectionLost"),
    ],
)
def test_a_failure_to_connect_has_a_fixed_reason(failure: Exception, reason: str) -> None:
    assert connect_reason(failure) == reason
