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
    #: Together with the unanswered ones they are fewer than 255: a client of 2019 crashes when all its ids are taken.
    transports_per_connection: int = 192
    #: When all places of a connection for transports that others open are taken, a newcomer gets one from the source that has
    #: the most, if the newcomer's address group, or within the largest group its key, has fewer than this; others are busy.
    transports_per_source: int = 32
    transports_per_pair: int = 32
    #: Requests towards one connection that it has not answered. They take no places; above that, the same rule holds.
    unanswered_per_target: int = 48
    #: A channel that one side has closed and the other side goes on using is closed after this.
    close_timeout_s: float = 10.0
