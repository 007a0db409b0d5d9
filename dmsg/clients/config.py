"""What is set for the clients of any protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmsg.clients.dial import DialConfig
from dmsg.clients.limits import ListenerLimits
from dmsg.relays.pool import PoolConfig
from dmsg.relays.scores import ScoreConfig


@dataclass(frozen=True, slots=True)
class RelayClientConfig:
    """Everything about a client that can be set whatever its protocol, by what it concerns."""

    pool: PoolConfig = field(default_factory=PoolConfig)
    dial: DialConfig = field(default_factory=DialConfig)
    scores: ScoreConfig = field(default_factory=ScoreConfig)
    listener: ListenerLimits = field(default_factory=ListenerLimits)
    handshake_timeout_s: float = 10.0
    #: What is written when the client stops has this long to arrive.
    stop_timeout_s: float = 2.0
