"""The limits of a link and of a client's channels over it; those of frames are in :mod:`dmsg.messaging.core.wire`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dmsg.sansio.rate import check_limits

#: Longest JSON object of a link handshake, including the white space before it. Go writes 519 bytes at most.
HANDSHAKE_OBJECT_LIMIT_BYTES: Final = 4_096
#: The whole link handshake, on each side, as Go has it.
HANDSHAKE_TIMEOUT_S: Final = 3.0
#: A relay sends nothing for this many seconds after its last handshake frame (:ref:`spec-messaging-boundary`).
FIRST_FRAME_PAUSE_S: Final = 0.05
#: Ids that a client gives to channels: 0 to 254. Go never gives 255.
CLIENT_IDS: Final = 255
#: Ids of a link in all, 0 to 255.
LINK_IDS: Final = 256


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Limits of a client's end of a link, each with its unit."""

    #: A CloseChannel that is not answered within this ends the channel all the same.
    close_timeout_s: float = 1.0
    #: The id of a dial that was given up is kept for this long, because a late answer would be taken for that of another dial.
    abandoned_id_s: float = 30.0
    #: Offered channels that wait for a decision; our relays pass on 48 at once. Each costs two Diffie-Hellmans once its
    #: key is admitted. More are refused; or, where each side has ids of its own, the one that has waited longest is.
    offered_limit: int = 64
    #: Channels that others have opened, including offered ones: the rest of the 255 ids stays for our own.
    incoming_limit: int = 192
    #: Unread bytes that a channel may hold before it is ended. Without acknowledgements nothing slows a peer down.
    receive_limit_bytes: int = 4 * 1024 * 1024
    #: Written and not yet framed: the writer is told to pause above the first and to go on below the second.
    pause_bytes: int = 64 * 1024
    resume_bytes: int = 32 * 1024
    #: A writer that ignores the pause is cut off here.
    pending_limit_bytes: int = 64 * 1024 * 1024
    #: Sealed in one batch; the network takes it before the next batch is made.
    flush_bytes: int = 128 * 1024
    #: Frames that answer the relay, waiting for the network: above this, reading stops.
    control_limit_bytes: int = 64 * 1024
    #: Never two Sends of one channel in one write: Go gives each to a thread of its own and loses their order.
    one_send_per_write: bool = True

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for limits with which no channel or data would pass."""
        check_limits(self, "offered_limit", "incoming_limit", "receive_limit_bytes", "flush_bytes")
        if self.pending_limit_bytes <= self.pause_bytes:
            raise ValueError(
                "pending_limit_bytes must be more than pause_bytes, or writers are cut off before they are paused"
            )
