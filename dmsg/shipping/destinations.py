"""The destinations of event log files: a local directory, or any file system that fsspec knows. Blocking; owner of fsspec.

A destination has one promise: when :meth:`Destination.deliver` returns, exactly that content is stored under that name. It may
be called again for content that is there already, and never overwrites other content.

- A local path: written under a hidden name, fsynced, read back, then linked to its name, which fails if that is taken.
- An object store (``s3://``, ``gs://``, ``abfs://`` …): an object appears whole or not at all, so it is written in one
  step (on S3 with the condition that there is none yet), then checked.
- Anything else (``hdfs://``, ``sftp://`` …): written under a hidden name, read back, renamed.

fsspec and the libraries behind it are imported when the first file is shipped or :func:`check_target` asks for them.
"""

from __future__ import annotations

import abc
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from dmsg.errors import ConfigError
from dmsg.shipping.errors import ShippingError
from dmsg.shipping.local import (
    PIECE_BYTES,
    STAGING_SUFFIX,
    LocalDestination,
    Standing,
    compare,
    demand,
    reason_of,
)
from dmsg.shipping.plan import clip, redact
from dmsg.shipping.scan import Content

#: Parts of one large object that are uploaded at a time; each is 50 MB of memory.
_PARTS_AT_A_TIME: Final = 2
_LOCAL_SCHEMES: Final = frozenset({"", "file", "local"})
#: Schemes of object stores: a put is atomic, and many may be under way on one connection pool.
_OBJECT_STORES: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci", "tos", "obs"})
_CONDITIONAL: Final = frozenset({"s3", "s3a"})
#: File systems whose clients may be used by several threads at once.
_PARALLEL: Final = _OBJECT_STORES | {"hdfs", "arrow_hdfs"}
#: A storage option is a credential if its name has one of these words.
_SECRET_WORDS: Final = ("secret", "password", "passwd", "passphrase", "token", "credential", "private", "sas")
_SECRET_NAMES: Final = frozenset({"key", "access_key", "account_key", "connection_string", "pkey"})


class Destination(Protocol):
    """Takes files. Called in threads, several at a time."""

    #: Its name for logs, without secrets.
    text: str

    def deliver(self, path: str, content: Content) -> None:
        """Store ``content`` under ``path`` (relative, with ``/``) and verify that; raises ``ShippingError``."""


# --- which -----------------------------------------------------------------------------------------------------------


def local_path(target: str) -> str | None:
    """The absolute path of a target; ``None`` if it is not on a file system of this machine."""
    scheme, there, rest = target.partition("://")
    if not there:
        return os.path.abspath(target)
    return os.path.abspath(rest) if scheme in _LOCAL_SCHEMES else None


