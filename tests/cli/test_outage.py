"""What a command that listens tells when it has lost all its servers."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.endpoints import TCP4ServerEndpoint
from twisted.internet.task import Clock

from dmsg.cli import outage
from dmsg.cli.files.receive import Rules, run_receive
from dmsg.cli.outage import LOOK_S, OutageWatch
from dmsg.cli.output import Output
from dmsg.cli.ping import run_echo
from dmsg.cli.tunnels import run_expose
from dmsg.messaging.relay.service import MessagingRelay
from dmsg.mux.relay.service import DmsgRelay


class Watched:
    """A watch over some sessions, and what it tells people or programs."""

    def __init__(self, *, json_lines: bool = False) -> None:
        self.clock = Clock()
        self.sessions = {"one"}
        self.failure: tuple[str, str] | None = ("03" * 33, "refused")
        self.results, self.notes = io.StringIO(), io.StringIO()
        out = Output(self.results, self.notes, json_lines=json_lines)
        self.watch = OutageWatch(self.sessions, lambda: self.failure, out, self.clock)
        self.watch.start()

    def after(self, looks: float) -> list[str]:
        """The notes after some more looks, and what came before."""
        for _ in range(round(looks * 2)):
            self.clock.advance(LOOK_S / 2)
        return self.notes.getvalue().splitlines()


def test_an_outage_is_told_once_and_so_is_its_end() -> None:
    watched = Watched()
    assert watched.after(9) == []
    watched.sessions.clear()
    assert watched.after(1) == []
    told = ["no server is connected any more: 030303030303… refused"]
    assert watched.after(1) == watched.after(99) == told
    watched.sessions.add("another")
    told.append("a server is connected again")
    assert watched.after(1) == watched.after(99) == told
    watched.sessions.clear()
    watched.failure = None
    assert watched.after(99) == [*told, "no server is connected any more"]
    watched.watch.stop()
    assert not watched.clock.getDelayedCalls()


def test_a_server_that_is_replaced_soon_is_no_outage() -> None:
    watched = Watched()
    for _ in range(9):
        watched.sessions.clear()
        watched.after(1)
        watched.sessions.add("another")
        watched.after(1)
    assert watched.notes.getvalue() == ""


def test_programs_are_told_of_an_outage_in_objects() -> None:
    watched = Watched(json_lines=True)
    watched.sessions.clear()
    watched.after(2)
    watched.sessions.add("another")
    watched.after(1)
    failed, connected = map(json.loads, watched.results.getvalue().splitlines())
    assert failed == {
        "event": "failed",
        "error": "CommandError",
        "message": "no server is connected any more: 030303030303… refused",
        "server": "03" * 33,
        "reason": "refused",
    }
    assert connected == {"event": "connected"}
    assert watched.notes.getvalue() == ""


@pytest.mark.parametrize("bench", [None, "messaging"], indirect=True)
@pytest_twisted.ensureDeferred
async def test_each_command_that_listens_tells_that_its_server_is_gone_and_back(
    bench: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "LOOK_S", 0.1)
    (relay,), (place,) = bench.relays, list(bench.pinned)
    commands = [
        bench.start(run_echo),
        bench.start(run_receive, Rules(tmp_path, 1000)),
        bench.start(run_expose, "tcp:127.0.0.1:9"),
    ]
    for command in commands:
        await command.ready()
    await bench.network.stop_relay(relay)
    for command in commands:
        told = await command.stdout.wait_for(event="failed", server=str(place.public_key))
        assert told["message"].startswith(f"no server is connected any more: {str(place.public_key)[:12]}… ")
        assert command.stdout.objects()[-1]["event"] == "failed"
    kind = MessagingRelay if isinstance(relay, MessagingRelay) else DmsgRelay
    back = kind(bench.reactor, relay.key, TCP4ServerEndpoint(bench.reactor, place.address.port, interface="127.0.0.1"))
    back.startService()
    for command in commands:
        await command.stdout.wait_for(event="connected")
    await back.stopService()
