"""A transport's producer: who writes, and when it may."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from twisted.internet.interfaces import IProducer, IPullProducer, IPushProducer, IReactorTime

if TYPE_CHECKING:
    from dmsg.mux.client.transport import DmsgTransport


class Feed:
    """Pauses the registered producer while the stream takes nothing, and asks a pull producer as long as it does."""

    __slots__ = ("_clock", "_paused", "_streaming", "_transport", "producer")

    def __init__(self, transport: DmsgTransport, clock: IReactorTime) -> None:
        self.producer: IProducer | None = None
        self._transport = transport
        self._clock = clock
        self._streaming = False
        self._paused = False

    def register(self, producer: IProducer, streaming: bool) -> None:
        """See :meth:`DmsgTransport.registerProducer`."""
        if self.producer is not None:
            raise RuntimeError(f"cannot register {producer!r}: {self.producer!r} is still registered")
        if not self._transport.connected:
            producer.stopProducing()
            return
        self.producer = producer
        self._streaming = streaming
        self._paused = False
        if self._transport.stream.blocked:
            self.pause()
        elif not streaming:
            cast(IPullProducer, producer).resumeProducing()
            self._pull_again()

    def pause(self) -> None:
        """The stream takes nothing more for now."""
        if self.producer is not None and not self._paused:
            self._paused = True
            if self._streaming:
                cast(IPushProducer, self.producer).pauseProducing()

    def go_on(self) -> None:
        """The stream takes again."""
        if self.producer is not None and self._paused:
            self._paused = False
            self._transport.guarded(cast(IPullProducer, self.producer).resumeProducing)
            if not self._streaming:
                self._pull_again()

    def stop(self) -> None:
        """The transport is over."""
        producer, self.producer = self.producer, None
        if producer is not None:
            producer.stopProducing()

    def _pull_again(self) -> None:
        self._clock.callLater(0, self._pull)

    def _pull(self) -> None:
        if self.producer is None or self._streaming or not self._transport.connected or self._paused:
            return
        if self._transport.stream.blocked:
            self._paused = True
        else:
            self._transport.guarded(cast(IPullProducer, self.producer).resumeProducing)
            self._pull_again()
