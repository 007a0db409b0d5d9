"""``twistd rmb-peer``: lets the programs at a Redis call, and answer, twins of the Reliable Message Bus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twisted.internet.defer import Deferred, ensureDeferred

import dmsg
from dmsg.address import RedisAddress, parse_ip
from dmsg.crypto.errors import KeyFileError
from dmsg.errors import ConfigError, InvalidAddress
from dmsg.eventlog.log import short_node
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import ServerStarted, ServerStopped
from dmsg.rmb.core.errors import InvalidSecret
from dmsg.rmb.core.limits import MAX_OWN_RELAYS
from dmsg.taps._options import RoleOptions, demand_rmb
from dmsg.taps._service import RoleService
from dmsg.taps.settings import RmbPeerSettings

if TYPE_CHECKING:
    from dmsg.rmb.core.keys import TwinKey
    from dmsg.rmb.interfaces import ITwinRegistry
    from dmsg.rmb.peer.gateway import Gateway


class Options(RoleOptions):
    """Options of ``twistd rmb-peer``."""

    synopsis = "--key FILE --registry FILE --relay URL [options]"
    longdesc = (
        "A peer of the Reliable Message Bus: programs push requests to msgbus.system.local in Redis, and take those of "
        "other twins from msgbus.COMMAND."
    )
    tap_name = "rmb-peer"
    role = "rmb-peer"
    settings_class = RmbPeerSettings
    letters = {"key_type": "k", "mnemonic": "m", "redis": "r", "substrate": "s"}  # noqa: RUF012 - the public peer's

    def opt_debug(self) -> None:
        """Taken because the public peer has it, and does nothing: what is logged does not depend on it"""

    def opt_uploads(self, directory: str) -> None:
        """Taken because the public peer has it, which does not use it either"""

    opt_d, opt_u = opt_debug, opt_uploads


class RmbPeerService(RoleService):
    """A peer with its registry and metrics, as a Twisted service."""

    tap_name = "rmb-peer"
    role = "client"
    settings: RmbPeerSettings

    def __init__(self, reactor: Any, settings: RmbPeerSettings, *, uid: int | None = None) -> None:
        """``uid`` is the user that a process started as root will run as; that user may own the key file."""
        demand_rmb()
        from dmsg.rmb.client.relays import check_relays
        from dmsg.rmb.twins.open import check_registry, parse_genesis

        check_registry(settings.registry, settings.substrate)
        self._genesis = parse_genesis(settings.genesis)
        if not 0 < len(settings.relay) <= MAX_OWN_RELAYS:
            text = f"must be given, up to {MAX_OWN_RELAYS} times: over which relays the twin is reached"
            raise ConfigError("relay", text)
        check_relays(settings.relay)
        self._key = _read_key(settings, uid)
        try:
            self._redis = RedisAddress.parse(settings.redis)
        except InvalidAddress as error:
            raise ConfigError("redis", str(error)) from None
        super().__init__(reactor, settings, node=short_node(self._key.account.hex()), listen=None)
        self.registry: ITwinRegistry | None = None
        #: The peer itself, set at the start.
        self.gateway: Gateway | None = None
        self._works = False

    def start_role(self) -> None:
        """Open the registry (only now: a daemon has forked, and threads do not survive that), and begin."""
        from dmsg.rmb.client.exchange import Exchange
        from dmsg.rmb.peer.gateway import Gateway
        from dmsg.rmb.twins.open import open_registry

        settings = self.settings
        registry = self.registry = open_registry(
            self.reactor, settings.registry, settings.substrate, genesis=self._genesis
        )
        self.gateway = Gateway(
            self.reactor,
            self._redis,
            lambda owner: Exchange(
                self.reactor,
                self._key,
                registry,
                settings.relay,
                owner,
                publish=False if settings.no_update else hosts_to_publish(settings.relay) or True,
                allow_plain=settings.allow_plain,
                events=self.events,
            ),
            events=self.events,
        )
        self.emit(ServerStarted("", "", dmsg.__version__, "rmb"))
        started: Deferred[None] = ensureDeferred(self.gateway.start())
        started.addCallbacks(self._working, self.fail)

    def _working(self, _: None) -> None:
        self._works = True

    async def stop_role(self) -> None:
        """Take nothing more from Redis, deliver what is on its way there, and disconnect."""
        if self.gateway is not None:
            await self.gateway.stop()
        if self.registry is not None:
            await self.registry.close()
            self.emit(ServerStopped(Reason.STOPPED, self.reactor.seconds() - self.started_at))

    def readiness(self) -> str:
        """Not ready without our twin, a relay, or Redis."""
        if self.gateway is None:
            return "starting"
        exchange = self.gateway.exchange
        if not self._works:
            return (exchange.introduction.problem if exchange.introduction is not None else "") or "starting"
        if self.gateway.redis_problem:
            return f"Redis: {self.gateway.redis_problem}"
        if exchange.relays.is_connected:
            return ""
        return "not connected to a relay: " + "; ".join(": ".join(one) for one in exchange.relays.problems().items())

    def gauges(self) -> dict[str, float]:
        """What is under way."""
        return {} if self.gateway is None else self.gateway.stats()

    def where(self) -> str:
        """The Redis it serves, and the relays it uses."""
        return f"between {self._redis} and {', '.join(self.settings.relay)}"


def hosts_to_publish(relays: tuple[str, ...]) -> tuple[str, ...]:
    """The names under which others find our relays; none if the URLs do not tell.

    A URL with an unusual port or an IP address is our own way to a relay: only the registry knows the name of such a relay.
    """
    from dmsg.rmb.client.connection import relay_url

    places = [relay_url(url) for url in relays]
    hosts = {place.address.host.lower() for place in places}
    named = all(place.has_usual_port for place in places) and all(parse_ip(host) is None for host in hosts)
    return tuple(sorted(hosts)) if named else ()


def _read_key(settings: RmbPeerSettings, uid: int | None) -> TwinKey:
    from dmsg.rmb.core.keys import KeyType, TwinKey, read_secret
    from dmsg.rmb.key_file import read_secret_file, read_twin_key

    given = [name for name in ("key", "mnemonic", "mnemonics", "seed") if getattr(settings, name) is not None]
    if len(given) != 1:
        raise ConfigError("key", "must be given, or mnemonic: one of them")
    owners = () if uid is None else (uid,)
    try:
        if settings.key is not None:
            return read_twin_key(settings.key, owners=owners)
        text = getattr(settings, given[0])
        secret = read_secret_file(Path(text[1:]), owners=owners) if text.startswith("@") else read_secret(text)
        return TwinKey(secret, KeyType(settings.key_type))
    except (KeyFileError, InvalidSecret) as error:
        raise ConfigError(given[0], str(error)) from None


def makeService(options: Options) -> RmbPeerService:
    """The service for parsed options; an error raises ``SystemExit`` with one line."""
    from twisted.internet import reactor

    return options.build(lambda: RmbPeerService(reactor, options.settings, uid=options.uid))
