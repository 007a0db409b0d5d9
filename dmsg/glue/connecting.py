"""Client endpoints for the addresses of relays, factories for their protocols, and why a connection fails."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from typing import Any, Final

from twisted.internet.abstract import isIPAddress, isIPv6Address
from twisted.internet.endpoints import HostnameEndpoint, TCP4ClientEndpoint, TCP6ClientEndpoint
from twisted.internet.error import ConnectError, ConnectionRefusedError, DNSLookupError, TimeoutError
from twisted.internet.interfaces import IStreamClientEndpoint
from twisted.internet.protocol import Factory

from dmsg.address import HostPort, is_host_name

#: The reason of a connection that was not even tried.
NO_DESCRIPTOR: Final = "no file descriptor is free"


class NamedHost(HostnameEndpoint):
    """Connects to a host by its name, as Twisted's endpoint does, and also where the name has a ``_``, or begins as ``ab--``.

    Twisted takes a name of ASCII for one of IDNA, which allows no such names. Resolvers know them, and containers have them.
    """

    @staticmethod
    def _hostAsBytesAndText(host: bytes | str) -> tuple[bool, bytes, str]:
        is_bad, octets, text = HostnameEndpoint._hostAsBytesAndText(host)
        return is_bad and not is_host_name(text), octets, text


def client_endpoint(reactor: Any, address: HostPort, timeout_s: float) -> IStreamClientEndpoint:
    """The endpoint that connects to ``address`` over TCP, and gives up after ``timeout_s``, rounded up to whole seconds."""
    timeout = math.ceil(timeout_s)
    if isIPAddress(address.host):
        return TCP4ClientEndpoint(reactor, address.host, address.port, timeout)
    if isIPv6Address(address.host):
        return TCP6ClientEndpoint(reactor, address.host, address.port, timeout)
    return NamedHost(reactor, address.host, address.port, timeout)


def tls_options(host: str, trust: Any = None) -> Any:
    """As Twisted's ``optionsForClientTLS``, for the certificate of ``host``, which may be a name that IDNA does not allow, too.

    ``trust`` is an ``IOpenSSLTrustRoot`` in place of the platform's. Raises ``UnicodeError`` for what is no name.
    """
    from twisted.internet.ssl import optionsForClientTLS

    try:
        return optionsForClientTLS(host, trustRoot=trust)
    except UnicodeError:
        if not is_host_name(host) or "xn--" in host.lower():
            raise
    # No certificate is of this name, so nothing is trusted if a future Twisted keeps the host elsewhere.
    options: Any = optionsForClientTLS("host.invalid", trustRoot=trust)
    options._hostname = options._hostnameASCII = host
    options._hostnameBytes = host.encode("ascii")
    return options


def quiet_factory(build: Callable[[], Any]) -> Any:
    """A factory that gives what ``build`` makes, and does not log that it starts and stops."""
    factory: Any = Factory.forProtocol(build)
    factory.noisy = False
    return factory


#: What Twisted raises for the certificate of another host, with service_identity and without.
_OTHER_NAME: Final = frozenset({"VerificationError", "SimpleVerificationError"})


def tls_problem(error: BaseException | None) -> str:
    """The problem with TLS, in OpenSSL's words; "" if ``error`` is about something else.

    Compares names of classes, so that programs without TLS need not import OpenSSL.
    """
    if type(error).__name__ in _OTHER_NAME:
        return "the certificate is not of this host"
    if error is None or type(error).__module__.partition(".")[0] != "OpenSSL":
        return ""
    queue = error.args[0] if error.args and isinstance(error.args[0], list) else []
    texts = [one[-1] for one in queue if isinstance(one, tuple) and one and one[-1]]
    return ", ".join(dict.fromkeys(map(str, texts))) or "the handshake failed"


def lacks_descriptor(error: BaseException | None) -> bool:
    """Whether an endpoint did not connect because this process, or this system, has no descriptor left: no fault of the host."""
    return getattr(error, "osError", None) in (errno.EMFILE, errno.ENFILE)


def connect_reason(error: BaseException | None) -> str:
    """Why an endpoint did not connect, as a short fixed text."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, DNSLookupError):
        return "host not found"
    if tls_problem(error):
        return "TLS failed"
    if lacks_descriptor(error):
        return NO_DESCRIPTOR
    return "unreachable" if isinstance(error, ConnectError) else type(error).__name__
