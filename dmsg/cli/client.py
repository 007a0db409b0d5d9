"""A client for the time of one command, made from its settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final

from twisted.internet.defer import Deferred
from zope.interface import implementer

from dmsg.cli.exits import CommandError, Exit, describe
from dmsg.cli.outage import OutageWatch
from dmsg.cli.output import Output
from dmsg.cli.protocols import PROTOCOLS, Client, Settings, security_of
from dmsg.clients.parts import ClientParts, http_discovery
from dmsg.discovery.errors import DiscoveryError
from dmsg.eventlog.log import NullEventLog
from dmsg.eventlog.schema import Event, SessionDown
from dmsg.interfaces import IEventLog

#: How long a command that listens waits for its first server, in seconds.
CONNECT_TIMEOUT_S: Final = 15.0


@asynccontextmanager
async def open_discovery(settings: Settings, reactor: Any) -> AsyncIterator[Any]:
    """The discovery (an ``IDiscovery``), closed in the end; ``None`` without a URL."""
    if settings.discovery is None:
        yield None
        return
    discovery = http_discovery(settings.discovery, reactor, settings.ranks_keys)
    try:
        yield discovery
    finally:
        await discovery.close()


@asynccontextmanager
async def open_client(
    settings: Settings, reactor: Any, *, listening: bool, out: Output | None = None
) -> AsyncIterator[Client]:
    """A running client, stopped in the end.

    A ``listening`` client is published and connected before the block begins. From then on ``out`` is told when all its
    servers are gone, and when it has one again. Raises ``CommandError`` if it has fewer servers than it needs after
    :data:`CONNECT_TIMEOUT_S`, or the error of discovery. Any other client connects when it dials. ``out`` is also told
    when the client does without the operator's list, because there is no valid one.
    """
    if settings.discovery is None and not settings.servers:
        raise not_given("--discovery URL or --server PK@HOST:PORT", "DMSG_DISCOVERY, DMSG_SERVER", settings)
    if listening and settings.min_servers == 0:
        raise CommandError("min_servers: needs at least one, or no client finds this program", Exit.USAGE)
    parts = ClientParts(reactor, settings, settings.read_key())
    try:
        if parts.relays is not None:
            await _read_relays(parts.relays, out)
        elif listening and parts.discovery is not None:
            await _check_servers(settings, parts.discovery)
        parts.events = events = _Events(parts.events or NullEventLog())
        client: Client = PROTOCOLS[settings.protocol].make_client(
            parts,
            publish=listening,
            min_servers=settings.min_servers if listening else 0,
            **security_of(settings),
        )
        client.startService()
        try:
            if listening:
                await _ready(client, events, reactor, max(1, settings.min_servers or 0))
            events.reasons = None
            with _watched(client, events, reactor, out if listening else None):
                yield client
        finally:
            await client.stopService()
    finally:
        await parts.close()


def not_given(options: str, variables: str, settings: Settings) -> CommandError:
    """The error of a command to which nothing says where its network is; names all places where it could stand."""
    table = PROTOCOLS[settings.protocol].role  # each protocol has its own, and a file may have only the other one
    return CommandError(f"give {options} (or {variables}, or [{table}] in --config)", Exit.USAGE)


@contextmanager
def _watched(client: Client, events: _Events, reactor: Any, out: Output | None) -> Iterator[None]:
    if out is None:
        yield
        return
    watch = OutageWatch(client.pool.sessions, lambda: events.last_failure, out, reactor)
    watch.start()
    try:
        yield
    finally:
        watch.stop()


async def _read_relays(source: Any, out: Output | None) -> None:
    """Read the operator's list once, and keep it up to date from then on.

    Raises ``RelayListError`` when there is no valid list and no other relays may be used.
    """
    await source.refresh()
    if source.document is None:
        if source.only:
            raise source.error
        if out is not None:  # the list is read again, but a wrong path or key stays wrong
            out.note(f"{describe(source.error)}; going on with other relays")
    source.start()


async def _check_servers(settings: Settings, discovery: Any) -> None:
    """Report at once why there is no server; a wait for one would end without a reason."""
    try:
        found = await discovery.available_servers(settings.protocol)
    except DiscoveryError:
        if settings.servers:
            return
        raise
    if not found and not settings.servers:
        raise await no_server(settings, discovery, Exit.UNREACHABLE)


async def no_server(settings: Settings, discovery: Any, exit_code: Exit) -> CommandError:
    """The error of a command for which ``discovery`` has no server; tells when it has one of another protocol."""
    hint = ""
    for other in PROTOCOLS:
        with suppress(DiscoveryError):
            if other != settings.protocol and await discovery.available_servers(other):
                hint = f" for {settings.protocol}, but one for --protocol {other}"
    return CommandError(f"discovery knows no server with room{hint}", exit_code)


async def _ready(client: Client, events: _Events, reactor: Any, wanted: int) -> None:
    """Wait until ``wanted`` servers are connected and the entry is published."""

    def timed_out(result: object, timeout_s: float) -> None:
        up = set(map(str, client.pool.sessions))
        if len(up) >= wanted:
            problem = client.registrar.problem if client.registrar is not None else ""
            why = f": {problem}" if problem else ""  # while discovery is silent, nothing has failed yet
            raise CommandError(f"the entry could not be published in discovery{why}", Exit.NO_DISCOVERY)
        reasons = {server: reason for server, reason in (events.reasons or {}).items() if server not in up}
        why = "; ".join(f"{server[:12]}… {reason}" for server, reason in reasons.items())
        if not up and not why:
            why = client.pool.problem  # none was even tried
        found = f"{len(up)} of {wanted} servers" if up else "no server"
        raise CommandError(
            f"{found} within {timeout_s:g} s" + (f": {why}" if why else ""),
            Exit.UNREACHABLE,
            {"servers": reasons},
        )

    ready: Deferred[None] = client.when_ready()
    await ready.addTimeout(CONNECT_TIMEOUT_S, reactor, timed_out)


@implementer(IEventLog)
class _Events:
    """Passes events on to ``log``, and remembers why sessions did not come up, for a command that got none.

    ``reasons`` is ``None`` once the command itself runs, so that they do not grow: a discovery may list other relays each time.
    ``last_failure`` has the key of the server and the reason of the last one, at any time.
    """

    def __init__(self, log: IEventLog) -> None:
        self.reasons: dict[str, str] | None = {}
        self.last_failure: tuple[str, str] | None = None
        self._log = log

    def emit(self, event: Event) -> None:
        if isinstance(event, SessionDown):
            self.last_failure = event.server, event.reason
            if self.reasons is not None:
                self.reasons[event.server] = event.reason
        self._log.emit(event)
