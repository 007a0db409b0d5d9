"""One run at a time: a note names the run that is at work, and expires if that run is killed.

The note only keeps two runs from doing the same work. Correctness does not depend on it: commits are created once
(:mod:`dmsg_logs.ingest.store`), and generations are shown whole (:mod:`dmsg_logs.tables.generations`). So the note may
err, and errs on the side of letting work go on.
A note is void when its process is gone (known at once on the same machine), or when its time is more than ``LEASE_S`` from
now (for other machines), or when it is damaged.
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

#: Seconds without a renewed note after which a run of another machine is taken for dead.
LEASE_S: Final = 3600.0

#: Notes this process holds: any other note with our process id is of a run that failed.
_held: set[str] = set()

#: Members of a note, and their types in JSON.
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "machine": (str,),
    "pid": (int,),
    "started": (str,),
    "token": (str,),
    "at": (int, float),
}


class BusyError(Exception):
    """Another run is at the same work."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A run: its machine and process, and the Unix seconds at which it last renewed its note."""

    machine: str
    pid: int
    started: str
    token: str
    at: float

    def alive(self, now: float) -> bool:
        """Whether the run may still be at work."""
        if self.machine != _machine():
            return abs(now - self.at) < LEASE_S  # a clock that was wrong must not keep others out for years
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
            owner = cls(**json.loads(text))
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if not all(type(getattr(owner, name)) in kinds for name, kinds in _KINDS.items()):
            raise ValueError("not the note of a run")
        return owner


@contextlib.contextmanager
def hold(spark: SparkSession, path: str, work: str) -> Iterator[Callable[[], Owner]]:
    """Hold the note at ``path`` for ``work``; gives a function that renews it.

    Raises :class:`BusyError` if another run holds it.
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
    """Names this machine, its boot, and its namespace of process ids: a container is another machine."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _started(pid: int) -> str:
    """Start time of a process in the system's own units; "" if there is none. Process ids are reused, this is not."""
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
