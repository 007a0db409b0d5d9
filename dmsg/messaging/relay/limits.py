"""The limits of a relay of the messaging system. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.messaging.core.limits import HANDSHAKE_TIMEOUT_S
from dmsg.serving.limits import ServingLimits


@dataclass(frozen=True, slots=True)
class RelayLimits(ServingLimits):
    """The limits of one relay; its transports are channels. Every refusal is counted."""

    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    #: Open and requested transports of one connection; more are refused as busy. Half of them are kept for its own dials.
    #: With those that are unanswered they are fewer than 255: a client of 2019 whose ids are all taken crashes.
    transports_per_connection: int = 192
    #: When all places of a connection for transports that others open are taken, a newcomer whose address group, or within
    #: the largest group whose key, has fewer than this gets one from the source that has the most; others are busy.
    transports_per_source: int = 32
    transports_per_pair: int = 32
    #: Requests towards one connection that it has not answered. They take no places; with more, the same rule holds.
    unanswered_per_target: int = 48
    #: A channel that one side has closed and the other one goes on with is closed after this.
    close_timeout_s: float = 10.0
