"""Requests of local programs, on a real Redis: each is answered on its list, once and in time."""

from __future__ import annotations

import base64
import json
import re
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred
from twisted.internet.task import LoopingCall, deferLater
from twisted.logger import formatEvent, globalLogPublisher

from dmsg.glue.errors import RedisAway
from dmsg.glue.waiters import Waiters
from dmsg.rmb.client.errors import (
    CallRefused,
    NoEncryptionKey,
    NotConnected,
    RegistryFailed,
    TooMuchUnderWay,
    TwinUnknown,
)
from dmsg.rmb.client.exchange import Accepted
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.messages import OutgoingRequest
from dmsg.rmb.core.wire import Backlog, Envelope, parse_envelope
from dmsg.rmb.peer import gateway, requests, services
from dmsg.rmb.peer.commands import BACKLOG, LOCAL, LOCAL_TAKEN, REPLY, REPLY_TAKEN
from dmsg.rmb.peer.redis import RedisLists
from dmsg.sansio.backoff import Backoff

from .conftest import LostPush, Peer, answer_to

NO_KEY = "e2e error: the twin has no public key in the registry, and plain text is not allowed"
RECORDED = {
    "ver": 1, "ref": "mine", "cmd": "calc.add", "exp": 60, "dat": "MSAy", "tag": None, "dst": [100], "ret": "answers",
    "shm": None, "now": 0, "err": None, "src": None,
}  # fmt: skip


def local(**members: Any) -> dict[str, Any]:
    """A request as a local program writes it."""
    return {**RECORDED, "now": int(time.time()), **members}


async def notes(peer: Peer) -> list[str]:
    """Of which requests Redis knows that they are under way."""
    return [name for name, _ in await peer.lists.notes(BACKLOG, 100)]


@pytest_twisted.ensureDeferred
async def test_a_request_goes_out_and_its_answer_comes_to_the_list(peer: Peer) -> None:
    await peer.push(LOCAL, local(tag="a b", shm="text/plain"))
    answer = await peer.take("answers")
    [(envelope, timeout_s)] = peer.exchange.requests
    assert (envelope.request.command, envelope.plain, envelope.destination.twin) == ("calc.add", b"1 2", 100)
    assert (envelope.tags, envelope.schema) == ("a b", "text/plain")
    assert 50 < timeout_s < 60
    assert list(answer) == ["ver", "ref", "dat", "src", "shm", "now", "err"]
    assert answer == {
        "ver": 1, "ref": "mine", "dat": base64.b64encode(b"pong").decode(), "src": "100", "shm": None,
        "now": envelope.timestamp, "err": None,
    }  # fmt: skip
    assert 3000 < await peer.ask("ttl", "answers") <= 3600 or await peer.ask("llen", "answers") == 0
    assert await notes(peer) == []


@pytest_twisted.ensureDeferred
async def test_a_list_of_answers_that_nobody_takes_expires(peer: Peer) -> None:
    await peer.push(LOCAL, local())
    await peer.exchange.until_sent(1)
    await peer.push(LOCAL, local(ret="others"))
    await peer.take("others")
    assert 3000 < await peer.ask("ttl", "answers") <= 3600


@pytest_twisted.ensureDeferred
async def test_a_long_payload_for_many_destinations_is_in_memory_as_often_as_there_is_room_for_it(
    peer: Peer, monkeypatch: Any
) -> None:
    """256 times 1 MiB, else. The bytes of an envelope are not Python's, so the envelopes are counted."""
    envelopes, made, asked, most = OutgoingRequest.envelopes, 0, 0, 0

    def make(self: OutgoingRequest, uid: str, now: int) -> list[Envelope]:
        nonlocal made
        made += 1
        return envelopes(self, uid, now)

    async def full(envelope: Envelope, timeout_s: float) -> Accepted:
        nonlocal asked, most
        most = max(most, made - asked)
        asked += 1
        raise TooMuchUnderWay(SessionAddress.of(envelope.destination))

    monkeypatch.setattr(OutgoingRequest, "envelopes", make)
    monkeypatch.setattr(peer.exchange, "request", full)
    await peer.push(LOCAL, local(dst=list(range(100, 356)), dat=base64.b64encode(bytes(1024)).decode()))
    assert {(await peer.take("answers"))["err"]["code"] for _ in range(256)} == {109}
    assert asked == 256 and most == 1


