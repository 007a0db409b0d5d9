"""The structured event log: takes events on the reactor's side, writes lines of JSON on a thread of its own.

``emit`` only puts the event into a bounded queue: a slow disk, an fsync or a full pipe never holds the reactor up. Events
that do not fit are counted, and the count is itself an event (``events_dropped``) as soon as there is room again. A line
gets its ``seq`` when it is written, so ``(node, boot, seq)`` is a key without gaps: a gap in a reader's data means that the
reader lost lines, never that the log did.

Lines are collected for up to a second before they are written to files, because a second of lines packs far better than
one line, and waking a thread for each line costs more than writing it. A killed process loses the lines it had collected;
standard output gets every line at once.

The thread starts with the first event (or :meth:`EventLog.start`), which is after a daemon has forked.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final, TextIO

from twisted.logger import Logger
from zope.interface import implementer

from dmsg.errors import ConfigError
from dmsg.eventlog.encode import Encoder
from dmsg.eventlog.files import (
    FLUSH_BYTES,
    LIMIT_BYTES,
    ROTATE_BYTES,
    ROTATE_S,
    Batch,
    DescriptorSink,
    DirectorySink,
    Sink,
)
from dmsg.eventlog.schema import Event, EventsDiscarded, EventsDropped
from dmsg.eventlog.tree import Discarded
from dmsg.interfaces import IEventLog

#: Events waiting to be written; at a few hundred bytes each this bounds memory to a few MiB.
QUEUE_EVENTS: Final = 10_000
#: Number of waiting events that are written at once, however young they are: one or two frames of ordinary lines.
ENOUGH_EVENTS: Final = 512
#: Pause in seconds after a failed write (disk full, pipe full) before the retry.
RETRY_S: Final = 1.0
#: Seconds for which closing waits until the thread has written the queue.
CLOSE_TIMEOUT_S: Final = 5.0
_SHORT_NODE_DIGITS: Final = 16
_HOUR_S: Final = 3600.0
#: The last hour that a folder can be named after; a clock with a later time is wrong anyway.
_LAST_HOUR: Final = 70_000_000.0

_log = Logger()


def short_node(public_key: object) -> str:
    """The short form of a key that names a node in logs: its first 16 hex digits."""
    return str(public_key)[:_SHORT_NODE_DIGITS]


def check_directory(directory: str | os.PathLike[str]) -> None:
    """Make a directory for event logs if it is missing. Raises ``ConfigError`` if nothing can be written to it."""
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise ConfigError("events", f"{directory} cannot be used: {error.strerror}") from None
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError("events", f"{directory} cannot be written to")


def new_boot_id(random: Callable[[int], bytes]) -> str:
    """A random id (16 hex digits) for one run of a program."""
    return random(8).hex()


@implementer(IEventLog)
class EventLog:
    """Writes events to a ``sink`` as lines of JSON; see :meth:`to_directory` and :meth:`to_stream`.

    ``role``, ``node`` and ``boot`` go into every line. ``clock`` is Unix time in seconds. At most ``queue_events`` wait
    to be written; more are dropped and counted in ``dropped``.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        role: str,
        node: str,
        boot: str,
        clock: Callable[[], float] = time.time,
        queue_events: int = QUEUE_EVENTS,
    ) -> None:
        self._sink = sink
        self._encoder = Encoder(role, node, boot)
        self._clock = clock
        self._limit = queue_events
        self._enough = min(ENOUGH_EVENTS, queue_events)
        self._queue: deque[tuple[float, Event]] = deque()
        self._changed = threading.Condition()
        self._unreported = 0
        self._wake_at = 0
        self._discards = Discarded()
        self._closing = False
        self._lost = 0
        self._lost_to = ""
        self._thread: threading.Thread | None = None
        #: Events left out so far: the queue was full, the log was closed, or it could not be written when it was closed.
        self.dropped = 0
        #: Events in published files that the limit has deleted so far.
        self.discarded = 0
        #: Lines written so far.
        self.written = 0
        #: Why the last write failed; empty while writing works.
        self.problem = ""

    @classmethod
    def to_directory(
        cls,
        directory: str | os.PathLike[str],
        *,
        role: str,
        node: str,
        boot: str,
        rotate_bytes: int = ROTATE_BYTES,
        rotate_s: float = ROTATE_S,
        limit_bytes: int = LIMIT_BYTES,
        **options: Any,
    ) -> EventLog:
        """A log in files below ``directory`` (made if missing); :mod:`dmsg.eventlog.files` describes the options."""
        sink = DirectorySink(
            os.fspath(directory),
            role=role,
            node=node,
            boot=boot,
            rotate_bytes=rotate_bytes,
            rotate_s=rotate_s,
            limit_bytes=limit_bytes,
        )
        return cls(sink, role=role, node=node, boot=boot, **options)

    @classmethod
    def to_stream(cls, stream: TextIO, *, role: str, node: str, boot: str, **options: Any) -> EventLog:
        """A log on an open stream such as ``sys.stdout``.

        The stream's descriptor is duplicated at once, because twistd later replaces ``sys.stdout`` by an object that writes
        to its own log.
        """
        stream.flush()
        return cls(DescriptorSink(os.dup(stream.fileno())), role=role, node=node, boot=boot, **options)

    def emit(self, event: Event) -> None:
        """Take one event, from any thread; never blocks on output, never raises."""
        try:
            entry = (self._clock(), event)
            with self._changed:
                if self._closing:
                    self.dropped += 1
                    return
                if len(self._queue) >= self._limit:
                    self.dropped += 1
                    self._unreported += 1
                    return
                self._queue.append(entry)
                if self._thread is None:
                    self._start()
                elif len(self._queue) == self._wake_at:
                    self._changed.notify()
        except Exception:  # a thread that cannot be started or a clock that fails must not disturb the caller
            self.dropped += 1

    def start(self) -> None:
        """Start the thread now, so that files which a killed run left behind are published before the first event."""
        with self._changed:
            if self._thread is None and not self._closing:
                self._start()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Write the queue, publish it and stop the thread; returns whether all of it was written within ``timeout_s``.

        Blocks: call it in a thread of the reactor's pool. Later events are dropped and counted.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return self._attempt(self._sink.close)
        thread.join(timeout_s)
        problem = f"it takes more than {timeout_s:g} s" if thread.is_alive() else self.problem or self._lost_to
        if not problem:
            return True
        text = "the event log could not be written to its end, {count} events may be lost: {problem}"
        _log.error(text, count=self._lost + len(self._queue), problem=problem)
        return False

    # --- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="dmsg-event-log", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        self._attempt(self._sink.open)
        self._note_discards()
        while True:
            entries, dropped, closing = self._take()
            extra: list[tuple[float, Event]] = []
            if dropped:
                extra.append((self._clock(), EventsDropped(dropped)))
            if entries:  # a line on its own would fill another file, for which yet another is deleted
                extra.extend(self._report_discards())
            if entries or extra:
                self._write(chain(entries, extra))
            elif closing:
                break
            else:
                self._retry(lambda: self._sink.tick(time.monotonic()))
            self._note_discards()
        self._write(self._report_discards())
        self._attempt(self._sink.close)

    def _take(self) -> tuple[deque[tuple[float, Event]], int, bool]:
        """Wait for events, for a due time, or for the end; take the whole queue."""
        with self._changed:
            if not self._queue and not self._unreported and not self._closing:
                due = self._sink.next_due()
                self._wait(1, None if due is None else due - time.monotonic())
            if self._queue and self._sink.gather_s:
                until = time.monotonic() + self._sink.gather_s
                while not self._closing and len(self._queue) < self._enough and (left := until - time.monotonic()) > 0:
                    self._wait(self._enough, left)
            entries, self._queue = self._queue, deque()
            dropped, self._unreported = self._unreported, 0
            return entries, dropped, self._closing

    def _wait(self, events: int, timeout_s: float | None) -> None:
        """Wait until there are ``events`` events, or until the log is closed, but no longer than ``timeout_s``."""
        self._wake_at = events
        # Without a maximum age of files, ``timeout_s`` is longer than a wait may be.
        self._changed.wait(None if timeout_s is None else min(max(0.0, timeout_s), threading.TIMEOUT_MAX))
        self._wake_at = 0

    def _write(self, entries: Iterable[tuple[float, Event]]) -> None:
        lines: list[bytes] = []
        size = hour = 0
        hour_end = -math.inf
        for ts, event in entries:
            try:
                line = self._encoder.encode(event, ts)
            except Exception:  # not an event at all
                with self._changed:
                    self.dropped += 1
                    self._unreported += 1
                continue
            if ts >= hour_end or size + len(line) > FLUSH_BYTES:
                if lines:
                    self._flush(Batch(b"".join(lines), len(lines), hour))
                lines, size = [], 0
                hour = int(max(0.0, min(ts // _HOUR_S, _LAST_HOUR)))  # 0 for NaN
                hour_end = (hour + 1) * _HOUR_S
            lines.append(line)
            size += len(line)
        if lines:
            self._flush(Batch(b"".join(lines), len(lines), hour))

    def _flush(self, batch: Batch) -> None:
        sink = self._sink
        if self._attempt(lambda: sink.write(batch, time.monotonic())) or self._retry(
            lambda: sink.tick(time.monotonic())
        ):
            self.written += batch.lines
        else:
            self._lost_to = self.problem
            self._lost += batch.lines
            self.dropped += batch.lines

    def _note_discards(self) -> None:
        discarded = self._sink.take_discarded()
        if discarded.files and not self.discarded:
            text = "the event log has deleted {files} files, unshipped, to keep to its limit; more will follow"
            _log.warn(text, files=discarded.files)
        self.discarded += discarded.lines
        self._discards = self._discards.plus(discarded)

    def _report_discards(self) -> list[tuple[float, Event]]:
        discards, self._discards = self._discards, Discarded()
        return [(self._clock(), EventsDiscarded(*discards))] if discards.files else []

    def _retry(self, action: Callable[[], None]) -> bool:
        """Call ``action`` until it works; while closing only once, because waiting longer would hold the program up."""
        while not self._attempt(action):
            with self._changed:
                if self._changed.wait_for(lambda: self._closing, RETRY_S):
                    return self._attempt(action)
        return True

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            if not self.problem:
                _log.error("the event log cannot be written: {problem}", problem=problem)
            self.problem = problem
            return False
        self.problem = ""
        return True


@implementer(IEventLog)
class NullEventLog:
    """Takes every event and forgets it."""

    dropped = 0

    def emit(self, event: Event) -> None:
        """Do nothing."""

    def start(self) -> None:
        """Do nothing."""

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Do nothing; true."""
        return True
