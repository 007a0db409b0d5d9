"""The events of a client: which sessions count as the first ones."""

from __future__ import annotations

from typing import Any

from twisted.internet.task import Clock

from dmsg.clients.record import SEEN_LIMIT, ClientRecord
from dmsg.crypto.keys import PublicKey, SecretKey


class Session:
    """As much of a session as is written."""

    started_at = ready_at = 0.0

    def __init__(self, server: PublicKey) -> None:
        self.server = server


class Reasons(list[Any]):
    """An event log that keeps the reasons."""

    def emit(self, event: Any) -> None:
        self.append(event.reason)


def test_the_last_relays_that_there_was_a_session_with_are_known_and_no_more() -> None:
    events = Reasons()
    record = ClientRecord(Clock(), events, SecretKey.generate().public_key, "dmsg")
    first, second, *others = (SecretKey.generate().public_key for _ in range(SEEN_LIMIT + 1))
    for relay in (first, second, first, *others):
        record.session_up(Session(relay))
    assert events == ["first", "first", "reconnect"] + ["first"] * len(others)
    record.session_up(Session(first))
    record.session_up(Session(second))
    assert events[-2:] == ["reconnect", "first"]
