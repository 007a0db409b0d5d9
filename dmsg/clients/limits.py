"""The limits of a client's listeners."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """What a listener holds for its peers. A key costs a stranger nothing, so each bound is in all and not only by key."""

    #: Offers that wait for the access policy or for their initiator's proof (:ref:`spec-confirmation`). When all places
    #: are taken, the offer that has waited longest loses its place to a new one. As many are remembered whose path is lost
    #: before the proof has come (:ref:`spec-resume-unproved`).
    offers: int = 256
    #: Of those, offers of one key over one relay: half, so that no single key ever costs another one its place. More are
    #: refused as busy.
    offers_per_key: int = 128
    #: Open transports; above, an unused one (its peer has not sent a byte) is closed for a new one, and if there is none
    #: the new one is refused as busy.
    open_transports: int = 1_024
    #: With more than this open, those that are unused and have been idle for so many seconds are closed, of the key that
    #: holds most first. Three quarters of what a relay lets in to one client: the rest stays for those who come.
    crowd: int = 384
    crowd_idle_s: float = 10.0
    #: A transport on which nothing was received or acknowledged for this long is closed with ``deadline``; 0 is no limit,
    #: because a shell or a subscription may rightly be silent for days.
    idle_timeout_s: float = 0.0
