"""The shipper as a whole: what is here is removed only when it has arrived, also after failures and kills at any time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, execute
from twisted.internet.task import Clock
from twisted.logger import LogLevel, formatEvent, globalLogPublisher

from dmsg.eventlog.schema import FileShipped
from dmsg.sansio.backoff import Backoff
from dmsg.shipping.destinations import Destination
from dmsg.shipping.errors import ShippingError
from dmsg.shipping.local import LocalDestination
from dmsg.shipping.plan import Plan
from dmsg.shipping.scan import Content
from dmsg.shipping.shipper import STUCK_S, Shipper, ShipperConfig, in_daemon_thread
from tests.memory_log import MemoryEventLog

ROOT = Path(__file__).parents[2]


def seqs(landed: dict[str, list[int]]) -> list[int]:
    """The lines of all files, in the order of the files' names."""
    return [seq for file in landed.values() for seq in file]


class Switch:
    """A directory as a destination that fails as it is told to; ``delivered`` is what it was asked for, in order."""

    text = "the target"

    def __init__(self, root: Path) -> None:
        self._inner = LocalDestination(str(root))
        self.error: Callable[[str], Exception | None] = lambda path: None
        self.delivered: list[str] = []

    def deliver(self, path: str, content: Content) -> None:
        self.delivered.append(path)
        error = self.error(path)
        if error is not None:
            raise error
        self._inner.deliver(path, content)


class Bench:
    """A shipper on a clock, whose work is done at once."""

    def __init__(self, tmp_path: Path) -> None:
        self.clock = Clock()
        self.events_dir = tmp_path / "events"
        self.landing = tmp_path / "landing"
        for directory in (self.events_dir, self.landing):
            directory.mkdir()
        self.target = Switch(self.landing)
        self.events = MemoryEventLog()
        self.now = 2_000_000_000.0
        self.shippers: list[Shipper] = []

    def start(
        self, *, destination: Destination | None = None, in_thread: Any = None, parallel: int = 2, **config: Any
    ) -> Shipper:
        settings = ShipperConfig(**{"poll_s": 10.0, **config})
        shipper = Shipper(
            self.clock,
            str(self.events_dir),
            destination or self.target,
            plan=Plan(
                parallel=parallel,
                backoff=Backoff(),
                uniform=lambda: 0.5,
                give_up_after=3 if settings.once else None,
            ),
            in_thread=in_thread or execute,
            unix_time=lambda: self.now,
            events=self.events,
            config=settings,
        )
        self.shippers.append(shipper)
        shipper.start()
        return shipper

    def run(self, seconds: float) -> None:
        """Let time pass, in the steps the shipper asks for."""
        end = self.clock.seconds() + seconds
        while (due := min((call.getTime() for call in self.clock.getDelayedCalls()), default=end)) < end:
            self.clock.advance(max(0.0, due - self.clock.seconds()))
        self.clock.advance(end - self.clock.seconds())

    def told(self) -> list[tuple[bool, str, int]]:
        return [(event.ok, event.reason, event.attempt) for event in self.events.of(FileShipped)]


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    one = Bench(tmp_path)
    yield one
    for shipper in one.shippers:
        shipper.stop()
    assert not one.clock.getDelayedCalls()


def test_what_is_there_and_what_comes_later_is_shipped(bench: Bench, event_file: Any, landed: Any) -> None:
    first = event_file(bench.events_dir, 0)
    shipper = bench.start()
    assert list(landed(bench.landing).values()) == [[0, 1, 2]] and not first.exists()
    second = event_file(bench.events_dir, 1)
    bench.run(9.9)
    assert second.exists(), "it is not looked for all the time"
    bench.run(0.2)
    assert list(landed(bench.landing).values()) == [[0, 1, 2], [1000, 1001, 1002]] and not second.exists()
    [event, _] = bench.events.of(FileShipped)
    assert event.name in landed(bench.landing) and (event.lines, event.ok, event.reason) == (3, True, "")
    assert event.bytes == (bench.landing / event.name).stat().st_size
    assert shipper.problem == ""
    assert shipper.gauges()["shipped_files"] == 2 and shipper.gauges()["backlog_files"] == 0


