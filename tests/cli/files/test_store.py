"""Reading ahead and writing behind: threads do it, and the order of what they do is not theirs."""

from __future__ import annotations

import hashlib
import os
import threading
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import reactor
from twisted.internet.defer import CancelledError, Deferred

from dmsg.cli.files.store import BLOCK_BYTES, QUICK_S, ReadAhead, WriteBehind, find_source

from .test_slow import Reactor


class Disk:
    """Keeps what is written once it ``may`` be; fails from the block with the number ``full`` on."""

    def __init__(self, full: int = 1_000) -> None:
        self.may = threading.Event()
        self.written: list[bytes] = []
        self._full = full
        self._asked = 0

    def write(self, pieces: list[bytes]) -> None:
        assert self.may.wait(10)
        self._asked += 1
        if self._asked >= self._full:
            raise OSError("full")
        self.written.append(b"".join(pieces))


@pytest_twisted.ensureDeferred
async def test_blocks_are_written_in_order_while_the_next_ones_come():
    disk = Disk()
    behind = WriteBehind(reactor, disk.write)
    await behind.put([b"a", b"b"])
    assert not disk.written, "the caller goes on"
    disk.may.set()
    for number in range(20):
        await behind.put([b"%d" % number])
    await behind.done()
    assert disk.written == [b"ab", *(b"%d" % number for number in range(20))]


@pytest_twisted.ensureDeferred
async def test_what_waits_is_written_at_once_when_the_transfer_breaks():
    disk = Disk()
    behind = WriteBehind(reactor, disk.write)
    await behind.put([b"in work"])
    disk.may.set()
    behind.finish(b"the last")
    behind.stop()
    assert disk.written == [b"in work", b"the last"]


@pytest_twisted.ensureDeferred
async def test_nothing_is_written_behind_a_gap():
    disk = Disk(full=2)
    disk.may.set()
    behind = WriteBehind(reactor, disk.write)
    with pytest.raises(OSError, match="full"):
        for number in range(3):
            await behind.put([b"%d" % number])
    behind.finish(b"last")
    behind.stop()
    assert disk.written == [b"0"]


@pytest_twisted.ensureDeferred
async def test_a_source_that_is_read_ahead_comes_whole_and_hashed(tmp_path):
    data = bytes(range(256)) * (BLOCK_BYTES // 256 * 2) + b"end"
    (tmp_path / "a").write_bytes(data)
    source = find_source(str(tmp_path / "a")).open()
    ahead = ReadAhead(reactor, source, hashed=True)
    blocks = [await ahead.next()]
    while blocks[-1]:
        blocks.append(await ahead.next())
    await ahead.stop()
    assert b"".join(blocks) == data and source.sha256 == hashlib.sha256(data).hexdigest()
    source.close()


class Timed:
    """The reactor, with a clock on which everything takes ``takes_s``."""

    def __init__(self) -> None:
        self.takes_s = 0.0
        self._now = 0.0

    def seconds(self) -> float:
        self._now += self.takes_s
        return self._now

    def __getattr__(self, name: str) -> Any:
        return getattr(reactor, name)


@pytest_twisted.ensureDeferred
async def test_a_thread_writes_while_the_disk_is_slow():
    where: list[threading.Thread] = []
    clock = Timed()
    behind = WriteBehind(clock, lambda pieces: where.append(threading.current_thread()), quick=True)
    for takes_s in (QUICK_S / 2, QUICK_S * 2, QUICK_S * 2, QUICK_S / 2, QUICK_S / 2):
        clock.takes_s = takes_s
        await behind.put([b"block"])
        await behind.done()
    assert [one is threading.current_thread() for one in where] == [True, True, False, False, True]


@pytest_twisted.ensureDeferred
async def test_a_thread_reads_while_the_disk_is_slow(tmp_path):
    data = os.urandom(6 * BLOCK_BYTES)
    (tmp_path / "a").write_bytes(data)
    source = find_source(str(tmp_path / "a")).open()
    where: list[threading.Thread] = []
    read_block = source.read_block

    def noted(limit_bytes: int, *, hashed: bool) -> bytes:
        where.append(threading.current_thread())
        return read_block(limit_bytes, hashed=hashed)

    source.read_block = noted  # type: ignore[method-assign]
    clock = Timed()
    ahead = ReadAhead(clock, source, hashed=False)
    blocks = []
    for takes_s in (QUICK_S / 2, QUICK_S * 2, QUICK_S / 2, QUICK_S / 2, QUICK_S / 2, QUICK_S / 2):
        clock.takes_s = takes_s
        blocks.append(await ahead.next())
    await ahead.stop()
    assert b"".join(blocks) == data
    here = [one is threading.current_thread() for one in where]
    assert here[:3] == [True, True, False] and here[-1]
    source.close()


def test_a_hash_that_is_behind_catches_up(tmp_path):
    (tmp_path / "a").write_bytes(b"abc" * BLOCK_BYTES)
    source = find_source(str(tmp_path / "a")).open()
    source.read_block(hashed=True)
    source.read_block(hashed=False)
    assert (source.hashed, source.offset) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
    source.hash_to(2 * BLOCK_BYTES)
    assert source.sha256 == hashlib.sha256((b"abc" * BLOCK_BYTES)[: 2 * BLOCK_BYTES]).hexdigest()
    assert (source.hashed, source.offset) == (2 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    source.hash_to(10 * BLOCK_BYTES)
    assert source.sha256 == hashlib.sha256(b"abc" * BLOCK_BYTES).hexdigest() and source.offset == 3 * BLOCK_BYTES
    source.close()


@pytest_twisted.ensureDeferred
async def test_a_source_may_begin_again_once_reading_ahead_has_stopped(tmp_path):
    (tmp_path / "a").write_bytes(bytes(3 * BLOCK_BYTES))
    source = find_source(str(tmp_path / "a")).open()
    ahead = ReadAhead(reactor, source, hashed=True)
    await ahead.next()
    await ahead.stop()
    source.rewind()
    assert source.offset == 0 and len(source.read_block(hashed=True)) == BLOCK_BYTES
    source.close()


@pytest.mark.parametrize("fails", [True, False])
def test_a_command_that_is_cancelled_while_it_waits_for_the_reader_ends(tmp_path, fails):
    """An error of the reader, whose block is not wanted any more, ends nothing."""
    (tmp_path / "a").write_bytes(bytes(3 * BLOCK_BYTES))
    source, machine, ended = find_source(str(tmp_path / "a")).open(), Reactor(), []
    machine.hold = True
    ahead = ReadAhead(machine, source, hashed=True)
    Deferred.fromCoroutine(ahead.next())
    machine.work()
    stopping = Deferred.fromCoroutine(ahead.stop())
    stopping.addBoth(ended.append)
    if fails:
        source.close()
        machine.work()
        assert ended == [None]
    else:
        stopping.cancel()
        assert [getattr(one, "type", one) for one in ended] == [CancelledError]
        source.close()
