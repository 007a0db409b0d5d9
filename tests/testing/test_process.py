"""Programs started by a test: waited for by their output, reported when they fail, never left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

import pytest
import pytest_twisted

from dmsg.testing.process import OUTPUT_LIMIT_BYTES, Process, ProcessFailed, free_port

pytestmark = pytest.mark.system


def python(reactor, source, *arguments, **options):
    return Process(reactor, [sys.executable, "-u", "-c", source, *arguments], **options)


def runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest_twisted.ensureDeferred
async def test_lines_are_found_in_order_on_both_streams(reactor):
    source = "import sys; print('port 1'); print('port 2', file=sys.stderr); print('port 3'); print('x port 4', end='')"
    async with python(reactor, source) as process:
        assert (await process.line(r"port (\d)")).group(1) == "1"
        rest = {(await process.line(r"port (\d)")).group(1) for _ in range(2)}
        assert rest == {"2", "3"}
        assert await process.ended() == 0
        await process.line("^x port 4$")  # ended by the end of the program
        with pytest.raises(ProcessFailed, match="ended without printing 'port 5'"):
            await process.line("port 5")


@pytest_twisted.ensureDeferred
async def test_input_and_exit_status(reactor):
    async with python(reactor, "import sys; print(sys.stdin.read().upper()); sys.exit(7)") as process:
        process.write(b"hello\n")
        process.close_input()
        await process.line("HELLO")
        assert await process.ended() == 7
        process.signal(signal.SIGTERM)  # too late, and silent
    assert process.status == 7


@pytest_twisted.ensureDeferred
async def test_leaving_kills_what_still_runs(reactor):
    source = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf'); signal.pause()"
    async with python(reactor, source) as process:
        await process.line("deaf")
        pid = process.pid
        process.signal(signal.SIGTERM)
        assert runs(pid)
    assert not runs(pid)
    assert process.status == -signal.SIGKILL


@pytest_twisted.ensureDeferred
async def test_what_does_not_come_is_reported_with_the_output(reactor):
    source = "import signal; print('only this'); signal.pause()"
    async with python(reactor, source, patience_s=0.3) as process:
        with pytest.raises(ProcessFailed, match=r"(?s)did not print 'something else' within 0.3 s.*still runs"):
            await process.line("something else")
        with pytest.raises(ProcessFailed, match="did not end within"):
            await process.ended()


@pytest_twisted.ensureDeferred
async def test_a_failing_test_shows_the_output(reactor, capsys):
    with pytest.raises(ZeroDivisionError):
        async with python(reactor, "print('what it said')") as process:
            await process.line("said")
            raise ZeroDivisionError
    assert "what it said" in capsys.readouterr().out


@pytest_twisted.ensureDeferred
async def test_environment_and_directory(reactor, tmp_path):
    source = "import os; print(os.getcwd()); print(os.environ['GREETING'])"
    async with python(reactor, source, environ={"GREETING": "hello"}, directory=tmp_path) as process:
        await process.line(tmp_path.name)
        await process.line("^hello$")
        with pytest.raises(RuntimeError, match="once"):
            process.start()


@pytest_twisted.ensureDeferred
async def test_output_is_bounded(reactor):
    source = f"import sys; sys.stdout.write('x' * {OUTPUT_LIMIT_BYTES}); print('\\ntail')"
    async with python(reactor, source) as process:
        await process.line("^tail$")
        await process.ended()
        assert len(process.output) == OUTPUT_LIMIT_BYTES


def test_a_free_port_can_be_bound_and_is_given_once():
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[-1]))


def test_a_free_port_is_not_one_that_the_system_gives_to_others():
    with contextlib.ExitStack() as held:
        given = [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(20)]
    assert max(free_port() for _ in range(200)) < min(given)


@pytest_twisted.ensureDeferred
async def test_processes_side_by_side_find_other_ports(reactor):
    source = "from dmsg.testing.process import free_port; print(*[free_port() for _ in range(60)])"
    found: list[int] = []
    for _ in range(3):  # this process is no neighbour of theirs
        async with python(reactor, source) as process:
            found += map(int, (await process.line(r"^\d+( \d+)+$")).group().split())
    assert len(set(found)) == 180


def test_a_port_that_listens_is_not_free():
    taken = free_port()
    with socket.create_server(("127.0.0.1", taken + 1)):
        assert free_port() != taken + 1  # which would be next


def test_no_port_of_a_foreign_host_is_free():
    with pytest.raises(OSError, match="Cannot assign"):
        free_port("192.0.2.1")


@pytest_twisted.ensureDeferred
async def test_a_program_has_ended_although_what_it_started_holds_its_output(reactor):
    source = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid); print('x', end='')"
    async with python(reactor, source) as process:
        heir = int((await process.line(r"^(\d+)$")).group(1))
        try:
            assert await process.ended() == 0
            await process.line("^x$")
            assert runs(heir)
        finally:
            os.kill(heir, signal.SIGKILL)