def test_the_oldest_go_first(bench: Bench, event_file: Any) -> None:
    for number, age in enumerate((5, 1, 9, 3)):
        path = event_file(bench.events_dir, number)
        os.utime(path, (bench.now - age, bench.now - age))
    bench.start(parallel=1)
    assert [path.split("-")[-3] for path in bench.target.delivered] == ["000002", "000000", "000003", "000001"]


def test_a_target_that_is_down_loses_nothing_and_is_not_pestered(bench: Bench, event_file: Any, landed: Any) -> None:
    for number in range(5):
        os.utime(event_file(bench.events_dir, number), (bench.now - 100, bench.now - 100))
    bench.target.error = lambda path: ShippingError("unreachable", "no route")
    shipper = bench.start()
    bench.run(3600)
    tries = len(bench.target.delivered)
    assert 50 <= tries <= 150
    assert len(list(bench.events_dir.rglob("*.zst"))) == 5 and not landed(bench.landing)
    assert shipper.problem == "unreachable: the last file could not be shipped to the target"
    gauges = shipper.gauges()
    assert (gauges["backlog_files"], gauges["oldest_file_age_seconds"]) == (5, 100.0)
    assert gauges["failed_attempts"] == tries
    assert {(ok, reason) for ok, reason, _ in bench.told()} == {(False, "unreachable")}
    bench.target.error = lambda path: None
    bench.run(61)
    assert len(landed(bench.landing)) == 5 and not list(bench.events_dir.rglob("*.zst"))
    assert shipper.problem == ""
    assert max(attempt for ok, _, attempt in bench.told() if ok) > 1


def test_one_bad_file_does_not_stop_the_others(bench: Bench, event_file: Any, landed: Any) -> None:
    for number in range(6):
        os.utime(event_file(bench.events_dir, number), (number, number))
    bench.target.error = lambda path: ShippingError("conflict", "other content") if "-000000-" in path else None
    bench.start(parallel=1)
    assert len(landed(bench.landing)) == 5
    [left] = bench.events_dir.rglob("*.zst")
    assert "-000000-" in left.name
    bench.run(300)
    assert left.exists() and len([one for one in bench.told() if one[1] == "conflict"]) > 5


def test_what_no_library_ought_to_raise_is_a_failure_like_others(
    bench: Bench, event_file: Any, landed: Any, logged_errors: Any
) -> None:
    event_file(bench.events_dir)
    bench.target.error = lambda path: ZeroDivisionError("oops")
    bench.start()
    assert bench.told() == [(False, "failed", 1)] and len(logged_errors.flush(ZeroDivisionError)) == 1
    bench.target.error = lambda path: None
    bench.run(5)
    assert len(landed(bench.landing)) == 1


@pytest.fixture
def warned() -> Any:
    """The texts of the warnings that are logged."""
    texts: list[str] = []

    def observe(event: Any) -> None:
        if event.get("log_level") is LogLevel.warn:
            texts.append(formatEvent(event))

    globalLogPublisher.addObserver(observe)
    yield texts
    globalLogPublisher.removeObserver(observe)


def test_many_files_that_fail_make_one_line_a_minute_for_each_reason(
    bench: Bench, event_file: Any, warned: list[str]
) -> None:
    for number in range(40):
        event_file(bench.events_dir, number)
    reasons = {f"-{number:06d}-": "conflict" if number % 2 else "unreadable" for number in range(40)}
    bench.target.error = lambda path: ShippingError(reasons[path[path.index("-0000") :][:8]], "for a test")
    shipper = bench.start()
    assert len(warned) == 2 and "was not shipped to the target: conflict: for a test" in "\n".join(warned)
    bench.run(600)
    shipper.stop()
    for reason in ("conflict", "unreadable"):
        failures = len([one for one in bench.told() if one[1] == reason])
        lines = [text for text in warned if f": {reason}: for a test" in text]
        assert failures >= 100 and 2 <= len(lines) <= 11
        left_out = [int(count) for text in lines for count in re.findall(r"; (\d+) more like it were not logged", text)]
        [rest] = [text for text in warned if text.endswith(f"more failures were not logged: {reason}")]
        assert failures == len(lines) + sum(left_out) + int(rest.split()[0]), "each is told or counted"
    shipper.stop()
    assert len([text for text in warned if "more failures" in text]) == 2


