"""How a transport ends: what a CLOSE means for the application. Pure.

:ref:`spec-clean-ends`.
"""

from __future__ import annotations

from dmsg.mux.core.stream import Stream
from dmsg.mux.core.wire import CloseReason


def close_is_final(stream: Stream, *, proven: bool, closing: bool) -> bool:
    """Whether a CLOSE ends the transport, or only its path. ``closing``: the application has closed it in full."""
    return not stream.resumable or proven or _both_know(stream, closing)


def peers_reason(stream: Stream, code: int, *, closing: bool) -> int:
    """The reason a transport ended for, when the peer's CLOSE says ``code``.

    A clean close is not clean if written data was not acknowledged, as with a reset of TCP.
    """
    if stream.was_cut:
        return CloseReason.REFUSED
    if stream.half_closes:
        if _both_know(stream, closing):
            return CloseReason.NORMAL  # whatever is said now: both sides know that they have everything
        if code == CloseReason.NORMAL and stream.ended_before and not stream.end_received and stream.end_wanted:
            return CloseReason.NORMAL  # it was over when this path came: only its acknowledgement of our end was lost
        if code == CloseReason.NORMAL and not stream.end_received:
            return CloseReason.REFUSED
    if code == CloseReason.NORMAL and stream.cut_bytes:
        return CloseReason.REFUSED
    return code


def _both_know(stream: Stream, closing: bool) -> bool:
    return stream.end_acked and (closing or stream.end_received)
