"""The limits of a client's connections; those of a relay stand in :mod:`dmsg.mux.relay.limits`."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.crypto.aead import AES_MESSAGES
from dmsg.mux.core.sealed_stream import LEAST_DATA_BYTES
from dmsg.mux.core.wire import FRAME_PAYLOAD_LIMIT_BYTES, SEQUENCE_BYTES
from dmsg.sansio.rate import check_limits, check_more_than_zero


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Limits of a client's connection, each with its unit."""

    #: Unacknowledged bytes that a base stream may have under way (:ref:`spec-plain-acks`), and a sealed one
    #: (:ref:`spec-sealed-acks`).
    send_window_bytes: int = 256 * 1024
    secure_window_bytes: int = 1024 * 1024
    #: How far a sealed stream's window may grow, when its peer and the server allow it; and how much all sealed streams of a
    #: client may hold together, sent or received, before each has only the window above (:ref:`spec-windows`).
    largest_window_bytes: int = 32 * 1024 * 1024
    shared_buffer_bytes: int = 192 * 1024 * 1024
    #: With more than this unread, a sealed stream withholds its acknowledgements.
    ack_limit_bytes: int = 256 * 1024
    #: A sealed stream gets a new key for what it sends after so many frames (with AES no more than the default), or this long
    #: after the last one, whichever is first. So no key comes near a bound of its cipher, and whoever reads a key in memory
    #: can read an hour of data at most.
    rekey_after_frames: int = AES_MESSAGES
    rekey_after_s: float = 3600.0
    #: Data in one FWD of a plain stream: two of them fill a record, and no stream waits long behind another.
    frame_data_bytes: int = 32_750
    #: The same of a sealed stream, tag included: one fills a record. Where the path is slow, they are shorter.
    sealed_data_bytes: int = FRAME_PAYLOAD_LIMIT_BYTES - SEQUENCE_BYTES
    #: Unread bytes that a stream may hold before its peer is closed as misbehaving (:ref:`spec-plain-acks`).
    receive_limit_bytes: int = 4 * 1024 * 1024
    #: Written and not yet framed: the writer is told to pause above the first and to go on below the second.
    pause_bytes: int = 64 * 1024
    resume_bytes: int = 32 * 1024
    #: A writer that ignores the pause is cut off here.
    pending_limit_bytes: int = 64 * 1024 * 1024
    #: Sealed in one batch; the network takes it before the next batch is made.
    flush_bytes: int = 128 * 1024
    #: Frames that answer the server, waiting for the network: above this, reading stops.
    control_limit_bytes: int = 256 * 1024
    #: The server's OK has to come within this (:ref:`spec-admission`).
    ok_timeout_s: float = 10.0
    #: Offered streams that wait for a decision.
    offered_limit: int = 1_024

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for limits with which no stream or data would pass, or the client would only be busy."""
        check_limits(
            self, "send_window_bytes", "secure_window_bytes", "frame_data_bytes", "flush_bytes", "offered_limit"
        )
        check_more_than_zero(self, "receive_limit_bytes", "rekey_after_s", "ok_timeout_s")
        if self.sealed_data_bytes < LEAST_DATA_BYTES:
            raise ValueError(
                f"sealed_data_bytes must be at least {LEAST_DATA_BYTES}, for an acknowledgement, a byte and a tag"
            )
        if self.pending_limit_bytes <= self.pause_bytes:
            raise ValueError(
                "pending_limit_bytes must be more than pause_bytes, or writers are cut off before they are paused"
            )
