"""The parts of SCALE, the encoding of Substrate, that twins need, with limits for reading; :ref:`spec-rmb-chain`. Pure.

All input comes from a node that is not trusted. Every length is compared with the bytes left before it is used, no object
is built unless the caller asks for it, and the input cannot cause nesting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

from dmsg.rmb.core.errors import InvalidTwin
from dmsg.rmb.core.limits import MAX_PK_BYTES, MAX_RELAYS_BYTES
from dmsg.rmb.core.twin import ACCOUNT_BYTES, Twin, parse_relays
from dmsg.rmb.twins.errors import MalformedAnswer

#: Size of a stored twin: only its entities are unbounded, and they are not used.
MAX_TWIN_BYTES: Final = 64 * 1024
_ENTITY_SIGNATURE_BYTES: Final = 1024
#: The pallet's name hashed by twox128, followed by the hashes of its two maps' names; all are constant.
_PALLET: Final = "19a2526838feefd7695a3b5715b415b1"
_TWINS: Final = bytes.fromhex(_PALLET + "311378229266fc86f673a3f4cf398e69")
_NUMBERS: Final = bytes.fromhex(_PALLET + "aca6514962aa3f0d58aff3524045f9e0")
#: The key of the events of a block: System.Events.
EVENTS_KEY: Final = bytes.fromhex("26aa394eea5630e07c48ae0c9558cef780d41e5e16056765bc8461851072c9d7")


class Reader:
    """Reads ``data`` from its beginning; every method raises :class:`~dmsg.rmb.twins.errors.MalformedAnswer`."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        end = self.at + count
        if end > len(self.data):
            raise MalformedAnswer("it ends too early")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def skip(self, count: int) -> None:
        """Skip ``count`` bytes."""
        if count > len(self.data) - self.at:
            raise MalformedAnswer("it ends too early")
        self.at += count

    def u8(self) -> int:
        """A byte."""
        return self.take(1)[0]

    def u32(self) -> int:
        """A little-endian number of four bytes."""
        return int.from_bytes(self.take(4), "little")

    def compact(self) -> int:
        """A compact number: one, two or four bytes, or a length and up to eight bytes."""
        first = self.u8()
        match first & 3:
            case 0:
                return first >> 2
            case 1:
                return (first | self.u8() << 8) >> 2
            case 2:
                return (first | int.from_bytes(self.take(3), "little") << 8) >> 2
        count = (first >> 2) + 4
        if count > 8:
            raise MalformedAnswer("a number of more than 64 bits")
        return int.from_bytes(self.take(count), "little")

    def bytes(self, limit: int) -> bytes:
        """Bytes that follow their length, which is at most ``limit``."""
        count = self.compact()
        if count > limit:
            raise MalformedAnswer("a text longer than it may be")
        return self.take(count)

    def skip_bytes(self) -> None:
        """Skip bytes that follow their length."""
        self.skip(self.compact())

    def option(self) -> bool:
        """Whether an optional value follows."""
        flag = self.u8()
        if flag > 1:
            raise MalformedAnswer("an option that is neither there nor not")
        return flag == 1

    def each(self, read: Callable[[], object]) -> None:
        """Call ``read``, which takes at least a byte, for each item of a list."""
        count = self.count()
        if count > len(self.data) - self.at:
            raise MalformedAnswer("it ends too early")
        for _ in range(count):
            read()

    def count(self) -> int:
        """The length of a list."""
        return self.compact()


def compact(number: int) -> bytes:
    """``number``, 0 to 2**64 - 1, in as few bytes as it takes."""
    if number < 1 << 6:
        return bytes([number << 2])
    if number < 1 << 14:
        return (number << 2 | 1).to_bytes(2, "little")
    if number < 1 << 30:
        return (number << 2 | 2).to_bytes(4, "little")
    count = max(4, (number.bit_length() + 7) // 8)
    return bytes([(count - 4) << 2 | 3]) + number.to_bytes(count, "little")


def with_length(data: bytes) -> bytes:
    """``data`` with its length in front."""
    return compact(len(data)) + data


def optional(data: bytes | None) -> bytes:
    """Bytes that may be missing."""
    return b"\0" if data is None else b"\1" + with_length(data)


def _hashed(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=16).digest() + key


def twin_key(number: int) -> bytes:
    """The key under which the chain stores a twin."""
    return _TWINS + _hashed(number.to_bytes(4, "little"))


def account_key(account: bytes) -> bytes:
    """The key under which the chain stores the number of an account's twin."""
    return _NUMBERS + _hashed(account)


def decode_number(data: bytes) -> int:
    """The number of a twin, of four bytes."""
    if len(data) != 4:
        raise MalformedAnswer("a number of a twin has four bytes")
    return int.from_bytes(data, "little")


def decode_twin(data: bytes) -> Twin:
    """Decode a stored twin: number, account, relays, entities (which are skipped), encryption key.

    Later versions of the chain may append fields, which are ignored.
    """
    reader = Reader(data)
    number, account = reader.u32(), reader.take(ACCOUNT_BYTES)
    relays = reader.bytes(MAX_RELAYS_BYTES) if reader.option() else b""

    def entity() -> None:
        reader.skip(4)
        reader.bytes(_ENTITY_SIGNATURE_BYTES)

    reader.each(entity)
    pk = reader.bytes(MAX_PK_BYTES) if reader.option() else b""
    try:
        return Twin(number, account, parse_relays(relays.decode("utf-8", "replace")), pk or None)
    except InvalidTwin as error:
        raise MalformedAnswer(str(error)) from None
