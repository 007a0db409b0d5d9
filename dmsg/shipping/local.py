"""Shipping into a directory on a file system of this machine, and the common part of all destinations. Blocking.

A file is written under a hidden name, locked meanwhile, fsynced, read back, and linked to its final name, which fails if that
is taken; then the directory is synced. The hidden name of a file is always the same, so the next shipper overwrites what a
killed one has left.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from enum import Enum
from typing import BinaryIO, Final

from dmsg.eventlog.tree import NO_LINKS, sync_directory
from dmsg.shipping.errors import ShippingError
from dmsg.shipping.plan import clip
from dmsg.shipping.scan import Content

#: Bytes read and written at a time.
PIECE_BYTES: Final = 1024 * 1024
STAGING_SUFFIX: Final = ".staging"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_UNREACHABLE: Final = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.ESTALE}
)
#: Names of exception classes of libraries that are not imported here -> reason.
_KNOWN_ERRORS: Final = {
    "EndpointConnectionError": "unreachable",
    "HTTPClientError": "unreachable",
    "ClientConnectionError": "unreachable",
    "FSTimeoutError": "unreachable",
    "NoCredentialsError": "denied",
    "PartialCredentialsError": "denied",
    "CredentialRetrievalError": "denied",
    "TokenRetrievalError": "denied",
}


class Standing(Enum):
    """What is stored under a name."""

    NOTHING = "nothing"
    THIS = "this"
    OTHER = "other"


class LocalDestination:
    """A directory on a file system of this machine. It must exist, and is never made.

    So a directory on a disk that is not mounted is a target that is down. The mount point itself is no such target: without
    its disk it is an empty directory, and takes files.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self.text = root

    def deliver(self, path: str, content: Content) -> None:
        """Write, read back, link."""
        try:
            self._deliver(os.path.join(self.root, path), content)
        except OSError as error:
            raise ShippingError(reason_of(error), clip(error)) from None

    def _deliver(self, final: str, content: Content) -> None:
        folder, name = os.path.split(final)
        staging = os.path.join(folder, f".{name}{STAGING_SUFFIX}")
        standing = self.standing(final, content)
        if standing is Standing.NOTHING:
            _make_folders(self.root, folder)
            with _claim(staging) as file:
                try:
                    self._fill(file, staging, content)
                    self.publish(staging, final)
                except BaseException:  # clean up now: the next attempt at this file may be another shipper's
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(staging)
                    raise
            standing = self.standing(final, content)
        else:
            with contextlib.suppress(FileNotFoundError):  # a killed shipper may have left it
                os.unlink(staging)
            sync_directory(folder)  # and may not have come to this
        demand(standing, final)

    def _fill(self, file: BinaryIO, staging: str, content: Content) -> None:
        with content.open() as ours:
            file.truncate(0)
            shutil.copyfileobj(ours, file, PIECE_BYTES)
        file.flush()
        os.fsync(file.fileno())
        if self.standing(staging, content) is not Standing.THIS:
            raise ShippingError("mismatch", f"{staging} does not hold what was written to it")

    def publish(self, staging: str, final: str) -> None:
        """Give a finished file its name, unless that name is taken; then sync the directory."""
        try:
            os.link(staging, final)
        except FileExistsError:
            pass
        except FileNotFoundError:  # another shipper has found the file there, and tidied up
            if not os.path.exists(final):
                raise
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if not os.path.lexists(final):
                os.rename(staging, final)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(staging)
        sync_directory(os.path.dirname(final))

    def standing(self, path: str, content: Content) -> Standing:
        """What is stored under an absolute path, found by reading it."""
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if os.path.samestat(status, content.status):
                    raise ShippingError("conflict", f"{path} is the very file that is to be shipped")
                return compare(file, status.st_size, content)
        except FileNotFoundError:
            return Standing.NOTHING


def _make_folders(root: str, folder: str) -> None:
    """Make the folders below ``root``, each synced to the disk; ``root`` itself is never made."""
    path = root
    for part in os.path.relpath(folder, root).split(os.sep):
        above, path = path, os.path.join(path, part)
        try:
            os.mkdir(path, 0o750)
        except FileExistsError:
            continue
        sync_directory(above)


def _claim(staging: str) -> BinaryIO:
    """Open a hidden file for this process alone, with whatever a killed shipper left in it."""
    descriptor = os.open(staging, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(staging)):
            raise FileNotFoundError
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise ShippingError("unreadable", f"another shipper is writing {staging}") from None
        if isinstance(error, FileNotFoundError):
            raise ShippingError("unreadable", f"another shipper has just written {staging}") from None
        with contextlib.suppress(OSError):
            is_empty = not os.stat(staging).st_size
            if is_empty:  # a file system without locks, where nothing is ever delivered: it would stay
                os.unlink(staging)
        raise
    return os.fdopen(descriptor, "r+b")


# --- the common part of all destinations ---


def compare(file: BinaryIO, size_bytes: int, content: Content) -> Standing:
    """Whether an open file of a known size holds ``content``."""
    if size_bytes != content.size_bytes:
        return Standing.OTHER
    digest = hashlib.sha256()
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return Standing.THIS if digest.hexdigest() == content.sha256 else Standing.OTHER


def demand(standing: Standing, path: str) -> None:
    """Raise ``ShippingError`` unless the right content is stored under ``path``."""
    if standing is Standing.OTHER:
        raise ShippingError("conflict", f"{path} has another content than its name says; it is left as it is")
    if standing is Standing.NOTHING:
        raise ShippingError("mismatch", f"{path} is not there after it was written")


def reason_of(error: BaseException) -> str:
    """The fixed text for an exception of any library."""
    number = getattr(error, "errno", None)
    if isinstance(error, FileNotFoundError):
        return "no_such_place"
    if isinstance(error, PermissionError) or number == errno.EROFS:
        return "denied"
    if number in _FULL:
        return "no_space"
    if isinstance(error, (TimeoutError, ConnectionError)) or number in _UNREACHABLE:
        return "unreachable"
    names = {cls.__name__ for one in (error, error.__cause__) if one is not None for cls in type(one).__mro__}
    return next((reason for name, reason in _KNOWN_ERRORS.items() if name in names), "failed")
