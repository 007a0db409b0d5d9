"""TLS on a transport in use: what a program asks for after STARTTLS."""

from __future__ import annotations

from functools import cache
from typing import Any, Final, cast

from twisted.internet.interfaces import IProducer, IPushProducer, IReactorTime, ISSLTransport
from zope.interface import implementer

from dmsg.glue.producer import ProducerAdapter
from dmsg.glue.stream_transport import StreamTransport


class UnderTls:
    """What TLS takes over of a transport. Mixed into its class, before all others.

    ``protocol`` is TLS by then, and the program's protocol is above it. What the program writes goes to TLS, which writes to
    the transport as it was before: to ``super()``.
    """

    __slots__ = ()

    #: As on a TCP connection.
    TLS: Final = True
    protocol: Any
    _reason: Any

    def write(self, data: bytes) -> None:
        """Encrypt and send ``data``, anything that holds bytes."""
        if self.protocol is not None:
            self.protocol.write(data if isinstance(data, bytes) else bytes(memoryview(data)))

    def loseConnection(self) -> None:
        """Say goodbye as TLS does, and close once everything written has arrived."""
        if self.protocol is not None:
            self.protocol.loseConnection()

    def registerProducer(self, producer: IProducer, streaming: bool) -> None:
        """Let ``producer`` write at the pace the peer takes it. ``RuntimeError`` if one is registered already."""
        if self.protocol is not None:
            self.protocol.registerProducer(producer, streaming)
        else:
            producer.stopProducing()

    def unregisterProducer(self) -> None:
        """The producer is done; a close that waited for it goes on."""
        if self.protocol is not None:
            self.protocol.unregisterProducer()

    def _tell(self) -> None:
        # The program may ask for the peer's certificate in connectionLost: it is told before TLS is gone.
        protocol = self.protocol
        try:
            if protocol is not None:
                protocol.connectionLost(self._reason)
        finally:
            self.protocol = None

    def attach(self, protocol: object) -> None:
        """``RuntimeError``: nothing takes the place of TLS."""
        raise RuntimeError("a transport under TLS keeps its protocol")

    def startTLS(self, contextFactory: object, normal: bool = True) -> None:
        """``RuntimeError``: TLS begins once."""
        raise RuntimeError("the transport is under TLS already")

    def getHandle(self) -> Any:
        """The connection of OpenSSL; ``None`` once the transport is over."""
        return None if self.protocol is None else self.protocol.getHandle()

    def getPeerCertificate(self) -> Any:
        """The peer's certificate, as OpenSSL has it; ``None`` before it came, and once the transport is over."""
        return None if self.protocol is None else self.protocol.getPeerCertificate()


# Programs ask for it to find out whether they are secure. As a decorator, mypy would insist on all of TCP.
implementer(ISSLTransport)(UnderTls)


@cache
def _under_tls(kind: type) -> type:
    return type(f"{kind.__name__}UnderTls", (UnderTls, kind), {"__slots__": ()})


def start_tls(
    transport: StreamTransport[Any],
    writer: ProducerAdapter,
    context_factory: Any,
    *,
    is_client: bool,
    clock: IReactorTime,
) -> None:
    """Put ``transport`` under TLS, beginning with the handshake; ``writer`` has its producer.

    ``context_factory`` is one of Twisted's, as for ``startTLS`` over TCP. From now on the transport is of a class whose methods
    encrypt, so that a program that has kept a reference to it cannot write in the clear. Raises ``RuntimeError`` if it has no
    protocol: none yet, or none any more. If the factory makes no connection, its error is raised, and the transport is as it was.
    """
    from twisted.protocols.tls import TLSMemoryBIOFactory

    if transport.protocol is None:
        raise RuntimeError("a transport without a protocol cannot be put under TLS")
    factory: Any = TLSMemoryBIOFactory(context_factory, is_client, cast(Any, None), clock)
    before = (transport.protocol, type(transport))
    tls = factory.protocol(factory, transport.protocol, False)
    producer, streaming, paused = writer.take()
    transport.protocol = tls
    transport.__class__ = _under_tls(type(transport))
    try:
        tls.makeConnection(super(UnderTls, cast(Any, transport)))
    except BaseException:  # else it could not even be closed
        transport.protocol, transport.__class__ = before
        writer.producer = producer
        raise
    if producer is not None:
        transport.registerProducer(producer, streaming)
        if paused and streaming:
            if transport.blocked:
                writer.pause()  # TLS learns now that its producer waits, and resumes it when we resume TLS
            else:
                cast(IPushProducer, producer).resumeProducing()