def check_target(target: str, source: str, options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if files of ``source`` can never be shipped to ``target``, whatever the network does."""
    path = local_path(target)
    if path is not None:
        if options:
            raise ConfigError("option", "a local directory takes none")
        ours, theirs = os.path.realpath(source), os.path.realpath(path)
        if os.path.commonpath((ours, theirs)) in (ours, theirs):
            raise ConfigError("to", "must be neither the directory files are shipped from, nor inside or around it")
        return
    try:
        parts = urlsplit(target)
    except ValueError:  # brackets that are no IPv6 address
        parts = urlsplit("")
    if "::" in target or not parts.netloc + parts.path.strip("/"):
        raise ConfigError("to", "must be a directory or a URL such as s3://bucket/prefix")
    scheme = parts.scheme
    if scheme == "memory":
        raise ConfigError("to", "memory:// is the shipper's own memory: what is shipped there is lost when it ends")
    try:
        import fsspec
    except ImportError:
        raise ConfigError("to", "a target that is not local needs fsspec: install dmsg[ship] or dmsg[s3]") from None
    try:
        fsspec.get_filesystem_class(scheme)
    except ValueError:
        raise ConfigError("to", f"{scheme}:// is not known to fsspec") from None
    except ImportError as error:
        raise ConfigError("to", f"{scheme}:// needs another library: {clip(error)}") from None


def parse_options(text: str | None) -> dict[str, Any]:
    """Storage options of fsspec from ``name=value`` words; ``config_kwargs.s3.addressing_style=path`` nests.

    Raises ``ConfigError`` for other words, and for credentials. These come from the environment or from files that the
    libraries read by themselves, because a command line can be read by others.
    """
    options: dict[str, Any] = {}
    for word in (text or "").split():
        name, equals, value = word.partition("=")
        parts = name.split(".")
        if not equals or not all(parts):
            raise ConfigError("option", "must be name=value, several separated by spaces")
        last = parts[-1].lower()
        if last in _SECRET_NAMES or any(one in last for one in _SECRET_WORDS):
            raise ConfigError("option", f"{name}: credentials are given in the environment or in files of their own")
        place = options
        for part in parts[:-1]:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ConfigError("option", f"{name} is both a value and a group")
        place[parts[-1]] = _value(value)
    return options


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def open_destination(
    target: str, options: Mapping[str, Any], *, read_back: bool, random: Callable[[int], bytes]
) -> Destination:
    """The destination of a target that :func:`check_target` accepts; connects to nothing yet.

    With ``read_back`` all data is read back after it was written, even if the store tells a checksum.
    """
    path = local_path(target)
    if path is not None:
        return LocalDestination(path)
    token = random(8).hex()
    scheme = urlsplit(target).scheme

    def connect() -> tuple[Any, str]:
        return _connect(target, scheme, options)

    if scheme in _OBJECT_STORES:
        return ObjectDestination(target, connect, conditional=scheme in _CONDITIONAL, read_back=read_back)
    return StagedDestination(target, connect, token=token, one_at_a_time=scheme not in _PARALLEL)


def _connect(target: str, scheme: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    import fsspec

    given = dict(options)
    if scheme in _CONDITIONAL:
        # s3fs has a name of its own for the endpoint, and passes on what botocore calls the region.
        region = given.pop("region", given.pop("region_name", None))
        if region is not None:
            given["client_kwargs"] = {**given.get("client_kwargs", {}), "region_name": region}
        given.setdefault("use_listings_cache", False)
        # We retry ourselves: the layers below would hold a failing file for minutes.
        given["config_kwargs"] = {"retries": {"max_attempts": 1}, **given.get("config_kwargs", {})}
    file_system, root = fsspec.core.url_to_fs(target, skip_instance_cache=True, **given)
    if scheme in _CONDITIONAL:
        file_system.retries = 2
    return file_system, root.rstrip("/")


# --- everything else ---------------------------------------------------------------------------------------------------


class _Remote(abc.ABC):
    """A file system of fsspec: connected when it is first used, its exceptions translated."""

    #: Whether its library reconnects by itself. Otherwise, as with FTP and SFTP, a connection that a server or a firewall has
    #: ended between two files would fail for ever. So after a failure a new connection is made, and at once if the failed one
    #: was not new.
    _reconnects = False

    def __init__(self, target: str, connect: Callable[[], tuple[Any, str]], *, read_back: bool) -> None:
        self.text = redact(target)
        self._target = target
        self._connect = connect
        self._read_back = read_back
        self._connected: tuple[Any, str] | None = None
        self._connecting = threading.Lock()

    def deliver(self, path: str, content: Content) -> None:
        """Write and check; the subclass decides how."""
        if not self._try(path, content, may_be_over=not self._reconnects):
            self._try(path, content, may_be_over=False)

    def _try(self, path: str, content: Content, *, may_be_over: bool) -> bool:
        """Deliver; ``False`` if that failed on an earlier connection, which ``may_be_over``."""
        connected: tuple[Any, str] | None = None
        is_new = False
        try:
            with self._connecting:
                if self._connected is None:
                    is_new = True
                    self._connected = self._connect()
                connected = self._connected
            file_system, root = connected
            self._deliver(file_system, f"{root}/{path}", content)
        except ShippingError:
            raise
        except Exception as error:  # fsspec's back ends raise whatever their libraries do
            reason = reason_of(error)
            # Credentials are read when connecting: after a refusal there may be new ones.
            if not self._reconnects or reason == "denied":
                with self._connecting:
                    if self._connected is connected:
                        self._connected = None
            if may_be_over and not is_new:
                return False
            raise ShippingError(reason, clip(error, self._target)) from None
        return True

    @abc.abstractmethod
    def _deliver(self, file_system: Any, final: str, content: Content) -> None:
        """Store ``content`` under ``final`` and verify that."""

    def standing(self, file_system: Any, path: str, content: Content) -> Standing:
        """What is stored under a path, found by its size and checksum if the store tells them, otherwise by reading it."""
        file_system.invalidate_cache(path.rpartition("/")[0])
        try:
            info = file_system.info(path)
            if info["type"] != "file":
                return Standing.NOTHING if info["type"] == "directory" else Standing.OTHER
            if info["size"] != content.size_bytes:
                return Standing.OTHER
            # The ETag of an object that came in one piece and is not encrypted by the store is its MD5. If the ETag is not
            # our MD5, it may be something else altogether, and the content has to be compared.
            if not self._read_back and str(info.get("ETag", "")).strip('"').lower() == content.md5:
                return Standing.THIS
            with file_system.open(path, "rb", block_size=PIECE_BYTES) as file:
                return compare(file, info["size"], content)
        except FileNotFoundError:
            return Standing.NOTHING


class ObjectDestination(_Remote):
    """An object store. If it is ``conditional``, it can create an object only if there is none of that name."""

    _reconnects = True

    def __init__(
        self, target: str, connect: Callable[[], tuple[Any, str]], *, conditional: bool = False, read_back: bool = False
    ) -> None:
        super().__init__(target, connect, read_back=read_back)
        self._conditional = conditional

    def _deliver(self, file_system: Any, final: str, content: Content) -> None:
        standing = self.standing(file_system, final, content)
        if standing is Standing.NOTHING:
            content.open().close()
            self.put(file_system, final, content)
            standing = self.standing(file_system, final, content)
        demand(standing, redact(final))

    def put(self, file_system: Any, final: str, content: Content) -> None:
        """Write the object; if there is one by now, leave it as it is."""
        if not self._conditional:
            file_system.put_file(content.path, final)
            return
        try:
            file_system.put_file(content.path, final, mode="create", max_concurrency=_PARTS_AT_A_TIME)
        except Exception as error:
            code = _code(error)
            if code in ("NotImplemented", "501"):  # a store that speaks S3, but not conditional writes
                self._conditional = False
                file_system.put_file(content.path, final, max_concurrency=_PARTS_AT_A_TIME)
            elif not isinstance(error, FileExistsError) and code not in ("PreconditionFailed", "412"):
                raise


class StagedDestination(_Remote):
    """A file system on which a file is visible while it is being written: so it has a hidden name until it is whole.

    ``token`` distinguishes the hidden names of this shipper from those of others.
    """

    def __init__(
        self, target: str, connect: Callable[[], tuple[Any, str]], *, token: str, one_at_a_time: bool = False
    ) -> None:
        super().__init__(target, connect, read_back=True)
        self._token = token
        self._turn: Any = threading.Lock() if one_at_a_time else contextlib.nullcontext()

    def _deliver(self, file_system: Any, final: str, content: Content) -> None:
        with self._turn:
            standing = self.standing(file_system, final, content)
            if standing is Standing.NOTHING:
                self._write(file_system, final, content)
                standing = self.standing(file_system, final, content)
            demand(standing, redact(final))

    def _write(self, file_system: Any, final: str, content: Content) -> None:
        folder, _, name = final.rpartition("/")
        file_system.makedirs(folder, exist_ok=True)
        self._sweep(file_system, folder, name)
        staging = f"{folder}/.{name}.{self._token}{STAGING_SUFFIX}"
        try:
            with content.open() as ours, file_system.open(staging, "wb") as theirs:
                shutil.copyfileobj(ours, theirs, PIECE_BYTES)
            if self.standing(file_system, staging, content) is not Standing.THIS:
                raise ShippingError("mismatch", f"{redact(staging)} does not hold what was written to it")
            if not file_system.exists(final):
                file_system.mv(staging, final)
        finally:
            with contextlib.suppress(Exception):  # it has been renamed, or the next attempt sweeps it away
                file_system.rm_file(staging)

    def _sweep(self, file_system: Any, folder: str, name: str) -> None:
        """Remove what killed shippers left of this file. A shipper that is alive fails once, and then finds the file there."""
        for path in file_system.ls(folder, detail=False):
            left = path.rpartition("/")[2]
            if left.startswith(f".{name}.") and left.endswith(STAGING_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    file_system.rm_file(f"{folder}/{left}")


def _code(error: BaseException) -> str:
    """The error code of S3 in an exception; "" if there is none."""
    response = getattr(error.__cause__ or error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""
