"""``twistd rmb-relay``: a relay of the Reliable Message Bus."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from twisted.logger import Logger

import dmsg
from dmsg.address import RedisAddress
from dmsg.crypto.ed25519 import SigningKey
from dmsg.crypto.errors import KeyFileError
from dmsg.errors import ConfigError, InvalidAddress
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.refusals import RefusalReport
from dmsg.eventlog.schema import Drained, ServerStarted, ServerStopped
from dmsg.glue.listening import address_text
from dmsg.ops.metrics import MetricsEventLog, add_gauges
from dmsg.rmb.relay.limits import RelayLimits, post_rate
from dmsg.rmb.relay.peering import parse_trust
from dmsg.sansio.jitter import Jitter
from dmsg.taps._options import RoleOptions, demand_rmb
from dmsg.taps._service import RoleService
from dmsg.taps.settings import Posters, RmbRelaySettings

if TYPE_CHECKING:
    from twisted.internet.interfaces import IListeningPort

    from dmsg.http.client import HttpCaller
    from dmsg.rmb.interfaces import ITwinRegistry
    from dmsg.rmb.relay.federation import Federation
    from dmsg.rmb.relay.service import RmbRelay
    from dmsg.rmb.relay.stores.base import QueueStore

_log = Logger()
#: The public relay's defaults, for the one of two options that is not given.
_WORKERS: Final = 500
_USERS_PER_WORKER: Final = 1000


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

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """As for other roles; options that have several words in the public relay's command line may have them here, too."""
        super().parseOptions(_one_word_each(options or ()))

    def opt_debug(self) -> None:
        """Taken because the public relay has it, and does nothing: what is logged does not depend on it"""

    opt_d = opt_debug


#: Options that the public relay takes with any number of words; and the one it takes with two numbers, between which its
#: description has a comma.
_LISTS: Final = ("-m", "--domain", "-s", "--substrate")
_PAIR: Final = "--limit"


def _one_word_each(words: Sequence[str]) -> list[str]:
    """``words`` with one word for each option: ``-m A B`` is ``-m A -m B``, and ``--limit 10 1000`` is ``--limit 10,1000``."""
    made: list[str] = []
    for word in words:
        before = made[-2] if len(made) > 1 else ""
        is_value = not word.startswith("-")
        if is_value and before in _LISTS:
            made += [before, word]
        elif is_value and before == _PAIR and word.isdecimal() and made[-1].removesuffix(",").isdecimal():
            made[-1] = f"{made[-1].removesuffix(',')},{word}"
        else:
            made.append(word)
    return made


