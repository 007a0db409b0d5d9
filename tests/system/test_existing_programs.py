"""``twistd words`` and ``twistd mail``, unmodified, listen on dmsg."""

from __future__ import annotations

import signal

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.endpoints import clientFromString, connectProtocol
from twisted.internet.protocol import Protocol

from dmsg.testing.network import LocalNetwork

pytestmark = pytest.mark.system


class Caller(Protocol):
    """Says something; ``answered`` fires when ``expected`` came."""

    def __init__(self, saying: bytes, expected: bytes) -> None:
        self.saying = saying
        self.expected = expected
        self.heard = b""
        self.answered: Deferred[None] = Deferred()

    def connectionMade(self) -> None:
        self.transport.write(self.saying)

    def dataReceived(self, data: bytes) -> None:
        self.heard += data
        if self.expected in self.heard and not self.answered.called:
            self.answered.callback(None)


@pytest_twisted.ensureDeferred
async def test_chat_and_mail(reactor, start, secret_of, tmp_path):
    keys = {name: secret_of(name) for name in ("chat", "pop3", "smtp")}
    async with LocalNetwork(reactor, relays=1, discovery=None) as network:
        how = network.endpoint_arguments
        chat, pop3, smtp = (f"dmsg:key={file}:{how}" for file, _ in keys.values())
        twistd = ("twistd", "-n", "--pidfile=")
        programs = [
            start(*twistd, "words", "--irc-port", chat, "--auth", "memory:alice:secret"),
            start(
                *twistd,
                "mail",
                "--pop3",
                pop3,
                "--smtp",
                smtp,
                "--maildirdbmdomain",
                f"example.org={tmp_path / 'mail'}",
            ),
        ]
        for program, names in zip(programs, (("chat",), ("pop3", "smtp")), strict=True):
            for name in names:
                await program.saw(f"is reached as dmsg:{keys[name][1]}")
        for name, saying, expected in (
            ("chat", b"NICK alice\r\nUSER alice 0 * :Alice\r\n", b"Password?"),
            ("pop3", b"CAPA\r\n", b"+OK"),
            ("smtp", b"HELO there\r\n", b"250"),
        ):
            endpoint = clientFromString(reactor, f"dmsg:{keys[name][1]}:{how}")
            caller = await connectProtocol(endpoint, Caller(saying, expected))
            await caller.answered
            caller.transport.loseConnection()
        for program in programs:
            program.kill(signal.SIGTERM)
            await program.ended()
            assert "Traceback" not in program.output, program.output
