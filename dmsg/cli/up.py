"""``dmsg up``: a discovery and some relays in one process, for work on one machine."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import click
from twisted.internet.defer import Deferred, maybeDeferred
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.error import CannotListenError

from dmsg.address import HostPort, PinnedServer
from dmsg.cli.exits import CommandError
from dmsg.cli.output import Output, output_options
from dmsg.cli.protocols import DEFAULT
from dmsg.cli.runner import run
from dmsg.cli.settings import protocol_option
from dmsg.crypto.keys import SecretKey, read_key_file, write_key_file
from dmsg.discovery.entry import DMSG, MESSAGING
from dmsg.discovery.proofs.prover import RelayProofs
from dmsg.discovery.relay_addresses import RelayAddresses
from dmsg.glue.listening import BACKLOG, TakenPort
from dmsg.messaging.client.prover import LinkProver
from dmsg.messaging.relay.limits import RelayLimits as MessagingRelayLimits
from dmsg.messaging.relay.service import MessagingRelay
from dmsg.mux.client.prover import XkProver
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.service import DmsgRelay
from dmsg.sansio.jitter import Jitter

#: The only protection of this network.
LOOPBACK: Final = "127.0.0.1"
MAX_RELAYS: Final = 32
#: How long relays may take to be listed in discovery, in seconds.
READY_TIMEOUT_S: Final = 15.0
#: Open transports may go on for this many seconds when the command ends.
DRAIN_TIMEOUT_S: Final = 0.5
#: Protocol -> a relay, and its limits.
RELAYS: Final[dict[str, tuple[Any, Any]]] = {
    DMSG: (DmsgRelay, RelayLimits),
    MESSAGING: (MessagingRelay, MessagingRelayLimits),
}
_SPARE_KEYS: Final = ("alice", "bob")


@click.command(short_help="Run discovery and relays on the loopback interface.")
@click.option("--relays", type=click.IntRange(1, MAX_RELAYS), default=1, show_default=True, help="How many relays.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of discovery; by default any free one.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False),
    help="Keep keys and entries (SQLite) here; by default they end with the command.",
)
@protocol_option
@output_options
def up(relays: int, port: int, directory: str | None, protocol: str, out: Output, verbose: bool) -> None:
    """Run discovery and relays on the loopback interface until interrupted.

    Prints what to export for the other commands, and the files of two keys to use with them.
    """
    sys.exit(
        run(
            lambda reactor: run_up(out, reactor, relays, port=port, directory=directory, protocol=protocol),
            out,
            verbose=verbose,
        )
    )


async def run_up(
    out: Output,
    reactor: Any,
    relays: int,
    *,
    port: int = 0,
    directory: str | None = None,
    protocol: str = DEFAULT,
) -> None:
    """``dmsg up``."""
    async with AsyncExitStack() as stack:
        if directory is None:
            home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dmsg-up-")))
        else:
            home = Path(directory)
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            _claim(stack, home)
        keys = [_key(home / f"relay-{number + 1}.key") for number in range(relays)]
        spares = {name: home / f"{name}.key" for name in _SPARE_KEYS}
        for path in spares.values():
            _key(path)
        store = "memory:" if directory is None else f"sqlite:{home / 'entries.sqlite'}"
        url, proofs = await _start_discovery(stack, reactor, store, port)
        servers = [await _start_relay(stack, reactor, key, url, protocol) for key in keys]
        await proofs.quiet().addTimeout(READY_TIMEOUT_S, reactor, _late)
        lines = [f"export DMSG_DISCOVERY={url}", f"# or: export DMSG_SERVER='{' '.join(servers)}'"]
        if protocol != DEFAULT:
            lines.append(f"# and give commands: --protocol {protocol}")
        lines += [f"# key of {name}: {path}" for name, path in spares.items()]
        out.result(
            {
                "event": "ready",
                "discovery": url,
                "servers": servers,
                "keys": {name: str(path) for name, path in spares.items()},
            },
            *lines,
        )
        out.note(f"ready: discovery and {relays} relay{'s' if relays > 1 else ''} until interrupted")
        await Deferred()


def _claim(stack: AsyncExitStack, home: Path) -> None:
    """Lock ``home`` while the command runs: a relay of the same key would take its entry from ours."""
    descriptor = os.open(home, os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommandError(f"{home} is in use: another dmsg up runs with it") from None


def _key(path: Path) -> SecretKey:
    if path.exists():
        return read_key_file(path)
    key = SecretKey.generate()
    write_key_file(path, key)
    return key


async def _start_discovery(stack: AsyncExitStack, reactor: Any, store_url: str, port: int) -> tuple[str, RelayProofs]:
    from dmsg.discovery.api import DiscoveryApi, make_site  # Klein installs the reactor
    from dmsg.discovery.stores.open import open_store

    store = open_store(store_url, reactor)
    stack.push_async_callback(_close, store.close)
    dice = Jitter(os.urandom)
    addresses = RelayAddresses(private=True)
    provers = {DMSG: XkProver(reactor), MESSAGING: LinkProver(reactor)}
    proofs = RelayProofs(store, provers, reactor, now_ns=time.time_ns, random=dice, addresses=addresses)
    stack.push_async_callback(proofs.stop)
    api = DiscoveryApi(store, clock_ns=time.time_ns, random=dice, addresses=addresses, proofs=proofs)
    site = make_site(api.resource(), reactor=reactor)
    try:
        listening = await TCP4ServerEndpoint(reactor, port, interface=LOOPBACK).listen(site)
    except CannotListenError as error:
        raise CommandError(f"cannot listen on {LOOPBACK}:{port}: {error.socketError.strerror}") from None
    stack.push_async_callback(_close, listening.stopListening)
    proofs.start()
    return f"http://{LOOPBACK}:{listening.getHost().port}", proofs


async def _start_relay(stack: AsyncExitStack, reactor: Any, key: SecretKey, discovery_url: str, protocol: str) -> str:
    from dmsg.discovery.client import HttpDiscovery

    discovery = HttpDiscovery.connect(discovery_url, reactor)
    stack.push_async_callback(discovery.close)
    # The entry names the port, so the port has to be known before the server starts.
    taken = await TakenPort.take(TCP4ServerEndpoint(reactor, 0, BACKLOG, LOOPBACK))
    host: Any = taken.port.getHost()
    address = HostPort(LOOPBACK, host.port)
    make_relay, make_limits = RELAYS[protocol]
    server = make_relay(
        reactor,
        key,
        taken,
        public_address=address,
        discovery=discovery,
        limits=make_limits(drain_timeout_s=DRAIN_TIMEOUT_S),
        now_ns=time.time_ns,
    )
    server.startService()
    stack.push_async_callback(_close, server.stopService)
    await server.listening()
    assert server.registrar is not None
    await Deferred.fromCoroutine(server.registrar.published()).addTimeout(READY_TIMEOUT_S, reactor, _late)
    return str(PinnedServer(key.public_key, address))


def _late(result: object, timeout_s: float) -> None:
    raise CommandError(f"a relay could not be registered within {timeout_s:g} s")


async def _close(action: Any) -> None:
    await maybeDeferred(action)