def test_what_no_library_ought_to_raise_does_not_fill_the_log_either(
    bench: Bench, event_file: Any, logged_errors: Any, warned: list[str]
) -> None:
    for number in range(20):
        event_file(bench.events_dir, number)
    bench.target.error = lambda path: ZeroDivisionError("oops")
    bench.start()
    bench.run(50)
    assert len(bench.told()) > 5
    assert len(warned) == 1 == len(logged_errors.flush(ZeroDivisionError))


def test_files_that_always_fail_are_hardly_tried_in_the_end(bench: Bench, event_file: Any) -> None:
    """Thousands of them would keep a core busy for ever otherwise, and fill the log of events."""
    for number in range(10):
        event_file(bench.events_dir, number)
    bench.target.error = lambda path: ShippingError("unreadable", "for a test")
    shipper = bench.start()
    bench.run(3 * 3600)
    before = shipper.gauges()["failed_attempts"]
    bench.run(3 * 3600)
    assert 10 * 3 <= shipper.gauges()["failed_attempts"] - before <= 10 * 6
    assert len(bench.told()) == shipper.gauges()["failed_attempts"], "an event for each all the same"


def test_a_damaged_file_is_set_aside_and_told_of(
    bench: Bench, event_file: Any, landed: Any, logged_errors: Any
) -> None:
    bad = event_file(bench.events_dir, 0)
    bad.write_bytes(bad.read_bytes()[:-3])
    event_file(bench.events_dir, 1)
    shipper = bench.start()
    assert list(landed(bench.landing).values()) == [[1000, 1001, 1002]]
    assert sorted(bench.told()) == [(False, "damaged", 1), (True, "", 1)]
    assert logged_errors.texts() == ["a damaged file was not shipped: {detail}"]
    logged_errors.flush()
    bench.run(60)
    assert len(bench.target.delivered) == 1 and shipper.gauges()["damaged_files"] == 1
    assert shipper.problem == "", "it can ship"
    assert len([path for path in (bench.events_dir / ".damaged").rglob("*") if path.is_file()]) == 1


def test_its_own_files_are_shipped_without_a_word(bench: Bench, event_file: Any, landed: Any) -> None:
    """Otherwise each file would make an event, that event a file, and so on."""
    event_file(bench.events_dir, role="shipper")
    shipper = bench.start()
    assert len(landed(bench.landing)) == 1 and bench.told() == []
    assert shipper.gauges()["shipped_files"] == 1


def test_a_directory_that_is_missing_is_waited_for(bench: Bench, event_file: Any, landed: Any) -> None:
    bench.events_dir.rmdir()
    shipper = bench.start()
    assert "cannot be read" in shipper.problem
    event_file(bench.events_dir)
    bench.run(11)
    assert len(landed(bench.landing)) == 1 and shipper.problem == ""


def test_kept_files_are_moved_aside(bench: Bench, event_file: Any, landed: Any) -> None:
    event_file(bench.events_dir)
    bench.start(keep=True)
    assert landed(bench.events_dir / ".shipped") == landed(bench.landing) != {}
    bench.run(60)
    assert len(bench.target.delivered) == 1


@pytest.mark.parametrize("failing", ["nothing", "one file", "the target", "the directory"])
def test_once(bench: Bench, event_file: Any, landed: Any, failing: str) -> None:
    for number in range(4):
        event_file(bench.events_dir, number)
    if failing == "one file":
        bench.target.error = lambda path: ShippingError("conflict", "x") if "-000000-" in path else None
    if failing == "the target":
        bench.target.error = lambda path: ShippingError("denied", "x")
    if failing == "the directory":
        bench.events_dir.rename(bench.events_dir.with_name("elsewhere"))
    shipper = bench.start(once=True)
    results: list[bool] = []
    shipper.done.addCallback(results.append)
    bench.run(600)
    assert results == [failing == "nothing"]
    assert len(landed(bench.landing)) == {"nothing": 4, "one file": 3}.get(failing, 0)
    assert len(bench.target.delivered) <= 6


def test_once_damaged_files_count(bench: Bench, event_file: Any, logged_errors: Any) -> None:
    event_file(bench.events_dir, says=9)
    results: list[bool] = []
    bench.start(once=True).done.addCallback(results.append)
    assert results == [False]
    logged_errors.flush()


