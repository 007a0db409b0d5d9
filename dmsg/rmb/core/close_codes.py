"""The codes with which a relay closes a session. Pure."""

from __future__ import annotations

from enum import IntEnum


class CloseCode(IntEnum):
    """Why a relay closes a session: codes of the private range of WebSocket, and those of the standard."""

    GOING_AWAY = 1001
    #: A message is longer than the relay takes.
    TOO_BIG = 1009
    #: A newer connection of the same twin has the same name.
    REPLACED = 4001
    #: The client sent a message that is not an envelope.
    MALFORMED = 4002
    #: The client reads nothing of its queue, or the session takes too much memory.
    SLOW_CONSUMER = 4003
    #: The relay needs the place for others.
    EVICTED = 4004
    #: The twin has too many sessions.
    TOO_MANY_SESSIONS = 4005
