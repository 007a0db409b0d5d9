"""One run at a time: a note of who is at work, which a killed run does not leave behind for ever.

The note only keeps two runs from doing the same work. That they cannot spoil what they make is not its business, but that
of commits, which are created once (:mod:`dmsg_logs.ingest.store`), and of generations, which are shown whole
(:mod:`dmsg_logs.tables.generations`). So it may err, and does on the side of letting work go on.
A note is void when its process is gone (known on the same machine, at once) or after ``LEASE_S`` (for other machines).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from dmsg_logs.runtime import paths

#: A run of another machine that has not renewed its note for so long is taken for dead, in seconds.
LEASE_S: Final = 3600.0

#: Notes this process holds: one with our process id that is not among them is of a run that failed.
_held: set[str] = set()


class BusyError(Exception):
    """Another run is at the same work."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A run: where it is, which process it is, and Unix seconds at which it last said so."""

    machine: str
    pid: int
    started: str
    token: str
    at: float

    def alive(self, now: float) -> bool:
        """Whether the run may still be at work."""
        if self.machine != _machine():
            return now - self.at < LEASE_S
        if self.pid == os.getpid():
            return self.token in _held
        return _started(self.pid) == self.started != ""

    def to_json(self) -> str:
        """For a file."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Owner:
        """The owner of :meth:`to_json`; ``ValueError`` for anything else."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from None


@contextlib.contextmanager
def hold(spark: SparkSession, path: str, work: str) -> Iterator[Callable[[], Owner]]:
    """Be the one at ``work``, as the note at ``path`` says; gives a function that renews the note.

    :class:`BusyError` if another run is at it.
    """
    token = uuid.uuid4().hex

    def renew() -> Owner:
        owner = _myself(token)
        paths.write_text(spark, path, owner.to_json())
        return owner

    if not paths.create_text(spark, path, _myself(token).to_json()):
        with contextlib.suppress(FileNotFoundError, ValueError):  # gone since, or not a note at all
            other = Owner.from_json(paths.read_text(spark, path))
            if other.alive(time.time()):
                raise BusyError(f"process {other.pid} of {other.machine.partition(' ')[0]} is at work on {work}")
        renew()
    _held.add(token)
    try:
        yield renew
    finally:
        _held.discard(token)
        with contextlib.suppress(Exception):  # without a JVM the note stays, and is void
            paths.delete(spark, path)


def _myself(token: str) -> Owner:
    return Owner(_machine(), os.getpid(), _started(os.getpid()), token, time.time())


def _machine() -> str:
    """This machine, since it was started, and its space of process ids: a container is another machine."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> str:
    """When a process was started, in the system's own units; "" if there is none. Ids are used again, this is not."""
    if os.path.isdir("/proc/self"):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] in ("Z", "X") else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except OSError:  # another user's
        pass
    return "running"
