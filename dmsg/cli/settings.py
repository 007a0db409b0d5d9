"""What every command is told: discovery, key, pinned servers. And the client those make."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThreadPool
from zope.interface import implementer

from dmsg.address import HostPort, PinnedServer, check_service_name
from dmsg.cli.exits import CommandError, Exit
from dmsg.cli.output import Output
from dmsg.cli.runner import run
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey, SecretKey, parse_public_keys, read_key_file
from dmsg.discovery.errors import DiscoveryError
from dmsg.endpoints.sharing import open_relay_list
from dmsg.errors import ConfigError, InvalidAddress
from dmsg.eventlog.log import EventLog, NullEventLog, check_directory, new_boot_id, short_node
from dmsg.eventlog.schema import Event, SessionDown
from dmsg.interfaces import IEventLog
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.core.negotiation import Security
from dmsg.relays.choice import RelaysFrom
from dmsg.relays.state import NONE, state_file

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:  # only newer versions of click have it generic
    ParamType = click.ParamType

#: How long a command that listens waits for its first server, in seconds.
CONNECT_TIMEOUT_S: Final = 15.0
#: How long a dial may take, in seconds.
DIAL_TIMEOUT_S: Final = 10.0


class KeyType(ParamType):
    """A public key on the command line."""

    name = "PK"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> PublicKey:
        """The key, or a usage error."""
        try:
            return value if isinstance(value, PublicKey) else PublicKey.parse(value)
        except InvalidKey as error:
            self.fail(str(error), param, ctx)


class ServerType(ParamType):
    """A pinned server on the command line: ``pk@host:port``."""

    name = "PK@HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> PinnedServer:
        """The server, or a usage error."""
        try:
            return value if isinstance(value, PinnedServer) else PinnedServer.parse(value)
        except InvalidAddress as error:
            self.fail(str(error), param, ctx)


class ServiceType(ParamType):
    """The name of a service on the command line."""

    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name, or a usage error."""
        try:
            return check_service_name(value)
        except (InvalidAddress, UnicodeError) as error:
            self.fail(str(error), param, ctx)


class AddressType(ParamType):
    """A ``host:port`` on the command line."""

    name = "HOST:PORT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> HostPort:
        """The address, or a usage error."""
        try:
            return value if isinstance(value, HostPort) else HostPort.parse(value)
        except InvalidAddress as error:
            self.fail(str(error), param, ctx)


class KeysType(ParamType):
    """Public keys on the command line, with commas or white space in between."""

    name = "PK[,PK]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[PublicKey, ...]:
        """The keys, or a usage error."""
        try:
            return value if isinstance(value, tuple) else parse_public_keys(value)
        except InvalidKey as error:
            self.fail(str(error), param, ctx)


