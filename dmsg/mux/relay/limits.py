"""The limits of a relay of the dmsg protocol. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.serving.limits import ServingLimits


@dataclass(frozen=True, slots=True)
class RelayLimits(ServingLimits):
    """The limits of one relay. Every refusal is counted."""

    #: The largest window of a transport, announced to clients that know the extension. So much more than the hard limit may
    #: wait for its receiver, but no more than eight times what the transport has carried before (:ref:`spec-queues`).
    window_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        ServingLimits.__post_init__(self)  # super() would fail: with slots, dataclass replaces this class
        if self.window_bytes >= 1 << 32:
            raise ValueError("window_bytes must be less than 4 GiB")
