"""The events of the switch for the service: facts for the event log and the metrics, but none for each frame. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from dmsg.serving.member import Leg, Member


class Ending(IntEnum):
    """Why a relay itself ends or refuses a transport. The numbers are the codes in event logs."""

    NORMAL = 0
    REFUSED = 1
    UNKNOWN_PEER = 2
    BUSY = 3
    RATE_LIMITED = 4
    SLOW_CONSUMER = 5
    BAD_ID = 7
    MALFORMED = 8
    UNSUPPORTED = 10
    HANDSHAKE_TIMEOUT = 11
    PEER_GONE = 13
    SERVER_DRAINING = 14


class Refusal(NamedTuple):
    """Why a request is not passed on: the code that its client is told, and the reason for the event log."""

    code: int
    reason: str


#: By code: the refusals whose reason is the name of the code.
REFUSALS: Final[Mapping[int, Refusal]] = {code: Refusal(code, code.name.lower()) for code in Ending}


class SwitchEvent:
    """Base of all switch events."""

    __slots__ = ()


@dataclass(slots=True)
class TransportStarted(SwitchEvent):
    """A transport was accepted; ``asking`` is the initiating leg."""

    asking: Leg[Any]


@dataclass(slots=True)
class TransportEnded(SwitchEvent):
    """A transport, or a request for one, is over.

    ``by`` is the side that closed it or is gone, ``initiator`` or ``responder``, or ``server`` when a limit closed it.
    """

    asking: Leg[Any]
    reason: int
    by: str
    was_open: bool


@dataclass(slots=True)
class RequestRefused(SwitchEvent):
    """A request was refused by the relay itself."""

    member: Member[Any]
    reason: str


@dataclass(slots=True)
class MemberDropped(SwitchEvent):
    """The connection of ``member`` has to be closed. The switch has forgotten it already."""

    member: Member[Any]
    reason: str
