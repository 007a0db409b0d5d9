"""The file transfer protocol: what ``dmsg send`` and ``dmsg receive`` say to each other. Pure.

A unit is ``u8 kind ‖ u32 length ‖ body`` (big-endian). Kind 1 is a header: one JSON object of at most
:data:`HEADER_LIMIT_BYTES`. Kind 2 is data of a file: 1 to :data:`DATA_LIMIT_BYTES`. For each large file::

    sender                     receiver
                               ready            once, at the beginning
    offer name size id [begun]                  the same id when it is offered again
    data …                                      its first ``begun`` bytes, if it does
                               have offset sha256   what is there of an earlier try
    start offset hashed                         the same offset if the hash fits, else 0
    data …
    finish [sha256]                             of the whole file, if it is hashed
                               done             verified and in its place

``ready`` is the first word on every transport, and waits for nothing: a sender that hears no word at all soon knows that
this is no receiver. Whatever else is heard first counts as much.

A sender that offers a file for the first time sends its beginning before it has the answer, so that the round trip costs no
time. If the receiver has nothing from an earlier try, the data goes on after what was ``begun``; otherwise that is dropped, and
data begins at ``offset``.

The receiver answers an offer with ``done`` when a file with this id has arrived. A file has to be ``hashed`` unless it
comes over a sealed transport of dmsg. Such a transport authenticates every byte, and both ends compare a hash of all their
tags (:ref:`spec-sealed-acks`), so another hash over the same bytes would take time and find nothing.

A small file, of at most :data:`WHOLE_LIMIT_BYTES`, takes one message each way, and the sender waits for no answer before
it sends the next small ones. They are answered in order, and all of them before a large one is offered::

    whole name size sha256 [again]              again if no answer came the first time
    data …
                               done

``end`` follows the last file, without waiting for its ``done``; if the transport has a half-close, the sender's half ends with
it. Either side may send ``failed code`` instead, about the first file without an answer, and then closes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from dmsg.cli.exits import CommandError, Exit

VERSION: Final = 1
HEADER: Final = 1
DATA: Final = 2
PREFIX: Final = struct.Struct(">BI")
#: An offer with the longest name, every character of it escaped, fits.
HEADER_LIMIT_BYTES: Final = 4096
#: The most that one unit announces; data is passed on as it comes, so it costs no memory.
DATA_LIMIT_BYTES: Final = 1024 * 1024
#: Files up to this size are sent without asking how much of them is there: sending them again costs less than the question.
WHOLE_LIMIT_BYTES: Final = 256 * 1024
#: How much of a larger file is sent before it is known how much of it is there: as much as a transport carries in its first
#: round trip. The receiver keeps it in memory until it has answered.
BEGUN_LIMIT_BYTES: Final = 256 * 1024
SIZE_LIMIT_BYTES: Final = 2**63 - 1
PART_SUFFIX: Final = ".part"
_SHA256: Final = re.compile(r"[0-9a-f]{64}\Z")
_ID: Final = re.compile(r"[0-9a-f]{32}\Z")

#: Code of a refusal -> what it means to a person, and the exit code it leads to.
REFUSALS: Final[dict[str, tuple[str, Exit]]] = {
    "bad_name": ("the name is not one a file may be received under", Exit.FAILED),
    "too_big": ("the file is larger than the receiver allows", Exit.FAILED),
    "busy": ("the receiver has too much to do, or another transfer of this file is under way", Exit.FAILED),
    "quota": ("the receiver takes no more: its quota is used up", Exit.FAILED),
    "storage": ("the receiver could not write the file", Exit.FAILED),
    "no_space": ("the receiver has no space left", Exit.FAILED),
    "source": ("the sender could not read the file, or it became shorter meanwhile", Exit.FAILED),
    "mismatch": ("the SHA-256 of what arrived is not that of what was sent", Exit.UNVERIFIED),
    "malformed": ("the other side does not keep to the protocol", Exit.FAILED),
}


class TransferFailed(CommandError):
    """A transfer that one of the two sides gave up: ``code`` is a key of :data:`REFUSALS`, ``name`` the name of the file."""

    def __init__(self, code: str, name: str = "", problem: str = "") -> None:
        text, exit_code = REFUSALS[code]
        super().__init__(f"{text} ({problem})" if problem else text, exit_code, {"code": code, "file": ""})
        self.code = code
        self.about(name)

    def about(self, name: str) -> TransferFailed:
        """Set the name of the file, unless it is known; gives itself back."""
        if name and not self.data["file"]:
            self.data["file"] = name
            self.args = (f"{name}: {self.args[0]}",)
        return self


class MalformedTransfer(TransferFailed):
    """The other side sent something that is not of this protocol, or out of turn; ``problem`` says what it was."""

    def __init__(self, problem: str) -> None:
        super().__init__("malformed", problem=problem)


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all headers; ``KIND`` stands under ``type``."""

    KIND: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class Ready(Message):
    """This is a receiver."""

    KIND: ClassVar[str] = "ready"


@dataclass(frozen=True, slots=True)
class Offer(Message):
    """The sender has a file: its ``name``, its ``size`` in bytes, and a random ``id`` (32 hex digits) of this transfer.

    The first ``begun`` bytes follow at once, at most :data:`BEGUN_LIMIT_BYTES`.
    """

    KIND: ClassVar[str] = "offer"
    name: str
    size: int
    id: str
    begun: int = 0
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Whole(Message):
    """All ``size`` bytes of a small file follow; they have this ``sha256``. ``again``: they were sent before, and no
    confirmation came.
    """

    KIND: ClassVar[str] = "whole"
    name: str
    size: int
    sha256: str
    again: bool = False
    version: int = VERSION


