"""The event log from outside: what stands in the files and streams it leaves, also when things go wrong."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zope.interface.verify import verifyObject

from dmsg.eventlog import schema as events
from dmsg.eventlog.compress import read_lines
from dmsg.eventlog.encode import Encoder
from dmsg.eventlog.files import FLUSH_BYTES, Batch
from dmsg.eventlog.log import EventLog, NullEventLog, new_boot_id, short_node
from dmsg.eventlog.names import LogFileName, folder
from dmsg.eventlog.reasons import Reason
from dmsg.eventlog.schema import DiscoveryRequest, Drained, Event, Refused, SessionUp
from dmsg.eventlog.tree import Discarded
from dmsg.interfaces import IEventLog

WHO: Any = {"role": "server", "node": "n1", "boot": "00112233aabbccdd"}


def read(directory: Path) -> list[dict[str, Any]]:
    """All lines of all published files, in order; the names of the files say how many there are, and where they are."""
    lines = []
    for file in sorted(directory.rglob("*.jsonl.zst"), key=lambda path: path.name):
        held = [json.loads(line) for line in read_lines(file)]
        name = LogFileName.parse(file.name)
        assert name is not None and name.lines == len(held)
        assert str(file.parent.relative_to(directory)) == folder(held[0]["role"], held[0]["ts"])
        lines += held
    return lines


class HeldSink:
    """A sink that does nothing until it is let go: a disk that takes its time. Can be told to fail, and to discard."""

    def __init__(self, gather_s: float = 0.0) -> None:
        self.gather_s = gather_s
        self.data = b""
        self.batches: list[Batch] = []
        self.discards: list[Discarded] = []
        self.dues: list[float] = []
        self.idle = threading.Event()
        self.entered = threading.Event()
        self.go = threading.Event()
        self.failures: list[OSError] = []
        self.rest = b""
        self.closed = False

    def open(self) -> None:
        pass

    def write(self, batch: Batch, now: float) -> None:
        self.entered.set()
        self.batches.append(batch)
        self.rest += batch.data
        assert self.go.wait(20)
        self.tick(now)

    def tick(self, now: float) -> None:
        if self.failures:
            raise self.failures.pop()
        self.data += self.rest
        self.rest = b""

    def take_discarded(self) -> Discarded:
        return self.discards.pop(0) if self.discards else Discarded()

    def next_due(self) -> float | None:
        if self.dues:
            return self.dues.pop()
        self.idle.set()
        return None

    def close(self) -> None:
        self.closed = True

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.data.splitlines()]


# --- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [NullEventLog(), EventLog(HeldSink(), **WHO)])
def test_every_log_is_an_event_log(log: Any) -> None:
    assert verifyObject(IEventLog, log)
    assert log.close() is True


def test_a_line_has_the_envelope_first_and_then_the_columns_in_their_order(tmp_path: Path) -> None:
    log = EventLog.to_directory(tmp_path, **WHO, clock=lambda: 1700000000.1234567)
    log.emit(Refused(7, "02ab", "request", "rate_limited", 3))
    assert log.close()
    [file] = tmp_path.rglob("*.*")
    assert str(file.relative_to(tmp_path)) == (
        "role=server/date=2023-11-14/hour=22/n1-00112233aabbccdd-000000-1.jsonl.zst"
    )
    assert list(read_lines(file)) == [
        b'{"event":"refused","v":1,"ts":1700000000.123457,"role":"server","node":"n1","boot":"00112233aabbccdd",'
        b'"seq":0,"conn":7,"remote":"02ab","what":"request","reason":"rate_limited","count":3}'
    ]


_VALUES = {
    str: st.text(st.characters(), max_size=30),
    int: st.integers(),
    float: st.floats(),
    bool: st.booleans(),
}
#: Those of the list, and texts that are not.
_REASONS = st.sampled_from(Reason) | st.sampled_from([reason.value for reason in Reason]) | _VALUES[str]


@st.composite
def _any_event(draw: st.DrawFn) -> Event:
    cls = draw(st.sampled_from(sorted(events.EVENTS.values(), key=lambda c: c.NAME)))
    columns = events.describe_event(cls).fields
    return cls(*[draw(_REASONS if column.is_reason else _VALUES[column.type]) for column in columns])


@given(st.lists(_any_event(), max_size=5), st.floats(0, 2**33))
def test_every_event_becomes_one_line_of_its_schema(made: list[Event], ts: float) -> None:
    encoder = Encoder("client", "n", "b")
    for seq, event in enumerate(made):
        text = encoder.encode(event, ts)
        assert text.count(b"\n") == 1 and text.endswith(b"\n") and text.isascii()
        line = json.loads(text, parse_constant=pytest.fail)
        assert line["seq"] == seq and line["event"] == event.NAME and line["ts"] == pytest.approx(ts, abs=1e-6)
        for column in events.describe_event(type(event)).fields:
            value, written = getattr(event, column.name), line[column.name]
            assert type(written) is column.type
            if column.type is float and not math.isfinite(value):
                assert written == 0.0
            elif column.type is int:
                assert written == max(-(2**63), min(value, 2**63 - 1))
            elif column.is_reason:
                assert written == Reason.of(value).value
            else:
                assert written == value


def test_values_of_another_type_are_made_to_fit_their_column() -> None:
    encoder = Encoder("client", "n", "b")
    line = json.loads(encoder.encode(SessionUp(server=object, reason=None, duration_s=2, attempt=True), 0.0))  # type: ignore[arg-type]
    assert (
        line["server"] == str(object)
        and line["reason"] == "other"
        and line["duration_s"] == 2.0
        and line["attempt"] == 1
    )
    line = json.loads(encoder.encode(SessionUp("s", "r", "long", None), 0.0))  # type: ignore[arg-type]
    assert (line["duration_s"], line["attempt"], line["seq"]) == (0.0, 0, 1)


def test_what_is_no_event_is_counted_and_uses_no_number(tmp_path: Path) -> None:
    log = EventLog.to_directory(tmp_path, **WHO)
    log.emit("not an event")  # type: ignore[arg-type]
    log.emit(Drained())
    assert log.close()
    lines = read(tmp_path)
    assert sorted(line["event"] for line in lines) == ["drained", "events_dropped"]
    assert [line["seq"] for line in lines] == [0, 1]
    assert log.dropped == 1


@given(_any_event(), st.text(), st.text())
def test_lines_are_those_that_a_library_would_write(event: Event, role: str, node: str) -> None:
    text = Encoder(role, node, "b").encode(event, 1.5)
    assert json.dumps(json.loads(text), separators=(",", ":")).encode() + b"\n" == text


def test_names_of_nodes_and_boots() -> None:
    assert short_node("02" + "ab" * 32) == "02ababababababab"
    assert new_boot_id(lambda n: bytes(range(n))) == "0001020304050607"


# --- streams ---------------------------------------------------------------------------------------------------------


def test_a_stream_gets_whole_lines_and_stays_open(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+") as stream:
        stream.write("before\n")
        log = EventLog.to_stream(stream, **WHO)
        log.emit(Drained(1.5, 2))
        assert log.close()
        stream.write("after\n")
        stream.flush()
        first, line, last = (tmp_path / "out").read_text().splitlines()
    assert (first, last) == ("before", "after")
    assert json.loads(line)["transports"] == 2


def test_the_stream_is_bound_when_the_log_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        log = EventLog.to_stream(sys.stdout, **WHO)
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # as twistd does when it starts logging
    log.emit(Drained())
    assert log.close()
    assert json.loads((tmp_path / "out").read_text())["event"] == "drained"


def test_a_full_pipe_never_blocks_the_caller(logged_errors: Any) -> None:
    reader, writer = os.pipe()
    filled = 0
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            filled += os.write(writer, b"x")
    os.set_blocking(writer, True)
    with os.fdopen(writer, "w") as stream:
        log = EventLog.to_stream(stream, **WHO, queue_events=50)
        for number in range(5_000):  # far more than the queue holds
            log.emit(DiscoveryRequest("GET", "entry", 200, 1.0, "", f"{number:066x}"))
    assert log.dropped > 0
    assert log.close(timeout_s=0.05) is False
    assert logged_errors.texts()
    logged_errors.flush()
    collected = bytearray()
    while piece := os.read(reader, 1 << 20):  # until the thread has written everything and closed its end
        collected += piece
    os.close(reader)
    lines = [json.loads(line) for line in collected[filled:].splitlines()]
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    told = sum(line["count"] for line in lines if line["event"] == "events_dropped")
    assert told == log.dropped
    assert len([line for line in lines if line["event"] != "events_dropped"]) + told == 5_000


# --- collecting ------------------------------------------------------------------------------------------------------


def test_lines_are_collected_and_written_together(tmp_path: Path) -> None:
    sink = HeldSink(gather_s=60)
    sink.go.set()
    log = EventLog(sink, **WHO, clock=lambda: 7200.5)
    for number in range(100):
        log.emit(Refused(number, "", "", "", 0))
    assert log.close()
    [batch] = sink.batches
    assert (batch.lines, batch.hour, batch.data.count(b"\n")) == (100, 2, 100)


def test_enough_events_are_written_however_young_they_are() -> None:
    sink = HeldSink(gather_s=60)
    sink.go.set()
    log = EventLog(sink, **WHO, queue_events=20)
    log.start()
    for number in range(20):
        log.emit(Refused(number, "", "", "", 0))
    assert sink.entered.wait(10)
    assert log.close()
    assert [line["conn"] for line in sink.lines()] == list(range(20))


def test_old_events_are_written_however_few_they_are() -> None:
    sink = HeldSink(gather_s=0.01)
    sink.go.set()
    log = EventLog(sink, **WHO)
    log.emit(Drained())
    assert sink.entered.wait(10)
    assert log.close()


def test_files_that_never_grow_old_are_written_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest age that the settings take is longer than a thread can wait."""
    sink = HeldSink()
    sink.go.set()
    monkeypatch.setattr(sink, "next_due", lambda: sink.idle.set() or time.monotonic() + 2.0**63)
    log = EventLog(sink, **WHO)
    log.start()
    assert sink.idle.wait(10)
    log.emit(Drained())
    assert sink.entered.wait(10)
    assert log.close() and len(sink.lines()) == 1


