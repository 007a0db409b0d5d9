"""Who may open a session: checks the token in the URL, and limits how often a network may try. :ref:`spec-rmb-token`."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256

from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import TokenRefused
from dmsg.rmb.core.token import Token, check_token, read_token
from dmsg.rmb.interfaces import ITwinRegistry
from dmsg.rmb.relay.limits import RelayLimits
from dmsg.rmb.relay.lookups import LookUps
from dmsg.rmb.twins.errors import RegistryError
from dmsg.sansio.tally import Tally
from dmsg.serving.admission import Origin
from dmsg.serving.handshake_rates import HandshakeRates


class _UsedTokens:
    """The network from which each token came first: someone elsewhere who has seen a token, say in a log, cannot use it.

    The same network may use it again: a program that connects twice within a second may make the same token twice.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._count = 0
        self._of_twin: dict[int, OrderedDict[bytes, str]] = {}
        self._tally: Tally[int] = Tally()

    def is_replayed(self, token: Token, origin: Origin) -> bool:
        """Whether ``token`` was used from another network; if not, note that the network of ``origin`` has used it."""
        name = sha256(token.signed).digest()
        used = self._of_twin.setdefault(token.twin, OrderedDict())
        if name in used:
            return used[name] != origin.network
        used[name] = origin.network
        self._tally.add(token.twin)
        self._count += 1
        if self._count > self._capacity:  # a twin that logs in endlessly makes only its own tokens new again
            self._forget(self._tally.largest())
        return False

    def _forget(self, twin: int) -> None:
        self._of_twin[twin].popitem(last=False)
        if not self._of_twin[twin]:
            del self._of_twin[twin]
        self._tally.remove(twin)
        self._count -= 1


class Logins:
    """Checks logins to the relay whose names are ``domains``. ``now`` is on the same clock as that of :meth:`check`."""

    def __init__(
        self,
        registry: ITwinRegistry,
        limits: RelayLimits,
        *,
        domains: frozenset[str],
        demand_audience: bool = False,
        now: float = 0.0,
    ) -> None:
        self._look_ups = LookUps(registry)
        self._limits = limits
        self._domains = frozenset(domain.lower() for domain in domains)
        self._demand_audience = demand_audience
        self._rates = HandshakeRates(limits, now)
        self._used = _UsedTokens(limits.used_tokens)

    async def check(self, query: str | None, origin: Origin, now: float, unix_s: float) -> SessionAddress:
        """The session for the token in ``query``, the text after the ``?``. Raises ``TokenRefused``."""
        limit = self._rates.take(origin, now)
        if limit:
            raise TokenRefused(429, "too many logins", limit)
        token = read_token(query, unix_s, self._limits.token_lifetime_s)
        try:
            twin = await self._look_ups.get(token.twin, origin.network)
        except RegistryError as error:
            raise TokenRefused(500, f"failed to get twin: {error.own_text}", "registry failed") from None
        if twin is None:
            raise TokenRefused(401, f"twin not found {token.twin}", "unknown twin")
        check_token(token, twin.account, self._domains, demand_audience=self._demand_audience)
        if self._used.is_replayed(token, origin):
            raise TokenRefused(401, "invalid jwt: jwt was used from another network", "replayed")
        return SessionAddress(token.twin, token.connection)
