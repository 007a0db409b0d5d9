"""What is wrong with a key, a signature, a key file or a sealed message."""

from __future__ import annotations

from dmsg.errors import DmsgError, LocalProtocolError


class InvalidKey(DmsgError, ValueError):
    """A public or secret key that is not one: wrong length, wrong prefix, not on the curve, out of range, not hex."""


class InvalidSignature(DmsgError, ValueError):
    """A signature that is malformed, not in the canonical (low s) form, or not made by the key it is held against."""


class KeyFileError(DmsgError):
    """A key file that cannot be used: missing, malformed, of another owner, readable by group or world, in a directory
    where others may write, or already there on creation. ``problem`` says how to mend it.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem


class CryptoError(DmsgError):
    """A Noise message or sealed record that does not open."""


class NonceExhausted(LocalProtocolError):
    """A record counter reached its end; the connection must be made anew before another record is sealed."""
