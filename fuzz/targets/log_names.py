"""Names of the files of an event log, and where a shipper puts them."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.eventlog.names import FILE_SUFFIX, LogFileName, check_boot, folder, safe_name
from dmsg.shipping.plan import clip, landing_path, recognise, redact
from fuzz.oracles import as_text


def one_input(data: bytes) -> None:
    """The input is a name, a path, a URL in an error. A parsed name is written so that it reads the same."""
    text = as_text(data)
    for name in (LogFileName.parse(text), LogFileName.parse_part(text)):
        if name is not None:
            assert LogFileName.parse(name.format()) == name
            assert LogFileName.parse_part(name.format_part()) == name._replace(lines=0, digest="")
    assert LogFileName.parse(text) is None or LogFileName.parse_part(text) is None
    safe = safe_name(text)
    assert safe and safe.isascii() and safe[0] not in "._" and "/" not in safe and safe_name(safe) == safe[:128]
    recognised = recognise(text)
    if recognised is not None:
        placed = landing_path(text, "0123456789abcdef" * 4)
        assert recognise(placed) == recognised._replace(digest="0123456789abcdef")
        assert ".." not in placed.split("/") and not placed.startswith("/")
        assert landing_path(placed, "0123456789abcdef" * 4) == placed
    try:
        boot = check_boot(text)
        assert LogFileName.parse(LogFileName(safe, boot, 0, 1).format()) is not None
    except ValueError:
        pass
    assert folder(text, 0.0).endswith("/date=1970-01-01/hour=00")
    assert len(clip(ValueError(text), text)) <= 300
    assert redact(redact(text)) == redact(text)


def seeds() -> Iterator[bytes]:
    """Names of both kinds, paths, URLs with passwords."""
    name = LogFileName("02c6047f9441ed7d", "9f2c0011aabbccdd", 0, 12)
    yield name.format().encode()
    yield name.format_part().encode()
    yield name._replace(digest="0123456789abcdef").format().encode()
    place = "role=server/date=2026-01-02/hour=05/"
    yield (place + name.format()).encode()
    yield (place + name._replace(digest="0123456789abcdef").format()).encode()
    yield f"-00000000-000000-{'9' * 12}{FILE_SUFFIX}".encode()
    yield b"s3://user:secret@bucket/path?token=secret"
    yield b"deadbeef"
    yield "٣".encode() * 8
