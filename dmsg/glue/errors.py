"""The failures of Redis; all data is in attributes."""

from __future__ import annotations

from dmsg.address import RedisAddress
from dmsg.errors import DmsgError


class RedisAway(DmsgError):
    """``redis`` is not there, or not able to work; a later attempt may succeed.

    ``reason`` says what is known, ``maybe_done`` whether the command may have been carried out nevertheless.
    """

    def __init__(self, redis: RedisAddress, reason: str, *, maybe_done: bool) -> None:
        super().__init__(f"{redis} failed: {reason}")
        self.redis = redis
        self.reason = reason
        self.maybe_done = maybe_done


class RedisRefused(DmsgError):
    """``redis`` does not carry out this command, now or later: the key is no list, for instance. ``reason`` is its own text."""

    def __init__(self, redis: RedisAddress, reason: str) -> None:
        super().__init__(f"{redis} refused: {reason}")
        self.redis = redis
        self.reason = reason
