"""The settings of an operator's list of relays: where it is, who signs it, and how it is used. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol as TypingProtocol

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey


class RelaysMode(Enum):
    """How the list is used: its relays first, or no others at all."""

    PREFER = "prefer"
    ONLY = "only"


class NamedRelay(TypingProtocol):
    """A relay of the list; without an address it is looked up in discovery."""

    @property
    def public_key(self) -> PublicKey:
        """Its key."""

    @property
    def address(self) -> HostPort | None:
        """Its address, if the list tells it."""


class RelayChoice(TypingProtocol):
    """The list in force."""

    only: bool
    changed: Callable[[], None]

    @property
    def error(self) -> Exception | None:
        """Why the last reading gave no valid list, if that is so."""

    def relays(self) -> Sequence[NamedRelay]:
        """Its relays; none while there is no list, or once it has expired."""


@dataclass(frozen=True, slots=True)
class RelaysFrom:
    """A setting: the file or URL of a list, the keys that may sign it, and how it is used."""

    location: str
    keys: tuple[PublicKey, ...]
    mode: RelaysMode = RelaysMode.PREFER
