"""Which files of an event log are shipped, under which names, in which order, and when a failure is tried again. Pure.

There are two kinds of failures. A failure of one file (:data:`FILE_REASONS`) delays that file only. Any other failure counts
as the target's: then all files wait, and one at a time is tried until one gets through. In both cases the pause of the file
that failed grows each time, so that the next attempt is at another file and none can stop the others. After failures of its
own a file waits for much longer, because those seldom pass by themselves and many files may have them.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from dmsg.eventlog.names import DIGEST_DIGITS, LogFileName
from dmsg.sansio.backoff import Backoff

#: Beginning of the paths of files that a shipper itself writes. Shipping these makes no event: each file would make a line,
#: that line a file, and so on for ever.
OWN_FOLDER: Final = "role=shipper/"
#: Reasons that concern one file only: its content, the content stored in its place, access to it.
FILE_REASONS: Final = frozenset({"damaged", "conflict", "unreadable", "mismatch"})
#: The longest pause after failures of a file's own is so many times as long as the one after other failures.
OWN_PAUSES: Final = 60.0
#: Of a message from a third-party library at most this many characters are logged.
DETAIL_CHARACTERS: Final = 300

_SAFE: Final = re.compile(r"[A-Za-z0-9._-]+")
_FOLDER: Final = re.compile(r"role=[A-Za-z0-9._-]+/date=\d{4}-\d{2}-\d{2}/hour=\d{2}", re.ASCII)
_QUERY: Final = re.compile(r"(\w://[^\s?]*)\?\S+")
_USERINFO: Final = re.compile(r"(\w://)[^\s/]*@")
_PASSWORD: Final = re.compile(r"\w://[^/?#:@]*:([^/?#]+)@")


class Waiting(NamedTuple):
    """A finished file: its path below the event directory, its size, and when it was last changed (Unix seconds)."""

    path: str
    size_bytes: int
    modified_at: float


def recognise(path: str) -> LogFileName | None:
    """The parts of the name of a finished file at its place (``role=…/date=…/hour=…/…``); ``None`` for anything else."""
    folder, _, name = path.rpartition("/")
    if not _FOLDER.fullmatch(folder) or not _SAFE.fullmatch(name):
        return None
    return LogFileName.parse(name)


def landing_path(path: str, sha256: str) -> str:
    """The path below the target of the file at ``path``, whose bytes have this SHA-256 (hex): the same folders, and the same
    name with the beginning of the digest in it."""
    name = recognise(path)
    if name is None:
        raise ValueError(f"{path!r} is no finished file of an event log")
    return f"{path.rpartition('/')[0]}/{name._replace(digest=sha256[:DIGEST_DIGITS]).format()}"


def redact(text: str) -> str:
    """``text`` without the parts of its URLs that may be secret: user, password and query."""
    return _QUERY.sub(r"\1?…", _USERINFO.sub(r"\1…@", text))


def clip(error: BaseException | None, url: str = "") -> str:
    """The first line of an error for a log: of limited length, and without the password of ``url``."""
    text = redact((str(error) or repr(error)).partition("\n")[0])
    password = _PASSWORD.search(url)  # urlsplit refuses some texts, and an error may well be about such a one
    if password is not None:
        text = text.replace(password[1], "…")
    return f"{type(error).__name__}: {text}"[:DETAIL_CHARACTERS]


class Sparing:
    """A rate limit for messages: lets one of a kind through in ``every_s`` seconds and counts the others."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._again_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def lets(self, kind: str, now: float) -> int | None:
        """How many of this kind were left out since the last one, if this one may be told; ``None`` if it may not."""
        if now < self._again_at.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return None
        self._again_at[kind] = now + self._every_s
        return self._left_out.pop(kind, 0)

    def rest(self) -> dict[str, int]:
        """How many of each kind were left out and not told yet; from now on they count as told."""
        left_out, self._left_out = self._left_out, {}
        return left_out


class _Failures(NamedTuple):
    """How often a file has failed, and how many of these failures were its own."""

    all: int = 0
    own: int = 0


