"""The program of a child: ``python -m benchmarks.child ROLE OPTIONS`` (see :class:`benchmarks.processes.Child`)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any, Final, Protocol

_PR_SET_PDEATHSIG: Final = 1
#: Niceness on systems without a scheduling class for idle time.
_OTHER_MACHINES_NICE: Final = 19


class Role(Protocol):
    """A role's module has ``async def start(reactor, options)`` giving one of these; ``None`` reactor for raw ones."""

    async def facts(self) -> dict[str, Any]:
        """Facts for the bench once the role is ready."""

    async def do(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command."""


def end_with_parent() -> None:
    """Let the kernel kill this process when the one that started it dies, even while it is stopped. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_dmsg() -> None:
    """Be the ``dmsg`` command with the arguments of this process."""
    end_with_parent()
    from dmsg.cli.main import main as dmsg

    dmsg()


def main() -> None:
    """Run one role until standard input ends."""
    end_with_parent()
    module = importlib.import_module(f"benchmarks.roles.{sys.argv[1]}")
    options = json.loads(sys.argv[2])
    if getattr(module, "STANDS_FOR_OTHER_MACHINES", False):
        _yield_to_others()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # keep other output out of the answers
    if module.USES_TWISTED:
        _run_twisted(module, options, answers)
    else:
        _run_plain(module, options, answers)


def _yield_to_others() -> None:
    """Run only in idle time. Those who flood a server live on other machines; here they share the cores with the clients
    whose tail is measured, and must yield to them at once. The load they make is checked against the requested load.
    """
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(_OTHER_MACHINES_NICE)


def _run_plain(module: Any, options: dict[str, Any], answers: Any) -> None:
    role = module.Role(options)
    _answer(answers, role.facts)
    for line in sys.stdin.buffer:
        arguments = json.loads(line)
        command = arguments.pop("do")
        try:
            answer = role.do(command, arguments)
        except Exception as error:
            answer = {"error": f"{command}: {type(error).__name__}: {error}"}
        _answer(answers, answer)
    role.close()


def _run_twisted(module: Any, options: dict[str, Any], answers: Any) -> None:
    if not options.pop("is_of_others", getattr(module, "IS_OF_OTHERS", False)):
        from dmsg.glue.reactors import install_default

        install_default(os.environ)  # as the role and the command do

    from twisted.internet import reactor, stdio
    from twisted.internet.defer import Deferred, ensureDeferred
    from twisted.internet.protocol import connectionDone
    from twisted.logger import (
        FilteringLogObserver,
        LogLevel,
        LogLevelFilterPredicate,
        globalLogBeginner,
        textFileLogObserver,
    )
    from twisted.protocols.basic import LineReceiver
    from twisted.python.failure import Failure

    from benchmarks.census import census

    quiet = FilteringLogObserver(textFileLogObserver(sys.stderr), [LogLevelFilterPredicate(LogLevel.warn)])
    globalLogBeginner.beginLoggingTo([quiet], redirectStandardIO=False)
    role = module.Role(reactor, options)

    class Commands(LineReceiver):
        delimiter = b"\n"

        def lineReceived(self, line: bytes) -> None:
            ensureDeferred(self._carry_out(json.loads(line)))

        async def _carry_out(self, arguments: dict[str, Any]) -> None:
            command = arguments.pop("do")
            try:
                answer = census(role) if command == "census" else await role.do(command, arguments)
            except Exception as error:
                answer = {"error": f"{command}: {type(error).__name__}: {error}"}
            _answer(answers, answer)

        def connectionLost(self, reason: Failure = connectionDone) -> None:
            if reactor.running:
                reactor.stop()

    async def begin() -> None:
        try:
            facts = await role.start()
        except Exception as error:
            facts = {"error": f"start: {type(error).__name__}: {error}"}
        _answer(answers, facts)
        stdio.StandardIO(Commands())

    def profile(work: Any) -> None:
        path = options.get("profile")
        if not path:
            work()
            return
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(work)
        profiler.dump_stats(path)

    starting: Deferred[None] = Deferred()
    starting.addCallback(lambda _: ensureDeferred(begin()))
    reactor.callWhenRunning(starting.callback, None)
    profile(reactor.run)


def _answer(answers: Any, answer: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        answers.write(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
