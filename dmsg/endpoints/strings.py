"""Endpoint strings of any protocol's clients: ``SCHEME:PUBLIC_KEY:…`` to connect, ``SCHEME:key=FILE:…`` to listen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from dmsg.address import DmsgAddress
from dmsg.clients.access import AllowKeys
from dmsg.clients.limits import ListenerLimits
from dmsg.clients.parts import T
from dmsg.clients.settings import TOGETHER
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.endpoints.arguments import SOURCE, read_arguments
from dmsg.endpoints.client import C
from dmsg.endpoints.sharing import MakeClient, SharedClient, SharedSettings, shared_clients
from dmsg.endpoints.stream import ClientEndpoint, ServerEndpoint
from dmsg.errors import ConfigError
from dmsg.ops.settings import setting
from dmsg.ops.values import DURATION, more_than_zero

U = TypeVar("U", bound="ConnectArguments")


@dataclass(frozen=True, kw_only=True)
class ConnectArguments:
    """The settings of connects in a client string."""

    timeout: float | None = setting(
        "a connect may take so long in all, or a server until it can be reached",
        default=None,
        kind=DURATION,
        unset="a connect: timeout_s of dial; a server: no limit",
        check=more_than_zero,
    )


def _not_empty(keys: tuple[PublicKey, ...]) -> None:
    """Raise ``ValueError`` for an empty list, which would admit everyone, though its author surely meant to name keys."""
    if not keys:
        raise ValueError("must name a key: without it, all are admitted")


@dataclass(frozen=True, kw_only=True)
class ListenArguments(ConnectArguments):
    """The settings of the listener in a server string."""

    allow: tuple[PublicKey, ...] = setting(
        "a server admits these public keys only", default=(), unset="all are admitted", check=_not_empty
    )
    idle_timeout: float | None = setting(
        "a server closes a connection on which nothing moves for so long",
        default=None,
        kind=DURATION,
        unset="never",
        check=more_than_zero,
    )

    @property
    def policy(self) -> AllowKeys | None:
        """The access policy of the string; ``None`` when everyone may come in."""
        return AllowKeys(self.allow) if self.allow else None

    def limits(self, limits: ListenerLimits) -> ListenerLimits:
        """The ``limits`` of a client, changed by the settings of the string."""
        return limits if self.idle_timeout is None else replace(limits, idle_timeout_s=self.idle_timeout)


@dataclass(frozen=True, slots=True)
class Scheme(Generic[T, C]):
    """The strings of one protocol: ``role`` is the table of its ``settings`` in a file, ``make_client`` makes its clients."""

    name: str
    role: str
    settings: type[T]
    make_client: MakeClient[T, C]

    def read_client(self, args: tuple[str, ...], arguments: Mapping[str, str], use: type[U]) -> tuple[PublicKey, T, U]:
        """The key to which a client string connects, the settings of the client, and those of its use.

        Raises ``ConfigError``.
        """
        if not args or not args[0]:
            raise ConfigError("public key", f"write {self.name}:PUBLIC_KEY", SOURCE)
        _no_more(args[1:])
        try:
            public_key = PublicKey.parse(args[0])
        except InvalidKey as error:
            raise ConfigError("public key", str(error), SOURCE) from None
        return public_key, *self._read(arguments, use)

    def read_server(self, args: tuple[str, ...], arguments: Mapping[str, str], use: type[U]) -> tuple[T, U]:
        """The settings of the client of a server string, and those of its use. Raises ``ConfigError``."""
        # a server string without its key is often that of a client, or a file without "key="
        _no_more(args, "" if "key" in arguments else f"a server listens with {self.name}:key=FILE, and ")
        settings, read = self._read(arguments, use)
        if settings.key is None:
            raise ConfigError("key", "a server needs a key file: key=FILE, or DMSG_KEY in the environment", SOURCE)
        if settings.min_servers == 0:
            raise ConfigError("min_servers", "a server needs at least one, or no client finds it", SOURCE)
        return settings, read

    def parse_client(self, reactor: Any, *args: str, **arguments: str) -> ClientEndpoint[C]:
        """The endpoint of a client string of a protocol without arguments of its own.

        Raises ``ConfigError``, or ``KeyFileError`` for a bad key file.
        """
        public_key, settings, read = self.read_client(args, arguments, ConnectArguments)
        address = DmsgAddress(public_key, scheme=self.name)
        return ClientEndpoint(self.shared(reactor, settings), address, read.timeout)

    def parse_server(self, reactor: Any, *args: str, **arguments: str) -> ServerEndpoint[C]:
        """The endpoint of a server string of such a protocol; raises as :meth:`parse_client` does."""
        settings, read = self.read_server(args, arguments, ListenArguments)
        limits = read.limits(settings.config.listener)
        client = self.shared(reactor, settings)
        return ServerEndpoint(client, policy=read.policy, limits=limits, timeout_s=read.timeout)

    def shared(self, reactor: Any, settings: T) -> SharedClient[T, C]:
        """The client that all strings with these settings share. Raises ``ConfigError`` or ``KeyFileError``."""
        return shared_clients(reactor, self.make_client).get(SharedSettings(settings.read_key(), settings))

    def _read(self, arguments: Mapping[str, str], use: type[U]) -> tuple[T, U]:
        settings, read = read_arguments(
            arguments, self.settings, use, role=self.role, environ=os.environ, together=TOGETHER
        )
        if settings.discovery is None and not settings.servers:
            raise ConfigError(
                "discovery",
                "say how servers are found: discovery=URL or server=pk@host:port, or set DMSG_DISCOVERY",
                SOURCE,
            )
        return settings, read


def _no_more(args: tuple[str, ...], hint: str = "") -> None:
    if any(args):
        problem = rf"not expected; {hint}a colon inside a value is written \:"
        raise ConfigError(repr(next(filter(None, args))), problem, SOURCE)
