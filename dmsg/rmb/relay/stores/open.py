"""The store of waiting envelopes that a URL names."""

from __future__ import annotations

from typing import Any

from dmsg.address import RedisAddress
from dmsg.errors import ConfigError, InvalidAddress
from dmsg.rmb.relay.stores.base import QueueLimits, QueueStore
from dmsg.rmb.relay.stores.redis import RedisQueues
from dmsg.rmb.relay.stores.sqlite import SqliteQueues


def open_queues(url: str, reactor: Any, *, limits: QueueLimits | None = None) -> QueueStore:
    """The store that ``url`` names: ``memory:``, ``sqlite:PATH`` or a URL of a Redis, as
    :class:`~dmsg.address.RedisAddress` reads it.

    A missing SQLite file is created; Redis need not be reachable yet. Raises :class:`~dmsg.errors.ConfigError` for any
    other URL, and for a file that cannot be used.
    """
    scheme, _, rest = url.partition(":")
    if url == "memory:":
        return SqliteQueues(":memory:", reactor, limits=limits)
    if scheme == "sqlite" and rest:
        return SqliteQueues(rest, reactor, limits=limits)
    if RedisAddress.is_url(url):
        try:
            address = RedisAddress.parse(url)
        except InvalidAddress as error:
            raise ConfigError("store", str(error)) from None
        return RedisQueues(address, reactor, limits=limits)
    raise ConfigError("store", "a store is memory:, sqlite:PATH or redis://host:port/db")
