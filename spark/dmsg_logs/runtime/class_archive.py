"""An archive of Spark's classes, with which a JVM starts in half the time: what ``python -m dmsg_logs prepare`` makes.

A starting JVM finds, reads and verifies some 25,000 classes, the same ones every time. Class data sharing lets it map them
into memory as another JVM has dumped them. A JVM ignores an archive of another Java or class path, so the archive's name
tells its Java and Spark.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import pyspark

#: Environment variable for the directory of archives; the default is the user's cache directory.
CACHE_VARIABLE: Final = "DMSG_LOGS_CACHE"
#: Silences a JVM's many messages about classes it cannot archive, and about archives that do not fit.
_QUIET: Final = "-Xlog:cds*=off -Xlog:class*=off"
_TIMEOUT_S: Final = 600.0
#: The module that uses Spark. It imports most others, which need this one, so it is not imported here.
_FIRST_USE: Final = "dmsg_logs.first_use"


class NotMade(Exception):
    """There is no archive; the message says why."""


class Made(NamedTuple):
    """An archive, and the seconds to a first answer with it."""

    path: Path
    start_s: float


def name() -> str | None:
    """The archive's name, without its size, for the Java and Spark that a session would start; ``None`` without Java."""
    home = os.environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java")
    if java is None:
        return None
    modules = Path(os.path.realpath(java)).parent.parent / "lib" / "modules"
    spark = os.environ.get("SPARK_HOME") or os.path.dirname(pyspark.__file__)
    try:
        status = modules.stat()
    except OSError:
        return None
    facts = (str(modules), status.st_size, status.st_mtime_ns, os.path.realpath(spark), pyspark.__version__)
    return f"classes-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def directory() -> Path:
    """Where archives are."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dmsg-logs"


def find() -> Path | None:
    """The archive for a session, if there is one and it is whole: a truncated archive crashes the JVM."""
    ours = name()
    for each in directory().glob(f"{ours}-*.jsa") if ours else ():
        with contextlib.suppress(FileNotFoundError):
            if each.name == f"{ours}-{each.stat().st_size}.jsa":
                return each
    return None


def java_options() -> str:
    """The JVM options to use the archive; empty if there is none."""
    path = find()
    return "" if path is None else _use(path)


def make() -> Made:
    """Make the archive, anew if there is one, and start Spark with it. Takes some 30 s and 200 MB. Raises
    :class:`NotMade`, and ``OSError`` where it cannot be written."""
    ours, place = name(), directory()
    if ours is None:
        raise NotMade("there is no Java, or it has no image of its modules (lib/modules)")
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place, prefix=".making-") as work:
        made = Path(work, "classes.jsa")
        _run("work", f'"-XX:ArchiveClassesAtExit={made}" {_QUIET} -XX:TieredStopAtLevel=1', work)
        if not made.is_file():
            raise NotMade("this Java makes no archive of its classes")
        start_s = _run("start", _use(made), work)
        path = place / f"{ours}-{made.stat().st_size}.jsa"
        os.replace(made, path)
    for other in set(place.glob(f"{ours}-*.jsa")) - {path}:
        other.unlink(missing_ok=True)
    return Made(path, start_s)


def _use(path: Path) -> str:
    return f'"-XX:SharedArchiveFile={path}" {_QUIET}'


def _run(what: str, options: str, directory: str) -> float:
    """Use Spark in a process of its own, which ends after its JVM; gives the seconds to a first answer."""
    command = [sys.executable, "-m", _FIRST_USE, what, options, directory]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise NotMade(f"Spark did not end within {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        raise NotMade(done.stderr.strip().rpartition("\n")[2] or f"Spark ended with {done.returncode}")
    return float(done.stdout.split()[-1])
