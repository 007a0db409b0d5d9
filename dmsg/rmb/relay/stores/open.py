"""The store of waiting envelopes that a URL names."""

from __future__ import annotations

from typing import Any

from dmsg.errors import ConfigError
from dmsg.rmb.relay.stores.base import QueueLimits, QueueStore


def open_queues(url: str, reactor: Any, *, limits: QueueLimits | None = None) -> QueueStore:
    """The store ``url`` names: ``memory:`` or ``sqlite:PATH``.

    A SQLite file is made if it is not there. Raises :class:`~dmsg.errors.ConfigError` for a URL that is none of these, and
    for a file that cannot be used.
    """
    from dmsg.rmb.relay.stores.sqlite import SqliteQueues

    scheme, _, rest = url.partition(":")
    if url == "memory:":
        return SqliteQueues(":memory:", reactor, limits=limits)
    if scheme == "sqlite" and rest:
        return SqliteQueues(rest, reactor, limits=limits)
    raise ConfigError("store", "a store is memory: or sqlite:PATH")