def test_stopping_begins_nothing_more_and_lets_the_rest_finish(bench: Bench, event_file: Any, landed: Any) -> None:
    for number in range(5):
        event_file(bench.events_dir, number)
    work: list[tuple[Callable[[], Any], Deferred[Any]]] = []

    def in_thread(function: Callable[[], Any]) -> Deferred[Any]:
        done: Deferred[Any] = Deferred()
        work.append((function, done))
        return done

    def do() -> None:
        function, done = work.pop(0)
        done.callback(function())

    shipper = bench.start(in_thread=in_thread, parallel=2)
    do()
    assert shipper.in_flight == 2 == len(work)
    bench.run(STUCK_S + 1)
    assert shipper.problem == "the target does not answer"
    shipper.stop()
    do()
    do()
    assert shipper.in_flight == 0 and len(work) <= 1, "at most a look at the directory"
    assert len(landed(bench.landing)) == 2 and len(list(bench.events_dir.rglob("*.zst"))) == 3


class Held:
    """Work that is done when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], Any], Deferred[Any]]] = []

    def __call__(self, function: Callable[[], Any]) -> Deferred[Any]:
        done: Deferred[Any] = Deferred()
        self.waiting.append((function, done))
        return done

    def go(self) -> None:
        """Do what has waited longest."""
        function, done = self.waiting.pop(0)
        execute(function).chainDeferred(done)


def test_who_waits_for_the_attempts_under_way_is_told_when_the_last_one_has_ended(
    bench: Bench, event_file: Any
) -> None:
    for number in range(3):
        event_file(bench.events_dir, number)
    held = Held()
    shipper = bench.start(in_thread=held, parallel=2)
    assert shipper.problem == "starting"
    held.go()
    assert shipper.problem == "" and shipper.in_flight == 2
    shipper.stop()
    waited = Deferred.fromCoroutine(shipper.when_none_in_flight(30))
    held.go()
    assert shipper.in_flight == 1 and not waited.called
    held.go()
    assert shipper.in_flight == 0 and waited.called
    assert not bench.clock.getDelayedCalls(), "a shipper that was stopped begins nothing more"
    assert Deferred.fromCoroutine(shipper.when_none_in_flight(30)).called


def test_with_once_there_is_nothing_to_come_back_for_while_the_last_files_are_under_way(
    bench: Bench, event_file: Any
) -> None:
    event_file(bench.events_dir)
    held = Held()
    shipper = bench.start(in_thread=held, once=True)
    held.go()
    assert shipper.in_flight == 1 and not bench.clock.getDelayedCalls()
    held.go()
    assert shipper.done.result is True


def test_events_tell_how_long_an_attempt_took(bench: Bench, event_file: Any) -> None:
    event_file(bench.events_dir)
    held = Held()
    bench.clock.advance(1000)
    bench.start(in_thread=held)
    held.go()
    bench.target.error = lambda path: ShippingError("unreachable", "no route")
    bench.clock.advance(2.5)
    held.go()
    bench.target.error = lambda path: None
    bench.clock.advance(5)
    bench.clock.advance(1.5)
    held.go()
    assert [event.elapsed_ms for event in bench.events.of(FileShipped)] == [2500, 1500]


def test_what_is_no_file_of_a_log_is_told_of_when_it_comes_and_not_when_it_goes(
    bench: Bench, warned: list[str]
) -> None:
    (bench.events_dir / "notes").write_text("not ours")
    shipper = bench.start()
    bench.run(60)
    assert shipper.gauges()["foreign_files"] == len(warned) == 1
    (bench.events_dir / "notes").unlink()
    bench.run(60)
    assert shipper.gauges()["foreign_files"] == 0 and len(warned) == 1


def test_two_shippers_on_one_directory_do_no_harm(bench: Bench, event_file: Any, landed: Any) -> None:
    """The other has looked at the same files, and ships each one in the midst of ours."""
    for number in range(4):
        event_file(bench.events_dir, number)
    other = Switch(bench.landing)
    busy = False

    def meanwhile(path: str) -> None:
        nonlocal busy
        if not busy:
            busy = True
            bench.start(destination=other)

    bench.target.error = meanwhile
    bench.start()
    bench.run(30)
    assert seqs(landed(bench.landing)) == [1000 * number + one for number in range(4) for one in range(3)]
    assert not list(bench.events_dir.rglob("*.zst"))


def test_a_file_that_is_deleted_while_it_is_shipped_is_no_failure(bench: Bench, event_file: Any, landed: Any) -> None:
    """The writer does that when nothing was shipped for so long that its directory is full."""
    source = event_file(bench.events_dir)

    def meanwhile(path: str) -> None:
        source.unlink()

    bench.target.error = meanwhile
    shipper = bench.start()
    bench.run(60)
    assert bench.told() == [] and shipper.problem == "" and len(bench.target.delivered) == 1
    assert not landed(bench.landing)


@pytest_twisted.ensureDeferred
async def test_threads_bring_back_results_and_errors(reactor: Any) -> None:
    in_thread = in_daemon_thread(reactor)
    assert await in_thread(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)


@pytest_twisted.ensureDeferred
async def test_a_machine_without_room_for_a_thread_holds_shipping_up_and_does_not_end_it(
    bench: Bench, event_file: Any, landed: Any, reactor: Any
) -> None:
    event_file(bench.events_dir, 0)
    work: list[Deferred[Any]] = []

    def in_thread(function: Callable[[], Any]) -> Deferred[Any]:
        work.append(in_daemon_thread(reactor)(function))
        return work[-1]

    async def done() -> None:
        while work:
            await work.pop()

    shipper = bench.start(in_thread=in_thread)
    await done()
    await done()
    event_file(bench.events_dir, 1)
    stack_bytes = threading.stack_size(2**46)
    try:
        bench.run(10)
        assert shipper.problem and len(landed(bench.landing)) == 1
    finally:
        threading.stack_size(stack_bytes)
    bench.run(10)
    await done()
    await done()
    assert len(landed(bench.landing)) == 2 and not shipper.problem


# --- killed ------------------------------------------------------------------------------------------------------------

#: Ships a directory and kills itself with SIGKILL at one point.
KILLED = """
import dataclasses, os, signal, sys
from dmsg.shipping import local as destination_local
from dmsg.shipping import shipper
from dmsg.shipping.local import LocalDestination, Standing

