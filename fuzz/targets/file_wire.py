"""What ``dmsg send`` and ``dmsg receive`` say to each other."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.cli.files import wire as filewire
from dmsg.cli.files.wire import Decoder, Message, Offer, TransferFailed
from fuzz import words
from fuzz.choices import Choices
from fuzz.oracles import check_memory

DICTIONARY = words.members(
    *(
        "type",
        "name",
        "size",
        "sha256",
        "version",
        "offset",
        "code",
        "offer",
        "whole",
        "again",
        "id",
        "hashed",
        "have",
        "start",
        "finish",
        "done",
        "failed",
        "end",
    )
)

_UNIT_LIMIT_BYTES = filewire.PREFIX.size + filewire.HEADER_LIMIT_BYTES


def one_input(data: bytes) -> None:
    """The first byte says how the rest is cut. Only ``TransferFailed`` leaves; pieces change no header and no data."""
    choices = Choices(data)
    cut = 1 + choices.byte()
    stream = choices.rest()
    whole, whole_failed = _units([stream])
    pieces, failed = _units([stream[at : at + cut] for at in range(0, len(stream), cut)])
    assert failed == whole_failed
    if not failed:
        assert pieces == whole
    for unit in pieces:
        if isinstance(unit, Message):
            check_memory(unit, len(stream))


def _units(pieces: list[bytes]) -> tuple[list[Message | bytes], bool]:
    """Headers, and the data between them joined."""
    decoder = Decoder()
    found: list[Message | bytes] = []
    for piece in pieces:
        try:
            units = decoder.feed(piece)
        except TransferFailed as error:
            assert error.code == "malformed"
            return found, True
        assert len(decoder._begun) < _UNIT_LIMIT_BYTES
        for unit in units:
            if isinstance(unit, bytes) and found and isinstance(found[-1], bytes):
                found[-1] += unit
            else:
                found.append(unit)
    return found, False


def seeds() -> Iterator[bytes]:
    """A whole conversation, names of all kinds, headers that are nearly right."""
    digest = "0" * 64
    messages = [
        Offer("notes.txt", 5, digest[:32], 3),
        filewire.Whole("notes.txt", 5, digest),
        filewire.Have(0, digest),
        filewire.Start(0, hashed=True),
        filewire.Finish(digest),
        filewire.Done(),
        filewire.Failed("busy"),
        filewire.End(),
    ]
    talk = b"".join(map(filewire.encode, messages)) + filewire.data_prefix(5) + b"hello" + filewire.encode(messages[5])
    yield b"\x00" + talk
    yield b"\xff" + talk
    for name in (
        "-rf",
        "--checkpoint-action=exec=sh",
        "*",
        "$(id)",
        "..",
        "a/b",
        ".hidden",
        "a\u0301" * 9,
        "x.part",
        "\u202e",
    ):
        yield b"\xff" + filewire.encode(Offer(name, 1, digest[:32]))
    for body in (b"[]", b'{"type":"offer"}', b'{"type":"done","x":1}', b'{"type":"start","offset":1e9}', b"[" * 4_000):
        yield b"\xff" + filewire.PREFIX.pack(filewire.HEADER, len(body)) + body
    yield b"\xff" + filewire.PREFIX.pack(2, 0)
    yield b"\xff" + filewire.PREFIX.pack(1, 5_000)
