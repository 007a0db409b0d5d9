"""The landing zone: which files are there, what their names say, and how Spark gets at them.

A landing zone is a directory tree of ``*.jsonl``, ``*.jsonl.gz`` and ``*.jsonl.zst`` files that appear whole (by a
rename, or as an object). Ignored are names that begin with ``.`` or ``_`` and everything below them, names that are not
UTF-8, names with a ``:`` in their last part, which Hadoop takes for the end of a scheme (our writer makes none), and
anything but plain files: a pipe would block its reader for ever. If Hadoop has no file system for the scheme (``s3:``
without its jars), :class:`MirroredLanding` copies new files to a local directory with fsspec, one batch at a time.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import PurePosixPath
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from dmsg_logs.runtime import paths

_SUFFIX: Final = re.compile(r"\.jsonl(\.zst|\.gz)?\Z")
#: ``<node>-<boot>-<number>[-<lines>[-<digest>]]``, read from the right: a node may be any text.
_NAME: Final = re.compile(
    r"^(?P<node>.+)-(?P<boot>[0-9a-f]{8,32})-(?P<number>\d{6,9})"
    r"(?:-(?P<lines>\d{1,12})(?:-(?P<digest>[0-9a-f]{16}))?)?$"
)
_ROLE: Final = re.compile(r"(?:^|/)role=([^/]+)/")
_WHEN: Final = re.compile(r"(?:^|/)date=([0-9-]{10})/(?:hour=(\d{2})/)?")
#: Characters that need no encoding in a URI.
_PLAIN: Final = re.compile(r"[A-Za-z0-9._=/-]*")

#: Estimated bytes of text in one batch: some 25 million lines, which a 2 GiB driver handles easily.
MAX_BATCH_BYTES: Final = 8 * 1024**3
#: Files in one batch: the driver keeps accounts of each.
MAX_BATCH_FILES: Final = 5_000
#: Object stores of fsspec. They have no directories: before its first object, a landing zone looks like a mistyped path.
_OBJECT_STORES: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "ocilake", "obs", "cos", "tos", "b2", "r2"}
)
#: Most bytes of one part of a path that file systems take.
_NAME_BYTES: Final = 255
#: Approximate compression ratio of our lines.
_COMPRESSION: Final = 7


class FileName(NamedTuple):
    """The fields in the name of a landing file; ``None`` for those it does not have."""

    role: str | None
    node: str | None
    boot: str | None
    number: int | None
    recorded: int | None
    digest: str | None


@dataclass(frozen=True, slots=True)
class LandingFile:
    """A file: its name relative to the landing zone, its bytes, Unix seconds of its last change, and where to read it:
    ``path`` goes to Spark, ``uri`` comes back from Spark, and ``local`` is for other programs if the file is on a file
    system of the machine."""

    name: str
    size: int
    changed_at: float
    path: str = ""
    uri: str = ""
    local: str = ""

    @property
    def identity(self) -> str:
        """Equal if and only if the file has nothing new, as far as a name can say. A digest in the name vouches for the
        content of a whole file; a file without a digest is taken again when its size has changed."""
        return self.name if parse_name(self.name).digest else f"{self.name}:{self.size}"

    @property
    def text_bytes(self) -> int:
        """Approximate bytes of text in the file."""
        return self.size * (1 if self.name.endswith(".jsonl") else _COMPRESSION)


def parse_name(name: str) -> FileName:
    """The fields of a name relative to the landing zone. The role comes from the directory."""
    role = _ROLE.search(name)
    match = _NAME.match(_SUFFIX.sub("", name.rpartition("/")[2]))
    if match is None:
        return FileName(role and role[1], None, None, None, None, None)
    lines = match["lines"]
    number, recorded = int(match["number"]), None if lines is None else int(lines)
    return FileName(role and role[1], match["node"], match["boot"], number, recorded, match["digest"])


def batches(files: Iterable[LandingFile]) -> list[list[LandingFile]]:
    """Files in the order they are taken, oldest hours first, in batches of a bounded size; each has at least one."""
    result: list[list[LandingFile]] = []
    room = 0
    for each in sorted(files, key=_order):
        if not result or each.text_bytes > room or len(result[-1]) >= MAX_BATCH_FILES:
            result.append([])
            room = MAX_BATCH_BYTES
        result[-1].append(each)
        room -= each.text_bytes
    return result


def shares(files: Sequence[LandingFile], count: int) -> list[list[LandingFile]]:
    """Files in their order, cut into at most ``count`` shares of about the same size."""
    size = sum(each.size for each in files) / count
    result: list[list[LandingFile]] = [[]]
    taken = 0
    for each in files:
        if size and taken >= size * len(result):
            result.append([])
        result[-1].append(each)
        taken += each.size
    return result


def days(files: Iterable[LandingFile]) -> int:
    """Number of days on which the files were begun, according to their directories; at least 1."""
    return len({_order(each)[0] for each in files}) or 1


def _order(file: LandingFile) -> tuple[str, str, str]:
    when = _WHEN.search(file.name)
    return (when[1], when[2] or "", file.name) if when else ("", "", file.name)


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _is_ours(name: str) -> bool:
    parts = name.split("/")
    return all(map(_is_seen, parts)) and ":" not in parts[-1] and _SUFFIX.search(name) is not None


def _is_seen(part: str) -> bool:
    """Whether a file or directory of this name may be read."""
    if not part.isascii() and part.encode(errors="replace").decode() != part:  # bytes that are no UTF-8
        return False
    return not part.startswith((".", "_"))


def _directories(root: str) -> Iterator[tuple[str, list[str], bool]]:
    """Every readable directory from ``root`` on, once: its path, the names in it, and whether a symbolic link leads to it.

    Symbolic links are followed last and in order, so that a directory with several links always has the same name: its
    files would otherwise be taken for new ones. A link that leads back is not followed. An unreadable directory is an
    error, unless it was reached by a link, which may lead anywhere.
    """
    found: set[tuple[int, int]] = set()
    waiting = [root]
    linked = False
    while waiting:
        links = []
        for directory, below, names in os.walk(waiting.pop(0), onerror=None if linked else _unless_gone):
            try:
                status = os.stat(directory)
            except OSError as error:  # the retention was quicker
                if not linked:
                    _unless_gone(error)
                below.clear()
                continue
            if (status.st_dev, status.st_ino) in found:
                below.clear()
                continue
            found.add((status.st_dev, status.st_ino))
            below[:] = filter(_is_seen, below)
            links += [path for each in below if os.path.islink(path := os.path.join(directory, each))]
            yield directory, names, linked
        waiting += sorted(links)
        linked = True


def _plain_file(path: str, *, linked: bool) -> os.stat_result | None:
    """The status of a plain file; ``None`` for anything else, and for an unreadable file behind a link."""
    linked = linked or os.path.islink(path)
    try:
        status = os.stat(path)
    except OSError as error:  # the retention was quicker
        if not linked:
            _unless_gone(error)
        return None
    if not stat.S_ISREG(status.st_mode) or (linked and not os.access(path, os.R_OK)):
        return None
    return status


class Landing(Protocol):
    """Where files come from."""

    def files(self) -> list[LandingFile]:
        """All files there are now."""

    def fetch(self, files: list[LandingFile]) -> list[LandingFile]:
        """The same files with ``path`` and ``uri``, readable by Spark until :meth:`release`."""

    def release(self) -> None:
        """Give up the fetched files."""


def open_landing(spark: SparkSession, landing: str) -> Landing:
    """The landing zone at a path or URL; ``FileNotFoundError`` if there is no such directory."""
    if paths.known(spark, landing):
        if not paths.exists(spark, landing):
            raise FileNotFoundError(f"no landing zone at {landing}")
        return HadoopLanding(spark, landing) if paths.local(spark, landing) is None else LocalLanding(spark, landing)
    return MirroredLanding(spark, landing)


class _InPlace:
    """Files are read where they are."""

    def __init__(self, spark: SparkSession, landing: str) -> None:
        self._spark = spark
        self._root = paths.qualified(spark, landing).rstrip("/")

    def fetch(self, files: list[LandingFile]) -> list[LandingFile]:
        """Nothing has to be moved."""
        return _located(self._spark, self._root, files)

    def release(self) -> None:
        """Nothing was moved."""


class LocalLanding(_InPlace):
    """A landing zone on a file system of the machine; on a cluster every executor sees it under the same path."""

    def files(self) -> list[LandingFile]:
        """All files there are now."""
        root = paths.local(self._spark, self._root) or "/"
        found = []
        for directory, names, linked in _directories(root):
            for each in names:
                path = os.path.join(directory, each)
                name = os.path.relpath(path, root)
                if _is_ours(name) and (status := _plain_file(path, linked=linked)) is not None:
                    found.append(LandingFile(name, status.st_size, status.st_mtime))
        return found


class HadoopLanding(_InPlace):
    """A landing zone that Spark reads by itself."""

    def files(self) -> list[LandingFile]:
        """All files there are now; listed by Spark, in parallel where there are many directories."""
        listed = (
            self._spark.read.format("binaryFile")
            .option("recursiveFileLookup", "true")
            .option("pathGlobFilter", "*.jsonl*")
            .load(paths.literally(self._root))
        )
        columns = ("path", "length", F.unix_micros("modificationTime"))
        found = {path: (size, changed / 1e6) for path, size, changed in listed.select(*columns).collect()}
        uris = listed.inputFiles()
        if len(uris) != len(found):  # the rows lack empty files, and an empty file may be the rest of a full one
            for path in (paths.path_of_uri(self._spark, uri) for uri in uris):
                if path not in found:
                    found[path] = (0, paths.changed_at(self._spark, path))
        named = ((path[len(self._root) + 1 :], *facts) for path, facts in found.items())
        return [LandingFile(*each) for each in named if _is_ours(each[0])]


class MirroredLanding:
    """A landing zone that only fsspec can read: new files are copied to a directory of this machine, batch by batch.

    Objects whose names cannot be paths of files are not read: names with an empty or too long part, and names below
    another file's name.

    For a session whose executors are on this machine; ``ValueError`` otherwise.
    """

    def __init__(self, spark: SparkSession, landing: str, options: Mapping[str, Any] | None = None) -> None:
        import fsspec

        if not str(spark.sparkContext.master).startswith("local"):
            scheme = urlsplit(landing).scheme
            raise ValueError(f"Hadoop has no file system for {scheme}: and a cluster cannot read a local mirror of it")
        self._spark = spark
        self._system, root = fsspec.core.url_to_fs(landing, **(options or {}))
        self._landing = landing
        self._root = str(root).rstrip("/")
        self._mirror = ""

    def files(self) -> list[LandingFile]:
        """All files there are now; ``FileNotFoundError`` without a landing zone, where directories exist by themselves."""
        found = {}
        for path, info in self._system.find(self._root, detail=True).items():
            name = path[len(self._root) :].lstrip("/")
            if _is_ours(name) and all(0 < len(part.encode()) <= _NAME_BYTES for part in name.split("/")):
                found[name] = LandingFile(name, int(info["size"]), _changed_at(info))
        schemes = {urlsplit(each).scheme for each in self._landing.split("::")}  # simplecache::s3://bucket/landing
        if not found and schemes.isdisjoint(_OBJECT_STORES) and not self._system.exists(self._root):
            raise FileNotFoundError(f"no landing zone at {self._landing}")
        return [each for name, each in found.items() if found.keys().isdisjoint(map(str, PurePosixPath(name).parents))]

    def fetch(self, files: list[LandingFile]) -> list[LandingFile]:
        """Copy the files, with the times of their last change."""
        self.release()
        self._mirror = tempfile.mkdtemp(prefix="dmsg-landing-")
        for each in files:
            local = os.path.join(self._mirror, each.name)
            os.makedirs(os.path.dirname(local), exist_ok=True)
            self._system.get_file(f"{self._root}/{each.name}", local)
            os.utime(local, (each.changed_at, each.changed_at))
        return _located(self._spark, paths.qualified(self._spark, f"file://{self._mirror}"), files)

    def release(self) -> None:
        """Remove the copies."""
        if self._mirror:
            shutil.rmtree(self._mirror, ignore_errors=True)
            self._mirror = ""


def _located(spark: SparkSession, root: str, files: list[LandingFile]) -> list[LandingFile]:
    root_uri = paths.spark_uri(spark, root)
    local = paths.local(spark, root)
    located = []
    for each in files:
        path = f"{root}/{each.name}"
        plain = _PLAIN.fullmatch(each.name) is not None
        uri = f"{root_uri}/{each.name}" if plain else paths.spark_uri(spark, path)
        on_disk = "" if local is None else f"{local}/{each.name}"
        located.append(replace(each, path=paths.literally(path), uri=uri, local=on_disk))
    return located


def _changed_at(info: Mapping[str, Any]) -> float:
    """Unix seconds of the last change; each file system of fsspec has its own name and type for this time."""
    value = next((info[name] for name in ("LastModified", "mtime", "modified", "created") if info.get(name)), 0.0)
    if isinstance(value, str):
        value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    if isinstance(value, datetime):
        aware = value if value.tzinfo else value.replace(tzinfo=timezone.utc)
        return aware.timestamp()
    return float(value)
