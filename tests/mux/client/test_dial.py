"""What a dial of the mux protocol asks of a session, and what it makes of a refusal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from twisted.internet.defer import CancelledError, Deferred, fail
from twisted.python.failure import Failure

from dmsg.crypto.keys import SecretKey
from dmsg.errors import StageError
from dmsg.mux.client.dial import DialRequest
from dmsg.mux.core.e2e_negotiation import Carrier, Security
from dmsg.mux.core.errors import Busy, Refused, Unsupported

PEER = SecretKey(b"\x01" * 32).public_key


class Session:
    """Gives the answers it was given, one for each request."""

    def __init__(self, *answers: Any, extended: bool = True) -> None:
        self.connection = SimpleNamespace(extended=extended)
        self.carriers: list[Carrier] = []
        self._answers = list(answers)

    def request(self, target: Any, carrier: Carrier, *, service: str, resume: Any) -> Deferred[Any]:
        self.carriers.append(carrier)
        answer = self._answers.pop(0)
        if isinstance(answer, Busy):
            raise answer
        return answer if isinstance(answer, Deferred) else fail(answer)


def dial(session: Any, *, security: Security = Security.E2E, promised: bool = True) -> list[Any]:
    ended: list[Any] = []
    DialRequest(PEER, security=security).through(session, promised=promised).addBoth(ended.append)
    return ended


def unsupported() -> StageError:
    return StageError("request", "unsupported", Unsupported("no", by="server"))


def error_of(ended: list[Any]) -> StageError:
    [failure] = ended
    assert isinstance(failure, Failure) and isinstance(failure.value, StageError)
    return failure.value


def test_a_base_connection_of_the_peer_is_tried_with_the_other_carrier() -> None:
    answer: Deferred[str] = Deferred()
    session = Session(unsupported(), answer)
    ended = dial(session)
    assert session.carriers == [Carrier.REQUEST, Carrier.FORWARD] and not ended
    answer.callback("opened")
    assert ended == ["opened"]


def test_the_other_carrier_is_the_last_thing_that_is_tried() -> None:
    session = Session(unsupported(), unsupported())
    assert isinstance(error_of(dial(session)).error, Unsupported)
    assert session.carriers == [Carrier.REQUEST, Carrier.FORWARD]


@pytest.mark.parametrize("extended", [True, False])
def test_a_refusal_is_not_tried_again(extended: bool) -> None:
    session = Session(StageError("accept", "refused", Refused("no", by="peer")), extended=extended)
    assert isinstance(error_of(dial(session)).error, Refused)
    assert session.carriers == [Carrier.REQUEST if extended else Carrier.FORWARD]


def test_a_dial_in_the_clear_stays_what_it_is() -> None:
    session = Session(unsupported())
    error_of(dial(session, security=Security.HOP))
    assert session.carriers == [Carrier.NONE]


def test_a_session_without_room_at_once_or_when_the_turn_of_the_request_comes() -> None:
    with pytest.raises(StageError) as raised:
        dial(Session(Busy("no room", by="local")))
    assert raised.value.stage == "request" and isinstance(raised.value.error, Busy)
    turn: Deferred[Any] = Deferred()
    ended = dial(Session(turn))
    turn.errback(Busy("no room", by="local"))
    assert error_of(ended).stage == "request" and isinstance(error_of(ended).error, Busy)


def test_cancelling_reaches_the_second_request() -> None:
    answer: Deferred[Any] = Deferred()
    asked = DialRequest(PEER, security=Security.E2E).through(Session(unsupported(), answer), promised=True)  # type: ignore[arg-type]
    ended: list[Any] = []
    asked.addBoth(ended.append)
    asked.cancel()
    assert answer.called and isinstance(ended[0].value, CancelledError)
