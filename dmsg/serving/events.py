"""What the switch tells the service: facts for the event log and the metrics, none for each frame. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dmsg.serving.member import Leg, Member


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
