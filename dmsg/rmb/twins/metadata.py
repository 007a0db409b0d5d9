"""The parts of a node's metadata that twins need: numbers of calls and events, and how extrinsics are signed. Pure.

Metadata of version 14 is a list of types, the pallets that refer to them by number, and the form of an extrinsic. It is read
in one pass, which keeps only the places of enumerations, because calls and events are enumerations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dmsg.rmb.twins.errors import MalformedAnswer
from dmsg.rmb.twins.scale import Reader

#: Metadata of public chains has 300 to 700 KB.
MAX_METADATA_BYTES: Final = 2 * 1024 * 1024
#: Items in all of its lists: types, fields, lines of documentation. Each takes a microsecond to read.
MAX_THINGS: Final = 250_000
MAX_EXTENSIONS: Final = 32

_MAGIC: Final = b"meta\x0e"
_EXTRINSIC_VERSION: Final = 4
_NAME_BYTES: Final = 256
_PALLET: Final = b"TfgridModule"
_UPDATE: Final = b"update_twin"
_CHANGES: Final = (b"TwinStored", b"TwinUpdated")


@dataclass(frozen=True, slots=True)
class Metadata:
    """The first bytes of the call ``update_twin`` and of the events that change a twin, and the names of the extensions of a
    signed extrinsic, in order."""

    update_twin: bytes
    changes: tuple[bytes, ...]
    extensions: tuple[str, ...]


def read_metadata(data: bytes) -> Metadata:
    """Parse the result of ``state_call`` of ``Metadata_metadata``; raises :class:`~dmsg.rmb.twins.errors.MalformedAnswer`."""
    outer = Reader(data)
    reader = _Walk(outer.bytes(MAX_METADATA_BYTES))
    if reader.take(len(_MAGIC)) != _MAGIC:
        raise MalformedAnswer("no metadata of version 14")
    reader.each(reader.type)
    reader.each(reader.pallet)
    if not reader.found:
        raise MalformedAnswer("the chain has no twins")
    index, calls, events = reader.found
    reader.compact()
    if reader.u8() != _EXTRINSIC_VERSION:
        raise MalformedAnswer("extrinsics of an unknown version")
    reader.each(reader.extension)
    if len(reader.extensions) > MAX_EXTENSIONS:
        raise MalformedAnswer("too many extensions")
    call = reader.variants(calls).get(_UPDATE)
    variants = reader.variants(events)
    if call is None or not all(name in variants for name in _CHANGES):
        raise MalformedAnswer("the chain knows no update of twins")
    changes = tuple(bytes((index, variants[name])) for name in _CHANGES)
    return Metadata(bytes((index, call)), changes, tuple(reader.extensions))


class _Walk(Reader):
    """A reader for the parts of metadata; each method reads one of them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.places: dict[int, int] = {}
        self.extensions: list[str] = []
        self.found: tuple[int, int, int] | None = None
        self._left = MAX_THINGS

    def count(self) -> int:
        count = self.compact()
        self._left -= count
        if self._left < 0:
            raise MalformedAnswer("more things than any chain has")
        return count

    def type(self) -> None:
        number = self.compact()
        self.each(self.skip_bytes)  # path
        self.each(self._parameter)
        kind = self.u8()
        match kind:
            case 0:  # composite
                self.each(self._field)
            case 1:  # variant
                self.places[number] = self.at
                self.each(self._variant)
            case 2 | 6:  # sequence, compact
                self.compact()
            case 3:  # array
                self.skip(4)
                self.compact()
            case 4:  # tuple
                self.each(self.compact)
            case 5:  # primitive
                self.skip(1)
            case 7:  # bits
                self.compact()
                self.compact()
            case _:
                raise MalformedAnswer("a type of an unknown kind")
        self.each(self.skip_bytes)  # docs

    def variants(self, number: int) -> dict[bytes, int]:
        """The wanted variants of the enumeration with this number: their numbers by name."""
        if number not in self.places:
            raise MalformedAnswer("a type that is missing")
        self.at = self.places[number]
        found: dict[bytes, int] = {}

        def variant() -> None:
            name, index = self._variant()
            if name in (_UPDATE, *_CHANGES):
                found[name] = index

        self.each(variant)
        return found

    def pallet(self) -> None:
        name = self.bytes(_NAME_BYTES)
        if self.option():
            self.skip_bytes()  # prefix
            self.each(self._entry)
        calls = self.compact() if self.option() else -1
        events = self.compact() if self.option() else -1
        self.each(self._constant)
        if self.option():
            self.compact()  # error
        index = self.u8()
        if name == _PALLET:
            self.found = (index, calls, events)

    def extension(self) -> None:
        name = self.bytes(_NAME_BYTES)
        self.compact()
        self.compact()
        if len(self.extensions) <= MAX_EXTENSIONS:
            self.extensions.append(name.decode("utf-8", "replace"))

    def _parameter(self) -> None:
        self.skip_bytes()
        if self.option():
            self.compact()

    def _field(self) -> None:
        if self.option():
            self.skip_bytes()  # name
        self.compact()
        if self.option():
            self.skip_bytes()  # name of the type
        self.each(self.skip_bytes)  # docs

    def _variant(self) -> tuple[bytes, int]:
        name = self.bytes(_NAME_BYTES)
        self.each(self._field)
        index = self.u8()
        self.each(self.skip_bytes)  # docs
        return name, index

    def _entry(self) -> None:
        self.skip_bytes()  # name
        self.skip(1)  # modifier
        if self.u8():  # a map: hashers, key
            self.each(self.u8)
            self.compact()
        self.compact()
        self.skip_bytes()  # default
        self.each(self.skip_bytes)  # docs

    def _constant(self) -> None:
        self.skip_bytes()  # name
        self.compact()
        self.skip_bytes()  # value
        self.each(self.skip_bytes)  # docs