class _Queue:
    """Paths by a key, the least first. A step costs O(log n) on average, because a dropped path stays in the heap until it
    comes up, or until more than half of the heap is dropped paths."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[float, ...]] = {}
        self._heap: list[tuple[tuple[float, ...], str]] = []

    def put(self, path: str, *key: float) -> None:
        self._keys[path] = key
        heappush(self._heap, (key, path))
        if len(self._heap) > 2 * len(self._keys):
            self._heap = [(key, path) for path, key in self._keys.items()]
            heapify(self._heap)

    def drop(self, path: str) -> None:
        self._keys.pop(path, None)

    def first(self) -> tuple[tuple[float, ...], str] | None:
        """The least key and its path, which stays in the queue; of equal keys the least path."""
        heap = self._heap
        while heap and self._keys.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0] if heap else None


class Plan:
    """The known files, and which one is tried next. ``now`` is always monotonic seconds.

    ``backoff`` is for the target; failures of a file's own have :data:`OWN_PAUSES` times its limit.
    At most ``parallel`` attempts are under way at a time. With ``give_up_after`` a file is left alone after so many failures,
    and all files are after so many failures of the target in a row. The cost of an attempt hardly grows with the number of
    files: a directory may hold hundreds of thousands, and all of them may fail.
    """

    def __init__(
        self, *, parallel: int, backoff: Backoff, uniform: Callable[[], float], give_up_after: int | None = None
    ) -> None:
        self._parallel = max(1, parallel)
        self._backoff = backoff
        self._own_backoff = replace(backoff, limit_s=OWN_PAUSES * backoff.limit_s)
        self._uniform = uniform
        self._give_up_after = give_up_after
        self._files: dict[str, Waiting] = {}
        self._failures: dict[str, _Failures] = {}
        # A file is in one of these: under way, with the number of the target's failures when it began; not tried yet; waiting,
        # ordered by when its turn comes; due, in both orders. A file that was given up is in none.
        self._running: dict[str, int] = {}
        self._ready: deque[str] = deque()
        self._waiting = _Queue()
        self._due_by_age = _Queue()
        self._due_by_failures = _Queue()
        self._settled: set[str] = set()
        self._target_failures = 0
        self._target_due = 0.0

    # --- what there is -----------------------------------------------------------------------------------------------

    def scan_begins(self) -> None:
        """A scan begins: its list may still name files that settle from now on, and these are ignored."""
        self._settled.clear()

    def scanned(self, files: Iterable[Waiting]) -> None:
        """Take the list of all finished files."""
        found = {one.path: one for one in files if one.path not in self._settled}
        found.update((path, self._files[path]) for path in self._running)
        self._files = found
        for path in [path for path in self._failures if path not in found]:
            del self._failures[path]
            for queue in (self._waiting, self._due_by_age, self._due_by_failures):
                queue.drop(path)
        fresh = [one for path, one in found.items() if path not in self._running and path not in self._failures]
        fresh.sort(key=lambda one: (one.modified_at, one.path))
        self._ready = deque(one.path for one in fresh)

    # --- attempts ----------------------------------------------------------------------------------------------------

    def take(self, now: float) -> Waiting | None:
        """The next file to try now, oldest first; ``None`` if there is none, or none now."""
        limit = 1 if self._target_failures else self._parallel
        if len(self._running) >= limit or now < self._target_due or self._target_given_up:
            return None
        path = self._next(now)
        if path is None:
            return None
        self._running[path] = self._target_failures
        return self._files[path]

    def _next(self, now: float) -> str | None:
        """Files that are due again go first, the oldest of them first. While the target fails they go last, those with the
        fewest failures first: it may be only one file that the target refuses."""
        while (waiting := self._waiting.first()) is not None and waiting[0][0] <= now:
            path = waiting[1]
            self._waiting.drop(path)
            self._due_by_age.put(path, self._files[path].modified_at)
            self._due_by_failures.put(path, self._failures[path].all, self._files[path].modified_at)
        due = (self._due_by_failures if self._target_failures else self._due_by_age).first()
        if self._ready and (self._target_failures or due is None):
            return self._ready.popleft()
        if due is None:
            return None
        self._due_by_age.drop(due[1])
        self._due_by_failures.drop(due[1])
        return due[1]

    def attempt(self, path: str) -> int:
        """The number of the attempt under way at the file, from 1."""
        return self._failures.get(path, _Failures()).all + 1

    def settled(self, path: str, *, reached: bool) -> None:
        """The file is no longer here; ``reached`` if the target has taken it."""
        del self._running[path]
        self._files.pop(path, None)
        self._failures.pop(path, None)
        self._settled.add(path)
        if reached:
            self._target_failures, self._target_due = 0, 0.0

    def failed(self, path: str, reason: str, now: float) -> float:
        """The attempt failed; gives when the file will be tried again at the earliest (infinity: never)."""
        failures_then = self._running.pop(path)
        own = reason in FILE_REASONS
        if not own and failures_then == self._target_failures:  # one outage fails several at once
            self._target_failures += 1
            self._target_due = now + self._backoff.pause_s(self._target_failures, self._uniform)
        before = self._failures.get(path, _Failures())
        failures = self._failures[path] = _Failures(before.all + 1, before.own + own)
        if self._give_up_after is not None and failures.all >= self._give_up_after:
            return float("inf")
        backoff, count = (self._own_backoff, failures.own) if own else (self._backoff, failures.all)
        due = now + backoff.pause_s(count, self._uniform)
        self._waiting.put(path, due)
        return due

    def next_due(self, now: float) -> float | None:
        """When :meth:`take` gives a file again, if nothing happens before; ``None`` if it needs another event."""
        limit = 1 if self._target_failures else self._parallel
        if len(self._running) >= limit or self._target_given_up:
            return None
        if self._ready or self._due_by_age.first() is not None:
            return max(now, self._target_due)
        waiting = self._waiting.first()
        return None if waiting is None else max(now, waiting[0][0], self._target_due)

    # --- how it stands -----------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether nothing is under way, and nothing will be without a new list of files."""
        if self._running:
            return False
        left = self._ready or self._due_by_age.first() is not None or self._waiting.first() is not None
        return self._target_given_up or not left

    @property
    def in_flight(self) -> int:
        """Attempts under way."""
        return len(self._running)

    @property
    def backlog(self) -> tuple[Waiting, ...]:
        """Every file that is still here, including those under way."""
        return tuple(self._files.values())

    @property
    def _target_given_up(self) -> bool:
        return self._give_up_after is not None and self._target_failures >= self._give_up_after