@pytest_twisted.ensureDeferred
async def test_each_destination_answers_by_itself(peer: Peer) -> None:
    def answer(envelope: Any) -> Any:
        twin = envelope.destination.twin
        return TwinUnknown(SessionAddress(twin)) if twin == 2 else answer_to(envelope, b"from %d" % twin)

    peer.exchange.answer = answer
    await peer.push(LOCAL, local(dst=[1, 2, 3, 3]))
    answers = {one["src"]: one for one in [await peer.take("answers") for _ in range(3)]}
    assert base64.b64decode(answers["1"]["dat"]) == b"from 1" and base64.b64decode(answers["3"]["dat"]) == b"from 3"
    assert answers["2"]["err"] == {"code": 103, "message": "unknown twin id '2'"}
    assert len({envelope.uid for envelope, _ in peer.exchange.requests}) == 3
    assert await peer.take("answers", 1) is None
    assert await notes(peer) == []


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ({"exp": 0}, 102),
        ({"now": 1_000_000_000}, 102),
        ({"dat": "not base64"}, 101),
        ({"dst": []}, 101),
        ({"dst": "x"}, 101),
        ({"cmd": None}, 101),
        ({"exp": -1}, 101),
        ({"dat": "A" * 2_000_000}, 101),
    ],
)
@pytest_twisted.ensureDeferred
async def test_a_request_that_cannot_be_sent_is_answered_with_an_error(peer: Peer, members: Any, code: int) -> None:
    await peer.push(LOCAL, local(**members))
    answer = await peer.take("answers")
    assert (answer["ref"], answer["dat"], answer["now"]) == ("mine", "", 0)
    assert answer["err"]["code"] == code and answer["err"]["message"]
    assert peer.exchange.requests == [] and await notes(peer) == []


@pytest_twisted.ensureDeferred
async def test_what_is_no_json_does_not_stop_what_is(peer: Peer) -> None:
    for rubbish in (b"", b"{", b"\xff", b"[]", b"null", b'{"ret":7}', b"[" * 100_000, bytes(3 * 1024 * 1024)):
        await peer.push(LOCAL, rubbish)
    await peer.push(LOCAL, local())
    assert (await peer.take("answers"))["err"] is None


@pytest_twisted.ensureDeferred
async def test_a_message_that_we_fail_at_does_not_stop_the_next(
    peer: Peer, monkeypatch: Any, logged_errors: Any
) -> None:
    def fail(data: bytes) -> Any:
        monkeypatch.undo()
        raise ZeroDivisionError

    monkeypatch.setattr(requests.OutgoingRequest, "from_json", fail)
    await peer.push(LOCAL, local(ret="failed"))
    await peer.push(LOCAL, local())
    assert (await peer.take("answers"))["err"] is None
    assert await peer.take("failed", 1) is None
    assert len(logged_errors.flush(ZeroDivisionError)) == 1


@pytest_twisted.ensureDeferred
async def test_an_error_comes_before_the_time_of_the_request_is_over(peer: Peer) -> None:
    peer.exchange.answer = lambda envelope: None
    message, before_s = local(exp=2), time.time()
    await peer.push(LOCAL, message)
    answer = await peer.take("answers")
    [(_, timeout_s)] = peer.exchange.requests
    # How late a busy machine lets a timer be is not ours to say.
    assert before_s + timeout_s <= message["now"] + 2 - min(requests.EARLY_S, timeout_s)
    assert answer["src"] == "100" and answer["err"]["code"] == 102
    assert await notes(peer) == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NotConnected(SessionAddress(100), {}), ("100", 500, "other: no relay has taken the request ()")),
        (RegistryFailed(SessionAddress(100), "why"), ("100", 500, "other: failed to get twin information: why")),
        (NoEncryptionKey(SessionAddress(100), ours=False), ("100", 106, NO_KEY)),
        (
            CallRefused(SessionAddress(100), 0, "destination offline", SessionAddress(0)),
            ("100", 0, "destination offline"),
        ),
        (CallRefused(SessionAddress(100), 7, "no", SessionAddress(100, "a")), ("100:a", 7, "no")),
        (CallRefused(SessionAddress(100), 500, "no", SessionAddress(100)), ("100", 500, "no")),
    ],
)
@pytest_twisted.ensureDeferred
async def test_an_error_says_which_destination_failed(peer: Peer, error: Any, expected: Any) -> None:
    peer.exchange.answer = lambda envelope: error
    await peer.push(LOCAL, local())
    answer = await peer.take("answers")
    assert (answer["src"], answer["err"]["code"], answer["err"]["message"]) == expected


