"""Files on whatever file system the session's Hadoop knows: a local path, ``file:``, ``hdfs:``, ``s3a:`` and so on.

Everything goes through the driver's JVM, so that a path means the same here as it does to Spark. Small files only: each
call is a round trip. Paths are texts; functions return fully qualified ones (``file:/data/landing``) only if they say so.

Two ways of writing are atomic, and everything the tables promise after a crash rests on them:

* :func:`write_text` replaces: a reader sees the old text or the new one, never a part.
* :func:`create_text` creates: of two writers exactly one is told that it did.

On a local disk both are also durable: once they return, a loss of power takes nothing back. A text that names other files
may be written only after these are durable, too: :func:`sync`.

On a local disk these are ``rename(2)`` and ``link(2)``; on HDFS and its like renames, which the name node serialises;
on an object store one conditional PUT each, which wants a connector that has it (``s3a`` from Hadoop 3.4.2 on). With a
connector that ignores the condition two runs must not be started at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import urlsplit

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

#: What a failed job may raise besides pyspark's own exceptions.
JavaError: Final = Py4JJavaError
_LOCAL: Final = "file"
#: Schemes whose renames are atomic and never overwrite; all others are taken for object stores.
_RENAMING: Final = frozenset({"hdfs", "viewfs", "webhdfs", "swebhdfs", "ofs"})
_CONDITIONAL: Final = "fs.option.create.conditional.overwrite"
#: Files that are synced at a time: a disk does many at once in little more time than one.
_SYNCED_AT_ONCE: Final = 16


def join(base: str, *parts: str) -> str:
    """``base`` and ``parts`` with exactly one slash between each; ``ValueError`` for an empty ``base``, which would make a
    path of the root directory."""
    if not base:
        raise ValueError("a path is empty")
    return "/".join([base.rstrip("/"), *(each.strip("/") for each in parts)])


def literally(path: str) -> str:
    """``path``, escaped for Spark's readers, which treat paths as patterns. Writers and this module do not."""
    return "".join(f"\\{char}" if char in "*?[]{}\\" else char for char in path)


def known(spark: SparkSession, path: str) -> bool:
    """Whether Hadoop has a file system for ``path``; one without a scheme always has."""
    scheme = urlsplit(path).scheme
    if not scheme:
        return True
    try:
        _java(spark, "org.apache.hadoop.fs.FileSystem").getFileSystemClass(scheme, _configuration(spark))
    except Py4JJavaError:
        return False
    return True


def qualified(spark: SparkSession, path: str) -> str:
    """The path with scheme and authority, as Spark shows it: ``file:/data/landing``."""
    system, java_path = _open(spark, path)
    return str(system.makeQualified(java_path).toString())


def local(spark: SparkSession, path: str) -> str | None:
    """The path as programs of the machine know it, or ``None`` if it is on another kind of file system."""
    scheme, _, rest = qualified(spark, path).partition(":")
    return rest if scheme == _LOCAL else None


def exists(spark: SparkSession, path: str) -> bool:
    """Whether there is a file or directory."""
    system, java_path = _open(spark, path)
    return bool(system.exists(java_path))


def names(spark: SparkSession, path: str) -> list[str]:
    """The sorted names in a directory; none if there is no such directory. For names without a comma, as ours are."""
    system, java_path = _open(spark, path)
    if not system.exists(java_path):
        return []
    listed = _java(spark, "org.apache.hadoop.fs.FileUtil").stat2Paths(system.listStatus(java_path))
    # One round trip for any number of names; py4j does not find the method of other ways to print an array.
    text = str(_java(spark, "org.apache.commons.lang3.ArrayUtils").toString(listed))
    return sorted(each.rpartition("/")[2] for each in text[1:-1].split(",") if each)


def spark_uri(spark: SparkSession, path: str) -> str:
    """A path as Spark shows it in ``input_file_name()``: special characters are percent-encoded, and a local path has an
    empty authority."""
    uri = str(_java(spark, "org.apache.hadoop.fs.Path")(path).toUri().toString())
    return re.sub(r"^file:/(?!/)", "file:///", uri)


def path_of_uri(spark: SparkSession, uri: str) -> str:
    """The reverse of :func:`spark_uri`."""
    return str(_java(spark, "org.apache.hadoop.fs.Path")(_java(spark, "java.net.URI")(uri)).toString())


def changed_at(spark: SparkSession, path: str) -> float:
    """Unix seconds of a file's last change."""
    system, java_path = _open(spark, path)
    return float(system.getFileStatus(java_path).getModificationTime() / 1000)


def read_text(spark: SparkSession, path: str) -> str:
    """A whole file as UTF-8; ``FileNotFoundError`` if it is not there."""
    system, java_path = _open(spark, path)
    try:
        stream = system.open(java_path)
    except Py4JJavaError as error:
        if "FileNotFoundException" in str(error.java_exception):
            raise FileNotFoundError(path) from None
        raise
    try:
        return bytes(stream.readAllBytes()).decode()
    finally:
        stream.close()


def write_text(spark: SparkSession, path: str, text: str) -> None:
    """Make ``path`` hold ``text``, atomically replacing an old file; makes the directories above it."""
    system, java_path, scheme = _open_to_write(spark, path)
    if scheme == _LOCAL:
        temporary = _write_local(spark, java_path, text)
        options = _array(
            spark,
            _java(spark, "java.nio.file.CopyOption"),
            _java(spark, "java.nio.file.StandardCopyOption").ATOMIC_MOVE,
        )
        _java(spark, "java.nio.file.Files").move(temporary, _nio(spark, java_path), options)
        _sync_directories([os.path.dirname(java_path.toUri().getPath()) or "."])
    elif scheme in _RENAMING:
        hidden = _hidden(spark, java_path)
        _write_all(system.create(hidden, False), text)
        rename = _java(spark, "org.apache.hadoop.fs.Options").Rename
        context = _java(spark, "org.apache.hadoop.fs.FileContext").getFileContext(
            system.getUri(), _configuration(spark)
        )
        context.rename(hidden, java_path, _array(spark, rename, rename.OVERWRITE))
    else:
        _write_all(system.create(java_path, True), text)


