"""The states of a transport and the transitions between them. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Final


class TransportState(Enum):
    """How far a transport is in its life, as the application sees it."""

    __hash__ = object.__hash__  # identity is enough, and the hash of Enum is a function in Python

    OPEN = "open"  # both halves are open
    WRITE_ENDED = "write ended"  # the application has ended its half and goes on reading
    READ_ENDED = "read ended"  # the application was told that the peer has ended its half
    BOTH_ENDED = "both ended"  # both halves have ended, and the application has not closed yet
    FINISHING = "finishing"  # the application has closed; its producer may write the rest
    CLOSING = "closing"  # the application has closed; what it wrote is still on its way
    ENDING = "ending"  # over, but not by the application: data that came before the end is delivered first
    TELLING = "telling"  # over: connectionLost is called in the next turn of the reactor
    ENDED = "ended"  # connectionLost was called


#: The states that may follow each state; the state diagram in the documentation is drawn from this.
TRANSITIONS: Final[dict[TransportState, frozenset[TransportState]]] = {
    TransportState.OPEN: frozenset(
        {
            TransportState.WRITE_ENDED,
            TransportState.READ_ENDED,
            TransportState.FINISHING,
            TransportState.CLOSING,
            TransportState.ENDING,
            TransportState.TELLING,
        }
    ),
    TransportState.WRITE_ENDED: frozenset(
        {TransportState.BOTH_ENDED, TransportState.CLOSING, TransportState.ENDING, TransportState.TELLING}
    ),
    TransportState.READ_ENDED: frozenset(
        {
            TransportState.BOTH_ENDED,
            TransportState.FINISHING,
            TransportState.CLOSING,
            TransportState.ENDING,
            TransportState.TELLING,
        }
    ),
    TransportState.BOTH_ENDED: frozenset({TransportState.CLOSING, TransportState.ENDING, TransportState.TELLING}),
    TransportState.FINISHING: frozenset({TransportState.CLOSING, TransportState.TELLING}),
    TransportState.CLOSING: frozenset({TransportState.TELLING}),
    TransportState.ENDING: frozenset({TransportState.TELLING, TransportState.ENDED}),
    TransportState.TELLING: frozenset({TransportState.ENDED}),
    TransportState.ENDED: frozenset(),
}

#: The application may write.
WRITABLE: Final = (TransportState.OPEN, TransportState.READ_ENDED, TransportState.FINISHING)
#: The application has not closed, and the stream is not over.
IN_USE: Final = (
    TransportState.OPEN,
    TransportState.WRITE_ENDED,
    TransportState.READ_ENDED,
    TransportState.BOTH_ENDED,
)
#: The application wants no more data, or can be given none.
CLOSED_HERE: Final = (
    TransportState.FINISHING,
    TransportState.CLOSING,
    TransportState.TELLING,
    TransportState.ENDED,
)
#: The transport is over, and the reason is known.
OVER: Final = (TransportState.ENDING, TransportState.TELLING, TransportState.ENDED)