@pytest.mark.parametrize("twin", [100, 0], ids=["a service", "a relay"])
@pytest_twisted.ensureDeferred
async def test_an_error_has_the_time_and_the_schema_of_its_envelope(peer: Peer, twin: int) -> None:
    """As an answer has them. Errors of our own have neither."""
    called, at = SessionAddress(100), 1_700_000_002
    peer.exchange.answer = lambda envelope: CallRefused(
        called, 7, "no", SessionAddress(twin), timestamp=at, schema="text/plain"
    )
    await peer.push(LOCAL, local())
    assert await peer.take("answers") == {
        "ver": 1, "ref": "mine", "dat": "", "src": "100", "shm": "text/plain", "now": at,
        "err": {"code": 7, "message": "no"},
    }  # fmt: skip
    peer.exchange.answer = lambda envelope: TwinUnknown(called)
    await peer.push(LOCAL, local())
    answer = await peer.take("answers")
    assert (answer["now"], answer["shm"]) == (0, None)


@pytest_twisted.ensureDeferred
async def test_requests_that_are_not_answered_hold_up_no_others(peer: Peer) -> None:
    peer.exchange.answer = lambda envelope: None if envelope.destination.twin == 1 else answer_to(envelope, b"")
    for _ in range(50):
        await peer.push(LOCAL, local(dst=[1], ret="slow"))
    await peer.push(LOCAL, local(dst=[2]))
    assert (await peer.take("answers"))["src"] == "2"
    assert peer.gateway.requests.under_way == 50


@pytest_twisted.ensureDeferred
async def test_a_twin_that_does_not_answer_takes_no_more_than_its_share(peer: Peer, monkeypatch: Any) -> None:
    monkeypatch.setattr(requests, "UNDER_WAY_TO_A_TWIN", 3)
    peer.exchange.answer = lambda envelope: None if envelope.destination.twin == 7 else answer_to(envelope, b"")
    for number in range(4):
        await peer.push(LOCAL, local(dst=[7], ref=str(number)))
    refused = await peer.take("answers")
    assert (refused["ref"], refused["src"], refused["err"]["code"]) == ("3", "7", 109)
    await peer.push(LOCAL, local(dst=[8]))
    assert (await peer.take("answers"))["src"] == "8"


@pytest_twisted.ensureDeferred
async def test_many_under_way_are_no_reason_to_stop_when_none_is_answered(peer: Peer, monkeypatch: Any) -> None:
    monkeypatch.setattr(requests, "UNDER_WAY", 2)
    peer.exchange.answer = lambda envelope: None if envelope.destination.twin == 7 else answer_to(envelope, b"")
    for number in range(5):
        await peer.push(LOCAL, local(dst=[7], ref=str(number)))
    await peer.push(LOCAL, local(dst=[8]))
    assert (await peer.take("answers"))["src"] == "8"


@pytest_twisted.ensureDeferred
async def test_requests_that_come_faster_than_they_are_answered_wait_in_their_list_for_room(peer: Peer) -> None:
    peer.exchange.most_open = 2
    peer.exchange.answer = lambda envelope: None
    for number in range(8):
        await peer.push(LOCAL, local(dst=[7], ref=str(number)))
    for number in range(8):
        await peer.exchange.until_sent(number + 1)
        envelope, _ = peer.exchange.requests[number]
        peer.exchange.give(answer_to(envelope, b"pong"))
        answer = await peer.take("answers")
        assert (answer["ref"], answer["err"]) == (str(number), None)


