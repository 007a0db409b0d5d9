"""An operator's list of relays, which its clients use exclusively or first. Pure.

The document (:ref:`spec-relay-list`) is accepted when it is signed by a trusted key, is not from the future, has not
expired, and is no older than the one before. Unlike ranks it does not fade: it is valid until ``expires``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final

from dmsg.address import HostPort
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.signed import NUMBER_LIMIT, DocumentKind
from dmsg.errors import InvalidAddress
from dmsg.relays.errors import RelayListError

#: Relays in a list: many more than a client tries before it is connected, few enough to be read in milliseconds.
RELAYS_LIMIT: Final = 1_000
#: Longest document in bytes: :data:`RELAYS_LIMIT` relays with a key, a host name of 255 bytes and white space.
DOCUMENT_LIMIT_BYTES: Final = 512 * 1024
#: Longest lifetime in seconds, a year: a list that was stolen or withdrawn must not be believed for ever.
LIFETIME_LIMIT_S: Final = 366 * 24 * 3600


#: The format that a list names, and the tag of its signature.
KIND: Final = DocumentKind("dmsg-relay-list", 1, DOCUMENT_LIMIT_BYTES, RelayListError)


@dataclass(frozen=True, slots=True)
class ListedRelay:
    """A relay of the list. Without an address it is looked up in discovery."""

    public_key: PublicKey
    address: HostPort | None = None

    @classmethod
    def parse(cls, text: str) -> ListedRelay:
        """Read ``pk`` or ``pk@host:port``; raises ``InvalidKey`` or ``InvalidAddress``."""
        key, at, address = text.partition("@")
        return cls(PublicKey.parse(key), HostPort.parse(address) if at else None)

    def __str__(self) -> str:
        return f"{self.public_key}@{self.address}" if self.address else str(self.public_key)


@dataclass(frozen=True, slots=True)
class RelayList:
    """A list that was verified. ``issued`` and ``expires`` are Unix seconds; ``issuer`` has signed it."""

    issued: int
    expires: int
    issuer: PublicKey
    relays: tuple[ListedRelay, ...]

    @classmethod
    def parse(
        cls, data: bytes, trusted: Collection[PublicKey], now_s: float, *, previous: RelayList | None = None
    ) -> RelayList:
        """Read and verify a document; ``now_s`` is Unix time in seconds.

        ``previous``, the list in force, is given back when ``data`` says the same. Raises only ``RelayListError``, which tells
        what is wrong.
        """
        document, issuer = KIND.open(data, trusted)
        issued = KIND.number(document, "issued", 0, NUMBER_LIMIT)
        expires = KIND.number(document, "expires", issued + 1, issued + LIFETIME_LIMIT_S)
        read = cls(issued, expires, issuer, _relays(document.get("relays")))
        KIND.check_issued(issued, now_s)
        if read.expired(now_s):
            raise RelayListError("expired", f"{now_s - expires:.0f} s ago")
        if previous is None:
            return read
        if read == previous:
            return previous
        KIND.check_later(issued, previous.issued)
        return read

    def expired(self, now_s: float) -> bool:
        """Whether the list is not valid any more at Unix time ``now_s``."""
        return now_s >= self.expires


def sign_relay_list(relays: Iterable[ListedRelay], key: SecretKey, *, issued: int, expires: int) -> bytes:
    """The signed document that lists ``relays``; raises ``RelayListError`` for one that no reader would accept."""
    relays = tuple(relays)
    _check_once(relays)  # of two with one key, the document would keep the last one only
    document = {
        "format": KIND.format,
        "version": KIND.version,
        "issued": issued,
        "expires": expires,
        "relays": {str(one.public_key): {} if one.address is None else {"address": str(one.address)} for one in relays},
    }
    data = KIND.sign(document, key)
    RelayList.parse(data, [key.public_key], issued)
    return data


def _relays(relays: Any) -> tuple[ListedRelay, ...]:
    if type(relays) is not dict or not relays:
        KIND.bad("relays", "not an object with a relay")
    if len(relays) > RELAYS_LIMIT:
        raise RelayListError("too_many_relays", f"more than {RELAYS_LIMIT}")
    found = tuple(_relay(key, members) for key, members in relays.items())
    _check_once(found)  # two keys of the JSON object may differ in capital letters only
    return found


def _check_once(relays: Collection[ListedRelay]) -> None:
    if len({one.public_key for one in relays}) < len(relays):
        KIND.bad("relays", "a relay stands there twice")


def _relay(key: str, members: Any) -> ListedRelay:
    if type(members) is not dict:
        KIND.bad("relays", "a relay is not an object")
    address = members.get("address")
    try:
        return ListedRelay(PublicKey.parse(key), None if address is None else HostPort.parse(address))
    except (InvalidKey, InvalidAddress) as error:
        KIND.bad("relays", str(error))