def test_frames_are_bounded_and_never_of_two_hours() -> None:
    sink = HeldSink(gather_s=60)
    sink.go.set()
    times = iter([3599.0] * 3 + [3600.0] * 3 + [3599.9] + [3600.0] * 2000 + [math.inf, math.nan, -5.0])
    log = EventLog(sink, **WHO, clock=lambda: next(times))
    for number in range(2010):
        log.emit(Refused(number, "x" * 400, "", "", 0))
    assert log.close()
    assert [line["conn"] for line in sink.lines()] == list(range(2010))
    assert all(len(batch.data) <= FLUSH_BYTES for batch in sink.batches)
    assert {batch.hour for batch in sink.batches[1:-1]} == {1} and (sink.batches[0].hour, sink.batches[0].lines) == (
        0,
        3,
    )
    assert len(sink.batches) < 10


# --- drops and failures ----------------------------------------------------------------------------------------------


def test_drops_are_reported_as_soon_as_there_is_room_and_leave_no_gap() -> None:
    sink = HeldSink()
    log = EventLog(sink, **WHO, queue_events=3)
    log.emit(Refused(0, "", "", "", 0))
    assert sink.entered.wait(10)
    for number in range(1, 11):
        log.emit(Refused(number, "", "", "", 0))
    assert log.dropped == 7
    sink.go.set()
    assert log.close()
    lines = sink.lines()
    assert [line.get("conn", "dropped") for line in lines] == [0, 1, 2, 3, "dropped"]
    assert [line["seq"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[-1]["count"] == 7
    assert sink.closed


def test_a_write_that_fails_is_continued_and_nothing_is_lost_or_doubled(logged_errors: Any) -> None:
    sink = HeldSink()
    sink.go.set()
    sink.failures.append(OSError(errno.ENOSPC, "No space left on device"))
    log = EventLog(sink, **WHO)
    for number in range(600):
        log.emit(Refused(number, "", "", "", 0))
    assert log.close()
    assert [line["seq"] for line in sink.lines()] == list(range(600))
    assert log.problem == "" and log.written == 600
    assert logged_errors.texts()
    logged_errors.flush()


def test_a_disk_that_stays_full_does_not_hold_closing_up(logged_errors: Any) -> None:
    sink = HeldSink()
    sink.go.set()
    sink.failures.extend(OSError(errno.ENOSPC, "No space left on device") for _ in range(1000))
    log = EventLog(sink, **WHO)
    for _ in range(3):
        log.emit(Drained())
    assert log.close() is False
    assert log.dropped == 3
    said = logged_errors.events()
    assert [event["count"] for event in said if "count" in event] == [3]
    assert all("No space left on device" in event["problem"] for event in said)
    logged_errors.flush()


def told_of(sink: HeldSink) -> list[tuple[int, int, int]]:
    return [
        (line["files"], line["lines"], line["bytes"]) for line in sink.lines() if line["event"] == "events_discarded"
    ]


def test_what_was_deleted_to_make_room_is_told_with_the_next_line() -> None:
    sink = HeldSink()
    sink.go.set()
    sink.discards = [Discarded(2, 30, 4096), Discarded(1, 5, 100)]
    log = EventLog(sink, **WHO)
    log.emit(Drained())
    assert log.close()
    assert [line["event"] for line in sink.lines()] == ["drained", "events_discarded", "events_discarded"]
    assert told_of(sink) == [(2, 30, 4096), (1, 5, 100)]
    assert [line["seq"] for line in sink.lines()] == [0, 1, 2]
    assert (log.discarded, log.dropped) == (35, 0)


def test_an_idle_log_fills_no_files_with_what_it_deleted() -> None:
    sink = HeldSink()
    sink.go.set()
    sink.dues = [0.0] * 5
    sink.discards = [Discarded(1, number, 100) for number in range(5)]
    log = EventLog(sink, **WHO)
    log.start()
    assert sink.idle.wait(10)
    assert sink.data == b""
    assert log.close()
    assert told_of(sink) == [(5, 0 + 1 + 2 + 3 + 4, 500)]


def test_a_directory_without_a_shipper_stays_within_its_limit(tmp_path: Path) -> None:
    log = EventLog.to_directory(tmp_path, **WHO, rotate_bytes=1, limit_bytes=40_960, queue_events=20_000)
    for number in range(20_000):
        log.emit(Refused(number, "", "", "", 0))
    assert log.close()
    kept = read(tmp_path)
    assert log.dropped == 0
    assert sum(4096 * -(-path.stat().st_size // 4096) for path in tmp_path.rglob("*.zst")) <= 40_960 + 2 * 65_536
    numbers = [line["seq"] for line in kept]
    assert numbers == list(range(numbers[0], log.written))
    assert (
        log.discarded > 0 and sum(line["lines"] for line in kept if line["event"] == "events_discarded") <= numbers[0]
    )


def test_events_after_closing_are_counted_only(tmp_path: Path) -> None:
    log = EventLog.to_directory(tmp_path, **WHO)
    log.emit(Drained())
    assert log.close()
    log.emit(Drained())
    assert (log.dropped, log.close(), len(read(tmp_path))) == (1, True, 1)


def test_many_threads_share_one_log(tmp_path: Path) -> None:
    log = EventLog.to_directory(tmp_path, **WHO, rotate_bytes=200)

    def work(number: int) -> None:
        for count in range(100):
            log.emit(Refused(number, "", "", "", count))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.close()
    lines = read(tmp_path)
    assert [line["seq"] for line in lines] == list(range(400))
    for number in range(4):
        assert [line["count"] for line in lines if line["conn"] == number] == list(range(100))


# --- death -----------------------------------------------------------------------------------------------------------

_VICTIM = """
import sys
from dmsg.eventlog.schema import Refused
from dmsg.eventlog.log import EventLog
log = EventLog.to_directory(sys.argv[1], role="server", node="n", boot=sys.argv[2], rotate_bytes=20_000)
told = number = 0
while True:
    log.emit(Refused(number, "", "", "", log.dropped))
    number += 1
    if log.written > told:
        told = log.written
        print(told, flush=True)
"""


@pytest.mark.system
@pytest.mark.time_limit(90)
def test_a_killed_writer_leaves_whole_files_without_gaps(tmp_path: Path) -> None:
    dice = random.Random(7)
    flushed: dict[str, int] = {}
    for run in range(6):
        boot = f"{run:016x}"
        command = [sys.executable, "-c", _VICTIM, str(tmp_path), boot]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as victim:
            assert victim.stdout is not None
            goal, told = dice.randrange(1_000, 30_000), 0
            while told < goal:
                told = int(victim.stdout.readline())
            victim.send_signal(signal.SIGKILL)
            flushed[boot] = max(told, *map(int, victim.stdout.read().split()[-1:]), 0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.zst")}
    log = EventLog.to_directory(tmp_path, role="server", node="n", boot="f" * 16)
    log.start()
    assert log.close()
    assert not list(tmp_path.rglob("*.part"))
    assert all(path.read_bytes() == content for path, content in before.items())
    lines = read(tmp_path)
    for boot, told in flushed.items():
        numbers = [line["seq"] for line in lines if line["boot"] == boot]
        assert len(numbers) >= told  # what had been written when it was killed is there
        assert numbers == list(range(len(numbers)))  # nothing is missing in between, nothing is there twice
    keys = [(line["boot"], line["seq"]) for line in lines]
    assert len(keys) == len(set(keys))
