"""Client endpoints for the places where relays are, factories for what they connect, and why they do not connect."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.error import ConnectError, ConnectionRefusedError, DNSLookupError, TimeoutError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Factory

from dmsg.address import HostPort


def client_endpoint(reactor: Any, address: HostPort, timeout_s: float) -> IStreamClientEndpoint:
    """The endpoint that connects to ``address`` over TCP, and gives up after ``timeout_s``, rounded up to whole seconds."""
    timeout = math.ceil(timeout_s)
    if isIPAddress(address.host):
        return TCP4ClientEndpoint(reactor, address.host, address.port, timeout)
    if isIPv6Address(address.host):
        return TCP6ClientEndpoint(reactor, address.host, address.port, timeout)
    return HostnameEndpoint(reactor, address.host, address.port, timeout)


def quiet_factory(build: Callable[[], Any]) -> Any:
    """A factory that gives what ``build`` makes, and does not log that it starts and stops."""
    factory: Any = Factory.forProtocol(build)
    factory.noisy = False
    return factory


def connect_reason(error: BaseException | None) -> str:
    """Why an endpoint did not connect, as a short fixed text."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, DNSLookupError):
        return "host not found"
    return "unreachable" if isinstance(error, ConnectError) else type(error).__name__