class RmbRelayService(RoleService):
    """A relay with its registry, store and metrics, as a Twisted service."""

    tap_name = "rmb-relay"
    role = "server"
    settings: RmbRelaySettings

    def __init__(self, reactor: Any, settings: RmbRelaySettings, *, uid: int | None = None) -> None:
        """``uid`` is the user that a process started as root will run as; that user may own the key file."""
        demand_rmb()
        from dmsg.rmb.twins.open import check_registry

        check_registry(settings.registry, settings.substrate)
        if settings.redis is not None and settings.store not in (settings.redis, "memory:"):
            raise ConfigError("redis", "is another name of store, which is also given: one of them")
        if settings.redis is not None:
            try:
                RedisAddress.parse(settings.redis)
            except InvalidAddress as error:
                raise ConfigError("redis", str(error)) from None
        self._key = _read_key(settings, uid)
        self._known = _read_trust(settings.trust)
        if not settings.domain and (self._key is not None or self._known):
            raise ConfigError("domain", "must be given with relay-key and trust: other relays know this one by it")
        if not settings.domain and settings.demand_audience:
            raise ConfigError(
                "domain", "must be given with demand-audience: without it every token is for another relay"
            )
        super().__init__(
            reactor,
            settings,
            node=settings.domain[0] if settings.domain else "rmb-relay",
            listen=settings.listen,
            public_pages=not settings.private_metrics,
        )
        if isinstance(self.events, MetricsEventLog):
            self.events.name_always("relay", self._known)
        self.registry: ITwinRegistry | None = None
        self.store: QueueStore | None = None
        #: The relay itself, set at the start.
        self.relay: RmbRelay | None = None
        self.federation: Federation | None = None
        self._caller: HttpCaller | None = None
        self._refusals = RefusalReport(reactor, self.emit)
        self._listens = False

    def start_role(self) -> None:
        """Open the registry and the store (only now: a daemon has forked, and threads do not survive that), and serve."""
        from dmsg.rmb.relay.api import make_site
        from dmsg.rmb.relay.service import RmbRelay
        from dmsg.rmb.relay.stores.open import open_queues
        from dmsg.rmb.twins.blocks import BlockConfig
        from dmsg.rmb.twins.chain import ChainRegistry
        from dmsg.rmb.twins.open import open_registry

        settings = self.settings
        if not settings.domain:
            _log.warn(
                "no --domain is given: clients that connect by a name in the registry are refused, as are posts of other "
                "relays, and nothing is kept for twins that are not connected"
            )
        blocks = BlockConfig(catchup_threshold=settings.catchup_threshold)
        self.registry = open_registry(self.reactor, settings.registry, settings.substrate, blocks)
        self.store = open_queues(settings.redis or settings.store, self.reactor)
        self.relay = relay = RmbRelay(
            self.reactor,
            self.registry,
            self.store,
            domains=frozenset(settings.domain),
            limits=self.limits,
            limit=settings.limit,
            max_message_bytes=settings.max_message,
            demand_audience=settings.demand_audience,
            events=self.events,
        )
        add_gauges(self.metrics, "", relay.public_stats)
        if isinstance(self.registry, ChainRegistry):
            add_gauges(self.metrics, "", self.registry.public_stats)
        ingest = self._federate(relay)
        pages = {b"/" + name: page for name, page in self.pages().items()}
        if settings.private_metrics:
            del pages[b"/metrics"]
        relay.startService()
        site = make_site(relay, self.reactor, pages, ingest, self._refuse_get)
        self.endpoint.listen(site).addCallbacks(self._listening, self.fail)

    def _refuse_get(self, host: str) -> None:
        self._refusals.add(0, host, "request", Reason.TOO_MANY_REQUESTS)

    def _federate(self, relay: RmbRelay) -> Any:
        """Let ``relay`` post to other relays; gives the resource that takes their posts."""
        from dmsg.rmb.core.ranker import Ranker
        from dmsg.rmb.relay.federation import Federation
        from dmsg.rmb.relay.ingest import Ingest
        from dmsg.rmb.relay.peering import Signer, Verifier
        from dmsg.rmb.relay.posting import RelayPoster

        settings, domains, random = self.settings, self.settings.domain, Jitter(os.urandom)
        key, known = self._key, self._known
        self._caller = RelayPoster.connect(self.reactor)
        poster = RelayPoster(
            self._caller,
            time.time,
            domains=domains,
            scheme=settings.federation_scheme.value,
            signer=Signer(domains[0], key, os.urandom) if key is not None else None,
            known=known,
        )
        self.federation = relay.delivery.federation = Federation(
            poster,
            self.registry,
            Ranker(random, settings.ranker_period),
            self.reactor,
            random,
            unix_time=time.time,
            domains=domains,
            failed=relay.delivery.answer,
            emit=self.emit,
        )
        rates = post_rate(relay.limits)
        return Ingest(
            relay.delivery.accept,
            self.registry,
            Verifier(domains, known),
            time.time,
            domains=domains,
            open_to_all=settings.federation is Posters.OPEN,
            clock=self.reactor,
            admit=lambda host: rates.take(host, self.reactor.seconds()),
            flush=relay.flush,
            refused=lambda host, why: self._refusals.add(0, host, "post", why),
            message_bytes=settings.max_message,
        )

    @property
    def limits(self) -> RelayLimits:
        """The limits, changed by the options that stand for one of them."""
        settings = self.settings
        changes: dict[str, Any] = {}
        if settings.drain_timeout is not None:
            changes["drain_timeout_s"] = settings.drain_timeout
        if settings.workers is not None or settings.user_per_worker is not None:
            workers, users = settings.workers or _WORKERS, settings.user_per_worker or _USERS_PER_WORKER
            changes["connections"] = workers * users
        return dataclasses.replace(settings.limits, **changes)

    def _listening(self, port: IListeningPort) -> None:
        self._listens = True
        self.emit(ServerStarted("", address_text(port), dmsg.__version__, "rmb"))

    async def stop_role(self) -> None:
        """Accept no more connections, close the sessions, store what they have not got, and close the store."""
        began = self.reactor.seconds()
        await self.endpoint.close()
        if self.federation is not None:
            await self.federation.stop(self.limits.drain_timeout_s)
        if self.relay is not None:
            left_s = began + self.limits.drain_timeout_s - self.reactor.seconds()
            await self.relay.stopService(max(0.0, left_s))
            self.emit(Drained((self.reactor.seconds() - began) * 1000, 0))
        self._refusals.close()
        if self._caller is not None:
            await self._caller.close()
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
        if self.relay is None or self.federation is None:
            return {}
        return {**self.relay.stats(), "federation_outstanding": len(self.federation)}


def _read_trust(given: Sequence[str]) -> dict[str, bytes]:
    """The keys of relays by name; raises ``ConfigError``, also for two keys of one relay."""
    known: dict[str, bytes] = {}
    for name, key in map(parse_trust, given):
        if known.setdefault(name, key) != key:
            raise ConfigError("trust", f"{name} has two keys")
    return known


def _read_key(settings: RmbRelaySettings, uid: int | None) -> SigningKey | None:
    if settings.relay_key is None:
        return None
    from dmsg.rmb.core.keys import KeyType
    from dmsg.rmb.key_file import read_twin_key

    try:
        key = read_twin_key(settings.relay_key, owners=() if uid is None else (uid,))
    except KeyFileError as error:
        raise ConfigError("relay_key", str(error)) from None
    if key.kind is not KeyType.ED25519:
        raise ConfigError("relay_key", "must be a key of ed25519")
    return SigningKey(key.secret)


def makeService(options: Options) -> RmbRelayService:
    """The service for parsed options; an error raises ``SystemExit`` with one line."""
    from twisted.internet import reactor

    return options.build(lambda: RmbRelayService(reactor, options.settings, uid=options.uid))
