"""Small files on their way from a conversation to the disk, many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from twisted.internet.defer import Deferred

from dmsg.cli.channel import TimedOut, TransportBroken
from dmsg.cli.files.parts import SmallFile
from dmsg.cli.files.store import BLOCK_BYTES, in_thread, storage_failure
from dmsg.cli.files.talk import Conversation
from dmsg.cli.files.wire import Done, TransferFailed
from dmsg.glue.waiters import Waiters

#: Files that wait for the disk; at that number, or at :data:`~dmsg.cli.files.store.BLOCK_BYTES` of data, their sender waits.
#: They are open together, in each of the ten threads of the pool: 640 descriptors at most, of the usual 1,024.
WAITING_LIMIT: Final = 64

#: Stores files in a thread; gives the names of the stored files, and the error of the first one that failed, if any.
Keep = Callable[[Sequence[SmallFile]], tuple[list[str], OSError | TransferFailed | None]]


class SmallFiles:
    """The small files of one conversation. Files that come while a thread stores some are stored together next.

    ``known`` tells whether a file has arrived already, ``stored`` is told which file was stored, and under which name. When a
    file cannot be stored, the conversation is interrupted with ``TransferFailed``, after the answers to the files before it.
    It is in ``storing`` while it has files to store, which may be longer than the conversation lasts.
    """

    def __init__(
        self,
        reactor: Any,
        talk: Conversation,
        *,
        keep: Keep,
        known: Callable[[SmallFile], bool],
        stored: Callable[[SmallFile, str], object],
        sender: str,
        storing: set[SmallFiles],
    ) -> None:
        #: The key of their sender, in hex.
        self.sender = sender
        self._reactor = reactor
        self._talk = talk
        self._keep = keep
        self._known = known
        self._stored = stored
        self._storing = storing
        self._waiting: list[SmallFile] = []
        self._waiting_bytes = 0
        self._error: Exception | None = None
        self._unanswered: TransportBroken | TimedOut | None = None
        self._progress: Waiters[None] = Waiters()

    async def put(self, file: SmallFile) -> None:
        """Have ``file`` stored and answered; returns later while too many wait."""
        self._waiting.append(file)
        self._waiting_bytes += len(file.data)
        if self not in self._storing:
            self._storing.add(self)
            Deferred.fromCoroutine(self._store())
        while len(self._waiting) >= WAITING_LIMIT or self._waiting_bytes >= BLOCK_BYTES:
            await self._wait()

    async def done(self) -> None:
        """Wait until all are stored and answered. Raises the error of that: ``TransferFailed`` if a file was not stored,
        ``TransportBroken`` or ``TimedOut`` if an answer could not be given."""
        while self in self._storing:
            await self._wait()
        error = self._error or self._unanswered
        if error is not None:
            raise error

    async def idle(self) -> None:
        """Wait until nothing is being stored, whatever became of it."""
        while self in self._storing:
            await self._progress.wait()

    async def _wait(self) -> None:
        await self._progress.wait()
        if self._error is not None:
            raise self._error

    async def _store(self) -> None:
        try:
            while self._waiting and self._error is None:
                files, self._waiting, self._waiting_bytes = self._waiting, [], 0
                # The conversation learns of a lost transport itself, once it does not wait here. Files that have come are
                # stored all the same, so that they need not be sent again.
                try:
                    await self._store_some(files)
                except (TransportBroken, TimedOut) as error:
                    self._unanswered = error
                self._progress.fire(None)
        except Exception as error:  # of any kind: otherwise the conversation would wait for ever
            self._error = error
            self._talk.channel.interrupt(error)
        finally:
            self._storing.discard(self)
            self._progress.fire(None)

    async def _store_some(self, files: list[SmallFile]) -> None:
        new = [file for file in files if not self._known(file)]
        names: list[str] = []
        problem: OSError | TransferFailed | None = None
        if new:
            names, problem = await in_thread(self._reactor, lambda: self._keep(new))
        for file, name in zip(new, names, strict=False):
            self._stored(file, name)
        answered = len(files) if problem is None else files.index(new[len(names)])
        await self._talk.say(*[Done()] * answered)
        if problem is not None:
            failed = problem if isinstance(problem, TransferFailed) else storage_failure(problem, "")
            raise failed.about(files[answered].name)
