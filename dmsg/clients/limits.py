"""The limits of a client's listeners."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.sansio.rate import check_limits


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """What a listener holds for its peers. Keys cost a stranger nothing, so each limit is in all, and not only per key."""

    #: Offers that wait for the access policy or for their initiator's proof (:ref:`spec-confirmation`). When all places
    #: are taken, the offer that has waited longest loses its place to a new one. As many offers again are remembered whose path
    #: is lost before the proof has come (:ref:`spec-resume-unproved`).
    offers: int = 256
    #: Of those, offers of one key over one relay: half, so that no single key can take the place of another. More are refused
    #: as busy.
    offers_per_key: int = 128
    #: Open transports. Above that, an unused transport (its peer has not sent a byte, or the application has closed it
    #: and the peer has not) is closed for a new one; if none is unused, the new one is refused as busy.
    open_transports: int = 1_024
    #: Above this number, unused transports that have been idle for the time below are closed, starting with the key that
    #: holds most. It is three quarters of what a relay lets in to one client; the rest stays free for newcomers.
    crowd: int = 384
    crowd_idle_s: float = 10.0
    #: A transport on which nothing was received or acknowledged for this long is closed with ``deadline``; 0 is no limit,
    #: because a shell or a subscription may rightly be silent for days.
    idle_timeout_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a number of offers or transports that lets none in."""
        check_limits(self, "offers", "offers_per_key", "open_transports")
