"""Entries that the clients of one process with the same key and discovery publish together, whatever their protocols.

Two registrars of one key would keep overwriting each other's relays.
"""

from __future__ import annotations

import os
import time
from typing import Any
from weakref import WeakValueDictionary

from zope.interface import implementer

from dmsg.clients.parts import MakeDiscovery
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.registrar import EntryRegistrar
from dmsg.eventlog.schema import Event
from dmsg.glue.waiters import Waiters
from dmsg.interfaces import IEventLog
from dmsg.sansio.jitter import Jitter


@implementer(IEventLog)
class SharedEntry:
    """The entry of ``key`` in the discovery at ``url``, for clients that come and go.

    Its events go to the event log of the client that joined first.
    """

    def __init__(self, reactor: Any, key: SecretKey, url: str, make_discovery: MakeDiscovery) -> None:
        self._reactor = reactor
        self._key = key
        self._url = url
        self._make_discovery = make_discovery
        self._registrar: EntryRegistrar | None = None
        self._discovery: Any = None
        self._logs: dict[object, IEventLog | None] = {}
        self._leaving: set[object] = set()
        self._free: Waiters[None] = Waiters()

    async def free(self) -> None:
        """Wait while the last clients leave: they withdraw the entry, which must not happen after a new one is published."""
        while self._logs and len(self._leaving) == len(self._logs):
            await self._free.wait()

    def join(self, client: object, events: IEventLog | None) -> EntryRegistrar:
        """The registrar, in which ``client`` publishes until it has called :meth:`left`; call after :meth:`free`."""
        self._logs[client] = events
        if self._registrar is None:
            self._discovery = self._make_discovery(self._url, self._reactor, ())
            self._registrar = EntryRegistrar(
                self._discovery,
                self._key,
                clock=self._reactor,
                now_ns=time.time_ns,
                random=Jitter(os.urandom),
                events=self,
            )
        return self._registrar

    def leave(self, client: object) -> None:
        """``client`` begins to stop."""
        self._leaving.add(client)

    async def left(self, client: object) -> None:
        """``client`` has stopped; after the last client, the discovery is closed."""
        self._leaving.discard(client)
        del self._logs[client]
        if not self._logs:
            discovery, self._discovery, self._registrar = self._discovery, None, None
            self._free.fire(None)
            await discovery.close()

    def emit(self, event: Event) -> None:
        """See :class:`~dmsg.interfaces.IEventLog`."""
        log: Any = next(iter(self._logs.values()), None)
        if log is not None:
            log.emit(event)


_entries: WeakValueDictionary[object, SharedEntry] = WeakValueDictionary()


def shared_entry(reactor: Any, key: SecretKey, url: str, make_discovery: MakeDiscovery) -> SharedEntry:
    """The entry that this process shares on ``reactor``; the entry keeps ``reactor`` alive."""
    identity = id(reactor), key.public_key, url, make_discovery
    entry = _entries.get(identity)
    if entry is None:
        entry = _entries[identity] = SharedEntry(reactor, key, url, make_discovery)
    return entry