PUBLIC_KEY: Final = KeyType()


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


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one run: a discovery URL or "", a key file or "", pinned servers, a directory for events or "",
    what security is asked for (``None``: the default), whose relay ranks are believed, and where relays that worked are kept
    (:func:`~dmsg.relays.state.state_file`), and an operator's list of relays.
    """

    discovery: str = ""
    key_file: str = ""
    servers: tuple[PinnedServer, ...] = ()
    events: str = ""
    security: Security | None = None
    ranks_keys: tuple[PublicKey, ...] = ()
    state_dir: str = NONE
    relays: RelaysFrom | None = None

    def key(self) -> SecretKey:
        """The key of the key file, or a new one that ends with the command. Raises ``KeyFileError``."""
        return read_key_file(self.key_file) if self.key_file else SecretKey.generate()

    def relay_file(self, key: SecretKey) -> Path | None:
        """Where relays that worked are kept; ``None`` for a key that ends with the command."""
        return state_file(self.state_dir, key.public_key, self.discovery) if self.key_file else None

    def check(self) -> None:
        """Raise ``CommandError`` when there is no way to any server."""
        if not self.discovery and not self.servers:
            raise CommandError("give --discovery URL or --server PK@HOST:PORT", Exit.USAGE)

    @asynccontextmanager
    async def open_discovery(self, reactor: Any) -> AsyncIterator[Any]:
        """The discovery (an ``IDiscovery``), closed in the end; ``None`` without a URL."""
        if not self.discovery:
            yield None
            return
        from dmsg.discovery.client import HttpDiscovery

        try:
            discovery = HttpDiscovery.connect(self.discovery, reactor, ranks_keys=self.ranks_keys)
        except ConfigError as error:
            raise CommandError(f"--discovery: {error.problem}", Exit.USAGE) from None
        try:
            yield discovery
        finally:
            await discovery.close()

    @asynccontextmanager
    async def open_client(self, reactor: Any, *, listening: bool) -> AsyncIterator[DmsgClient]:
        """A running client, stopped in the end.

        One that is ``listening`` is published and connected when it is given out: raises ``CommandError`` after
        :data:`CONNECT_TIMEOUT_S` without a server, or what discovery fails with. Any other connects when it dials.
        """
        self.check()
        key = self.key()
        async with (
            self.open_discovery(reactor) as discovery,
            self._open_log(reactor, key) as log,
            self._open_relays(reactor) as relays,
        ):
            events = _Events(log)
            if listening and self.relays is None and discovery is not None:
                await self._check_servers(discovery)
            client = DmsgClient(
                reactor,
                key,
                discovery=discovery,
                servers=self.servers,
                min_servers=None if listening else 0,
                publish=listening,
                security=self.security or Security.PREFER,
                events=events,
                relay_file=self.relay_file(key),
                relays=relays,
                now_ns=time.time_ns,
            )
            client.startService()
            try:
                if listening:
                    await self._ready(client, events, reactor)
                yield client
            finally:
                await client.stopService()

    @asynccontextmanager
    async def _open_relays(self, reactor: Any) -> AsyncIterator[Any]:
        """The operator's list, read once and looked at from then on; ``None`` without one.

        Raises ``RelayListError`` when there is no list that is good and no other relays are to be used.
        """
        if self.relays is None:
            yield None
            return
        source = open_relay_list(self.relays, reactor)
        try:
            await source.refresh()
            if source.document is None and source.only:
                raise source.error
            source.start()
            yield source
        finally:
            await source.stop()

    @asynccontextmanager
    async def _open_log(self, reactor: Any, key: SecretKey) -> AsyncIterator[EventLog | NullEventLog]:
        log: EventLog | NullEventLog = NullEventLog()
        if self.events:
            try:
                check_directory(self.events)
            except ConfigError as error:
                raise CommandError(f"--events: {error.problem}", Exit.USAGE) from None
            node, boot = short_node(key.public_key), new_boot_id(os.urandom)
            log = EventLog.to_directory(self.events, role="client", node=node, boot=boot)
        try:
            yield log
        finally:
            await deferToThreadPool(reactor, reactor.getThreadPool(), log.close)

    async def _check_servers(self, discovery: Any) -> None:
        """Find out at once what waiting for a server would only show as silence."""
        try:
            found = await discovery.available_servers()
        except DiscoveryError:
            if self.servers:
                return
            raise
        if not found and not self.servers:
            raise CommandError("discovery knows no server with room", Exit.UNREACHABLE)

    async def _ready(self, client: DmsgClient, events: _Events, reactor: Any) -> None:
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


@dataclass(frozen=True, slots=True)
class Invocation:
    """One command as it was called: its settings, where it writes, and how it is run."""

    settings: Settings
    out: Output
    verbose: bool = False

    def execute(self, make: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine function of the reactor, and leave with its exit code."""
        sys.exit(run(make, self.out, verbose=self.verbose))


