"""Programs that answer requests."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred

from dmsg.cli.rmb.programs import Program, ProgramFailed

DEFAULTS = {"time_limit_s": 20.0, "output_limit_bytes": 1 << 20}


def python(source: str, reactor: Any, **options: Any) -> Program:
    return Program(reactor, [sys.executable, "-c", source], **{**DEFAULTS, **options})


@pytest_twisted.ensureDeferred
async def test_it_gets_the_payload_and_gives_the_answer(reactor: Any) -> None:
    program = Program(reactor, ["cat"], **DEFAULTS)
    payload = bytes(range(256)) * 4000
    assert await program.run(payload, {}) == payload
    assert await program.run(b"", {}) == b""


@pytest_twisted.ensureDeferred
async def test_it_knows_who_asks(reactor: Any) -> None:
    program = python("import os; print(os.environ['RMB_SOURCE'], end='')", reactor)
    assert await program.run(b"", {"RMB_SOURCE": "7:a"}) == b"7:a"


@pytest_twisted.ensureDeferred
async def test_it_need_not_read_its_input(reactor: Any) -> None:
    assert await python("print('done', end='')", reactor).run(bytes(1 << 20), {}) == b"done"


@pytest_twisted.ensureDeferred
async def test_what_no_environment_holds_is_a_failure_like_others(reactor: Any) -> None:
    with pytest.raises(ProgramFailed, match="cannot be run"):
        await Program(reactor, ["cat"], **DEFAULTS).run(b"", {"RMB_SCHEMA": "a\0b"})


async def failed(program: Program, **options: Any) -> ProgramFailed:
    with pytest.raises(ProgramFailed) as caught:
        await program.run(b"", {}, **options)
    return caught.value


@pytest_twisted.ensureDeferred
async def test_an_exit_status_is_a_failure_with_the_last_of_what_it_said(reactor: Any) -> None:
    source = "import sys; print('answer'); print('x' * 10000 + ' disk is\\n full', file=sys.stderr); sys.exit(3)"
    error = await failed(python(source, reactor))
    assert error.status == 3
    assert error.text.startswith("the program ended with 3: xxx") and error.text.endswith("x disk is full")
    assert len(error.text) < 600
    assert (await failed(python("import os; os.kill(os.getpid(), 15)", reactor))).text.endswith("by signal 15")


@pytest_twisted.ensureDeferred
async def test_an_endless_answer_is_cut_off(reactor: Any) -> None:
    error = await failed(Program(reactor, ["yes"], **{**DEFAULTS, "output_limit_bytes": 100_000}))
    assert error.text == "the program wrote more than 100000 bytes"


@pytest_twisted.ensureDeferred
async def test_a_program_that_takes_too_long_is_killed(reactor: Any) -> None:
    # its child keeps the output open
    sleeper = Program(reactor, ["sh", "-c", "sleep 5 & sleep 5"], **DEFAULTS)
    assert (await failed(sleeper, time_limit_s=0.05)).text == "the program took longer than 0.05 s"


@pytest_twisted.ensureDeferred
async def test_cancelling_kills_it(reactor: Any) -> None:
    running = Deferred.fromCoroutine(Program(reactor, ["sleep", "1000"], **DEFAULTS).run(b"", {}))
    running.cancel()
    with pytest.raises(ProgramFailed, match="the program was stopped"):
        await running


@pytest_twisted.ensureDeferred
async def test_a_program_that_is_not_there_is_a_failure(reactor: Any) -> None:
    error = await failed(Program(reactor, ["/nowhere/at/all"], **DEFAULTS))
    assert "program" in error.text