@pytest_twisted.ensureDeferred
async def test_what_is_wrong_with_a_list_is_not_forgotten_while_nothing_is_taken_from_it(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers are left in theirs while relays do not take those that there are."""
    monkeypatch.setattr(services, "ROOM_S", 0.0)
    monkeypatch.setattr(gateway, "_REDIS_PAUSES", Backoff(0.001, 0.001))
    await peer.ask("SET", REPLY, "no list")
    while not peer.gateway.redis_problem.startswith("WRONGTYPE"):
        await peer.ask("PING")
    peer.exchange.takes_answers = False
    for _ in range(200):
        await peer.ask("PING")
        assert peer.gateway.redis_problem.startswith("WRONGTYPE")


@pytest_twisted.ensureDeferred
async def test_what_is_wrong_with_the_list_of_requests_is_not_forgotten_while_a_note_waits(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is taken then, since what was taken before may have to be given back."""
    noting = True

    async def away_for_a_while(self: RedisLists, *arguments: Any) -> None:
        if noting:
            raise RedisAway(self.redis.address, "OOM", maybe_done=False)

    monkeypatch.setattr(RedisLists, "done", away_for_a_while)
    monkeypatch.setattr(gateway, "_REDIS_PAUSES", Backoff(0.001, 0.001))
    peer.exchange.answer = lambda envelope: None
    await peer.push(LOCAL, local())
    await peer.exchange.until_sent(1)
    await peer.ask("SET", LOCAL, "no list")
    while not peer.gateway.redis_problem.startswith("WRONGTYPE"):
        await peer.ask("PING")
    monkeypatch.setattr(gateway, "TAKE_S", 0.001)  # the time is over after which all is given back
    for _ in range(200):
        await peer.ask("PING")
        assert peer.gateway.redis_problem.startswith("WRONGTYPE")
    noting = False


@pytest_twisted.ensureDeferred
async def test_the_next_process_waits_for_the_answers_of_the_one_before(make_peer: Any, address: Any) -> None:
    first, second = make_peer(address), make_peer(address)
    first.exchange.answer = lambda envelope: None
    await first.gateway.start()
    await first.push(LOCAL, local(dst=[7, 8, 9]))
    await first.push(LOCAL, local(dst=[10], ref="other", exp=3))
    await first.exchange.until_sent(4)
    await first.gateway.stop()
    await second.gateway.start()
    await second.push(LOCAL, local(dst=[11], ret="here"))
    assert (await second.take("here"))["src"] == "11"  # it has read the notes
    for envelope, _ in first.exchange.requests[:3]:
        answer = answer_to(envelope, b"late")
        assert second.gateway.is_awaited(envelope.uid, envelope.destination.twin)
        assert second.gateway.is_awaited(envelope.uid, 0)
        assert not second.gateway.is_awaited(envelope.uid, 99)
        second.gateway.answer_received(answer)
        assert not second.gateway.is_awaited(envelope.uid, envelope.destination.twin)
    answers = {one["src"]: one for one in [await second.take("answers") for _ in range(4)]}
    assert {name: one["ref"] for name, one in answers.items()} == {"7": "mine", "8": "mine", "9": "mine", "10": "other"}
    assert {name: (one["err"] or {}).get("code") for name, one in answers.items()} == {
        "7": None,
        "8": None,
        "9": None,
        "10": 102,
    }
    assert await notes(second) == []


@pytest.mark.parametrize("is_answered", [True, False])
@pytest_twisted.ensureDeferred
async def test_an_answer_of_a_killed_process_that_redis_gets_behind_that_of_the_next_is_not_pushed(
    make_peer: Any, address: Any, monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    """What it had sent is on its way when its network fails, and comes when that works again."""
    first, second, sent = make_peer(address), make_peer(address), list[Any]()

    async def send_into_the_void(*arguments: Any, **options: Any) -> None:
        sent.append((arguments, options))
        await Deferred()

    monkeypatch.setattr(gateway, "STOP_TIMEOUT_S", 0.0)
    monkeypatch.setattr(first.gateway.requests._lists, "push_once", send_into_the_void)
    first.exchange.answer = lambda envelope: None
    await first.gateway.start()
    await first.push(LOCAL, local(exp=60 if is_answered else 2))
    await first.exchange.until_sent(1)
    while not await notes(first):
        pass
    answer = answer_to(first.exchange.requests[0][0], b"pong")
    first.exchange.give(answer)
    await first.gateway.stop()
    await second.gateway.start()
    if is_answered:
        while not second.gateway.is_awaited(answer.envelope.uid, 100):
            await second.ask("PING")
        second.gateway.answer_received(answer)
    assert (await second.take("answers"))["ref"] == "mine"
    [(arguments, options)] = sent
    assert not await second.lists.push_once(*arguments, **options)
    assert await second.ask("LLEN", "answers") == 0
    assert {0 < await second.ask("TTL", key) <= 300 for key in await second.ask("KEYS", "msgbus.*")} == {True}


@pytest_twisted.ensureDeferred
async def test_answers_that_a_relay_has_kept_come_when_the_notes_are_read(
    make_peer: Any, redis_process: Any, reactor: Any
) -> None:
    redis_process.start()
    first, second = make_peer(redis_process.address), make_peer(redis_process.address)
    first.exchange.answer = lambda envelope: None
    await first.gateway.start()
    await first.push(LOCAL, local(dst=[7, 8, 9]))
    await first.exchange.until_sent(3)
    await first.gateway.stop()
    second.exchange.kept = [answer_to(envelope, b"kept") for envelope, _ in first.exchange.requests]
    redis_process.pause()
    await second.gateway.start()
    await deferLater(reactor, 0.2)
    redis_process.resume()
    answers = [await second.take("answers") for _ in range(3)]
    assert [one["err"] for one in answers] == [None, None, None]
    assert {one["src"] for one in answers} == {"7", "8", "9"}


@pytest_twisted.ensureDeferred
async def test_a_note_that_is_none_and_a_redis_that_fails_behind_the_notes_do_no_harm(
    make_peer: Any, address: Any
) -> None:
    peer = make_peer(address)
    note = Backlog(uid="u", reply_to="answers", reference="mine", ttl=60, destination=7, expires=int(time.time()) + 60)
    await peer.ask("SET", f"{BACKLOG}rubbish", b"\xff")
    await peer.ask("SET", f"{BACKLOG}u", note.SerializeToString())
    await peer.ask("SET", LOCAL_TAKEN, "no list")
    await peer.gateway.start()
    while not peer.gateway.redis_problem.startswith("WRONGTYPE"):
        await peer.ask("PING")
    await peer.ask("DEL", LOCAL_TAKEN)
    await peer.push(LOCAL, local(dst=[8], ret="here"))
    assert (await peer.take("here"))["src"] == "8"
    awaited = Envelope(uid="u", plain=b"late")
    awaited.destination.twin = 7
    peer.gateway.answer_received(answer_to(awaited, b"late"))
    assert (await peer.take("answers"))["src"] == "7"


@pytest_twisted.ensureDeferred
async def test_a_list_that_is_none_is_told_of_once_while_the_other_one_works(peer: Any) -> None:
    said: list[str] = []

    def observe(event: Any) -> None:
        text = formatEvent(event)
        if "edis" in text:
            said.append(text)

    while peer.gateway.redis_problem:
        await peer.ask("PING")
    globalLogPublisher.addObserver(observe)
    try:
        await peer.ask("SET", REPLY, "no list")
        while not peer.gateway.redis_problem:
            await peer.ask("PING")
        for _ in range(3):
            await peer.push(LOCAL, local(dst=[8], ret="here"))
            assert (await peer.take("here"))["src"] == "8"
        assert peer.gateway.redis_problem.startswith("WRONGTYPE")
        assert [text.partition(": ")[0] for text in said] == [f"{peer.lists.redis.address} refused"]
        await peer.ask("DEL", REPLY)
        while peer.gateway.redis_problem:
            await peer.ask("PING")
        assert said[1:] == ["Redis is there"]
    finally:
        globalLogPublisher.removeObserver(observe)


@pytest_twisted.ensureDeferred
async def test_what_no_relay_has_goes_back_to_redis_when_the_peer_stops(make_peer: Any, address: Any) -> None:
    first, second = make_peer(address), make_peer(address)
    first.exchange.answer = lambda envelope: None
    first.exchange.unreachable = {7, 8}
    await first.gateway.start()
    await first.push(LOCAL, local(dst=[7, 8, 9], tag="t", shm="text/plain"))
    await first.exchange.until_sent(3)
    await first.gateway.stop()
    assert await first.ask("LLEN", LOCAL) == 2
    assert len(await notes(first)) == 1
    await second.gateway.start()
    answers = [await second.take("answers") for _ in range(2)]
    assert sorted(one["src"] for one in answers) == ["7", "8"]
    (one, _), (other, _) = second.exchange.requests
    assert (one.plain, one.tags, one.schema) == (b"1 2", "t", "text/plain")
    before = first.exchange.requests[0][0]
    assert before.timestamp + before.expiration == one.timestamp + one.expiration
    assert {one.destination.twin, other.destination.twin} == {7, 8}


@pytest_twisted.ensureDeferred
async def test_what_goes_back_to_redis_has_its_time_though_an_answer_whose_twin_is_looked_up_took_all_of_that(
    make_peer: Any, redis_process: Any, reactor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while the registry fails."""
    monkeypatch.setattr(gateway, "STOP_TIMEOUT_S", 0.5)
    redis_process.start()
    peer, taken = make_peer(redis_process.address), Deferred[None]()
    stop = peer.exchange.stop

    async def look_up_for_ever(*arguments: Any) -> None:
        taken.callback(None)
        await Deferred()

    async def stop_with_a_slow_redis() -> None:
        redis_process.pause()
        reactor.callLater(0.1, redis_process.resume)
        await stop()

    monkeypatch.setattr(peer.exchange, "send", look_up_for_ever)
    monkeypatch.setattr(peer.exchange, "stop", stop_with_a_slow_redis)
    peer.exchange.answer = lambda envelope: None
    peer.exchange.unreachable = {100}
    await peer.gateway.start()
    for number in range(20):
        await peer.push(LOCAL, local(ref=str(number), dat=base64.b64encode(bytes(60_000)).decode()))
    await peer.exchange.until_sent(20)
    await peer.push(REPLY, {"ver": 1, "ref": "uid", "dst": "7", "dat": "", "now": int(time.time())})
    await taken
    await peer.gateway.stop()
    monkeypatch.undo()
    assert await peer.ask("LLEN", LOCAL) == 20 and await notes(peer) == []


@pytest_twisted.ensureDeferred
async def test_a_peer_with_much_under_way_stops_soon_though_answers_come(
    make_peer: Any, address: Any, reactor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, numbers = make_peer(address), count()
    peer.exchange.answer = lambda envelope: None
    await peer.gateway.start()
    for number in range(30):
        await peer.push(LOCAL, local(ref=str(number)))
    await peer.exchange.until_sent(30)
    monkeypatch.setattr(requests, "UNDER_WAY", 2)

    def give() -> None:
        with suppress(KeyError, IndexError):  # the exchange has stopped
            peer.exchange.give(answer_to(peer.exchange.requests[next(numbers)][0], b"pong"))

    giving = LoopingCall(give)
    giving.start(0.3)
    await deferLater(reactor, 1.5)
    began = time.monotonic()
    await peer.gateway.stop()
    giving.stop()
    assert time.monotonic() - began < 3


@pytest_twisted.ensureDeferred
async def test_an_answer_waits_for_a_redis_that_is_away_and_comes_once(make_peer: Any, redis_process: Any) -> None:
    redis_process.start()
    peer = make_peer(redis_process.address)

    def answer(envelope: Any) -> Any:
        redis_process.kill()
        return answer_to(envelope, b"kept")

    peer.exchange.answer = answer
    await peer.gateway.start()
    await peer.push(LOCAL, local())
    await peer.exchange.until_sent(1)
    redis_process.start()
    assert (await peer.take("answers"))["dat"] == base64.b64encode(b"kept").decode()
    assert await peer.take("answers", 1) is None


@pytest.mark.parametrize("members", [{"dst": []}, {}])
@pytest_twisted.ensureDeferred
async def test_an_answer_that_was_taken_before_redis_stopped_is_not_pushed_again(
    peer: Peer, monkeypatch: Any, members: Any
) -> None:
    """Redis did it, and its reply is lost: the program has the answer by then. There is no note of the first request, and
    that of the second is not known to be there."""
    push_once, done, tries = RedisLists.push_once, RedisLists.done, list[bool]()

    async def lose_the_reply(self: RedisLists, *arguments: Any, **options: Any) -> bool:
        tries.append(await push_once(self, *arguments, **options))
        if len(tries) == 1:
            assert (await peer.take("answers"))["ref"] == "mine"
            raise RedisAway(self.redis.address, "connection lost", maybe_done=True)
        return tries[-1]

    async def away_for_a_while(self: RedisLists, *arguments: Any) -> None:
        if len(tries) < 2:
            raise RedisAway(self.redis.address, "connection lost", maybe_done=True)
        await done(self, *arguments)

    monkeypatch.setattr(RedisLists, "push_once", lose_the_reply)
    monkeypatch.setattr(RedisLists, "done", away_for_a_while)
    await peer.push(LOCAL, local(**members))
    while len(tries) < 2 or peer.gateway.stats()["waiting_for_redis"]:
        await peer.ask("PING")
    assert tries == [True, False] and await peer.ask("LLEN", "answers") == 0
    assert not await peer.ask("KEYS", "msgbus.system.pushed.*")


@pytest_twisted.ensureDeferred
async def test_an_answer_without_a_note_is_pushed_again_if_redis_may_have_had_it_and_has_not(
    peer: Peer, monkeypatch: Any
) -> None:
    lost = LostPush(monkeypatch, maybe_done=True)
    await peer.push(LOCAL, local(dst=[]))
    assert (await peer.take("answers"))["ref"] == "mine" and lost.is_over


@pytest_twisted.ensureDeferred
async def test_an_answer_waits_for_a_redis_whose_disk_is_full(
    make_peer: Any, redis_process: Any, tmp_path: Path
) -> None:
    """A Redis that cannot save a snapshot takes no writes by default, until it can."""
    redis_process.start("--appendonly", "no")
    peer = make_peer(redis_process.address)
    peer.exchange.answer = lambda envelope: None
    await peer.gateway.start()
    await peer.push(LOCAL, local())
    await peer.exchange.until_sent(1)
    await peer.ask("CONFIG", "SET", "save", "3600 1")
    shutil.rmtree(tmp_path)
    await peer.ask("BGSAVE")
    while b"rdb_last_bgsave_status:err" not in await peer.ask("INFO", "persistence"):
        pass
    peer.exchange.give(answer_to(peer.exchange.requests[0][0], b"kept"))
    while not re.search(rb"cmdstat_eval:.*failed_calls=[1-9]", await peer.ask("INFO", "commandstats")):
        assert await peer.ask("LLEN", "answers") == 0
    await peer.ask("CONFIG", "SET", "save", "")
    assert (await peer.take("answers"))["dat"] == base64.b64encode(b"kept").decode()
    assert await notes(peer) == []


@pytest_twisted.ensureDeferred
async def test_requests_in_redis_survive_its_end_and_are_taken_when_it_is_back(
    make_peer: Any, redis_process: Any
) -> None:
    redis_process.start()
    peer = make_peer(redis_process.address)
    for number in range(20):
        await peer.push(LOCAL, local(ref=str(number)))
    redis_process.kill()
    await peer.gateway.start()
    redis_process.start()
    assert {one["ref"] for one in [await peer.take("answers") for _ in range(20)]} == {
        str(number) for number in range(20)
    }
    redis_process.kill()
    redis_process.start()
    await peer.push(LOCAL, local(ref="again"))
    assert (await peer.take("answers"))["ref"] == "again"


@pytest_twisted.ensureDeferred
async def test_a_program_that_waits_on_a_key_that_is_no_list_harms_nobody(peer: Peer) -> None:
    await peer.lists.redis.call("SETEX", "answers", 60, b"x")
    await peer.push(LOCAL, local())
    await peer.push(LOCAL, local(ret="others"))
    assert (await peer.take("others"))["err"] is None


def test_the_recorded_request_is_the_one_of_the_vectors(live: Any) -> None:
    [recorded] = [one["json_in"] for one in live["envelopes"] if one["name"] == "encrypted request from rmb-peer"]
    assert list(recorded) == list(RECORDED)


@pytest_twisted.ensureDeferred
async def test_the_recorded_requests_go_out_as_they_were_recorded(make_peer: Any, address: Any, live: Any) -> None:
    for one in live["envelopes"]:
        if "json_in" not in one:
            continue
        peer = make_peer(address, lambda stamp=one["json_in"]["now"]: stamp)
        await peer.gateway.start()
        await peer.push(LOCAL, json.dumps(one["json_in"]).encode())
        assert (await peer.take(one["json_in"]["ret"]))["err"] is None
        [(ours, _)] = peer.exchange.requests
        theirs = parse_envelope(bytes.fromhex(one["hex"]))
        assert ours.plain == bytes.fromhex(one["plain_hex"])
        for message in (ours, theirs):
            for random in ("uid", "signature", "plain", "cipher", "source"):
                message.ClearField(random)
        assert ours == theirs
        await peer.gateway.stop()


@pytest_twisted.ensureDeferred
async def test_a_peer_stops_soon_while_redis_is_away(make_peer: Any, redis_process: Any, reactor: Any) -> None:
    peer = make_peer(redis_process.address)
    redis_process.start()
    await peer.gateway.start()
    await peer.push(LOCAL, local())
    assert (await peer.take("answers"))["err"] is None
    redis_process.kill()
    while not peer.gateway.redis_problem:
        await deferLater(reactor, 0)
    began = time.monotonic()
    await peer.gateway.stop()
    assert time.monotonic() - began < 4.0


@pytest_twisted.ensureDeferred
async def test_what_a_process_had_taken_when_it_was_killed_is_taken_by_the_next_one(
    make_peer: Any, address: Any
) -> None:
    peer = make_peer(address)
    for number in range(3):
        await peer.push(LOCAL_TAKEN, local(ref=str(number)))
        await peer.push(REPLY_TAKEN, {"ver": 1, "ref": str(number), "dst": "7", "dat": "", "now": int(time.time())})
    await peer.push(LOCAL, local(ref="new"))
    await peer.gateway.start()
    assert [(await peer.take("answers"))["ref"] for _ in range(4)] == ["0", "1", "2", "new"]
    await peer.exchange.until_sent(7)
    assert [one.uid for one in peer.exchange.answers] == ["0", "1", "2"]
    await peer.gateway.stop()
    assert await peer.ask("EXISTS", LOCAL_TAKEN, REPLY_TAKEN) == 0


@pytest_twisted.ensureDeferred
async def test_a_request_is_noted_and_not_taken_once_more_before_it_is_sent(make_peer: Any, address: Any) -> None:
    peer, there = make_peer(address), list[bytes]()

    def look(envelope: Any) -> Any:
        """While nothing else happens in this process: it could be killed now."""
        asked, ends_at = f"EXISTS {LOCAL_TAKEN} {BACKLOG}{envelope.uid}\r\nEXISTS {LOCAL_TAKEN}\r\n".encode(), 5.0
        with socket.create_connection((address.server.host, address.server.port), timeout=ends_at) as redis:
            ends_at += time.monotonic()
            while there != [b":1", b":0"] and time.monotonic() < ends_at:
                redis.sendall(asked)
                there[:] = redis.recv(8, socket.MSG_WAITALL).split()
        return answer_to(envelope, b"pong")

    peer.exchange.answer = look
    await peer.gateway.start()
    await peer.push(LOCAL, local(ref="mine"))
    assert (await peer.take("answers"))["ref"] == "mine"
    assert there == [b":1", b":0"]


@pytest_twisted.ensureDeferred
async def test_a_request_that_was_taken_before_redis_was_full_is_noted_all_the_same(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next process would send it once more."""
    done = RedisLists.done

    async def fill_first(self: RedisLists, *arguments: Any) -> None:
        await peer.ask("CONFIG", "SET", "maxmemory", "1")
        await done(self, *arguments)

    monkeypatch.setattr(RedisLists, "done", fill_first)
    peer.exchange.answer = lambda envelope: None
    try:
        await peer.push(LOCAL, local(dst=[7, 8]))
        await peer.exchange.until_sent(2)
        for _ in range(200):
            await peer.ask("PING")
        assert await peer.ask("EXISTS", LOCAL_TAKEN) == 0 and len(await notes(peer)) == 2
    finally:
        await peer.ask("CONFIG", "SET", "maxmemory", "0")


@pytest_twisted.ensureDeferred
async def test_what_redis_gave_to_a_connection_that_was_lost_is_taken_once_more(peer: Peer) -> None:
    """The message is in the list of what was taken then, and no one has it."""

    async def lose(key: str, taken: str, message: Any) -> None:
        data = json.dumps(message).encode()
        for words in (
            ("MULTI",),
            ("LPUSH", key, data),
            ("RPOPLPUSH", key, taken),
            ("CLIENT", "KILL", "TYPE", "normal"),
        ):
            await peer.ask(*words)
        await peer.ask("EXEC")

    await peer.push(LOCAL, local(ref="before"))
    await peer.take("answers")
    await lose(LOCAL, LOCAL_TAKEN, local(ref="lost", ret="others"))
    assert (await peer.take("others"))["ref"] == "lost"
    answer = {"ver": 1, "ref": "uid", "dat": "MTI=", "dst": "5", "now": int(time.time())}
    await lose(REPLY, REPLY_TAKEN, answer)
    await peer.exchange.until_sent(3)
    assert [one.uid for one in peer.exchange.answers] == ["uid"] and len(peer.exchange.requests) == 2
    while await peer.ask("EXISTS", LOCAL_TAKEN, REPLY_TAKEN, LOCAL, REPLY):
        pass


@pytest_twisted.ensureDeferred
async def test_an_answer_that_is_being_sent_when_redis_is_lost_is_not_taken_without_end(peer: Peer) -> None:
    """The twin it is for is being looked up meanwhile, and other answers have their turn."""
    known: Waiters[None] = Waiters()
    sent: list[str] = []
    sending: Waiters[None] = Waiters()

    async def send(envelope: Envelope, taken: Callable[[], object]) -> None:
        sent.append(envelope.uid)
        sending.fire(None)
        if envelope.uid == "slow":
            await known.wait()
        taken()

    async def answer(uid: str) -> None:
        message = {"ver": 1, "ref": uid, "dat": "MTI=", "dst": "5", "now": int(time.time())}
        await peer.push(REPLY, message)
        while uid not in sent:
            await sending.wait()

    peer.exchange.send = send  # type: ignore[method-assign]
    await answer("slow")
    for words in (("MULTI",), ("CLIENT", "KILL", "TYPE", "normal")):
        await peer.ask(*words)
    await peer.ask("EXEC")
    await answer("next")
    assert sent.count("slow") <= 3
    known.fire(None)
    while await peer.ask("EXISTS", REPLY_TAKEN, REPLY):
        pass
