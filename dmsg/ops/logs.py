"""The structured event log: takes events on the reactor's side, writes lines of JSON on a thread of its own.

``emit`` only puts the event into a bounded queue: a slow disk, an fsync or a full pipe never holds the reactor up. What
does not fit is counted, and the count is itself an event (``events_dropped``) as soon as there is room again. A line
gets its ``seq`` when it is written, so that ``(node, boot, seq)`` is a key without gaps: a gap in a reader's data means
that the reader lost something, never that the log did.

The thread starts with the first event (or :meth:`EventLog.start`), which is after a daemon has forked.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final, TextIO

from twisted.internet.defer import Deferred
from twisted.logger import Logger
from zope.interface import implementer

from dmsg.interfaces import IEventLog
from dmsg.ops.events import Event, EventsDropped, Primitive, describe_event
from dmsg.ops.logfiles import ROTATE_BYTES, ROTATE_S, DescriptorSink, DirectorySink, Sink

#: Events waiting to be written; at a few hundred bytes each this bounds memory to a few MiB.
QUEUE_EVENTS: Final = 10_000
#: Events encoded and written in one go; keeps one write, and the size of a file beyond its limit, small.
BATCH_EVENTS: Final = 256
#: Pause after a write failed (disk full, pipe full) before it is tried again.
RETRY_S: Final = 1.0
#: How long closing waits for the thread to write what is queued.
CLOSE_TIMEOUT_S: Final = 5.0
MEMORY_EVENTS: Final = 10_000
_SHORT_NODE_DIGITS: Final = 16
_INT64: Final = 2**63

_log = Logger()


def short_node(public_key: object) -> str:
    """The short form of a key that names a node in logs: its first 16 hex digits."""
    return str(public_key)[:_SHORT_NODE_DIGITS]


def new_boot_id(random: Callable[[int], bytes]) -> str:
    """A random id (16 hex digits) for one run of a program."""
    return random(8).hex()


class Encoder:
    """Makes lines of events; knows the envelope and counts ``seq``. ``encode`` never fails for an ``Event``.

    A value that is not of its declared type is made so: a column must hold one type, or whoever reads the lines with a
    schema would get nothing at all.
    """

    def __init__(self, role: str, node: str, boot: str) -> None:
        self._envelope = {"role": role, "node": node, "boot": boot}
        self._columns: dict[type[Event], tuple[tuple[str, type[Primitive]], ...]] = {}
        self.seq = 0

    def encode(self, event: Event, ts: float) -> bytes:
        """One line with its end; ``TypeError`` for what is no declared event, and then no ``seq`` is used up."""
        cls = type(event)
        columns = self._columns.get(cls)
        if columns is None:
            columns = tuple((each.name, each.type) for each in describe_event(cls).fields)
            self._columns[cls] = columns
        line: dict[str, object] = {"event": cls.NAME, "v": cls.VERSION, "ts": round(ts, 6), **self._envelope}
        line["seq"] = self.seq
        for name, kind in columns:
            value = getattr(event, name, kind())
            line[name] = value if type(value) is kind and kind is not int else _coerce(value, kind)
        try:
            text = json.dumps(line, separators=(",", ":"), allow_nan=False)
        except ValueError:  # a number that JSON does not have
            text = json.dumps({name: _finite(value) for name, value in line.items()}, separators=(",", ":"))
        self.seq += 1
        return text.encode("ascii") + b"\n"


def _coerce(value: Any, kind: type[Primitive]) -> Primitive:
    """``value`` as ``kind``, or the empty value of ``kind`` if it cannot be that. Integers fit 64 bits."""
    if type(value) is int and kind is int:
        return max(-_INT64, min(value, _INT64 - 1))
    try:
        made: Primitive = kind(value)
        return _coerce(made, int) if kind is int else made
    except Exception:  # whatever a stranger's type does when it is converted, the line keeps its shape
        return kind()


def _finite(value: object) -> object:
    return 0.0 if isinstance(value, float) and not -float("inf") < value < float("inf") else value


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
        self._queue: deque[tuple[float, Event]] = deque()
        self._changed = threading.Condition()
        self._unreported = 0
        self._closing = False
        self._lost = False
        self._thread: threading.Thread | None = None
        #: Events left out so far, because the queue was full or the log closed.
        self.dropped = 0
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
        **options: Any,
    ) -> EventLog:
        """A log in files of ``directory`` (made if missing), published by size and age: :mod:`dmsg.ops.logfiles`."""
        sink = DirectorySink(
            os.fspath(directory), f"{role}-{node}-{boot}", rotate_bytes=rotate_bytes, rotate_s=rotate_s
        )
        return cls(sink, role=role, node=node, boot=boot, **options)

    @classmethod
    def to_stream(cls, stream: TextIO, *, role: str, node: str, boot: str, **options: Any) -> EventLog:
        """A log on an open stream such as ``sys.stdout``.

        The stream's descriptor is duplicated here and now: twistd replaces ``sys.stdout`` later by something that
        writes into its own log.
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
                self._changed.notify()
        except Exception:  # a thread that cannot be started, a clock that fails: never the caller's trouble
            self.dropped += 1

    def start(self) -> None:
        """Start the thread now, so that what a killed run left behind is published before the first event."""
        with self._changed:
            if self._thread is None and not self._closing:
                self._start()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Write what is queued, publish it and stop the thread; whether all of it was written within ``timeout_s``.

        Blocks: call it in a thread of the reactor's pool. Events that come later are dropped and counted.
        """
        with self._changed:
            self._closing = True
            self._changed.notify()
            thread = self._thread
        if thread is None:
            return self._attempt(self._sink.close)
        thread.join(timeout_s)
        return not thread.is_alive() and not self._lost and not self.problem

    # --- the thread --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="dmsg-event-log", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        self._attempt(self._sink.open)
        while True:
            entries, dropped, closing = self._take()
            self._write(entries)
            if dropped:
                self._write([(self._clock(), EventsDropped(dropped))])
            if not entries and not dropped:
                if closing:
                    break
                self._retry(lambda: self._sink.tick(time.monotonic()))
        self._attempt(self._sink.close)

    def _take(self) -> tuple[Iterable[tuple[float, Event]], int, bool]:
        """Wait for events, for something that is due, or for the end; take everything there is."""
        with self._changed:
            if not self._queue and not self._unreported and not self._closing:
                due = self._sink.next_due()
                self._changed.wait(None if due is None else max(0.0, due - time.monotonic()))
            entries, self._queue = self._queue, deque()
            dropped, self._unreported = self._unreported, 0
            return entries, dropped, self._closing

    def _write(self, entries: Iterable[tuple[float, Event]]) -> None:
        lines: list[bytes] = []
        for ts, event in entries:
            try:
                lines.append(self._encoder.encode(event, ts))
            except Exception:  # not an event at all
                with self._changed:
                    self.dropped += 1
                    self._unreported += 1
            if len(lines) == BATCH_EVENTS:
                self._flush(lines)
                lines = []
        if lines:
            self._flush(lines)

    def _flush(self, lines: list[bytes]) -> None:
        data = b"".join(lines)
        write = self._sink.write
        if self._attempt(lambda: write(data, time.monotonic())) or self._retry(lambda: write(b"", time.monotonic())):
            self.written += len(lines)
        else:
            self._lost = True

    def _retry(self, action: Callable[[], None]) -> bool:
        """Do it until it works. While closing only once, because waiting longer would hold the program up."""
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


@implementer(IEventLog)
class MemoryEventLog:
    """Keeps the last ``limit`` events in ``events``: for tests and for programs that look at their own events."""

    def __init__(self, limit: int = MEMORY_EVENTS) -> None:
        self.events: deque[Event] = deque(maxlen=limit)
        #: Events that were pushed out by newer ones.
        self.dropped = 0
        self._waiting: list[tuple[type[Event], Deferred[Any]]] = []

    def emit(self, event: Event) -> None:
        """Keep one event and wake whoever waits for its kind."""
        if len(self.events) == self.events.maxlen:
            self.dropped += 1
        self.events.append(event)
        woken = [waiter for kind, waiter in self._waiting if isinstance(event, kind)]
        self._waiting = [one for one in self._waiting if not isinstance(event, one[0])]
        for waiter in woken:
            waiter.callback(event)

    def of(self, kind: type[Event]) -> list[Any]:
        """The kept events of one kind, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]

    def next(self, kind: type[Event]) -> Deferred[Any]:
        """Fires with the next event of ``kind`` that is emitted from now on; may be cancelled."""
        waiter: Deferred[Any] = Deferred(self._forget)
        self._waiting.append((kind, waiter))
        return waiter

    def start(self) -> None:
        """Do nothing."""

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Do nothing; true."""
        return True

    def _forget(self, waiter: Deferred[Any]) -> None:
        self._waiting = [one for one in self._waiting if one[1] is not waiter]
