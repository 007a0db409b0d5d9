"""The exit codes of the command, and how an error becomes one line. No other module has exit codes."""

from __future__ import annotations

import errno
from enum import IntEnum
from typing import Any, Final

from dmsg.crypto.errors import CryptoError, InvalidSignature, KeyFileError
from dmsg.discovery.errors import (
    DiscoveryError,
    DiscoveryUnavailable,
    DocumentError,
    EntryNotFound,
    EntryRolledBack,
    RateLimitedByDiscovery,
    Unauthorized,
)
from dmsg.errors import Attempt, ConfigError, DialError, DmsgError
from dmsg.messaging.core.errors import IntegrityError as ChannelIntegrityError
from dmsg.mux.core.errors import IntegrityError
from dmsg.relays.errors import RelayListError, SessionTimeout
from dmsg.rmb.twins.errors import RegistryError

#: Error numbers of a process, or of a system, that may open nothing more.
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)


class Exit(IntEnum):
    """Exit codes of the ``dmsg`` command."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    UNVERIFIED = 5
    NO_DISCOVERY = 6
    INTERRUPTED = 130


#: Code -> its meaning; the help text and the documentation show this table.
MEANINGS: Final[dict[Exit, str]] = {
    Exit.OK: "done",
    Exit.FAILED: "failed",
    Exit.USAGE: "the command line, a setting or a key file is wrong",
    Exit.NOT_FOUND: "not found: no such entry",
    Exit.UNREACHABLE: "the peer, or every server, is unreachable",
    Exit.UNVERIFIED: "verification failed: a hash, a signature or an echo is wrong",
    Exit.NO_DISCOVERY: "discovery, or the registry of twins, is unavailable",
    Exit.INTERRUPTED: "interrupted",
}


class CommandError(DmsgError):
    """A command ends before its work is done: ``exit`` is its exit code, the message is for people.

    ``data`` goes into the JSON form of the error.
    """

    def __init__(self, message: str, exit_code: Exit = Exit.FAILED, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.exit = exit_code
        self.data = data or {}


def exit_code(error: BaseException) -> Exit:
    """The exit code for ``error``."""
    match error:
        case CommandError():
            return error.exit
        case ConfigError():
            return Exit.USAGE
        case KeyFileError():
            return Exit.FAILED if error.creating else Exit.USAGE
        case EntryNotFound():
            return Exit.NOT_FOUND
        case Unauthorized() | EntryRolledBack() | InvalidSignature() | CryptoError():
            return Exit.UNVERIFIED
        case IntegrityError() | ChannelIntegrityError():
            return Exit.UNVERIFIED
        case DocumentError(reason="untrusted" | "bad_signature" | "rolled_back"):
            return Exit.UNVERIFIED
        case RegistryError(reason="altered"):
            return Exit.UNVERIFIED
        case DiscoveryUnavailable() | RateLimitedByDiscovery() | RegistryError():
            return Exit.NO_DISCOVERY
        case DialError(attempts=attempts):
            # If no server was tried because discovery did not answer, discovery is missing, not the peer.
            missing = any(isinstance(one.error, DiscoveryUnavailable) or _is_silence(one) for one in attempts)
            tried = any(one.server for one in attempts)
            return Exit.NO_DISCOVERY if missing and not tried else Exit.UNREACHABLE
        case _:
            return Exit.FAILED


def _is_silence(attempt: Attempt) -> bool:
    """Whether the time of a dial ended before discovery answered."""
    return attempt.stage == "discovery" and isinstance(attempt.error, SessionTimeout)


def describe(error: BaseException) -> str:
    """``error`` for people: one line, or the whole tree of a failed dial."""
    if isinstance(error, DialError):
        return str(error)
    if isinstance(error, DiscoveryUnavailable):
        return f"discovery is unavailable: {error.detail}" if error.detail else "discovery is unavailable"
    if isinstance(error, DiscoveryError):
        return f"discovery: {error}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, RelayListError):
        return f"the list of relays is not used: {error}"
    if getattr(error, "osError", None) in _NO_DESCRIPTOR:  # in Twisted's words it "couldn't bind"
        return "Too many open files; allow this process more (ulimit -n)"
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, DmsgError | ValueError | OSError) else f"{type(error).__name__}: {text}"


def as_json(error: BaseException) -> dict[str, Any]:
    """``error`` for programs."""
    code = exit_code(error)
    found: dict[str, Any] = {"error": type(error).__name__, "message": describe(error), "exit_code": int(code)}
    if isinstance(error, DialError):
        found |= {
            "target": error.target,
            "reason": error.reason,
            "attempts": [one.as_dict() for one in error.attempts],
        }
    if isinstance(error, CommandError):
        found |= error.data
    return found


def epilogue() -> str:
    """The table of exit codes as the help shows it (``\\b`` keeps click from joining its lines)."""
    rows = "\n".join(f"  {int(code):>3}  {meaning}" for code, meaning in MEANINGS.items())
    return f"\b\nExit codes:\n{rows}"
