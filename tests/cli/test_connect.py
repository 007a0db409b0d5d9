"""``dmsg connect``: standard input and output over dmsg."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionLost
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import Factory, Protocol
from twisted.internet.threads import deferToThread
from zope.interface import implementer

from dmsg.cli.channel import TransportBroken
from dmsg.cli.commands import group
from dmsg.cli.connect import StandardStreams, _WatchedEnd, run_connect
from dmsg.cli.exits import CommandError, Exit, exit_code
from dmsg.cli.ping import Echo, run_echo
from dmsg.cli.tunnels import run_expose, run_forward
from dmsg.clients.access import AllowKeys
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.errors import DialError

both_protocols = pytest.mark.parametrize("bench", [None, "messaging"], indirect=True)


def everything(descriptor, count=None):
    """Read ``count`` bytes, or all to the end."""
    heard = b""
    while (count is None or len(heard) < count) and (part := os.read(descriptor, 65536)):
        heard += part
    return heard


class Program:
    """The program around ``dmsg connect PEER``: writes its standard input, and reads its standard output."""

    def __init__(self, bench, peer, *, terminal=False, stdin=None, stdout=None, **options):
        if stdin is None:
            self.writes, stdin = os.openpty() if terminal else reversed(os.pipe())
        if stdout is None:
            self.reads, stdout = os.pipe()
        self.descriptors = (stdin, stdout)
        self.command = bench.start(run_connect, PublicKey.parse(str(peer)), stdin=stdin, stdout=stdout, **options)

        def over(outcome):
            assert all(map(os.get_blocking, self.descriptors)), "as they were"
            for one in self.descriptors:
                os.close(one)
            return outcome

        self.ended = self.command.ended = self.command.ended.addBoth(over)

    def say(self, data, *, last=False):
        def write():
            sent = 0
            while sent < len(data):
                sent += os.write(self.writes, data[sent:])
            if last:
                os.close(self.writes)

        return deferToThread(write)

    def hear(self, count=None):
        """``count`` bytes, or all to the end."""
        return deferToThread(everything, self.reads, count)

    def hang_up(self):
        os.close(self.reads)

    def leave(self):
        self.hang_up()
        os.close(self.writes)


class Speaker(Protocol):
    """Is told what to do from outside; ``made`` fires when it is connected."""

    def __init__(self):
        self.made = Deferred()
        self.heard = b""
        self.ended = Deferred()
        self.reason = None

    def connectionMade(self):
        self.made.callback(None)

    def dataReceived(self, data):
        self.heard += data

    def connectionLost(self, reason):
        self.reason = reason
        if not self.ended.called:
            self.ended.callback(None)


@implementer(IHalfCloseableProtocol)
class HalfSpeaker(Speaker):
    """``ended`` fires at the end of what comes in."""

    def readConnectionLost(self):
        self.ended.callback(None)

    def writeConnectionLost(self):
        pass


async def listening(bench, protocol, **options):
    client = await bench.client(publish=True) if bench.protocol == "dmsg" else await bench.client()
    client.listen(Factory.forProtocol(lambda: protocol), **options)
    return client.public_key


@both_protocols
@pytest_twisted.ensureDeferred
async def test_what_is_said_comes_back(bench):
    echo = bench.start(run_echo)
    program = Program(bench, (await echo.ready())["public_key"])
    data = os.urandom(3 * 1024 * 1024)
    saying = program.say(data)
    assert await program.hear(len(data)) == data
    await saying
    await program.say(b"", last=True)
    assert await program.hear() == b""
    await program.ended
    program.hang_up()


@pytest_twisted.ensureDeferred
async def test_all_of_the_answer_arrives_after_the_end_of_standard_input(bench):
    speaker = HalfSpeaker()
    program = Program(bench, await listening(bench, speaker))
    await program.say(b"a question", last=True)
    await speaker.ended
    assert speaker.heard == b"a question"
    answer = os.urandom(1024 * 1024)
    speaker.transport.write(answer)
    speaker.transport.loseConnection()
    assert await program.hear() == answer
    await program.ended
    program.hang_up()


@pytest_twisted.ensureDeferred
async def test_the_reader_sees_an_end_although_the_peer_goes_on_listening(bench):
    speaker = HalfSpeaker()
    program = Program(bench, await listening(bench, speaker))
    await speaker.made
    speaker.transport.write(b"that is all")
    speaker.transport.loseWriteConnection()
    assert await program.hear() == b"that is all"
    assert not program.ended.called
    await program.say(b"thank you", last=True)
    await speaker.ended
    assert speaker.heard == b"thank you"
    await program.ended
    program.hang_up()


@both_protocols
@pytest_twisted.ensureDeferred
async def test_at_a_terminal_the_command_ends_when_the_peer_closes(bench):
    speaker = Speaker()
    program = Program(bench, await listening(bench, speaker), terminal=True)
    await speaker.made
    speaker.transport.write(b"bye")
    speaker.transport.loseConnection()
    assert await program.hear() == b"bye"
    await program.ended
    program.leave()


@both_protocols
@pytest_twisted.ensureDeferred
async def test_what_was_cut_off_is_written_and_the_exit_code_tells(bench):
    speaker = Speaker()
    program = Program(bench, await listening(bench, speaker))
    await speaker.made
    speaker.transport.write(b"half a sen")
    assert await program.hear(10) == b"half a sen"
    speaker.transport.abortConnection()
    assert await program.hear() == b""
    with pytest.raises(TransportBroken, match=r"^the transport was cut off: [a-z_ ]+$") as caught:
        await program.ended
    assert exit_code(caught.value) == Exit.FAILED
    program.leave()


@pytest_twisted.ensureDeferred
async def test_the_reader_of_standard_output_goes(bench):
    speaker = Speaker()
    program = Program(bench, await listening(bench, speaker))
    await speaker.made
    speaker.transport.write(b"hello")
    assert await program.hear(5) == b"hello"
    program.hang_up()
    with pytest.raises(CommandError, match="nothing can be written to standard output"):
        await program.ended
    await speaker.ended
    os.close(program.writes)


@pytest.mark.parametrize("end", ["loseWriteConnection", "loseConnection"])
@pytest_twisted.ensureDeferred
async def test_a_full_disk_is_told_although_the_peer_has_said_everything(reactor, end):
    near = _WatchedEnd()
    (stdin, says), stdout = os.pipe(), os.open("/dev/full", os.O_WRONLY)
    streams = StandardStreams(near, stdin, stdout, reactor)
    streams.write(b"the end of it")
    getattr(streams, end)()
    await near.over
    with pytest.raises(CommandError, match="nothing can be written to standard output"):
        raise near.cut
    for one in (stdin, says, stdout):
        os.close(one)


@pytest.mark.parametrize("end", ["loseWriteConnection", "loseConnection", "abortConnection"])
@pytest_twisted.ensureDeferred
async def test_a_slow_reader_gets_all_that_arrived_however_the_peer_ended(reactor, end):
    near = _WatchedEnd()
    (stdin, says), (reads, stdout) = os.pipe(), os.pipe()
    streams = StandardStreams(near, stdin, stdout, reactor)
    data = os.urandom(1024 * 1024)  # a pipe holds 64 KiB
    streams.write(data)
    getattr(streams, end)()
    assert await deferToThread(everything, reads) == data
    streams.stop()
    await near.over
    for one in (stdin, says, reads, stdout):
        os.close(one)


@pytest_twisted.ensureDeferred
async def test_standard_input_that_cannot_be_read_is_no_end(bench, tmp_path):
    speaker = HalfSpeaker()
    program = Program(bench, await listening(bench, speaker), stdin=os.open(tmp_path, os.O_RDONLY))
    await speaker.ended
    assert speaker.reason is not None and speaker.reason.check(ConnectionLost)
    with pytest.raises(CommandError, match="standard input cannot be read"):
        await program.ended
    program.hang_up()


@pytest_twisted.ensureDeferred
async def test_one_socket_for_both_has_two_ends(bench):
    """As under inetd. Closing standard output would end nothing, because standard input is the same socket."""
    speaker = HalfSpeaker()
    ours, theirs = socket.socketpair()
    stdin = theirs.detach()
    program = Program(bench, await listening(bench, speaker), stdin=stdin, stdout=os.dup(stdin))
    program.reads = ours.fileno()
    await speaker.made
    speaker.transport.write(b"that is all")
    speaker.transport.loseWriteConnection()
    assert await program.hear() == b"that is all"
    assert not program.ended.called
    ours.sendall(b"thank you")
    ours.shutdown(socket.SHUT_WR)
    await speaker.ended
    assert speaker.heard == b"thank you"
    await program.ended
    ours.close()


@pytest_twisted.ensureDeferred
async def test_a_peer_that_is_not_there(bench):
    program = Program(bench, SecretKey.generate().public_key)
    with pytest.raises(DialError):
        await program.ended
    program.leave()


@pytest_twisted.ensureDeferred
async def test_an_interrupted_command_cuts_the_transport_off(bench):
    speaker = Speaker()
    program = Program(bench, await listening(bench, speaker))
    await speaker.made
    await program.command.stop()
    await speaker.ended
    assert speaker.reason.check(ConnectionLost)
    program.leave()


@pytest_twisted.ensureDeferred
async def test_a_service_is_asked_for(bench):
    speaker = Speaker()
    key, file = bench.key("caller")
    peer = await listening(bench, speaker, service="talk", policy=AllowKeys((key.public_key,)))
    program = Program(bench, peer, service="talk", key_file=file)
    await speaker.made
    assert speaker.transport.getPeer().public_key == key.public_key
    await program.say(b"", last=True)
    await program.hear()
    await program.ended
    program.hang_up()


@pytest_twisted.ensureDeferred
async def test_as_a_command_between_a_file_and_a_pipe(bench, tmp_path):
    """Regular files cannot be polled."""
    factory = Factory.forProtocol(Echo)
    factory.noisy = False
    port = bench.reactor.listenTCP(0, factory, interface="127.0.0.1")
    expose = bench.start(run_expose, f"tcp:127.0.0.1:{port.getHost().port}")
    peer = (await expose.ready())["public_key"]
    data = os.urandom(2 * 1024 * 1024)
    (tmp_path / "said").write_bytes(data)
    [pin] = bench.pinned

    def run(**output):
        with open(tmp_path / "said", "rb") as said:
            return subprocess.run(
                [sys.executable, "-m", "dmsg.cli.main", "connect", peer, "--server", str(pin)],
                stdin=said,
                timeout=60,
                check=False,
                **output,
            )

    ended = await deferToThread(run, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, data, b"")
    with open(tmp_path / "heard", "wb") as heard:
        ended = await deferToThread(run, stdout=heard, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert (tmp_path / "heard").read_bytes() == data
    await port.stopListening()


@pytest_twisted.ensureDeferred
async def test_forward_says_who_uses_standard_input(bench):
    with pytest.raises(CommandError, match="dmsg connect"):
        await bench.run(run_forward, SecretKey.generate().public_key, "stdio:")


def test_the_help_shows_it():
    assert "connect" in group.list_commands(None)