directory, landing, point = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Dying:
    def __init__(self, file):
        self.file, self.left = file, 2
    def read(self, size):
        self.left -= 1
        return self.file.read(1000) if self.left else die()
    def __enter__(self):
        return self
    def __exit__(self, *_):
        self.file.close()

class Target(LocalDestination):
    def deliver(self, path, content):
        if point == "in mid-upload":
            real = content.open
            class Half(type(content)):
                __slots__ = ()
                def open(self):
                    return Dying(real())
            content = Half(**{f.name: getattr(content, f.name) for f in dataclasses.fields(content)})
        super().deliver(path, content)
        if point == "after verification, before removal":
            die()
    def publish(self, staging, final):
        if point == "after upload, before its name":
            die()
        if point == "between its two names":
            os.unlink = lambda path: die()
        super().publish(staging, final)
        if point == "after its name, before verification":
            die()
    def standing(self, path, content):
        if point == "before upload":
            die()
        return super().standing(path, content)

if point == "after removal":
    real = shipper.release
    def release(*args, **more):
        real(*args, **more)
        die()
    shipper.release = release
target = Target(landing)
for path, _, names in os.walk(directory):
    for name in sorted(names):
        shipper.ship(directory, os.path.relpath(os.path.join(path, name), directory), target, keep=False)
"""
POINTS = [
    "before upload",
    "in mid-upload",
    "after upload, before its name",
    "between its two names",
    "after its name, before verification",
    "after verification, before removal",
    "after removal",
]


@pytest.mark.parametrize("point", POINTS)
def test_killed_at_any_point_nothing_is_lost(point: str, bench: Bench, event_file: Any, landed: Any) -> None:
    sources = [event_file(bench.events_dir, number, pad=5000) for number in range(3)]
    expected = [1000 * number + one for number in range(3) for one in range(3)]
    command = [sys.executable, "-c", KILLED, str(bench.events_dir), str(bench.landing), point]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    there = landed(bench.landing)
    for number, source in enumerate(sources):
        lines = [1000 * number + one for one in range(3)]
        assert source.exists() or lines in there.values(), "what is gone here is there, whole"
    assert len(there) == (point in POINTS[3:])
    assert len([source for source in sources if source.exists()]) == 3 - (point == "after removal")
    bench.start()
    assert seqs(landed(bench.landing)) == expected
    names = [path.name for path in bench.landing.rglob("*") if path.is_file()]
    assert len(names) == 3 and not [name for name in names if name.startswith(".")]
    assert not [path for path in bench.events_dir.rglob("*") if path.is_file()]
