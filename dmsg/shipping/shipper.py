"""Ships finished files of an event log: looks for them, brings them to a destination, and removes what has arrived.

One rule has no exception: a file is removed here only after the destination has it and has confirmed that. So a shipper can be
killed at any point; the next one finds the file, looks whether it is at the destination, and goes on from there. Names hold a
digest of the content, so that shipping twice makes one file.

Blocking work runs in a limited number of threads. They are daemon threads: a target that hangs cannot keep the program from
ending, and an upload that is cut off by that end is like one that was killed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import FileShipped
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IEventLog
from dmsg.shipping.destinations import Destination
from dmsg.shipping.errors import ShippingError
from dmsg.shipping.plan import OWN_FOLDER, Plan, Sparing, Waiting, clip, landing_path, recognise
from dmsg.shipping.scan import Found, examine, release, scan

T = TypeVar("T")
#: Runs a blocking function in a thread; the Deferred fires in the reactor's thread.
InThread = Callable[[Callable[[], T]], "Deferred[T]"]
#: While an attempt takes longer than this many seconds, the shipper is not ready. It goes on: nothing can stop it.
STUCK_S: Final = 300.0
#: Of the failures for one reason, one in this many seconds is logged: there may be thousands, and each has its event anyway.
WARN_S: Final = 60.0

_log = Logger()


@dataclass(frozen=True, slots=True)
class ShipperConfig:
    """How a shipper works: seconds between two scans of the directory; whether shipped files are kept (moved into
    ``.shipped``); whether it ends once it has dealt with the files that are there."""

    poll_s: float = 10.0
    keep: bool = False
    once: bool = False


class Shipped(NamedTuple):
    """A file has arrived: its path below the target, its lines and its size."""

    path: str
    lines: int
    size_bytes: int


def ship(directory: str, path: str, destination: Destination, *, keep: bool) -> Shipped | None:
    """Bring one file to ``destination`` and remove it here; ``None`` if it is gone. Blocks; raises ``ShippingError``."""
    try:
        content = examine(directory, path)
    except FileNotFoundError:  # another shipper was quicker
        return None
    target = landing_path(path, content.sha256)
    try:
        destination.deliver(target, content)
    except ShippingError:
        if os.path.lexists(content.path):
            raise
        return None  # another process has shipped or deleted it meanwhile: there is nothing to retry
    release(directory, path, content, keep=keep)
    return Shipped(target, content.lines, content.size_bytes)


def in_daemon_thread(reactor: Any) -> InThread[Any]:
    """Gives a function that runs its argument in a new daemon thread; its Deferred fires in the thread of ``reactor``."""

    def run(function: Callable[[], T]) -> Deferred[T]:
        done: Deferred[T] = Deferred()

        def work() -> None:
            try:
                result: T | Failure = function()
            except BaseException:
                result = Failure()
            reactor.callFromThread(done.callback, result)

        try:
            threading.Thread(target=work, name="dmsg-shipper", daemon=True).start()
        except RuntimeError:  # no more threads, or no memory for one: tried again like any other failure
            done.errback()
        return done

    return run


class Shipper:
    """Ships the files of one ``directory`` to one ``destination``, as ``plan`` says.

    ``unix_time`` gives seconds since 1970, ``in_thread`` runs blocking functions. With ``once``, ``done`` fires with whether
    everything that was there has been shipped; otherwise it never fires.
    """

    def __init__(
        self,
        reactor: IReactorTime,
        directory: str,
        destination: Destination,
        *,
        plan: Plan,
        in_thread: InThread[Any],
        unix_time: Callable[[], float],
        events: IEventLog,
        config: ShipperConfig,
    ) -> None:
        self._reactor = reactor
        self._directory = directory
        self._destination = destination
        self._plan = plan
        self._in_thread = in_thread
        self._unix_time = unix_time
        self._events = events
        self._config = config
        self._running = False
        self._turning = False
        self._again = False
        self._scanning = False
        self._scanned_at: float | None = None
        self._scan_problem = ""
        self._ship_problem = ""
        self._call: Any = None
        self._began: dict[str, float] = {}
        self._found = Found((), 0, 0)
        self._shipped_files = 0
        self._shipped_bytes = 0
        self._failed_attempts = 0
        self._warnings = Sparing(WARN_S)
        self._ok = True
        self._none_in_flight: Waiters[None] = Waiters()
        self.done: Deferred[bool] = Deferred()

    def start(self) -> None:
        """Begin to scan and to ship."""
        self._running = True
        self._turn()

    def stop(self) -> None:
        """Begin nothing more; attempts under way (:attr:`in_flight`) go on."""
        self._running = False
        if self._call is not None and self._call.active():
            self._call.cancel()
        for reason, count in self._warnings.rest().items():
            _log.warn("{count} more failures were not logged: {reason}", count=count, reason=reason)

    @property
    def in_flight(self) -> int:
        """Attempts under way."""
        return self._plan.in_flight

    async def when_none_in_flight(self, limit_s: float) -> None:
        """Returns when no attempt is under way, or after ``limit_s``."""
        if self.in_flight:
            await self._none_in_flight.wait_at_most(limit_s, self._reactor)

    @property
    def problem(self) -> str:
        """Why it does not ship; "" while the last attempt worked."""
        if self._scan_problem or self._ship_problem:
            return self._scan_problem or self._ship_problem
        if self._scanned_at is None:
            return "starting"
        oldest = min(self._began.values(), default=self._reactor.seconds())
        return "the target does not answer" if self._reactor.seconds() - oldest > STUCK_S else ""

    def gauges(self) -> dict[str, float]:
        """Levels, and totals of this run that include what no event tells."""
        backlog = self._plan.backlog
        oldest = min((one.modified_at for one in backlog), default=None)
        return {
            "backlog_files": len(backlog),
            "backlog_bytes": sum(one.size_bytes for one in backlog),
            "oldest_file_age_seconds": 0.0 if oldest is None else max(0.0, self._unix_time() - oldest),
            "uploads": self._plan.in_flight,
            "damaged_files": self._found.damaged,
            "foreign_files": self._found.foreign,
            "shipped_files": self._shipped_files,
            "shipped_bytes": self._shipped_bytes,
            "failed_attempts": self._failed_attempts,
        }

    # --- what is next ------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Begin everything that can begin now, and come back when more can."""
        self._again = True
        if self._turning:  # work that was begun below has ended at once
            return
        self._turning = True
        try:
            while self._again and self._running:
                self._again = False
                self._begin(self._reactor.seconds())
        finally:
            self._turning = False
        if self._running:
            self._schedule(self._reactor.seconds())

    def _begin(self, now: float) -> None:
        if not self._scanning and self._scan_due(now) <= now:
            self._scan()
        if self._scanned_at is None:
            return
        while (file := self._plan.take(now)) is not None:
            self._attempt(file, now)
        if self._config.once and not self._again and self._plan.finished:
            self.stop()
            self.done.callback(self._ok and not self._plan.backlog)

    def _schedule(self, now: float) -> None:
        if self._call is not None and self._call.active():
            self._call.cancel()
        self._call = None
        shipping = self._plan.next_due(now) if self._scanned_at is not None else None
        due = [one for one in (shipping, None if self._scanning else self._scan_due(now)) if one is not None]
        soonest = min(due, default=float("inf"))
        if soonest < float("inf"):
            self._call = self._reactor.callLater(max(0.0, soonest - now), self._turn)

    def _scan_due(self, now: float) -> float:
        if self._scanned_at is None:
            return now
        return float("inf") if self._config.once else self._scanned_at + self._config.poll_s

    # --- looking -----------------------------------------------------------------------------------------------------

    def _scan(self) -> None:
        self._scanning = True
        self._plan.scan_begins()
        now = self._unix_time()
        looking = self._in_thread(lambda: scan(self._directory, now))
        looking.addCallbacks(self._scanned, self._scan_failed)
        looking.addCallback(lambda _: self._turn())

    def _scanned(self, found: Found) -> None:
        self._scan_ended("")
        if found.foreign and found.foreign != self._found.foreign:
            text = "{count} files below {directory} are none of an event log"
            _log.warn(text, count=found.foreign, directory=self._directory)
        self._found = found
        self._plan.scanned(found.files)

    def _scan_failed(self, failure: Failure) -> None:
        self._ok = False
        problem = f"{self._directory} cannot be read: {clip(failure.value)}"
        if problem != self._scan_problem:
            _log.warn("{problem}", problem=problem)
        self._scan_ended(problem)

    def _scan_ended(self, problem: str) -> None:
        self._scanning = False
        self._scanned_at = self._reactor.seconds()
        self._scan_problem = problem

    # --- shipping ----------------------------------------------------------------------------------------------------

    def _attempt(self, file: Waiting, now: float) -> None:
        self._began[file.path] = now
        shipping = self._in_thread(lambda: ship(self._directory, file.path, self._destination, keep=self._config.keep))
        shipping.addCallbacks(self._shipped, self._failed, callbackArgs=(file,), errbackArgs=(file,))
        shipping.addCallback(self._attempt_ended)

    def _attempt_ended(self, _: object) -> None:
        self._turn()
        if not self.in_flight:
            self._none_in_flight.fire(None)

    def _shipped(self, shipped: Shipped | None, file: Waiting) -> None:
        attempt = self._plan.attempt(file.path)
        elapsed_ms = (self._reactor.seconds() - self._began.pop(file.path)) * 1000
        self._plan.settled(file.path, reached=shipped is not None)
        if shipped is None:
            return
        self._ship_problem = ""
        self._shipped_files += 1
        self._shipped_bytes += shipped.size_bytes
        self._emit(
            FileShipped(shipped.path, shipped.lines, shipped.size_bytes, elapsed_ms, attempt, True, Reason.NONE), file
        )

    def _failed(self, failure: Failure, file: Waiting) -> None:
        error = failure.value
        kind = type(error).__name__
        if isinstance(error, ShippingError):
            kind = error.reason
        else:  # no library ought to have raised it
            error = ShippingError("failed", clip(error))
        now = self._reactor.seconds()
        attempt = self._plan.attempt(file.path)
        elapsed_ms = (now - self._began.pop(file.path)) * 1000
        self._failed_attempts += 1
        name = recognise(file.path)
        lines = name.lines if name is not None else 0
        self._emit(
            FileShipped(file.path, lines, file.size_bytes, elapsed_ms, attempt, False, Reason.of(error.reason)), file
        )
        if error.reason == "damaged":  # the file has been set aside: shipping itself works
            self._ok = False
            self._found = self._found._replace(damaged=self._found.damaged + 1)
            self._plan.settled(file.path, reached=False)
            _log.error("a damaged file was not shipped: {detail}", detail=error.detail)
            return
        self._ship_problem = f"{error.reason}: the last file could not be shipped to {self._destination.text}"
        pause_s = self._plan.failed(file.path, error.reason, now) - now
        left_out = self._warnings.lets(kind, now)
        if left_out is None:
            return
        if kind != error.reason:
            _log.failure("{path} was not shipped", failure, path=file.path)
        then = "given up" if pause_s == float("inf") else f"tried again in {pause_s:.1f} s at the earliest"
        _log.warn(
            "{path} was not shipped to {target}: {error} ({then})",
            path=file.path,
            target=self._destination.text,
            error=error,
            then=f"{then}; {left_out} more like it were not logged" if left_out else then,
        )

    def _emit(self, event: FileShipped, file: Waiting) -> None:
        if not file.path.startswith(OWN_FOLDER):
            self._events.emit(event)
