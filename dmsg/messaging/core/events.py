"""What the cores of this package tell the shells: one small object for each thing that happened."""

from __future__ import annotations

from dataclasses import dataclass

from dmsg.crypto.keys import PublicKey


class Event:
    """Base of all events."""

    __slots__ = ()


@dataclass(slots=True)
class LinkRequested(Event):
    """A client has proved that it has the key ``remote``: call ``accept`` or ``refuse`` of the handshake."""

    remote: PublicKey


@dataclass(slots=True)
class LinkDone(Event):
    """The link handshake is through: who the other side is, and the bytes behind the handshake, which are frames.

    From now on frames may be sent.
    """

    remote: PublicKey
    leftover: bytes
