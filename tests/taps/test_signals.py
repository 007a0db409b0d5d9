"""No signal but KILL ends a role in any other way than TERM does: it drains, tells so, and ends with status 0."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dmsg.crypto.keys import SecretKey
from dmsg.taps._signals import ENDING, NOTED, end_well_on_signals, note_signals
from dmsg.testing.process import free_port

from .conftest import Program
from .test_twistd import RUNNERS, get

Start = Callable[..., Program]
KEY = SecretKey(b"\x12" * 32)
#: All that would end a program which says nothing about it, and what Python ignores.
DEADLY = "SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGVTALRM SIGPROF SIGIO SIGSTKFLT SIGABRT SIGTRAP SIGSYS SIGRTMIN SIGRTMIN+7 SIGRTMAX"
HARMLESS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGURG, signal.SIGWINCH, signal.SIGCONT)


def number_of(name: str) -> int:
    base, _, more = name.partition("+")
    return int(getattr(signal, base)) + int(more or 0)


def arguments(role: str, key_file: Any, tmp_path: Any) -> tuple[list[str], int]:
    """How ``role`` is started, and the port of its admin site."""
    admin = free_port()
    listen = ["--listen", f"tcp:{free_port()}:interface=127.0.0.1"]
    line = {
        "dmsg-server": ["--key", str(key_file(KEY)), *listen],
        "dmsg-discovery": ["--store", f"sqlite:{tmp_path}/entries.db", *listen],
        "dmsg-shipper": ["--from", str(tmp_path / "from"), "--to", str(tmp_path / "to")],
    }[role]
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    return [role, *line, "--events", "-", "--admin", f"tcp:{admin}:interface=127.0.0.1"], admin


@pytest.mark.system
@pytest.mark.time_limit(90)
@pytest.mark.parametrize("role", ["dmsg-server", "dmsg-discovery", "dmsg-shipper"])
@pytest.mark.parametrize(
    ("runner", "last"), [(RUNNERS[0], signal.SIGINT), (RUNNERS[1], signal.SIGQUIT)], ids=["twistd-INT", "twist-QUIT"]
)
def test_a_role_notes_signals_and_ends_as_on_sigterm(
    start: Start, key_file: Any, tmp_path: Any, role: str, runner: tuple[str, ...], last: int
) -> None:
    line, admin = arguments(role, key_file, tmp_path)
    program = start(*runner, *line)
    program.wait_for(f"{role} runs, ")
    for name in DEADLY.split():
        program.send(number_of(name))
        program.wait_for(f"{name} changes nothing")
    for number in HARMLESS:
        program.send(number)
    program.send(signal.SIGHUP)
    program.wait_for_many("SIGHUP changes nothing", 2)
    assert get(admin, "/livez") == (200, {"status": "alive"})
    program.send(last)
    assert program.wait() == 0
    assert '"event":"server_stopped","v":1' in program.text
    assert ('"event":"drained"' in program.text) == (role != "dmsg-shipper")
    assert "Traceback" not in program.text


@pytest.mark.system
@pytest.mark.parametrize("when", ["starting on ", "dmsg-server runs, "])
def test_a_signal_that_comes_early_or_again_and_again_changes_nothing(
    start: Start, key_file: Any, tmp_path: Any, when: str
) -> None:
    line, _ = arguments("dmsg-server", key_file, tmp_path)
    program = start(*RUNNERS[0], *line)
    program.wait_for(when)
    program.send(signal.SIGINT if when == "starting on " else signal.SIGTERM)
    while program.is_running:
        program.send(signal.SIGTERM)
    assert program.wait() == 0 and "Traceback" not in program.text, program.text


def test_every_signal_is_accounted_for() -> None:
    never_ending = {"SIGKILL", "SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU"}
    of_a_broken_program = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"}
    left = set(range(1, signal.NSIG)) & signal.valid_signals() - set(NOTED) - set(ENDING) - set(HARMLESS)
    assert {signal.Signals(number).name for number in left} == never_ending | of_a_broken_program


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*NOTED, *ENDING)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Reactor:
    """Takes what a handler hands over."""

    def __init__(self) -> None:
        self.stops = 0
        self.calls = 0

    def callFromThread(self, function: Callable[..., object], *arguments: object) -> None:
        self.calls += 1
        function(*arguments)

    def stop(self) -> None:
        self.stops += 1


@pytest.mark.usefixtures("handlers")
def test_handlers_and_ignored_signals_are_left_alone() -> None:
    def rotate(number: int, frame: object) -> None:
        rotated.append(number)

    rotated: list[int] = []
    signal.signal(signal.SIGUSR1, rotate)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, rotate)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    reactor = Reactor()
    note_signals(reactor)
    end_well_on_signals(reactor)
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(number)
    assert (rotated, reactor.calls) == ([signal.SIGUSR1, signal.SIGINT], 0)
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGQUIT)
    assert (reactor.calls, reactor.stops) == (2, 1)


@pytest.mark.usefixtures("handlers")
def test_another_thread_sets_no_handlers() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    thread = threading.Thread(target=note_signals, args=(Reactor(),))
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGUSR2) is before
