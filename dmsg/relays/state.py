"""Relays that worked, kept in a file from one run of a program to the next.

A client that knows relays from before does not depend on what discovery lists when it starts. Each identity has a file of
its own: one file for all would lead all identities of a user to the same relays, which could tell that they belong together.

The file is a hint. The client verifies the key of a relay in it like any other, after it has asked discovery whether the
relay is still registered. A file with any error counts as empty and is written anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from twisted.logger import Logger

from dmsg.address import HostPort, network_group
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG
from dmsg.errors import ConfigError, InvalidAddress
from dmsg.relays.candidates import Candidate

#: Relays in a file, and relays of one network group in it. A client has two sessions, so this is several days of change, and
#: no single network can push the others out.
RELAYS_LIMIT: Final = 16
GROUP_LIMIT: Final = 2
#: Longest file in bytes: :data:`RELAYS_LIMIT` relays with host names of 255 bytes.
FILE_LIMIT_BYTES: Final = 16 * 1024
#: A relay that was not connected for so many seconds, 90 days, is forgotten.
AGE_LIMIT_S: Final = 90 * 24 * 3600
#: Files in a directory of :func:`state_file`; the oldest are removed first. Otherwise keys that are used once would fill the
#: directory.
FILES_LIMIT: Final = 64
#: In a setting that names a directory: keep no file.
NONE: Final = "none"

_VERSION: Final = 1
_PREFIX: Final = "relays-"
_log = Logger()


class RelayFile:
    """The relays of the file at ``path``, the newest last. ``now_s()`` is Unix time in seconds.

    The file is read here; a missing directory is made when it is written (mode 0700). Errors are logged once and never raised.
    """

    def __init__(self, path: str | os.PathLike[str], now_s: Callable[[], float]) -> None:
        self.path = Path(path)
        self._now_s = now_s
        self._warned = False
        self._changed = False
        #: relay -> its address, and when it was last connected (Unix seconds)
        self._relays: dict[PublicKey, tuple[HostPort, int]] = {}
        try:
            for key, address, at_s in _parse(_read(self.path), now_s()):
                self._put(key, address, at_s)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            self._warn("cannot be used and is written anew", error)

    @property
    def relays(self) -> list[Candidate]:
        """The remembered relays."""
        return [Candidate(key, address, remembered=True) for key, (address, _) in self._relays.items()]

    def worked(self, relay: PublicKey, address: HostPort) -> None:
        """There is a session with ``relay``."""
        _, before_s = self._relays.get(relay, (address, 0))
        self._put(relay, address, max(int(self._now_s()), before_s))  # a clock that is not set yet makes no entry older
        self._changed = True

    def holds(self, relays: Iterable[PublicKey]) -> None:
        """There are sessions with ``relays``, or just were: those that are remembered have worked until now."""
        for relay in relays:
            if relay in self._relays:
                self.worked(relay, self._relays[relay][0])

    def forget(self, relay: PublicKey) -> None:
        """``relay`` is no relay any more."""
        self._changed |= self._relays.pop(relay, None) is not None

    def save(self) -> None:
        """Write the file, whole and at once, if there is something new. Others may not read it (mode 0600).

        It is not synced: a file that a power failure cut short counts as empty.
        """
        if not self._changed:
            return
        self._changed = False
        relays = [
            {"public_key": str(key), "address": str(address), "connected": at_s}
            for key, (address, at_s) in self._relays.items()
        ]
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self.path, json.dumps({"version": _VERSION, "relays": relays}, indent=1).encode("ascii") + b"\n")
            _prune(self.path)
        except OSError as error:
            self._warn("cannot be written", error)

    def _put(self, key: PublicKey, address: HostPort, at_s: int) -> None:
        self._relays.pop(key, None)
        self._relays[key] = address, at_s
        group = network_group(address.host)
        same = [one for one, (place, _) in self._relays.items() if network_group(place.host) == group]
        for one in same[:-GROUP_LIMIT]:
            del self._relays[one]
        while len(self._relays) > RELAYS_LIMIT:
            del self._relays[next(iter(self._relays))]

    def _warn(self, what: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _log.warn("The file of relays {path} {what}: {error}", path=str(self.path), what=what, error=error)


def state_file(directory: str, key: PublicKey, discovery: str, protocol: str = DMSG) -> Path | None:
    """The file for the relays of ``key`` that speak ``protocol`` in the network of ``discovery`` (a URL or "").

    ``directory`` is "" for the user's own directory, :data:`NONE` for no file, or a path, where "~" is the home directory.
    The name of the file does not tell the key.
    """
    if directory == NONE:
        return None
    if directory:
        try:
            place = Path(directory).expanduser()
        except RuntimeError:
            raise ConfigError("state-dir", "the home directory is not known") from None
    else:
        import platformdirs  # a program that names its own directory does without

        place = platformdirs.user_state_path("dmsg", appauthor=False)
    network = discovery if protocol == DMSG else f"{discovery}\0{protocol}"
    digest = hashlib.sha256(b"dmsg-relay-state/1\0" + key.raw + network.encode("utf-8", "surrogatepass")).hexdigest()
    return place / f"{_PREFIX}{digest[:32]}.json"


# --- the file --------------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a plain file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise ValueError("others may have written it")
        return os.read(descriptor, FILE_LIMIT_BYTES + 1)
    finally:
        os.close(descriptor)


def _parse(data: bytes, now_s: float) -> list[tuple[PublicKey, HostPort, int]]:
    """The relays in ``data``, the newest last; raises ``ValueError`` for data that this version did not write.

    Times in the future are accepted, too: a machine without a battery for its clock begins in 1970, and another clock may
    have been set back.
    """
    if len(data) > FILE_LIMIT_BYTES:
        raise ValueError(f"longer than {FILE_LIMIT_BYTES} bytes")
    try:
        document = json.loads(data)
    except RecursionError:
        raise ValueError("not JSON") from None
    if type(document) is not dict or document.get("version") != _VERSION or type(document.get("relays")) is not list:
        raise ValueError(f"not a file of version {_VERSION}")
    found = [_relay(one) for one in document["relays"]]
    return sorted((one for one in found if now_s - AGE_LIMIT_S < one[2]), key=lambda one: one[2])


def _relay(members: Any) -> tuple[PublicKey, HostPort, int]:
    if type(members) is not dict or type(members.get("connected")) is not int:
        raise ValueError("a relay is not an object with a time")
    try:
        return PublicKey.parse(members.get("public_key", "")), HostPort.parse(members["address"]), members["connected"]
    except (InvalidKey, InvalidAddress, KeyError) as error:
        raise ValueError(f"a relay has no {error}") from None


def _replace(path: Path, data: bytes) -> None:
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _prune(path: Path) -> None:
    """Remove the oldest files beside ``path`` if there are too many and it is one of ours."""
    if not path.name.startswith(_PREFIX):
        return
    files = sorted(path.parent.glob(f"{_PREFIX}*.json"), key=_modified_s)
    for one in files[:-FILES_LIMIT]:
        one.unlink(missing_ok=True)


def _modified_s(path: Path) -> float:
    """When ``path`` was written (Unix seconds); 0 when another program has just removed it."""
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0
