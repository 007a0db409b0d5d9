"""A transport's producer: when it may write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, cast
from typing import Protocol as TypingProtocol

from twisted.internet.interfaces import IProducer, IPullProducer, IPushProducer, IReactorTime

#: Where the class is from that TLS registers for the producer of a program. It does nothing when it is paused a second time.
_TLS: Final = "twisted.protocols.tls"


class Sink(TypingProtocol):
    """What a producer writes to: a transport."""

    @property
    def connected(self) -> bool:
        """Whether the application has not been told of its end yet."""

    @property
    def blocked(self) -> bool:
        """Whether the producer has to pause."""

    def guarded(self, call: Callable[..., object], *arguments: object) -> None:
        """Call the application, which may raise anything."""


class ProducerAdapter:
    """Pauses the registered producer while the sink takes nothing, and pulls from a pull producer while it does.

    Calls are given the sink. No reference to it is kept, so that a sink that is over is freed at once.
    """

    __slots__ = ("_clock", "_of_tls", "_paused", "_pulls", "_streaming", "producer")

    def __init__(self, clock: IReactorTime) -> None:
        self.producer: IProducer | None = None
        self._clock = clock
        self._of_tls = False  # whether it may be let go on by TLS as well, after a handshake
        self._streaming = False
        self._paused = False
        self._pulls = False  # whether a pull producer will be asked for data in the next turn

    def register(self, sink: Sink, producer: IProducer, streaming: bool) -> None:
        """Let ``producer`` write; ``RuntimeError`` if another one is registered already."""
        if self.producer is not None:
            raise RuntimeError(f"cannot register {producer!r}: {self.producer!r} is still registered")
        if not sink.connected:
            producer.stopProducing()
            return
        self.producer = producer
        self._of_tls = type(producer).__module__ == _TLS
        self._streaming = streaming
        self._paused = False
        if sink.blocked and self._of_tls:
            self._paused = True
            self._clock.callLater(0, self._pause_tls, sink)  # a pull producer under TLS cannot be paused before
        elif sink.blocked:
            self.pause()
        elif not streaming:
            cast(IPullProducer, producer).resumeProducing()
            self._pull_again(sink)

    def take(self) -> tuple[IProducer | None, bool, bool]:
        """Give up the producer: it, whether it is a push producer, and whether it is paused."""
        producer, self.producer = self.producer, None
        return producer, self._streaming, self._paused

    @property
    def waits(self) -> bool:
        """Whether there is a producer that writes only when it is told to: a paused one, or one that is pulled."""
        return self.producer is not None and (self._paused or not self._streaming)

    def pause(self) -> None:
        """The sink takes nothing more for now."""
        if self.producer is not None and (self._of_tls or not self._paused):
            self._paused = True
            if self._streaming:
                cast(IPushProducer, self.producer).pauseProducing()

    def resume(self, sink: Sink) -> None:
        """The sink takes again."""
        if self.producer is not None and self._paused:
            self._paused = False
            sink.guarded(cast(IPullProducer, self.producer).resumeProducing)
            if not self._streaming:
                self._pull_again(sink)

    def stop(self) -> None:
        """The sink is over."""
        producer, self.producer = self.producer, None
        if producer is not None:
            producer.stopProducing()

    def _pause_tls(self, sink: Sink) -> None:
        if self._of_tls and self._paused:
            sink.guarded(self.pause)

    def _pull_again(self, sink: Sink) -> None:
        if not self._pulls:
            self._pulls = True
            self._clock.callLater(0, self._pull, sink)

    def _pull(self, sink: Sink) -> None:
        self._pulls = False
        if self.producer is None or self._streaming or not sink.connected or self._paused:
            return
        if sink.blocked:
            self._paused = True
        else:
            sink.guarded(cast(IPullProducer, self.producer).resumeProducing)
            self._pull_again(sink)
