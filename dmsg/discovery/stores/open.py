"""The store of entries that a URL names."""

from __future__ import annotations

from typing import Any

from dmsg.address import RedisAddress
from dmsg.discovery.stores.memory import MemoryStore
from dmsg.discovery.stores.rules import StoreLimits
from dmsg.errors import ConfigError, InvalidAddress
from dmsg.interfaces import IEntryStore
from dmsg.sansio.jitter import RandomNumbers


def open_store(
    url: str, reactor: Any, *, limits: StoreLimits | None = None, random: RandomNumbers | None = None
) -> IEntryStore:
    """The store ``url`` names: ``memory:``, ``sqlite:PATH`` or a URL of a Redis, as
    :class:`~dmsg.address.RedisAddress` reads it.

    A missing SQLite file is created. Raises :class:`~dmsg.errors.ConfigError` for any other URL, and for a file that cannot
    be used. Redis need not be reachable yet.
    """
    scheme, _, rest = url.partition(":")
    if url == "memory:":
        return MemoryStore(limits=limits, random=random)
    if scheme == "sqlite" and rest:
        from dmsg.discovery.stores.sqlite import SqliteStore

        return SqliteStore(rest, reactor, limits=limits, random=random)
    if RedisAddress.is_url(url):
        try:
            address = RedisAddress.parse(url)
        except InvalidAddress as error:
            raise ConfigError("store", str(error)) from None
        from dmsg.discovery.stores.redis import RedisStore

        return RedisStore(address, reactor, limits=limits)
    raise ConfigError("store", "a store is memory:, sqlite:PATH or redis://host:port/db")
