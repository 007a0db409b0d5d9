"""A client for the time of one command, made from its settings."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from zope.interface import implementer

from dmsg.cli.exits import CommandError, Exit
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.errors import DiscoveryError
from dmsg.endpoints.sharing import open_relay_list
from dmsg.eventlog.log import EventLog, NullEventLog, check_directory, new_boot_id, short_node
from dmsg.eventlog.schema import Event, SessionDown
from dmsg.interfaces import IEventLog
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.client.settings import ClientSettings
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.relays.choice import RelaysFrom

#: How long a command that listens waits for its first server, in seconds.
CONNECT_TIMEOUT_S: Final = 15.0


@asynccontextmanager
async def open_discovery(settings: ClientSettings, reactor: Any) -> AsyncIterator[Any]:
    """The discovery (an ``IDiscovery``), closed in the end; ``None`` without a URL."""
    if settings.discovery is None:
        yield None
        return
    from dmsg.discovery.client import HttpDiscovery

    discovery = HttpDiscovery.connect(settings.discovery, reactor, ranks_keys=settings.ranks_keys)
    try:
        yield discovery
    finally:
        await discovery.close()


@asynccontextmanager
async def open_client(settings: ClientSettings, reactor: Any, *, listening: bool) -> AsyncIterator[DmsgClient]:
    """A running client, stopped in the end.

    One that is ``listening`` is published and connected when it is given out: raises ``CommandError`` after
    :data:`CONNECT_TIMEOUT_S` without a server, or what discovery fails with. Any other connects when it dials.
    """
    if settings.discovery is None and not settings.servers:
        raise CommandError("give --discovery URL or --server PK@HOST:PORT", Exit.USAGE)
    listed = settings.relay_list()
    key = settings.read_key() or SecretKey.generate()
    async with (
        open_discovery(settings, reactor) as discovery,
        _open_log(settings, key, reactor) as log,
        _open_relays(listed, reactor) as relays,
    ):
        events = _Events(log)
        if listening and listed is None and discovery is not None:
            await _check_servers(settings, discovery)
        client = DmsgClient(
            reactor,
            key,
            discovery=discovery,
            servers=settings.servers,
            min_servers=settings.min_servers if listening else 0,
            publish=listening,
            security=settings.security or Security.PREFER,
            config=settings.config,
            events=events,
            relay_file=settings.relay_file(key),
            relays=relays,
            now_ns=time.time_ns,
        )
        client.startService()
        try:
            if listening:
                await _ready(client, events, reactor)
            yield client
        finally:
            await client.stopService()


@asynccontextmanager
async def _open_relays(listed: RelaysFrom | None, reactor: Any) -> AsyncIterator[Any]:
    """The operator's list, read once and looked at from then on; ``None`` without one.

    Raises ``RelayListError`` when there is no list that is good and no other relays are to be used.
    """
    if listed is None:
        yield None
        return
    source = open_relay_list(listed, reactor)
    try:
        await source.refresh()
        if source.document is None and source.only:
            raise source.error
        source.start()
        yield source
    finally:
        await source.stop()


@asynccontextmanager
async def _open_log(settings: ClientSettings, key: SecretKey, reactor: Any) -> AsyncIterator[EventLog | NullEventLog]:
    log: EventLog | NullEventLog = NullEventLog()
    if settings.events is not None:
        check_directory(settings.events)
        node, boot = short_node(key.public_key), new_boot_id(os.urandom)
        log = EventLog.to_directory(settings.events, role="client", node=node, boot=boot)
    try:
        yield log
    finally:
        await deferToThreadPool(reactor, reactor.getThreadPool(), log.close)


async def _check_servers(settings: ClientSettings, discovery: Any) -> None:
    """Find out at once what waiting for a server would only show as silence."""
    try:
        found = await discovery.available_servers()
    except DiscoveryError:
        if settings.servers:
            return
        raise
    if not found and not settings.servers:
        raise CommandError("discovery knows no server with room", Exit.UNREACHABLE)


async def _ready(client: DmsgClient, events: _Events, reactor: Any) -> None:
    def timed_out(result: object, timeout_s: float) -> None:
        if client.pool.sessions:
            raise CommandError("the entry could not be published in discovery", Exit.NO_DISCOVERY)
        tried = "; ".join(f"{server[:12]}… {reason}" for server, reason in events.reasons.items())
        raise CommandError(
            f"no server within {timeout_s:g} s" + (f": {tried}" if tried else ""),
            Exit.UNREACHABLE,
            {"servers": events.reasons},
        )

    ready: Deferred[None] = client.when_ready()
    await ready.addTimeout(CONNECT_TIMEOUT_S, reactor, timed_out)


@implementer(IEventLog)
class _Events:
    """Passes events on to ``log``, and remembers why sessions did not come up, for a command that got none."""

    def __init__(self, log: EventLog | NullEventLog) -> None:
        self.reasons: dict[str, str] = {}
        self._log = log

    def emit(self, event: Event) -> None:
        if isinstance(event, SessionDown):
            self.reasons[event.server] = event.reason
        self._log.emit(event)
