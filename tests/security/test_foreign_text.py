"""A relay's own words: they reach no terminal as they are, and neither the event log nor the name of a metric."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import pytest_twisted

from dmsg.cli.exits import as_json, describe
from dmsg.cli.output import LINE_LIMIT, Output
from dmsg.discovery.errors import DiscoveryUnavailable
from dmsg.errors import DialError
from dmsg.eventlog import schema as ev
from dmsg.mux.core.errors import ConnectionRefusedByServer
from dmsg.mux.core.tlv import Tlv, encode_tlvs
from dmsg.mux.core.wire import FrameType
from dmsg.ops.metrics import CollectorRegistry, MetricsEventLog, exposition
from tests.worlds import AliceAndBob

sync = pytest_twisted.ensureDeferred
#: Sets the title of a terminal, clears it, and says something on a line of its own.
EVIL = "\x1b]0;owned\x07\x1b[2J\nroot password:\u202e\x9b31m"


class Place(AliceAndBob):
    """A network with one relay, which refuses every connection with EVIL from :meth:`turn` on."""

    def turn(self) -> None:
        self.relay.rule(
            kind=FrameType.OK,
            times=None,
            act=lambda frame: [replace(frame, payload=encode_tlvs({Tlv.REASON: EVIL.encode()}))],
        )


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def emit(self, event: Any) -> None:
        self.seen.append(event)


@pytest.mark.system
@sync
async def test_the_words_of_a_refusal_reach_neither_terminal_nor_log(reactor: Any) -> None:
    async with Place(reactor) as place:
        place.turn()
        recorder, registry = Recorder(), CollectorRegistry()
        alice = place.new_client(events=MetricsEventLog(recorder, registry))
        alice.startService()
        with pytest.raises(DialError) as caught:
            await alice.dial(place.bob.public_key)
        error = caught.value
        assert isinstance(error.attempts[0].error, ConnectionRefusedByServer)
        assert error.reason == "refused by server"

        stderr = io.StringIO()
        out = Output(io.StringIO(), stderr)
        out.note(describe(error))
        out.failure(error)
        assert "�" not in stderr.getvalue()
        assert all(line.isprintable() and line.isascii() for line in stderr.getvalue().replace("…", "").split("\n"))
        assert "owned" in stderr.getvalue() and "\nroot" not in stderr.getvalue()
        json.dumps(as_json(error)).encode("ascii")

        downs = [event for event in recorder.seen if isinstance(event, ev.SessionDown)]
        dials = [event for event in recorder.seen if isinstance(event, ev.DialFinished)]
        assert {event.reason for event in downs} == {"refused by server"}
        assert [event.reason for event in dials] == ["refused by server"]
        assert all("owned" not in str(event) for event in recorder.seen)
        assert b"owned" not in exposition(registry) and b'result="refused by server"' in exposition(registry)


def test_notes_are_harmless_whatever_is_in_them() -> None:
    stderr = io.StringIO()
    out = Output(io.StringIO(), stderr)
    out.note(f"first\nsecond {EVIL}")
    out.note("x" * 10 * LINE_LIMIT)
    lines = stderr.getvalue().split("\n")
    assert lines[0] == "first"
    assert all(line.isprintable() for line in lines)
    assert max(map(len, lines)) == LINE_LIMIT + 1


def test_a_failure_of_discovery_is_told_in_one_line() -> None:
    stderr = io.StringIO()
    Output(io.StringIO(), stderr).failure(DiscoveryUnavailable("no\x1b[31m\x85answer"))
    assert stderr.getvalue().count("\n") == 1 and "\x1b" not in stderr.getvalue() and "\x85" not in stderr.getvalue()
