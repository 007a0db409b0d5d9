"""An operator's list of relays, as a client is told of it: where it is, whose it is, and what it is for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol as TypingProtocol

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey


class RelaysMode(Enum):
    """What the list is for: its relays first, or no others at all."""

    PREFER = "prefer"
    ONLY = "only"


class NamedRelay(TypingProtocol):
    """A relay of the list; without an address it is looked up in discovery."""

    @property
    def public_key(self) -> PublicKey:
        """Its key."""

    @property
    def address(self) -> HostPort | None:
        """Where it is, if the list tells."""


class RelayChoice(TypingProtocol):
    """The list in force."""

    only: bool
    changed: Callable[[], None]

    def relays(self) -> Sequence[NamedRelay]:
        """Its relays; none while there is no list, or once it has expired."""


@dataclass(frozen=True, slots=True)
class RelaysFrom:
    """A setting: the file or URL of a list, the keys it may be signed with, and what it is for."""

    location: str
    keys: tuple[PublicKey, ...]
    mode: RelaysMode = RelaysMode.PREFER
