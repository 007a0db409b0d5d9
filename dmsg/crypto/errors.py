"""Errors of keys, signatures, key files and sealed messages."""

from __future__ import annotations

from dmsg.errors import DmsgError, LocalProtocolError


class InvalidKey(DmsgError, ValueError):
    """A public or secret key that is not one: wrong length, wrong prefix, not on the curve, out of range, not hex."""


class InvalidSignature(DmsgError, ValueError):
    """A signature that is malformed, not in the canonical (low s) form, or not made by the expected key."""


class KeyFileError(DmsgError):
    """A key file that cannot be used: missing, malformed, of another owner, readable by group or world, in a directory
    where others may write, or already there on creation. ``problem`` says how to fix it; ``creating`` is whether the file
    was to be made.
    """

    def __init__(self, path: str, problem: str, *, creating: bool = False) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem
        self.creating = creating


class CryptoError(DmsgError):
    """A Noise message or sealed record that does not open."""


class NonceExhausted(LocalProtocolError):
    """A record counter reached its end; the connection must be made anew before another record is sealed."""
