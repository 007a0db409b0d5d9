"""The failures of Redis; all data is in attributes."""

from __future__ import annotations

from dmsg.errors import DmsgError


class RedisAway(DmsgError):
    """Redis is not there, or not able to work; a later attempt may succeed.

    ``reason`` says what is known, ``maybe_done`` whether the command may have been carried out nevertheless.
    """

    def __init__(self, reason: str, *, maybe_done: bool) -> None:
        super().__init__(f"Redis failed: {reason}")
        self.reason = reason
        self.maybe_done = maybe_done


class RedisRefused(DmsgError):
    """Redis does not carry out this command, now or later: the key is no list, for instance. ``reason`` is its own text."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"Redis refused: {reason}")
        self.reason = reason
