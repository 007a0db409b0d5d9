"""``twistd rmb-relay``: a relay of the Reliable Message Bus."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import dmsg
from dmsg.errors import ConfigError
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import Drained, ServerStarted, ServerStopped
from dmsg.taps._options import RoleOptions
from dmsg.taps._service import RoleService, address_text
from dmsg.taps.settings import RmbRelaySettings

if TYPE_CHECKING:
    from twisted.internet.interfaces import IListeningPort

    from dmsg.rmb.interfaces import ITwinRegistry
    from dmsg.rmb.relay.service import RmbRelay
    from dmsg.rmb.relay.stores.base import QueueStore


class Options(RoleOptions):
    """Options of ``twistd rmb-relay``."""

    synopsis = "--registry FILE --domain NAME [options]"
    longdesc = "A relay of the Reliable Message Bus: carries envelopes between twins, and to and from other relays."
    tap_name = "rmb-relay"
    role = "rmb-relay"
    settings_class = RmbRelaySettings
    letters = {  # noqa: RUF012 - the public relay's
        "domain": "m",
        "redis": "r",
        "substrate": "s",
        "workers": "w",
        "user_per_worker": "u",
        "listen": "l",
        "ranker_period": "p",
    }


class RmbRelayService(RoleService):
    """A relay with its registry, store and metrics, as a Twisted service."""

    tap_name = "rmb-relay"
    role = "server"
    settings: RmbRelaySettings

    def __init__(self, reactor: Any, settings: RmbRelaySettings) -> None:
        if not (settings.registry or settings.substrate):
            raise ConfigError("registry", "must be given, or substrate: where twins are looked up")
        super().__init__(
            reactor,
            settings,
            node="rmb-relay",
            listen=settings.listen,
            public_pages=not settings.private_metrics,
        )
        self.registry: ITwinRegistry | None = None
        self.store: QueueStore | None = None
        #: The relay itself, from the start on.
        self.relay: RmbRelay | None = None
        self._listens = False

    def start_role(self) -> None:
        """Open the registry and the store (only now: a daemon has forked, and threads do not survive that), and serve."""
        from dmsg.rmb.relay.api import make_site
        from dmsg.rmb.relay.service import RmbRelay
        from dmsg.rmb.relay.stores.open import open_queues
        from dmsg.rmb.twins.table import SqliteRegistry

        settings = self.settings
        self.registry = SqliteRegistry(settings.registry or "", self.reactor)
        self.store = open_queues(settings.redis or settings.store, self.reactor)
        self.relay = relay = RmbRelay(
            self.reactor,
            self.registry,
            self.store,
            domains=frozenset(settings.domain),
            limits=self._limits(),
            limit=settings.limit,
            max_message_bytes=settings.max_message,
            demand_audience=settings.demand_audience,
            events=self.events,
        )
        pages = {b"/" + name: page for name, page in self.pages().items()}
        if settings.private_metrics:
            del pages[b"/metrics"]
        relay.startService()
        self.endpoint.listen(make_site(relay, self.reactor, pages)).addCallback(self._listening)

    def _limits(self) -> Any:
        settings = self.settings
        changes: dict[str, Any] = {}
        if settings.drain_timeout is not None:
            changes["drain_timeout_s"] = settings.drain_timeout
        if settings.workers is not None and settings.user_per_worker is not None:
            changes["connections"] = settings.workers * settings.user_per_worker
        return dataclasses.replace(settings.limits, **changes)

    def _listening(self, port: IListeningPort) -> None:
        self._listens = True
        self.emit(ServerStarted("", address_text(port), dmsg.__version__, "rmb"))

    async def stop_role(self) -> None:
        """Take no more connections, close the sessions, put what they were not given into the store, and close that."""
        began = self.reactor.seconds()
        await self.endpoint.close()
        if self.relay is not None:
            await self.relay.stopService()
            self.emit(Drained((self.reactor.seconds() - began) * 1000, 0))
        if self.store is not None:
            await self.store.close()
        if self.registry is not None:
            await self.registry.close()
            self.emit(ServerStopped(Reason.STOPPED, self.reactor.seconds() - self.started_at))

    def readiness(self) -> str:
        """Not ready before it listens and while it drains."""
        return "" if self._listens and self.relay is not None and self.relay.ready else "not serving"

    def gauges(self) -> dict[str, float]:
        """The relay's own numbers."""
        return self.relay.stats() if self.relay is not None else {}


def makeService(options: Options) -> RmbRelayService:
    """The service for parsed options; what cannot work raises ``SystemExit`` with one line."""
    from twisted.internet import reactor

    return options.build(lambda: RmbRelayService(reactor, options.settings))
