"""What is known about a twin: its account, the relays over which it can be reached, its encryption key. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from dmsg.rmb.core.errors import InvalidTwin
from dmsg.rmb.core.limits import MAX_PK_BYTES, MAX_RELAYS, MAX_RELAYS_BYTES, MAX_TWIN

ACCOUNT_BYTES: Final = 32
_LABEL: Final = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_RELAY: Final = re.compile(rf"(?=.{{1,253}}(?::|\Z)){_LABEL}(?:\.{_LABEL})*(?::[1-9][0-9]{{0,4}})?\Z")


@dataclass(frozen=True, slots=True)
class Twin:
    """A party of the Reliable Message Bus, as the registry has it.

    ``account`` is a public key of 32 bytes, of ed25519 or sr25519; only its signatures tell which. ``relays`` are sorted
    host names, with ``:port`` unless it is the default port. ``pk`` is a secp256k1 public key, or ``None`` for a twin to
    which nobody can encrypt.
    """

    id: int
    account: bytes
    relays: tuple[str, ...] = ()
    pk: bytes | None = None

    def __post_init__(self) -> None:
        """Raise :class:`~dmsg.rmb.core.errors.InvalidTwin` for values that no registry may hold."""
        if not 0 < self.id <= MAX_TWIN:
            raise InvalidTwin("the number of a twin is 1 to 4294967295")
        if len(self.account) != ACCOUNT_BYTES:
            raise InvalidTwin("an account is 32 bytes")
        if self.pk is not None and not 0 < len(self.pk) <= MAX_PK_BYTES:
            raise InvalidTwin("an encryption key is at most 128 bytes")


def check_relay(host: str) -> str:
    """``host`` if it is a host name or an IPv4 address, perhaps with a port; raises ``InvalidTwin``.

    A name must not contain an underscore, because that separates relays.
    """
    if not _RELAY.match(host) or int(host.partition(":")[2] or 1) > 65535:
        raise InvalidTwin("a relay is a host name, with :port if need be")
    return host


def parse_relays(text: str) -> tuple[str, ...]:
    """The relays in a registry's text, sorted and without duplicates. In the text they are in any order, separated by ``_``.

    Others write the text, so parts that are not host names are ignored, and relays above
    :data:`~dmsg.rmb.core.limits.MAX_RELAYS` too.
    """
    found = set()
    for host in text[:MAX_RELAYS_BYTES].split("_"):
        try:
            found.add(check_relay(host))
        except InvalidTwin:
            continue
    return tuple(sorted(found)[:MAX_RELAYS])


def format_relays(relays: Iterable[str]) -> str:
    """The text that a registry keeps for ``relays``; raises ``InvalidTwin`` for one that is not a host name, and too many."""
    hosts = sorted({check_relay(host) for host in relays})
    text = "_".join(hosts)
    if len(hosts) > MAX_RELAYS or len(text) > MAX_RELAYS_BYTES:
        raise InvalidTwin("a twin has at most 16 relays, of 1024 bytes in all")
    return text
