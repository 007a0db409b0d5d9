"""The event log from outside: what stands in the files and streams it leaves, also when things go wrong."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from hypothesis import given
from hypothesis import strategies as st
from zope.interface.verify import verifyObject

from dmsg.interfaces import IEventLog
from dmsg.ops import events
from dmsg.ops.events import DiscoveryRequest, Drained, Event, EventsDropped, Refused, ServerStarted, SessionUp
from dmsg.ops.logs import Encoder, EventLog, MemoryEventLog, NullEventLog, new_boot_id, short_node

WHO: Any = {"role": "server", "node": "n1", "boot": "b1"}


def read(directory: Path) -> list[dict[str, Any]]:
    """All lines of all published files, in order."""
    files = sorted(directory.glob("*.jsonl"), key=lambda path: path.name)
    return [json.loads(line) for file in files for line in file.read_text("ascii").splitlines()]


class HeldSink:
    """A sink that does nothing until it is let go: a disk that takes its time. Can be told to fail."""

    def __init__(self) -> None:
        self.data = b""
        self.entered = threading.Event()
        self.go = threading.Event()
        self.failures: list[OSError] = []
        self.rest = b""
        self.closed = False

    def open(self) -> None:
        pass

    def write(self, data: bytes, now: float) -> None:
        self.entered.set()
        self.rest += data
        assert self.go.wait(20)
        if self.failures:
            raise self.failures.pop()
        self.data += self.rest
        self.rest = b""

    def tick(self, now: float) -> None:
        pass

    def next_due(self) -> float | None:
        return None

    def close(self) -> None:
        self.closed = True

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.data.splitlines()]


# --- lines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [NullEventLog(), MemoryEventLog(), EventLog(HeldSink(), **WHO)])
def test_every_log_is_an_event_log(log: Any) -> None:
    assert verifyObject(IEventLog, log)
    assert log.close() is True


def test_a_line_has_the_envelope_first_and_then_the_columns_in_their_order(tmp_path: Path) -> None:
    log = EventLog.to_directory(tmp_path, **WHO, clock=lambda: 1700000000.1234567)
    log.emit(Refused(7, "02ab", "request", "rate_limited", 3))
    assert log.close()
    [file] = tmp_path.iterdir()
    assert file.name == "server-n1-b1-000000.jsonl"
    assert file.read_text() == (
        '{"event":"refused","v":1,"ts":1700000000.123457,"role":"server","node":"n1","boot":"b1","seq":0,'
        '"conn":7,"remote":"02ab","what":"request","reason":"rate_limited","count":3}\n'
    )


_VALUES = {
    str: st.text(st.characters(), max_size=30),
    int: st.integers(),
    float: st.floats(),
    bool: st.booleans(),
}


@st.composite
def _any_event(draw: st.DrawFn) -> Event:
    cls = draw(st.sampled_from(sorted(events.EVENTS.values(), key=lambda c: c.NAME)))
    return cls(*[draw(_VALUES[column.type]) for column in events.describe_event(cls).fields])


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
            else:
                assert written == value


def test_values_of_another_type_are_made_to_fit_their_column() -> None:
    encoder = Encoder("client", "n", "b")
    line = json.loads(encoder.encode(SessionUp(server=object, reason=None, duration_s=2, attempt=True), 0.0))  # type: ignore[arg-type]
    assert line["server"] == str(object) and line["duration_s"] == 2.0 and line["attempt"] == 1
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


def test_a_full_pipe_never_blocks_the_caller() -> None:
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
    collected = bytearray()
    while piece := os.read(reader, 1 << 20):  # until the thread has written everything and closed its end
        collected += piece
    os.close(reader)
    lines = [json.loads(line) for line in collected[filled:].splitlines()]
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    told = sum(line["count"] for line in lines if line["event"] == "events_dropped")
    assert told == log.dropped
    assert len([line for line in lines if line["event"] != "events_dropped"]) + told == 5_000


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
    log.emit(Drained())
    assert log.close() is False
    assert logged_errors.texts()
    logged_errors.flush()


def test_events_after_closing_are_counted_only(tmp_path: Path) -> None:
    log = EventLog.to_directory(tmp_path, **WHO)
    log.emit(Drained())
    assert log.close()
    log.emit(Drained())
    assert (log.dropped, log.close(), len(read(tmp_path))) == (1, True, 1)


def test_many_threads_share_one_log(tmp_path: Path) -> None:
    log = EventLog.to_directory(tmp_path, **WHO, rotate_bytes=2_000)

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
from dmsg.ops.events import Refused
from dmsg.ops.logs import EventLog
log = EventLog.to_directory(sys.argv[1], role="server", node="n", boot=sys.argv[2], rotate_bytes=20_000)
told = False
while True:
    log.emit(Refused(0, "", "", "", 0))
    if log.written > 1_000 and not told:
        told = True
        print("busy", flush=True)
"""


@pytest.mark.system
def test_a_killed_writer_leaves_whole_lines_without_gaps(tmp_path: Path) -> None:
    for boot in ("b1", "b2", "b3"):
        with subprocess.Popen([sys.executable, "-c", _VICTIM, str(tmp_path), boot], stdout=subprocess.PIPE) as victim:
            assert victim.stdout is not None and victim.stdout.readline() == b"busy\n"
            victim.send_signal(signal.SIGKILL)
    log = EventLog.to_directory(tmp_path, role="server", node="n", boot="b4")
    log.start()
    assert log.close()
    assert not list(tmp_path.glob("*.part"))
    for boot in ("b1", "b2", "b3"):
        numbers = [line["seq"] for line in read(tmp_path) if line["boot"] == boot]
        assert len(numbers) > 1_000
        assert numbers == list(range(len(numbers)))


# --- in memory -------------------------------------------------------------------------------------------------------


def test_memory_keeps_the_last_events_and_counts_the_rest() -> None:
    log = MemoryEventLog(limit=2)
    for count in (1, 2, 3):
        log.emit(EventsDropped(count))
    assert [event.count for event in log.of(EventsDropped)] == [2, 3]
    assert log.of(Drained) == []
    assert log.dropped == 1


@pytest_twisted.ensureDeferred
async def test_memory_wakes_who_waits_for_a_kind_of_event() -> None:
    log = MemoryEventLog()
    first, second, cancelled = log.next(Drained), log.next(ServerStarted), log.next(Drained)
    cancelled.addErrback(lambda _: None)
    cancelled.cancel()
    log.emit(Drained(3.0))
    log.emit(Drained(4.0))
    assert (await first).elapsed_ms == 3.0
    assert not second.called
    log.emit(ServerStarted("k"))
    assert (await second).public_key == "k"