def create_text(spark: SparkSession, path: str, text: str) -> bool:
    """Create ``path`` with ``text``, atomically; false if it exists. Never overwrites."""
    system, java_path, scheme = _open_to_write(spark, path)
    if scheme == _LOCAL:
        temporary = _write_local(spark, java_path, text)
        try:
            _java(spark, "java.nio.file.Files").createLink(_nio(spark, java_path), temporary)
        except Py4JJavaError as error:
            if "FileAlreadyExistsException" in str(error.java_exception):
                return False
            raise
        finally:
            _java(spark, "java.nio.file.Files").deleteIfExists(temporary)
        _sync_directories([os.path.dirname(java_path.toUri().getPath()) or "."])
        return True
    if scheme in _RENAMING:
        hidden = _hidden(spark, java_path)
        _write_all(system.create(hidden, False), text)
        if system.rename(hidden, java_path):
            return True
        system.delete(hidden, False)
        return False
    if system.exists(java_path):
        return False
    try:
        builder = system.createFile(java_path).overwrite(False).opt(_CONDITIONAL, True)
        _write_all(builder.build(), text)
    except Py4JJavaError as error:
        if "FileAlreadyExists" in str(error.java_exception) or "412" in str(error.java_exception):
            return False
        raise
    return True


def sync(spark: SparkSession, *directories: str) -> None:
    """Make directories and all that is in them survive a loss of power, if they are on a file system of this machine. Other
    file systems decide that themselves. Raises ``OSError`` if a disk cannot write."""
    files: list[str] = []
    found: dict[str, None] = {}
    for each in directories:
        root = local(spark, each)
        for directory, _, names in os.walk(root) if root is not None else ():
            found[directory] = None
            files += [os.path.join(directory, name) for name in names]
        while root is not None and root != (root := os.path.dirname(root)):
            found[root] = None
    with ThreadPoolExecutor(_SYNCED_AT_ONCE) as pool:
        list(pool.map(_sync_file, files))
    _sync_directories(found)


def rename(spark: SparkSession, source: str, target: str) -> bool:
    """Rename a file or directory; false if ``target`` exists or ``source`` does not."""
    system, java_source = _open(spark, source)
    _, java_target = _open(spark, target)
    if system.exists(java_target) or not system.exists(java_source):
        return False
    system.mkdirs(java_target.getParent())
    return bool(system.rename(java_source, java_target))


def delete(spark: SparkSession, path: str) -> bool:
    """Delete a file, or a directory with all that is in it; false if there was none."""
    system, java_path = _open(spark, path)
    return bool(system.delete(java_path, True))


def _java(spark: SparkSession, name: str) -> Any:
    """A class by its full name. Asked for part by part (``org``, ``org.apache`` …), the JVM would search all its jars for
    a class of each name."""
    return getattr(spark._jvm, name)


def _configuration(spark: SparkSession) -> Any:
    context: Any = spark.sparkContext
    return context._jsc.hadoopConfiguration()


def _open(spark: SparkSession, path: str) -> tuple[Any, Any]:
    java_path = _java(spark, "org.apache.hadoop.fs.Path")(path)
    return java_path.getFileSystem(_configuration(spark)), java_path


def _open_to_write(spark: SparkSession, path: str) -> tuple[Any, Any, str]:
    """The file system, the path, and the scheme, which decides how to write; makes the directories above the path."""
    system, java_path = _open(spark, path)
    system.mkdirs(java_path.getParent())
    return system, java_path, str(system.getScheme())


def _array(spark: SparkSession, kind: Any, *values: Any) -> Any:
    context: Any = spark.sparkContext
    array = context._gateway.new_array(kind, len(values))
    for position, value in enumerate(values):
        array[position] = value
    return array


def _hidden(spark: SparkSession, java_path: Any) -> Any:
    return _java(spark, "org.apache.hadoop.fs.Path")(
        java_path.getParent(), f".{java_path.getName()}.{uuid.uuid4().hex}"
    )


def _nio(spark: SparkSession, java_path: Any) -> Any:
    return _java(spark, "java.io.File")(java_path.toUri().getPath()).toPath()


def _write_local(spark: SparkSession, java_path: Any, text: str) -> Any:
    """Write ``text`` to a hidden file beside ``java_path`` and sync it to disk. Without Hadoop, whose checksum files would
    have to be renamed as well."""
    temporary = _nio(spark, _hidden(spark, java_path))
    stream = _java(spark, "java.io.FileOutputStream")(temporary.toFile())
    try:
        stream.write(text.encode())
        stream.getFD().sync()
    except BaseException:  # a full disk: each run that fails on it would leave another file
        _java(spark, "java.nio.file.Files").deleteIfExists(temporary)
        raise
    finally:
        stream.close()
    return temporary


def _write_all(stream: Any, text: str) -> None:
    stream.write(text.encode())
    stream.close()


def _sync_file(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directories(directories: Iterable[str]) -> None:
    """Make the names in directories survive; where a file system cannot, or a directory is closed to us, they may not."""
    for each in directories:
        with contextlib.suppress(OSError):
            _sync_file(each)
