"""One dial over several relays: when each is started, which one wins, and what is reported about the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Generic, TypeVar
from typing import Protocol as TypingProtocol

from twisted.internet.defer import CancelledError, Deferred, ensureDeferred
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.python.failure import Failure

from dmsg.clients.dial import Dial, DialConfig, R
from dmsg.clients.sessions import S
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.errors import DiscoveryError, EntryNotFound
from dmsg.discovery.lookups import Known
from dmsg.errors import Attempt, DialError, DmsgError, StageError
from dmsg.eventlog.reasons import Reason
from dmsg.relays.errors import NoCommonRelay

NO_SERVER: Final = "the entry names no server to go through"

T = TypeVar("T")


class Racer(TypingProtocol[S, R]):
    """The interface of the dialer that a race uses."""

    config: DialConfig
    clock: IReactorTime

    def order(self, relays: Sequence[PublicKey], ended_by: Sequence[PublicKey]) -> list[PublicKey]:
        """The relays to race, best first."""

    def stage(self, relay: PublicKey) -> str:
        """The stage that the connection to ``relay`` has reached."""

    def asking(self, target: PublicKey) -> Deferred[Known] | None:
        """The question to discovery about ``target``, if it is under way."""

    async def attempt(self, relay: PublicKey, race: Race[S, R]) -> R:
        """Try one relay; raises ``StageError``."""


class Race(Generic[S, R]):
    """One dial over several relays: they are started one after another, and the first to get through wins (RFC 8305)."""

    def __init__(
        self, dialer: Racer[S, R], dial: Dial[S, R], attempts: list[Attempt], started: float, limit_s: float
    ) -> None:
        self.dial = dial
        #: The time limit of the whole dial.
        self.limit_s = limit_s
        self.known = Known((), promised=True)
        self.attempts = attempts
        #: Relays that were started and have not failed, and the stage that each has reached.
        self.owing: dict[PublicKey, str] = {}
        self._dialer = dialer
        self._started = started
        self._running: dict[PublicKey, Deferred[R]] = {}
        self._waiting: list[PublicKey] = []
        self._timer: IDelayedCall | None = None
        self._begun_at_s = 0.0  # when the last relay was started
        self._done: Deferred[R]  # once relays race
        self._is_running = False
        self._awaited: Deferred[Any] | None = None
        #: The look-up in discovery, while it is under way and relays are tried without its answer.
        self._asking: Deferred[Known] | None = None
        #: Why the whole dial was given up, if it was.
        self.given_up: tuple[Reason, DmsgError] | None = None

    def awaiting(self, step: Deferred[T]) -> Deferred[T]:
        """Return ``step``, and note that the dial waits for it. While relays race, the dial waits for the race instead."""
        if not self._is_running:
            self._awaited = step
        return step

    def give_up(self, reason: Reason, error: DmsgError) -> None:
        """End the dial for ``reason``, and cancel what it waits for."""
        self.given_up = reason, error
        for relay, stage in self.owing.items():
            if stage == "connect":
                self.owing[relay] = self._dialer.stage(relay)
        if self._awaited is not None:
            self._awaited.cancel()

    def note_owing(self, reason: Reason, error: DmsgError) -> None:
        """Note ``reason`` for the attempts that were under way when the dial was given up."""
        for relay, stage in ({str(relay): stage for relay, stage in self.owing.items()} or {"": "discovery"}).items():
            self.note(stage, relay, reason, error)

    def note(self, stage: str, relay: str, reason: str, error: BaseException | None) -> None:
        """Add an attempt to the tree."""
        elapsed_ms = (self._dialer.clock.seconds() - self._started) * 1000
        self.attempts.append(Attempt(stage, relay, elapsed_ms, reason, error))

    def note_look_up(self, error: DiscoveryError) -> None:
        """Add to the tree that discovery did not say where the peer is."""
        self.note("discovery", "", "no entry" if isinstance(error, EntryNotFound) else "unavailable", error)

    def run(self, relays: list[PublicKey], asking: Deferred[Known] | None) -> Deferred[R]:
        """Fires with the first stream that gets through; fails with ``DialError`` when none does.

        When ``asking`` is answered, the relays in the answer replace those that were not started yet.
        """
        self._done = self._awaited = Deferred(lambda _: self._stop())
        self._done.addBoth(self._ended)
        self._is_running = True
        self._waiting = relays
        self._await_answer(asking)
        self._next()
        return self._done

    def _ended(self, result: R | Failure) -> R | Failure:
        self._is_running = False
        return result

    def _await_answer(self, asking: Deferred[Known] | None) -> None:
        self._asking = asking
        if asking is not None:
            asking.addCallbacks(self._told, self._not_told)

    def _told(self, known: Known) -> None:
        if self._asking is None:
            return  # the race is over
        self._await_answer(self._dialer.asking(self.dial.target))  # if a transport has found the peer before
        if self.dial.heeds_promise and not known.promised:
            for relay, attempt in list(self._running.items()):  # started as if end-to-end security was promised
                self.owing.pop(relay)
                attempt.cancel()
        self.known = known
        if not known.servers:
            self.note("discovery", "", "no common server", NoCommonRelay(NO_SERVER))
        # Relays that have failed are tried again: the peer may be there now, or need another kind of request.
        order = self._dialer.order(known.servers, self.dial.ended_by)
        self._waiting = [relay for relay in order if relay not in self._running]
        if self._running:
            self._set_timer()
        else:
            self._next()
        self._look()

    def _not_told(self, failure: Failure) -> None:
        if self._asking is None:
            return
        self._asking = None
        if isinstance(failure.value, DiscoveryError):
            self.note_look_up(failure.value)
        else:
            self.note("discovery", "", type(failure.value).__name__, failure.value)
        self._look()

    def _look(self) -> None:
        """End the race if nothing is left to wait for. A moving transport waits for discovery in its next dial instead."""
        if self._waiting or self._running or self._done.called:
            return
        if self._asking is None or self.dial.moves:
            self._stop()
            self._done.errback(DialError(str(self.dial.target), self.attempts))

    def _next(self) -> None:
        self._stop_timer()
        if not self._waiting or self._done.called:
            return
        relay = self._waiting.pop(0)
        self._begun_at_s = self._dialer.clock.seconds()
        self._set_timer()
        attempt = self._running[relay] = ensureDeferred(self._dialer.attempt(relay, self))
        attempt.addCallbacks(self._won, self._failed, callbackArgs=(relay,), errbackArgs=(relay,))

    def _set_timer(self) -> None:
        """Start the next relay when the last one has had its time to answer."""
        self._stop_timer()
        if self._waiting:
            config, clock = self._dialer.config, self._dialer.clock
            stagger_s = config.ended_stagger_s if self._waiting[0] in self.dial.ended_by else config.stagger_s
            wait_s = self._begun_at_s + stagger_s - clock.seconds()
            self._timer = clock.callLater(max(0.0, wait_s), self._next)

    def _won(self, opened: R, relay: PublicKey) -> None:
        self._running.pop(relay, None)
        if self._done.called:
            opened.session.abort_stream(opened.stream)  # another relay was faster in the same turn
            return
        self._stop()
        self._done.callback(opened)

    def _failed(self, failure: Failure, relay: PublicKey) -> None:
        self._running.pop(relay, None)
        if self._done.called or failure.check(CancelledError):
            return
        self.owing.pop(relay, None)
        error = failure.value
        if isinstance(error, StageError):
            self.note(error.stage, str(relay), error.reason, error.error or error)
        else:
            self.note("connect", str(relay), type(error).__name__, error)
        if not self._waiting:
            self._look()
        elif not self._running or self._waiting[0] not in self.dial.ended_by:
            self._next()  # otherwise the timer starts it, unless another relay answers before

    def _stop(self) -> None:
        self._waiting = []
        self._stop_timer()
        asking, self._asking = self._asking, None
        if asking is not None:
            asking.cancel()
        for attempt in list(self._running.values()):
            attempt.cancel()

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and timer.active():
            timer.cancel()
