"""``dmsg expose`` and ``dmsg forward``: any stream service, reached by key."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Coroutine
from typing import Any, Final

import click
from twisted.internet.defer import CancelledError, Deferred, maybeDeferred
from twisted.internet.endpoints import clientFromString
from twisted.internet.error import ConnectingCancelledError
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.internet.protocol import Factory, connectionDone
from twisted.python.failure import Failure

from dmsg.cli.client import open_client
from dmsg.cli.exits import CommandError, Exit, describe
from dmsg.cli.output import tell_failed, tell_opened
from dmsg.cli.protocols import security_of
from dmsg.cli.redial import Redialer
from dmsg.cli.settings import PUBLIC_KEY, Invocation, ValueType, common_options, service_option
from dmsg.cli.splice import End, join
from dmsg.clients.access import AllowKeys
from dmsg.crypto.keys import PublicKey
from dmsg.glue.listening import address_text, listen_problem, server_endpoint
from dmsg.ops.descriptors import be_calm_without_descriptors
from dmsg.ops.values import DURATION

#: Pairs at a time: each holds two windows of data and a socket, and a process usually may have 1,024 sockets.
MAX_PAIRS: Final = 900
#: How long connecting to the exposed endpoint may take, in seconds.
CONNECT_TIMEOUT_S: Final = 15.0

_HOST_AND_PORT: Final = re.compile(r"(?:(?P<host>[\w.-]+):)?(?P<port>\d{1,5})", re.ASCII)
#: A part of an endpoint string, up to a colon: a text, or a name and a text. What follows a backslash is meant as it is.
_ARGUMENT: Final = re.compile(r"(?:^|:)((?:[^:=\\]|\\.)*)(?:=((?:[^:\\]|\\.)*))?", re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)

Open = Callable[[], Coroutine[Any, Any, End]]


@click.command(short_help="Accept transports and connect each to a TCP service.")
@click.argument("endpoint")
@click.option("--allow", metavar="PK", type=PUBLIC_KEY, multiple=True, help="Admit this peer only; may be repeated.")
@click.option(
    "--idle-timeout",
    "idle_timeout_s",
    metavar="SECONDS",
    type=ValueType(DURATION),
    help="Close a connection on which nothing moves for so long; default: never.",
)
@common_options
@service_option
def expose(
    call: Invocation, endpoint: str, allow: tuple[PublicKey, ...], idle_timeout_s: float | None, service: str
) -> None:
    """Accept transports and connect each to ENDPOINT, e.g. tcp:127.0.0.1:22.

    ENDPOINT is a Twisted client endpoint. Without --allow, all clients that know the key are connected.
    """
    call.execute(
        lambda reactor: run_expose(call, reactor, endpoint, allow=allow, idle_timeout_s=idle_timeout_s, service=service)
    )


@click.command(short_help="Listen on a port and dial PK for each connection.")
@click.argument("peer", metavar="PK", type=PUBLIC_KEY)
@click.argument("listen")
@common_options
@service_option
def forward(call: Invocation, peer: PublicKey, listen: str, service: str) -> None:
    """Listen on LISTEN, e.g. tcp:8022:interface=127.0.0.1, and dial PK for each connection.

    LISTEN is a Twisted server endpoint. Mind its interface: all who can connect there reach PK in your name.
    """
    call.execute(lambda reactor: run_forward(call, reactor, peer, listen, service=service))


async def run_expose(
    call: Invocation,
    reactor: Any,
    endpoint: str,
    *,
    allow: tuple[PublicKey, ...] = (),
    idle_timeout_s: float | None = None,
    service: str = "",
) -> None:
    """``dmsg expose``."""
    try:
        target: IStreamClientEndpoint = clientFromString(reactor, endpoint)
    except Exception as error:  # an endpoint parser may raise any exception
        meant = _meant(endpoint, "tcp:{host}:{port}", "tcp:127.0.0.1:22")
        problem = f"{listen_problem(error)}; {meant}"
        raise CommandError(f"{endpoint!r} is not a client endpoint: {problem}", Exit.USAGE) from None
    # Twisted finds this out at the first connection, and then says less
    if not 1 <= _port_of(endpoint) <= 65535:
        raise CommandError(f"{endpoint!r} is not a client endpoint: its port must be 1 to 65535", Exit.USAGE)

    async def connect() -> End:
        end = await target.connect(Factory.forProtocol(End)).addTimeout(CONNECT_TIMEOUT_S, reactor, _late)
        assert isinstance(end, End)
        return end

    def opened(near: End, far: End) -> None:
        tell_opened(call.out, near.transport)

    def failed(error: BaseException) -> None:
        tell_failed(call.out, error, f"{endpoint}: {describe(error)}")

    # the listener has the limit: it refuses peers as busy, and they may retry
    pairs = Pairs(connect, reactor, failed, opened, limit=None)
    limits = dataclasses.replace(call.settings.config.listener, open_transports=MAX_PAIRS)
    if idle_timeout_s is not None:
        limits = dataclasses.replace(limits, idle_timeout_s=idle_timeout_s)
    async with open_client(call.settings, reactor, listening=True, out=call.out) as client:
        port = client.listen(
            pairs,
            service,
            policy=AllowKeys(allow) if allow else None,
            limits=limits,
            **security_of(call.settings),
        )
        key = str(client.public_key)
        call.out.result({"event": "ready", "public_key": key, "endpoint": endpoint}, key)
        call.out.note(f"ready: connecting what comes to {endpoint}")
        try:
            await Deferred()
        finally:
            await port.stopListening()
            pairs.stop()


async def run_forward(call: Invocation, reactor: Any, peer: PublicKey, listen: str, *, service: str = "") -> None:
    """``dmsg forward``."""
    try:
        source = server_endpoint(reactor, listen)
    except Exception as error:  # as above
        meant = _meant(listen, "tcp:{port}:interface={host}", "tcp:8022:interface=127.0.0.1")
        problem = f"{listen_problem(error)}; {meant}"
        raise CommandError(f"{listen!r} is not a server endpoint: {problem}", Exit.USAGE) from None
    if listen.partition(":")[0].lower() == "stdio":
        raise CommandError(f"{listen!r} is for one connection: use dmsg connect {peer}", Exit.USAGE)
    async with open_client(call.settings, reactor, listening=False, out=call.out) as client:
        redialer = Redialer(client, peer, service, timeout_s=call.settings.config.dial.timeout_s, clock=reactor)

        async def connect() -> End:
            transport = await redialer.dial()
            end = End()
            transport.attach(end)
            return end

        def opened(near: End, far: End) -> None:
            tell_opened(call.out, far.transport)

        def failed(error: BaseException) -> None:
            tell_failed(call.out, error, describe(error))

        pairs = Pairs(connect, reactor, failed, opened)
        be_calm_without_descriptors(reactor, lambda line: failed(CommandError(line)))
        try:
            port = await source.listen(pairs)
        except Exception as error:  # as above
            raise CommandError(f"cannot listen on {listen}: {listen_problem(error)}") from None
        address = address_text(port)
        call.out.result({"event": "ready", "peer": str(peer), "listening": address}, address)
        call.out.note(f"ready: {address} leads to {peer}")
        try:
            await Deferred()
        finally:
            await maybeDeferred(port.stopListening)
            pairs.stop()


def _late(result: object, timeout_s: float) -> None:
    raise CommandError(f"no connection within {timeout_s:g} s")


def _port_of(endpoint: str) -> int:
    """The port in a client endpoint that Twisted has parsed; 1 if it has none, because it connects to no host."""
    unnamed: list[str] = []
    named: dict[str, str] = {}
    for part in _ARGUMENT.finditer(endpoint):
        first, value = (_ESCAPED.sub(r"\1", text or "") for text in part.groups())
        if part[2] is None:
            unnamed.append(first)
        else:
            named[first] = value
    kind, *unnamed = unnamed
    if kind.lower() not in ("tcp", "tls", "ssl") or "endpoint" in named:  # TLS then connects to that endpoint
        return 1
    if len(unnamed) == 1 and "host" in named:
        return int(unnamed[0])  # also where there is a port= besides
    return int(unnamed[1] if len(unnamed) == 2 or "port" not in named else named["port"])


def _meant(text: str, endpoint: str, example: str) -> str:
    """What to write in place of ``text``: others than Twisted take a port, or a host and a port."""
    if parts := _HOST_AND_PORT.fullmatch(text):
        return f"did you mean {endpoint.format(host=parts['host'] or '127.0.0.1', port=parts['port'])}?"
    return f"one is written as {example}"


class Pairs(Factory):
    """Joins each transport that comes in with one that ``connect`` opens for it; ``failed`` is told when it cannot.

    ``opened`` is told of each pair: the end that came in, and the one that was opened for it. Above ``limit`` pairs what
    comes in is closed at once.
    """

    noisy = False

    def __init__(
        self,
        connect: Open,
        clock: IReactorTime,
        failed: Callable[[BaseException], object],
        opened: Callable[[End, End], object],
        *,
        limit: int | None = MAX_PAIRS,
    ) -> None:
        self._connect = connect
        self._clock = clock
        self._failed = failed
        self._joined = opened
        self._limit = limit
        self._ends: set[End] = set()
        self._opening: dict[End, Deferred[End]] = {}

    def buildProtocol(self, addr: object) -> End | None:
        """The near end of one more pair, if there is room."""
        if self._limit is not None and len(self._ends) >= self._limit:
            return None
        end = _NearEnd(self._made, self._over)
        end.pairs = self._ends
        return end

    def stop(self) -> None:
        """Cut off every pair."""
        for opening in list(self._opening.values()):
            opening.cancel()
        for end in list(self._ends):
            end.transport.abortConnection()

    def _made(self, near: End) -> None:
        self._ends.add(near)
        opening: Deferred[End] = Deferred.fromCoroutine(self._connect())
        self._opening[near] = opening
        opening.addCallbacks(self._opened, self._not_opened, callbackArgs=(near,), errbackArgs=(near,))

    def _opened(self, far: End, near: End) -> None:
        self._opening.pop(near, None)
        if near.ended is None and far.ended is None:
            self._joined(near, far)
        join(near, far, self._clock)

    def _not_opened(self, failure: Failure, near: End) -> None:
        self._opening.pop(near, None)
        if failure.check(ConnectingCancelledError):  # from an endpoint; its text is an address
            if near.ended is not None:  # otherwise the command ends
                self._failed(CommandError("the peer went before the connection was made"))
        elif not failure.check(CancelledError):
            assert failure.value is not None
            self._failed(failure.value)
        if near.ended is None:
            near.transport.abortConnection()

    def _over(self, near: End, reason: Failure) -> None:
        opening = self._opening.get(near)
        if opening is not None:
            opening.cancel()


class _NearEnd(End):
    """An end that is counted."""

    pairs: set[End]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.pairs.discard(self)
        super().connectionLost(reason)
