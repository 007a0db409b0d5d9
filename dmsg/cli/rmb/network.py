"""How a command reaches the Reliable Message Bus: over relays as a twin of its own, or through a peer's Redis."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from dmsg.address import RedisAddress
from dmsg.cli.completion import file_option
from dmsg.cli.exits import CommandError, Exit, exit_code
from dmsg.cli.output import Output, output_options
from dmsg.cli.runner import run
from dmsg.errors import ConfigError, DmsgError, InvalidAddress
from dmsg.glue.errors import RedisAway
from dmsg.rmb.client import errors as wrong
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.client.relays import check_relays
from dmsg.rmb.client.service import RmbClient
from dmsg.rmb.core.errors import PeerCode, RelayProblem
from dmsg.rmb.core.keys import TwinKey
from dmsg.rmb.key_file import read_twin_key
from dmsg.rmb.twins.errors import RegistryError
from dmsg.rmb.twins.open import check_registry, check_registry_file, open_registry

F = TypeVar("F", bound=Callable[..., Any])

_NOT_THERE = frozenset({PeerCode.UNKNOWN_TWIN, RelayProblem.UNKNOWN_TWIN.code, RelayProblem.UNKNOWN_TWIN_LATER.code})
_OFFLINE = frozenset(
    {PeerCode.INVALID, *(one.code for one in (RelayProblem.OFFLINE, RelayProblem.EXPIRED, RelayProblem.REJECTED))}
)


@dataclass(frozen=True, slots=True)
class Network:
    """The way to the bus: either a ``redis``, or the other fields."""

    out: Output
    verbose: bool
    key: TwinKey | None = None
    registry: str | None = None
    relays: tuple[str, ...] = ()
    allow_plain: bool = False
    redis: RedisAddress | None = None
    substrate: tuple[str, ...] = ()

    def execute(self, make: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine function of the reactor, and leave with its exit code."""
        raise SystemExit(run(lambda reactor: self.told(make, reactor), self.out, verbose=self.verbose))

    async def told(self, make: Callable[[Any], Coroutine[Any, Any, None]], reactor: Any) -> None:
        """``await make(reactor)``; errors of the bus become errors of the command."""
        try:
            await make(reactor)
        except (wrong.CallError, wrong.NoTwin, RegistryError) as error:
            raise failure(error) from error
        except RedisAway as error:
            raise CommandError(str(error), Exit.UNREACHABLE, {"reason": "RedisAway"}) from error

    @asynccontextmanager
    async def client(self, reactor: Any, *, session: str | None, config: RmbConfig) -> AsyncIterator[RmbClient]:
        """A client that runs inside of the block."""
        assert self.key is not None
        registry = open_registry(reactor, self.registry, self.substrate)
        client = RmbClient(
            reactor,
            self.key,
            registry,
            self.relays,
            session=session,
            allow_plain=self.allow_plain,
            config=config,
        )
        client.startService()
        try:
            yield client
        finally:
            await client.stopService()
            await registry.close()


def network_options(function: F) -> F:
    """Add the options for the way to the bus; the function gets a :class:`Network` first."""

    @file_option("--key", "key_file", help="The key file of our twin.")
    @file_option("--registry", help="The registry of twins.")
    @click.option(
        "--substrate", metavar="URL", multiple=True, help="A node of tfchain, wss://host, in place of a registry file."
    )
    @click.option(
        "--relay", "relays", metavar="URL", multiple=True, help="A relay, as in ws://127.0.0.1:8080; up to four."
    )
    @click.option(
        "--allow-plain", is_flag=True, help="Take payloads in plain text, and send them so to twins without a key."
    )
    @click.option(
        "--redis",
        metavar="URL",
        help="The Redis of a running rmb-peer, redis://host:port/db, in place of all of these.",
    )
    @output_options
    @functools.wraps(function)
    def wrapped(
        key_file: str | None,
        registry: str | None,
        substrate: tuple[str, ...],
        relays: tuple[str, ...],
        allow_plain: bool,
        redis: str | None,
        out: Output,
        verbose: bool,
        **options: Any,
    ) -> Any:
        try:
            network = _network(out, verbose, key_file, registry, substrate, relays, allow_plain, redis)
        except DmsgError as error:
            out.leave(error)
        return function(network, **options)

    return wrapped  # type: ignore[return-value]


def _network(
    out: Output,
    verbose: bool,
    key_file: str | None,
    registry: str | None,
    substrate: tuple[str, ...],
    relays: tuple[str, ...],
    allow_plain: bool,
    redis: str | None,
) -> Network:
    direct = {
        "key": key_file,
        "registry": registry,
        "substrate": substrate,
        "relay": relays,
        "allow-plain": allow_plain,
    }
    if redis is not None:
        for name, given in direct.items():
            if given:
                raise ConfigError(name, "belongs to the peer that is at the Redis", "option --redis")
        try:
            return Network(out, verbose, redis=RedisAddress.parse(redis))
        except InvalidAddress as error:
            raise ConfigError("redis", str(error)) from None
    if not key_file:
        raise ConfigError("key", "must be given (--key), or --redis")
    check_registry(registry, substrate)
    if not relays:
        raise ConfigError("relay", "must be given (--relay), or --redis")
    check_relays(set(relays))
    if registry:
        check_registry_file(registry)
    return Network(out, verbose, read_twin_key(key_file), registry, relays, allow_plain, substrate=substrate)


def failure(error: DmsgError) -> CommandError:
    """``error`` with the exit code of its kind."""
    data: dict[str, Any] = {"reason": type(error).__name__}
    if isinstance(error, wrong.CallRefused):
        data |= {"code": error.code, "text": error.text}
        return CommandError(str(error), exit_of(error.code), data)
    code = Exit.FAILED
    if isinstance(error, wrong.NoTwin | wrong.TwinUnknown):
        code = Exit.NOT_FOUND
    elif isinstance(error, wrong.CallTimeout | wrong.NotConnected):
        code = Exit.UNREACHABLE
    elif isinstance(error, RegistryError):
        code = exit_code(error)
    elif isinstance(error, wrong.RegistryFailed):
        code = exit_code(RegistryError(error.problem))
    return CommandError(str(error), code, data)


def exit_of(code: int) -> Exit:
    """The exit code for an answer that is the error ``code``."""
    if code in _NOT_THERE:
        return Exit.NOT_FOUND
    return Exit.UNREACHABLE if code in _OFFLINE else Exit.FAILED
