"""Settings of a client of any protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmsg.clients.dial import DialConfig
from dmsg.clients.limits import ListenerLimits
from dmsg.relays.pool import PoolConfig
from dmsg.relays.scores import ScoreConfig
from dmsg.sansio.rate import check_more_than_zero


@dataclass(frozen=True, slots=True)
class RelayClientConfig:
    """The settings of a client that do not depend on its protocol, in groups."""

    pool: PoolConfig = field(default_factory=PoolConfig)
    dial: DialConfig = field(default_factory=DialConfig)
    scores: ScoreConfig = field(default_factory=ScoreConfig)
    listener: ListenerLimits = field(default_factory=ListenerLimits)
    handshake_timeout_s: float = 10.0
    #: How long data has to arrive that was written before the client stopped.
    stop_timeout_s: float = 2.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a time in which no relay can answer."""
        check_more_than_zero(self, "handshake_timeout_s")
