"""The codes with which a relay closes a session. Pure."""

from __future__ import annotations

from enum import IntEnum


class CloseCode(IntEnum):
    """Why a relay closes a session: codes of the private range of WebSocket, and those of the standard."""

    GOING_AWAY = 1001
    #: A newer connection has the same twin and the same name.
    REPLACED = 4001
    #: A message that is no envelope.
    MALFORMED = 4002
    #: It takes nothing of what waits for it, or too much waits for it.
    SLOW_CONSUMER = 4003
    #: Its place is needed for others.
    EVICTED = 4004
    #: Its twin has as many sessions as it may.
    TOO_MANY_SESSIONS = 4005