def common_options(function: F) -> F:
    """Add the options all networking commands take; the function gets an :class:`Invocation` first."""

    @click.option(
        "--discovery", metavar="URL", envvar="DMSG_DISCOVERY", default="", help="Discovery, http://host:port."
    )
    @click.option(
        "--key", "key_file", metavar="FILE", envvar="DMSG_KEY", default="", help="Key file; default: a new key."
    )
    @click.option(
        "--server",
        "servers",
        type=ServerType(),
        envvar="DMSG_SERVER",
        multiple=True,
        help="A server to use whatever discovery says; may be repeated.",
    )
    @click.option(
        "--security",
        type=click.Choice([one.value for one in Security]),
        envvar="DMSG_SECURITY",
        default=None,
        show_default="prefer; e2e with --allow",
        help="End to end, whatever that means for older peers; where the peer promises it; or only to the relay and on.",
    )
    @click.option(
        "--ranks-key",
        "ranks_keys",
        type=KeysType(),
        envvar="DMSG_RANKS_KEY",
        default=(),
        help="Whose relay ranks to believe when choosing servers; default: nobody's.",
    )
    @click.option(
        "--relays",
        "relays",
        metavar="FILE|URL",
        envvar="DMSG_RELAYS",
        default="",
        help="An operator's signed list of relays to use.",
    )
    @click.option(
        "--relays-key",
        metavar="PK[,PK]",
        envvar="DMSG_RELAYS_KEY",
        default="",
        help="Who may have signed the list of --relays.",
    )
    @click.option(
        "--relays-mode",
        metavar="prefer|only",
        envvar="DMSG_RELAYS_MODE",
        default="",
        help="Whether relays that are not on the list are used when no relay of the list can be reached; default: prefer.",
    )
    @click.option(
        "--state-dir",
        metavar="DIR|none",
        envvar="DMSG_STATE_DIR",
        default="",
        help="Where relays that worked are kept for a --key that listens; default: the user's directory for such things.",
    )
    @click.option("--events", metavar="DIR", type=click.Path(file_okay=False), default="", help="Log events here.")
    @output_options
    @functools.wraps(function)
    def wrapped(
        out: Output,
        verbose: bool,
        discovery: str,
        key_file: str,
        servers: tuple[PinnedServer, ...],
        events: str,
        security: str | None,
        ranks_keys: tuple[PublicKey, ...],
        state_dir: str,
        relays: str,
        relays_key: str,
        relays_mode: str,
        **options: Any,
    ) -> Any:
        asked = None if security is None else Security.parse(security)
        try:
            listed = RelaysFrom.parse((relays, relays_key, relays_mode))
        except ConfigError as error:
            raise click.UsageError(f"--{error.option}: {error.problem}") from None
        settings = Settings(discovery, key_file, servers, events, asked, ranks_keys, state_dir, listed)
        return function(Invocation(settings, out, verbose), **options)

    return wrapped  # type: ignore[return-value]


def service_option(function: F) -> F:
    """Add ``--service`` to a networking command (under :func:`common_options`); the function gets ``service``."""

    @click.option(
        "--service",
        metavar="NAME",
        type=ServiceType(),
        default="",
        help="The service to listen for, or to ask for; default: the one without a name.",
    )
    @functools.wraps(function)
    def wrapped(call: Invocation, *, service: str, **options: Any) -> Any:
        if service and call.settings.security is Security.HOP:
            raise click.UsageError("--service needs end-to-end security: the relay never sees the name")
        return function(call, service=service, **options)

    return wrapped  # type: ignore[return-value]


def output_options(function: F) -> F:
    """Add ``--json`` and ``--verbose``; the function gets ``out`` and ``verbose``."""

    @click.option("--json", "json_lines", is_flag=True, help="Write JSON, one object a line.")
    @click.option("--verbose", is_flag=True, help="Write a log to standard error, with tracebacks.")
    @functools.wraps(function)
    def wrapped(json_lines: bool, verbose: bool, **options: Any) -> Any:
        return function(out=Output(sys.stdout, sys.stderr, json_lines=json_lines), verbose=verbose, **options)

    return wrapped  # type: ignore[return-value]
