"""The windows of a client's sealed streams, which share one memory budget."""

from __future__ import annotations

from collections.abc import Iterator

from dmsg.mux.core.buffers import Buffers
from dmsg.mux.core.sealed_window import POWERS, SealedWindow
from fuzz.choices import Choices

_LEAST_BYTES = 1 << 20
_GROWTH = 8
_SLACK_BYTES = 1 << 18
_UNIT_BYTES = 1 << 16


class _Held:
    """A stream as seen by its window."""

    def __init__(self, most_bytes: int, buffers: Buffers) -> None:
        self.window = SealedWindow(_LEAST_BYTES, most_bytes, buffers)
        self.most_bytes = max(_LEAST_BYTES, min(most_bytes, 1 << POWERS[-1]))
        self.size = 0
        self.told_bytes = self.given_bytes = _LEAST_BYTES
        self.most_given_bytes = 0


def one_input(data: bytes) -> None:
    """Streams hold more and less, are told windows and give some to their peers.

    The budget counts the bytes that each stream holds beyond its least window. No window leaves its bounds, or grows beyond
    a quarter of the free budget. A peer is told each window once, and is at fault only if it exceeds every window it was
    told, or if nothing is left.
    """
    choices = Choices(data)
    buffers = Buffers(choices.byte() * 16 * _UNIT_BYTES)
    streams = [_Held(choices.byte() * 8 * _UNIT_BYTES, buffers) for _ in range(5)]
    for _ in range(200):
        if not choices.left:
            break
        operation = choices.byte()
        stream = streams[(operation >> 4) % 5]
        window = stream.window
        match operation & 7:
            case 0:
                power = choices.pick(POWERS)
                window.told(power)
                stream.told_bytes = min(1 << power, stream.most_bytes)
            case 1 | 2:
                stream.size = choices.byte() * 8 * _UNIT_BYTES + choices.byte()
                _hold(stream, buffers)
            case 3:
                stream.size = 0
                _hold(stream, buffers)
            case 4 | 5:
                _give(stream, buffers, choices.byte() * 2 * _UNIT_BYTES)
            case 6:
                unread = choices.byte() * 8 * _UNIT_BYTES
                full = buffers.used_bytes > buffers.total_bytes
                assert window.overfull(unread, _SLACK_BYTES) == (
                    full or unread > stream.most_given_bytes + _SLACK_BYTES
                )
            case _:
                stream.size = min(stream.size, window.bytes)
                _hold(stream, buffers)
        assert buffers.used_bytes == sum(max(0, one.size - _LEAST_BYTES) for one in streams)
        free = max(0, buffers.total_bytes - buffers.used_bytes)
        assert buffers.share_bytes * 4 <= free < buffers.share_bytes * 4 + 4
        assert buffers.full == (buffers.used_bytes > buffers.total_bytes)
    for one in streams:
        one.window.hold(0)
    assert not buffers.used_bytes


def _hold(stream: _Held, buffers: Buffers) -> None:
    stream.window.hold(stream.size)
    share = max(0, buffers.total_bytes - buffers.used_bytes) // 4
    assert stream.window.bytes == max(_LEAST_BYTES, min(stream.told_bytes, share))
    assert _LEAST_BYTES <= stream.window.bytes <= stream.most_bytes


def _give(stream: _Held, buffers: Buffers, taken_bytes: int) -> None:
    window, before = stream.window, stream.given_bytes
    power = window.give(taken_bytes)
    if power:
        assert power in POWERS and 1 << power != before
        stream.given_bytes = 1 << power
        stream.most_given_bytes = max(stream.most_given_bytes, stream.given_bytes)
    assert window.given_bytes == stream.given_bytes and window.most_given_bytes == stream.most_given_bytes
    share = max(0, buffers.total_bytes - buffers.used_bytes) // 4
    most = max(_LEAST_BYTES, min(stream.most_bytes, _LEAST_BYTES + _GROWTH * taken_bytes, share))
    # A window of the greatest size stays, whatever was taken on this path.
    assert (
        stream.given_bytes <= most < 2 * stream.given_bytes
        or stream.given_bytes == before == stream.most_bytes <= share
    )
    assert not window.give(taken_bytes)


def seeds() -> Iterator[bytes]:
    """A stream that grows to the largest window, several that use up what there is, windows that shrink again."""
    grow = b"\x04\x01\x04\x08\x04\x40\x04\xff" + b"\x06\x20\x06\xff"
    told = b"\x00\x05\x01\x40\x00\x07\x00\x02\x01\x80\x00"
    for total in (b"\xff", b"\x30", b"\x04", b"\x00"):
        for most in (b"\x40\xff\x04\x01\x20", b"\xff\xff\xff\xff\xff"):
            yield total + most + grow + told
            yield total + most + b"".join(bytes((n << 4, 5, n << 4 | 1, 0x50, 0, n << 4 | 7)) for n in range(5)) + grow
            yield total + most + grow + b"\x11\xff\x00\x21\xff\x00\x31\xff\x00" + grow + b"\x07\x13\x23" + grow + told
            yield total + most + grow + b"\x04\x00" + told + b"\x03" + told + b"\x14\xff\x16\x03\x11\xff\x01\x16\x00"