@dataclass(frozen=True, slots=True)
class Have(Message):
    """The receiver has the first ``offset`` bytes of the file, which have this ``sha256``."""

    KIND: ClassVar[str] = "have"
    offset: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Start(Message):
    """The data that follows begins at ``offset``; ``hashed`` tells whether a hash of the whole file comes after it."""

    KIND: ClassVar[str] = "start"
    offset: int
    hashed: bool


@dataclass(frozen=True, slots=True)
class Finish(Message):
    """The data is complete; the whole file has this ``sha256``, if it is hashed."""

    KIND: ClassVar[str] = "finish"
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The file is verified and in its place."""

    KIND: ClassVar[str] = "done"


@dataclass(frozen=True, slots=True)
class Failed(Message):
    """This side gives up, for the reason ``code``."""

    KIND: ClassVar[str] = "failed"
    code: str


@dataclass(frozen=True, slots=True)
class End(Message):
    """There are no more files."""

    KIND: ClassVar[str] = "end"


_MESSAGES: Final[dict[str, type[Message]]] = {
    cls.KIND: cls for cls in (Ready, Offer, Whole, Have, Start, Finish, Done, Failed, End)
}


def encode(message: Message) -> bytes:
    """``message`` as a unit."""
    body = json.dumps({"type": message.KIND, **dataclasses.asdict(message)}, separators=(",", ":")).encode("ascii")
    assert len(body) <= HEADER_LIMIT_BYTES
    return PREFIX.pack(HEADER, len(body)) + body


def encode_whole(message: Whole, data: bytes) -> bytes:
    """A small file with its ``data``."""
    head = encode(message)
    return head + data_prefix(len(data)) + data if data else head


def encode_offer(offer: Offer, data: bytes) -> bytes:
    """An offer of a large file, and the file's first ``data``."""
    return encode(offer) + (data_prefix(len(data)) + data if data else b"")


def data_prefix(length: int) -> bytes:
    """The prefix of ``length`` bytes of data."""
    assert 0 < length <= DATA_LIMIT_BYTES
    return PREFIX.pack(DATA, length)


def decode(body: bytes) -> Message:
    """The header in ``body``; raises ``MalformedTransfer`` unless it is exactly one."""
    try:
        found = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise MalformedTransfer("a header is not JSON") from None
    kind = found.pop("type", None) if isinstance(found, dict) else None
    cls = _MESSAGES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise MalformedTransfer("a header of no known type")
    fields = {each.name: each for each in dataclasses.fields(cls)}
    required = {name for name, each in fields.items() if each.default is dataclasses.MISSING}
    if not required <= found.keys() <= fields.keys():
        raise MalformedTransfer("a header lacks a member, or has one too many")
    for name, value in found.items():
        _check(name, value, optional=name not in required)
    return cls(**found)


def _check(name: str, value: Any, *, optional: bool) -> None:
    if name in ("size", "offset"):
        good = type(value) is int and 0 <= value <= SIZE_LIMIT_BYTES
    elif name == "begun":
        good = type(value) is int and 0 <= value <= BEGUN_LIMIT_BYTES
    elif name == "version":
        good = value == VERSION and type(value) is int
    elif name == "id":
        good = isinstance(value, str) and bool(_ID.match(value))
    elif name in ("again", "hashed"):
        good = isinstance(value, bool)
    elif name == "sha256":
        good = isinstance(value, str) and bool(_SHA256.match(value) or (optional and not value))
    elif name == "code":
        good = isinstance(value, str) and value in REFUSALS
    else:
        good = isinstance(value, str)
    if not good:
        raise MalformedTransfer(f"{name} is not what it should be")


class Decoder:
    """Splits a stream into units: headers come out whole, data in the pieces in which it came, without a copy of whole ones."""

    def __init__(self) -> None:
        self._begun = b""  # the first bytes of a unit: a prefix, or a prefix and a part of a header
        self._data_left = 0

    def feed(self, data: bytes) -> list[Message | bytes]:
        """The units that ``data`` completes; raises ``MalformedTransfer``, after which the stream is of no use."""
        if self._begun:
            data, self._begun = self._begun + data, b""
        found: list[Message | bytes] = []
        at = 0
        while at < len(data):
            if self._data_left:
                piece = data[at : at + self._data_left]  # a slice of all of ``data`` is no copy
                found.append(piece)
                at += len(piece)
                self._data_left -= len(piece)
                continue
            end = self._unit(data, at, found)
            if not end:
                self._begun = data[at:]
                break
            at = end
        return found

    def _unit(self, data: bytes, at: int, found: list[Message | bytes]) -> int:
        """Take the prefix at ``at``, and the header after it; gives where to go on, 0 if some of it is still to come."""
        kind = data[at]
        limit = {HEADER: HEADER_LIMIT_BYTES, DATA: DATA_LIMIT_BYTES}.get(kind, 0)
        if not limit:
            raise MalformedTransfer("a unit of no known kind")
        body = at + PREFIX.size
        if len(data) < body:
            return 0
        length: int = PREFIX.unpack_from(data, at)[1]
        if not 0 < length <= limit:
            raise MalformedTransfer("a unit is empty or too long")
        if kind == DATA:
            self._data_left = length
            return body
        if len(data) < body + length:
            return 0
        found.append(decode(data[body : body + length]))
        return body + length
