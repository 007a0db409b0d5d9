"""The limits of a relay of the dmsg protocol. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.serving.limits import ServingLimits


@dataclass(frozen=True, slots=True)
class RelayLimits(ServingLimits):
    """The limits of one relay. Every refusal is counted."""

    #: Frames of no transport that a connection may send before it is dropped for abuse.
    strays_per_s: float = 20.0
    stray_burst: int = 100
