"""``twistd dmsg-discovery``: a discovery that keeps entries in a store and answers over HTTP."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import dmsg
from dmsg.discovery.entry import DMSG, MESSAGING
from dmsg.discovery.proofs.prover import RelayProofs
from dmsg.discovery.ranks_source import RanksSource
from dmsg.discovery.relay_addresses import RelayAddresses
from dmsg.errors import ConfigError
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import Drained, ServerStarted, ServerStopped
from dmsg.glue.listening import address_text
from dmsg.messaging.client.prover import LinkProver
from dmsg.mux.client.prover import XkProver
from dmsg.ops.gc import HTTP_GC_THRESHOLDS
from dmsg.sansio.jitter import Jitter
from dmsg.taps._options import RoleOptions
from dmsg.taps._service import RoleService
from dmsg.taps.settings import DiscoverySettings

if TYPE_CHECKING:
    from twisted.internet.interfaces import IListeningPort

    from dmsg.interfaces import IEntryStore


class Options(RoleOptions):
    """Options of ``twistd dmsg-discovery``."""

    synopsis = "[options]"
    longdesc = "A discovery: keeps the signed entries of clients and servers and gives them out over HTTP."
    tap_name = "dmsg-discovery"
    role = "discovery"
    settings_class = DiscoverySettings


class DiscoveryService(RoleService):
    """A discovery as a Twisted service."""

    tap_name = "dmsg-discovery"
    role = "discovery"
    gc_thresholds = HTTP_GC_THRESHOLDS
    settings: DiscoverySettings

    def __init__(self, reactor: Any, settings: DiscoverySettings) -> None:
        super().__init__(reactor, settings, node="discovery", listen=settings.listen)
        self.store: IEntryStore | None = None
        #: The HTTP site, from the start on.
        self.site: Any = None
        #: The source of relay ranks, if there is one.
        self.ranks = self._ranks_source(settings)
        private = settings.private_addresses
        if private is None and settings.list_unproven:
            private = True
        self._addresses = RelayAddresses(private)
        #: Proves relays before they are listed. Set at the start, unless proofs are switched off.
        self.proofs: RelayProofs | None = None
        self._listens = False

    def _ranks_source(self, settings: DiscoverySettings) -> RanksSource | None:
        if settings.ranks is None:
            return None
        if not settings.ranks_key:
            raise ConfigError("ranks_key", "must be given with ranks: whose signature is believed")
        return RanksSource(
            settings.ranks,
            settings.ranks_key,
            self.reactor,
            now_s=time.time,
            refresh_s=settings.ranks_refresh_s,
            events=self.events,
        )

    def start_role(self) -> None:
        """Open the store (only now: a daemon has forked, and threads do not survive that) and serve."""
        from dmsg.discovery.api import DiscoveryApi, make_site
        from dmsg.discovery.stores.open import open_store

        settings = self.settings
        self.store = open_store(settings.store, self.reactor, limits=settings.store_limits)
        if not settings.list_unproven:
            self.proofs = RelayProofs(
                self.store,
                {DMSG: XkProver(self.reactor), MESSAGING: LinkProver(self.reactor)},
                self.reactor,
                now_ns=time.time_ns,
                random=Jitter(os.urandom),
                addresses=self._addresses,
                limits=settings.proof_limits,
            )
        api = DiscoveryApi(
            self.store,
            clock_ns=time.time_ns,
            random=Jitter(os.urandom),
            limits=settings.limits,
            events=self.events,
            ranks=lambda: self.ranks.ranks if self.ranks is not None else None,
            addresses=self._addresses,
            proofs=self.proofs,
            list_protocol=settings.list_protocol,
        )
        if self.ranks is not None:
            self.ranks.start()
        self.site = make_site(api.resource(), reactor=self.reactor, limits=settings.limits)
        self.endpoint.listen(self.site).addCallbacks(self._listening, self.fail)

    def _listening(self, port: IListeningPort) -> None:
        self._listens = True
        self._addresses.listens_on(getattr(port.getHost(), "host", ""))
        if self.proofs is not None:
            self.proofs.start()
        self.emit(ServerStarted("", address_text(port), dmsg.__version__))

    async def stop_role(self) -> None:
        """Take no more connections, answer the requests under way, close the store."""
        began = self.reactor.seconds()
        await self.endpoint.close()
        if self.ranks is not None:
            await self.ranks.stop()
        if self.site is not None:
            await self.site.drain(self.settings.drain_timeout, self.reactor)
            self.emit(Drained((self.reactor.seconds() - began) * 1000, 0))
        if self.proofs is not None:
            await self.proofs.stop()
        if self.store is not None:
            await self.store.close()
            self.emit(ServerStopped(Reason.STOPPED, self.reactor.seconds() - self.started_at))

    async def readiness(self) -> str:
        """Not ready before it listens, and while the store does not answer."""
        if self.store is None or not self._listens:
            return "starting"
        try:
            await self.store.available_servers(1, time.time_ns())
        except Exception:  # whatever it is, there are no entries
            return "the entry store does not answer"
        return ""

    def gauges(self) -> dict[str, float]:
        """Connections and request bodies under way, connections evicted for others or refused for lack of a place, and requests
        refused unread; with ranks, how many relays they name, their age and weight; with proofs, relays listed and
        known, and the results of proofs."""
        site = self.site
        if site is None:
            return {}
        gauges: dict[str, float] = {
            "connections": site.connections,
            "bodies": site.bodies,
            "connections_evicted": site.evicted,
            "connections_refused": site.refused,
            "requests_refused": site.requests_refused,
        }
        if self.proofs is not None:
            gauges |= self.proofs.stats()
        if self.ranks is not None:
            ranks, now_s = self.ranks.ranks, time.time()
            gauges["ranked_relays"] = len(ranks.scores) if ranks is not None else 0
            gauges["ranks_age_s"] = now_s - ranks.issued if ranks is not None else 0
            gauges["ranks_freshness"] = ranks.freshness(now_s) if ranks is not None else 0
        return gauges


def makeService(options: Options) -> DiscoveryService:
    """The service for parsed options; an error raises ``SystemExit`` with one line."""
    from twisted.internet import reactor

    return options.build(lambda: DiscoveryService(reactor, options.settings))
