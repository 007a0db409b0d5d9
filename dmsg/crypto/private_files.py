"""Making and reading files with a secret, and checking who owns them, who may read them, and who may replace them."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Collection

from dmsg.crypto.errors import KeyFileError

_ROOT = 0


def create_private(path: str | os.PathLike[str], content: bytes) -> None:
    """Create the file ``path`` (mode 0600, must not exist) with ``content``; fsynced.

    Raises ``KeyFileError``, also for a directory where others may write, because :func:`read_private` refuses such
    directories. A failed write leaves no file behind.
    """
    name = os.fspath(path)
    try:
        problem = why_not_safe(os.path.dirname(os.path.realpath(name)))
        if problem:
            raise KeyFileError(name, problem, creating=True)
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise KeyFileError(name, "already exists; a key file is never overwritten", creating=True) from None
    except (OSError, ValueError) as error:
        raise KeyFileError(name, _problem(error, "cannot be created"), creating=True) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:  # also when the program is interrupted
        os.unlink(name)
        if isinstance(error, OSError):
            raise KeyFileError(name, error.strerror or "cannot be written", creating=True) from None
        raise


def read_private(
    path: str | os.PathLike[str], limit_bytes: int, owners: Collection[int] = (), *, made_by: str = ""
) -> bytes:
    """At most the first ``limit_bytes`` of the file ``path``.

    Raises ``KeyFileError`` when it is missing, not a plain file, or not private: see :func:`why_not_private`. ``made_by``
    is the command that makes such a file, for the message that it is missing.
    """
    name = os.fspath(path)
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        hint = f"; {made_by} makes one" if made_by and isinstance(error, FileNotFoundError) else ""
        raise KeyFileError(name, _problem(error, "cannot be opened") + hint) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise KeyFileError(name, "is not a plain file")
        problem = why_not_private(name, status, owners)
        if problem:
            raise KeyFileError(name, problem)
        return os.read(descriptor, limit_bytes)
    except OSError as error:
        raise KeyFileError(name, error.strerror or "cannot be read") from None
    finally:
        os.close(descriptor)


def _problem(error: OSError | ValueError, otherwise: str) -> str:
    """Why a path leads to no file: Python raises ``ValueError`` for a path with a character that no path may have."""
    if isinstance(error, OSError):
        return error.strerror or otherwise
    what = "one that the file system cannot write" if isinstance(error, UnicodeError) else "a null character"
    return f"is no path: it has {what}"


def why_not_private(path: str, status: os.stat_result, owners: Collection[int] = ()) -> str:
    """The reason to refuse the file at ``path``, whose open file has ``status``; "" if there is none.

    Its owner must be this process's user, root, or one of ``owners`` (uids), and no other user may read it. The directory
    of ``path``, and the directory of the file itself if ``path`` is a link, must pass :func:`why_not_safe`. Directories
    further up are not checked: an attacker there would have to supply a file that passes all of this. Raises ``OSError``.
    """
    trusted = {os.geteuid(), _ROOT, *owners}
    if status.st_uid not in trusted:
        ours = _user(os.geteuid())
        return f"belongs to {_user(status.st_uid)}, not to {ours}; run as its owner, or chown it to {ours}"
    if status.st_mode & 0o077:
        return f"can be read by others (mode {stat.S_IMODE(status.st_mode):04o}); chmod 600 it"
    for each in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        problem = why_not_safe(os.path.dirname(each), trusted)
        if problem:
            return problem
    return ""


def why_not_safe(directory: str, owners: Collection[int] = ()) -> str:
    """The reason not to keep a secret in ``directory``; "" if there is none. Raises ``OSError``.

    Others who may write there may replace its files. A sticky directory (``/tmp``, and the directories in which container
    platforms mount secrets) is safe, because only the owner of a file may rename or remove it there. So is a directory that is
    writable for its user's own group, as systems with a umask of 002 make them.
    """
    status = os.stat(directory or ".")
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in {os.geteuid(), _ROOT, *owners}:
        return f"is in {directory}, which belongs to {_user(status.st_uid)}; move it to a directory of your own"
    if status.st_mode & stat.S_ISVTX:
        return ""
    if mode & 0o002 or (mode & 0o020 and not _is_own_group(status.st_gid, status.st_uid)):
        return f"is in {directory}, where others may write (mode {mode:04o}); chmod go-w {directory}"
    return ""


def _is_own_group(gid: int, uid: int) -> bool:
    """Whether the group has the same name as the user, and no other member."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
