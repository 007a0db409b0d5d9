"""What all sealed streams of a client may hold."""

from __future__ import annotations

from dmsg.mux.core.buffers import Buffers


def test_each_may_have_a_quarter_of_what_is_left():
    buffers = Buffers(1_000)
    assert buffers.share_bytes == 250
    buffers.used_bytes = 600
    assert buffers.share_bytes == 100
    buffers.used_bytes = 1_000
    assert buffers.share_bytes == 0 and not buffers.full
    buffers.used_bytes = 1_001
    assert buffers.share_bytes == 0 and buffers.full


def test_however_many_take_their_share_there_is_one_for_the_next():
    buffers = Buffers(192 << 20)
    for _ in range(16):
        assert buffers.share_bytes > 0
        buffers.used_bytes += buffers.share_bytes
    assert not buffers.full
