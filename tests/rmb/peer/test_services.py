"""Requests of other twins, on a real Redis: to the list of their command, and the services' answers back."""

from __future__ import annotations

import base64
import json
import re
import time
from typing import Any

import pytest
import pytest_twisted
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater
from twisted.logger import globalLogPublisher

import dmsg
from dmsg.address import RedisAddress
from dmsg.glue.waiters import Waiters
from dmsg.rmb.client.errors import EncryptionFailed, EnvelopeTooLarge, RegistryFailed, TwinUnknown
from dmsg.rmb.client.exchange import Accepted, Exchange
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.wire import Envelope, parse_envelope
from dmsg.rmb.peer import commands, gateway, services
from dmsg.rmb.peer.commands import REPLY, REPLY_TAKEN, UNSERVED_COMMANDS_OF_A_TWIN
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.process import free_port
from tests.rmb.client.conftest import MemoryRegistry, key_of

from .conftest import LostPush, Peer, accepted, answer_to, request_of

ANSWER = {
    "ver": 1, "ref": "uid", "dat": "cG9uZw==", "dst": "7:a", "shm": None, "now": 1_800_000_000, "err": None,
}  # fmt: skip


async def refused(peer: Peer) -> Any:
    """The error that the only answer so far is."""
    await peer.exchange.until_sent(1)
    [answer] = peer.exchange.answers
    assert answer.WhichOneof("message") == "error"
    return answer.error


@pytest_twisted.ensureDeferred
async def test_a_request_comes_to_the_list_of_its_command_and_its_answer_goes_out(peer: Peer) -> None:
    peer.gateway.request_received(request_of(7, "calc.add", b"1 2"))
    assert await peer.take("msgbus.calc.add") == {
        "ver": 1, "ref": "uid", "src": "7", "cmd": "calc.add", "exp": 60, "dat": "MSAy", "tag": None,
        "ret": "msgbus.system.reply", "shm": None, "now": 1_800_000_000,
    }  # fmt: skip
    await peer.push(REPLY, ANSWER)
    await peer.exchange.until_sent(1)
    [answer] = peer.exchange.answers
    assert (answer.uid, answer.plain, answer.WhichOneof("message")) == ("uid", b"pong", "response")
    assert SessionAddress.of(answer.destination) == SessionAddress(7, "a")
    assert answer.timestamp == 1_800_000_000


@pytest_twisted.ensureDeferred
async def test_requests_wait_for_their_service_in_order_and_the_list_expires(peer: Peer) -> None:
    for number in range(5):
        peer.gateway.request_received(request_of(7, "slow", uid=str(number)))
    assert [(await peer.take("msgbus.slow"))["ref"] for _ in range(4)] == ["0", "1", "2", "3"]
    assert 1800 < await peer.ask("ttl", "msgbus.slow") <= 1860


@pytest_twisted.ensureDeferred
async def test_the_error_of_a_service_goes_out_with_its_code(peer: Peer) -> None:
    await peer.push(REPLY, {**ANSWER, "dat": "", "err": {"code": 42, "message": "no such thing"}})
    error = await refused(peer)
    assert (error.code, error.message) == (42, "no such thing")


@pytest_twisted.ensureDeferred
async def test_rubbish_of_a_service_does_not_stop_what_is_none(peer: Peer) -> None:
    for rubbish in (b"", b"{", b"null", json.dumps({**ANSWER, "dst": "x"}).encode(), json.dumps({"ver": 1}).encode()):
        await peer.push(REPLY, rubbish)
    await peer.push(REPLY, ANSWER)
    await peer.exchange.until_sent(1)
    assert [one.uid for one in peer.exchange.answers] == ["uid"]


@pytest_twisted.ensureDeferred
async def test_an_answer_that_is_too_large_becomes_an_error(peer: Peer) -> None:
    def problem(envelope: Any) -> Any:
        return EnvelopeTooLarge(SessionAddress(7), 2) if envelope.HasField("response") else None

    peer.exchange.answer = problem
    await peer.push(REPLY, ANSWER)
    assert (await refused(peer)).message == "other: the answer is too large"
    peer.exchange.answer = lambda envelope: TwinUnknown(SessionAddress(7))
    await peer.push(REPLY, ANSWER)
    peer.gateway.request_received(request_of(7, "rmb.version"))
    await peer.exchange.until_sent(2)


@pytest_twisted.ensureDeferred
async def test_an_answer_that_is_too_long_a_message_becomes_an_error(peer: Peer) -> None:
    await peer.push(REPLY, {**ANSWER, "dat": "A" * 2_000_000})
    error = await refused(peer)
    assert (error.code, error.message) == (500, "other: the answer is too large")
    [answer] = peer.exchange.answers
    assert (answer.uid, answer.destination.twin) == ("uid", 7)


@pytest_twisted.ensureDeferred
async def test_answers_stay_in_their_list_while_relays_do_not_take_those_that_there_are(peer: Peer) -> None:
    peer.exchange.takes_answers = False
    for number in range(4):
        await peer.push(REPLY, {**ANSWER, "ref": str(number)})
    assert await peer.ask("llen", REPLY) >= 3  # the first may have been waited for when there was room
    peer.exchange.takes_answers = True
    peer.gateway.answers_have_room()
    await peer.exchange.until_sent(4)
    assert [answer.uid for answer in peer.exchange.answers] == ["0", "1", "2", "3"]


@pytest_twisted.ensureDeferred
async def test_answers_stay_in_their_list_while_many_wait_for_the_registry(peer: Peer, monkeypatch: Any) -> None:
    monkeypatch.setattr(services, "LOOKED_UP_BYTES", 3_000)
    gate: Deferred[None] = Deferred()
    send = peer.exchange.send

    async def send_later(envelope: Envelope, taken: Any) -> None:
        waits: Deferred[None] = Deferred()
        gate.addCallback(waits.callback)
        await waits
        await send(envelope, taken)

    monkeypatch.setattr(peer.exchange, "send", send_later)
    for number in range(5):
        await peer.push(REPLY, {**ANSWER, "ref": str(number)})
    while await peer.ask("llen", REPLY) > 3:
        pass
    assert await peer.ask("llen", REPLY) == 3
    gate.callback(None)
    await peer.exchange.until_sent(5)
    assert [answer.uid for answer in peer.exchange.answers] == ["0", "1", "2", "3", "4"]


@pytest_twisted.ensureDeferred
async def test_answers_stay_in_their_list_while_many_bytes_wait_for_a_relay(peer: Peer, monkeypatch: Any) -> None:
    """Also if they become short errors."""
    monkeypatch.setattr(services, "UNDONE_BYTES", 150_000, raising=False)
    waiting: list[Any] = []

    async def send(envelope: Envelope, taken: Any) -> None:
        waiting.append(taken)

    monkeypatch.setattr(peer.exchange, "send", send)
    failed = {**ANSWER, "dat": "A" * 100_000, "err": {"code": 1, "message": "failed"}}
    for number in range(5):
        await peer.push(REPLY, {**failed, "ref": str(number)})
    while len(waiting) < 2:
        await peer.ask("ping")
    for _ in range(100):
        await peer.ask("ping")
    assert await peer.ask("llen", REPLY) == 3
    done = 0
    while done < 5:
        if done < len(waiting):
            waiting[done]()
            done += 1
        await peer.ask("ping")
    while await peer.ask("exists", REPLY, REPLY_TAKEN):
        pass


@pytest_twisted.ensureDeferred
async def test_an_answer_is_sent_when_the_registry_works_again(peer: Peer, monkeypatch: Any) -> None:
    monkeypatch.setattr(services, "LOOK_UP_AGAIN_S", 0.01)
    problems: list[Exception] = [RegistryFailed(SessionAddress(7), "unavailable") for _ in range(3)]
    peer.exchange.answer = lambda envelope: problems.pop() if problems else None
    await peer.push(REPLY, ANSWER)
    await peer.exchange.until_sent(1)
    assert [answer.plain for answer in peer.exchange.answers] == [b"pong"] and not problems
    while await peer.ask("exists", commands.REPLY_TAKEN):
        pass


@pytest_twisted.ensureDeferred
async def test_an_answer_is_given_up_when_it_can_be_good_no_longer(peer: Peer, monkeypatch: Any, reactor: Any) -> None:
    """Others would have no room while the registry fails."""
    monkeypatch.setattr(services, "LOOK_UP_AGAIN_S", 0.01)
    monkeypatch.setattr(services, "MAX_TTL_S", 0.1, raising=False)
    peer.exchange.answer = lambda envelope: RegistryFailed(SessionAddress(7), "unavailable")
    await peer.push(REPLY, ANSWER)
    await deferLater(reactor, 0.5)
    assert await peer.ask("exists", REPLY, commands.REPLY_TAKEN) == 0


@pytest_twisted.ensureDeferred
async def test_answers_for_a_twin_that_cannot_be_looked_up_take_no_room_from_others(
    peer: Peer, monkeypatch: Any
) -> None:
    monkeypatch.setattr(services, "LOOKED_UP_BYTES", 3_000)
    failing = RegistryFailed(SessionAddress(8), "unavailable")
    peer.exchange.answer = lambda envelope: failing if envelope.destination.twin == 8 else None
    for number in range(5):
        await peer.push(REPLY, {**ANSWER, "dst": "8", "ref": str(number)})
    await peer.push(REPLY, ANSWER)
    await peer.exchange.until_sent(1)
    assert [answer.destination.twin for answer in peer.exchange.answers] == [7]


@pytest_twisted.ensureDeferred
async def test_the_peer_tells_its_version(peer: Peer) -> None:
    peer.gateway.request_received(request_of(7, "rmb.version"))
    [answer] = peer.exchange.answers
    assert json.loads(answer.plain) == f"dmsg {dmsg.__version__}"
    assert answer.schema == "application/json"


@pytest_twisted.ensureDeferred
async def test_only_commands_that_begin_with_its_name_and_a_dot_are_the_peers_own(peer: Peer) -> None:
    peer.gateway.request_received(request_of(7, "rmb"))
    assert (await peer.take("msgbus.rmb"))["cmd"] == "rmb"
    peer.gateway.request_received(request_of(7, "rmb.other", uid="2"))
    assert (await refused(peer)).code == 108


@pytest_twisted.ensureDeferred
async def test_a_twin_that_cannot_be_answered_does_not_fill_the_log(peer: Peer) -> None:
    """With ``--allow-plain`` a twin with a key that is none may ask, and no answer to it can be encrypted."""

    def fail(request: Accepted, data: bytes, schema: str | None = None) -> None:
        raise EncryptionFailed(request.source, "k256: malformed public key")

    said: list[Any] = []
    peer.exchange.respond = fail  # type: ignore[method-assign]
    globalLogPublisher.addObserver(said.append)
    try:
        for number in range(1_000):
            peer.gateway.request_received(request_of(7, "rmb.version", uid=str(number)))
    finally:
        globalLogPublisher.removeObserver(said.append)
    lines = [one for one in said if "was not sent" in (one.get("log_format") or "")]
    assert 1 <= len(lines) <= 10


@pytest.mark.parametrize(
    "command", ["rmb.other", "rmb.", "system.local", "system.reply", "backlog.uid", "", "a\r\nb", "x" * 300]
)
@pytest_twisted.ensureDeferred
async def test_commands_that_nobody_can_serve_are_answered(peer: Peer, command: str) -> None:
    peer.gateway.request_received(request_of(7, command))
    assert (await refused(peer)).code == 108
    assert await peer.ask("dbsize") == 0


@pytest_twisted.ensureDeferred
async def test_one_twin_cannot_fill_redis_with_lists(peer: Peer) -> None:
    for number in range(UNSERVED_COMMANDS_OF_A_TWIN + 1):
        peer.gateway.request_received(request_of(7, f"made.up.{number}"))
    assert (await refused(peer)).code == 109
    peer.gateway.request_received(request_of(8, "real"))
    assert (await peer.take("msgbus.real"))["src"] == "8"
    assert await peer.ask("dbsize") == UNSERVED_COMMANDS_OF_A_TWIN


@pytest_twisted.ensureDeferred
async def test_many_twins_cannot_fill_redis_with_lists_and_leave_one_to_another(peer: Peer, monkeypatch: Any) -> None:
    monkeypatch.setattr(commands, "UNSERVED_COMMANDS", 20)
    for number in range(20):
        peer.gateway.request_received(request_of(100 + number % 4, f"made.up.{number}"))
    peer.gateway.request_received(request_of(8, "real"))
    assert (await peer.take("msgbus.real"))["src"] == "8"
    assert await peer.ask("dbsize") == 19


@pytest_twisted.ensureDeferred
async def test_one_twin_cannot_fill_redis_with_large_requests_that_nobody_takes(peer: Peer, monkeypatch: Any) -> None:
    monkeypatch.setattr(commands, "UNSERVED_BYTES_OF_A_TWIN", 1_000_000)
    for number in range(3):
        peer.gateway.request_received(request_of(7, f"made.up.{number}", payload=bytes(300_000)))
        while peer.gateway.stats()["waiting_for_redis"]:
            await peer.ask("PING")
    assert (await refused(peer)).code == 109
    peer.gateway.request_received(request_of(8, "real", payload=bytes(300_000)))
    assert (await peer.take("msgbus.real"))["src"] == "8"
    assert await peer.ask("dbsize") == 2, "base64 counts as it is in Redis"


@pytest_twisted.ensureDeferred
async def test_a_list_that_is_removed_while_a_request_is_pushed_counts_when_it_is_made_again(
    peer: Peer, monkeypatch: Any
) -> None:
    """It is shorter than it was, as if a service had taken from it: then it would count for nothing."""
    monkeypatch.setattr(commands, "UNSERVED_COMMANDS", 5)
    for twin, command in ((7, "a"), (7, "b"), (7, "c"), (8, "d"), (9, "e")):
        peer.gateway.request_received(request_of(twin, command))
    while peer.gateway.stats()["waiting_for_redis"]:
        await peer.ask("PING")
    for twin, command in ((7, "a"), (7, "b"), (7, "c"), (10, "f"), (11, "a"), (12, "g"), (13, "h"), (14, "i")):
        peer.gateway.request_received(request_of(twin, command))
    while peer.gateway.stats()["waiting_for_redis"]:
        await peer.ask("PING")
    peer.gateway.request_received(request_of(15, "j"))
    while peer.gateway.stats()["waiting_for_redis"]:
        await peer.ask("PING")
    assert await peer.ask("dbsize") == 5


@pytest_twisted.ensureDeferred
async def test_a_list_that_is_full_answers_that_it_is(peer: Peer, monkeypatch: Any) -> None:
    monkeypatch.setattr(services, "KEPT_REQUESTS", 3)
    for number in range(4):
        peer.gateway.request_received(request_of(7, "slow", uid=str(number)))
    assert (await refused(peer)).code == 109
    assert peer.exchange.answers[0].uid == "3"
    assert await peer.ask("llen", "msgbus.slow") == 3


@pytest_twisted.ensureDeferred
async def test_twins_that_fill_a_list_leave_room_to_another(peer: Peer, monkeypatch: Any) -> None:
    """Also with requests that come so fast that it is not known yet how many are in the list."""
    monkeypatch.setattr(services, "KEPT_REQUESTS", 40)
    for twin in (7, 8, 9):
        for number in range(100):
            peer.gateway.request_received(request_of(twin, "slow", uid=f"{twin}-{number}"))
    while peer.gateway.stats()["waiting_for_redis"]:
        await peer.ask("PING")
    assert await peer.ask("llen", "msgbus.slow") == 70, "40, 20 and 10"
    assert [(await peer.take("msgbus.slow"))["src"] for _ in range(10)] == ["7"] * 10
    for twin in (7, 8, 9):
        for number in range(100):
            peer.gateway.request_received(request_of(twin, "slow", uid=f"{twin}-{number}"))
    while peer.gateway.stats()["waiting_for_redis"]:
        await peer.ask("PING")
    refused = len(peer.exchange.answers)
    for number in range(5):
        peer.gateway.request_received(request_of(10, "slow", uid=f"10-{number}"))
    while peer.gateway.stats()["waiting_for_redis"]:
        await peer.ask("PING")
    assert len(peer.exchange.answers) == refused


@pytest_twisted.ensureDeferred
async def test_large_requests_of_one_twin_leave_room_to_another(peer: Peer, monkeypatch: Any) -> None:
    monkeypatch.setattr(services, "KEPT_REQUESTS_BYTES", 2_000_000)
    for twin, expected in ((7, 109), (8, None)):
        for number in range(20 if twin == 7 else 1):
            peer.gateway.request_received(request_of(twin, "slow", bytes(100_000), str(number)))
        while peer.gateway.stats()["waiting_for_redis"]:
            await peer.ask("PING")
        assert {one.error.code for one in peer.exchange.answers} == ({expected} if expected else set())
        peer.exchange.answers.clear()


@pytest_twisted.ensureDeferred
async def test_what_a_service_has_taken_counts_no_more_for_its_twin(peer: Peer, monkeypatch: Any) -> None:
    monkeypatch.setattr(services, "KEPT_REQUESTS", 10)

    async def ask(twin: int, number: int) -> int:
        """How many of so many requests are refused."""
        before = len(peer.exchange.answers)
        for at in range(number):
            peer.gateway.request_received(request_of(twin, "slow", uid=f"{twin}-{at}"))
        while peer.gateway.stats()["waiting_for_redis"]:
            await peer.ask("PING")
        return len(peer.exchange.answers) - before

    assert await ask(7, 11) == 1
    assert [(await peer.take("msgbus.slow"))["src"] for _ in range(9)] == ["7"] * 9
    assert await ask(8, 9) == 0
    assert await ask(7, 5) == 0


@pytest_twisted.ensureDeferred
async def test_a_command_whose_key_is_no_list_is_answered(peer: Peer) -> None:
    await peer.lists.redis.call("SETEX", "msgbus.taken", 60, b"x")
    peer.gateway.request_received(request_of(7, "taken"))
    assert (await refused(peer)).code == 500


@pytest_twisted.ensureDeferred
async def test_requests_wait_for_a_redis_that_is_away(make_peer: Any, redis_process: Any) -> None:
    peer = make_peer(redis_process.address)
    await peer.gateway.start()
    for number in range(3):
        peer.gateway.request_received(request_of(7, "calc.add", uid=str(number)))
    redis_process.start()
    assert [(await peer.take("msgbus.calc.add"))["ref"] for _ in range(3)] == ["0", "1", "2"]
    assert peer.exchange.answers == []


@pytest_twisted.ensureDeferred
async def test_a_redis_that_is_full_is_asked_again(peer: Peer) -> None:
    await peer.ask("CONFIG", "RESETSTAT")
    await peer.ask("CONFIG", "SET", "maxmemory", "1")
    try:
        peer.gateway.request_received(request_of(7, "calc.add"))
        while b"errorstat_OOM" not in await peer.ask("INFO", "errorstats"):
            assert await peer.ask("LLEN", "msgbus.calc.add") == 0
    finally:
        await peer.ask("CONFIG", "SET", "maxmemory", "0")
    assert (await peer.take("msgbus.calc.add"))["ref"] == "uid"
    assert peer.exchange.answers == []


@pytest_twisted.ensureDeferred
async def test_a_redis_that_is_full_is_not_asked_by_each_request_that_waits(peer: Peer, reactor: Any) -> None:
    """One twin may have thousands there, and may have filled Redis, too."""

    async def asked() -> int:
        found = re.search(rb"cmdstat_eval:calls=(\d+)", await peer.ask("INFO", "commandstats"))
        return int(found[1]) if found else 0

    await peer.ask("CONFIG", "RESETSTAT")
    await peer.ask("CONFIG", "SET", "maxmemory", "1")
    try:
        for number in range(300):
            peer.gateway.request_received(request_of(7, "calc.add", uid=str(number)))
        while await asked() < 300:
            pass
        await deferLater(reactor, 0.5)
        assert await asked() < 320
    finally:
        await peer.ask("CONFIG", "SET", "maxmemory", "0")
    assert {(await peer.take("msgbus.calc.add"))["ref"] for _ in range(300)} == {str(one) for one in range(300)}
    assert peer.exchange.answers == []


@pytest_twisted.ensureDeferred
async def test_an_answer_for_a_program_does_not_wait_behind_requests_for_which_redis_is_full(
    peer: Peer, monkeypatch: Any, reactor: Any
) -> None:
    """Redis takes it at once, once the connection is there that was lost. The requests may be thousands of other twins."""
    lost = LostPush(monkeypatch, maybe_done=False)
    peer.exchange.answer = lambda envelope: None
    request = {"ver": 1, "cmd": "c", "exp": 60, "dat": "", "dst": [8], "ret": "answers", "now": int(time.time())}
    await peer.push(commands.LOCAL, request)
    await peer.exchange.until_sent(1)
    await peer.ask("CONFIG", "SET", "maxmemory", "1")
    try:
        for number in range(60):
            peer.gateway.request_received(request_of(7, "calc.add", uid=str(number)))
        await deferLater(reactor, 0.2)
        peer.exchange.give(answer_to(peer.exchange.requests[0][0], b"pong"))
        await deferLater(reactor, 1.0)
        assert lost.is_over and await peer.ask("LLEN", "answers") == 1
        assert await peer.ask("EXISTS", "msgbus.calc.add") == 0
    finally:
        await peer.ask("CONFIG", "SET", "maxmemory", "0")


@pytest_twisted.ensureDeferred
async def test_one_twin_cannot_fill_the_memory_while_redis_is_away(make_peer: Any, redis_process: Any) -> None:
    peer = make_peer(redis_process.address)
    await peer.gateway.start()
    for number in range(40):
        peer.gateway.request_received(request_of(7, "calc.add", bytes(1_000_000), str(number)))
    assert 20 < len(peer.exchange.answers) < 30
    assert {one.error.code for one in peer.exchange.answers} == {109}
    count = len(peer.exchange.answers)
    peer.gateway.request_received(request_of(8, "calc.add", b"small"))
    assert len(peer.exchange.answers) == count


@pytest_twisted.ensureDeferred
async def test_twins_that_fill_the_memory_while_redis_is_away_leave_room_to_another(
    make_peer: Any, redis_process: Any
) -> None:
    peer = make_peer(redis_process.address)
    await peer.gateway.start()
    for twin in range(100, 105):
        for number in range(20):
            peer.gateway.request_received(request_of(twin, "calc.add", bytes(1_000_000), f"{twin}-{number}"))
    count = len(peer.exchange.answers)
    assert 30 < count < 40
    for twin in range(8, 18):
        peer.gateway.request_received(request_of(twin, "calc.add", bytes(250_000), str(twin)))
    assert len(peer.exchange.answers) == count
    peer.gateway.request_received(request_of(8, "calc.add", bytes(10_000), "2"))
    assert len(peer.exchange.answers) == count + 1


@pytest_twisted.ensureDeferred
async def test_a_request_is_not_handed_out_twice_when_redis_dies(make_peer: Any, redis_process: Any) -> None:
    redis_process.start()
    peer = make_peer(redis_process.address)
    await peer.gateway.start()
    await peer.ask("ping")
    redis_process.pause()
    peer.gateway.request_received(request_of(7, "calc.add"))
    redis_process.kill()
    assert (await refused(peer)).code == 500


@pytest_twisted.ensureDeferred
async def test_a_request_that_redis_may_have_when_the_peer_stops_is_not_called_refused(
    make_peer: Any, redis_process: Any, reactor: Any
) -> None:
    """109 says that no service has it, so the caller may send it again."""
    redis_process.start()
    peer = make_peer(redis_process.address)
    await peer.gateway.start()
    peer.gateway.request_received(request_of(7, "cmd", uid="first"))
    assert (await peer.take("msgbus.cmd"))["ref"] == "first"
    while peer.gateway.services.waiting:
        await deferLater(reactor, 0.005)
    redis_process.pause()
    peer.gateway.request_received(request_of(7, "cmd", uid="hung"))
    await peer.gateway.services.stop(0.0)
    assert (await refused(peer)).code == 500
    redis_process.resume()
    assert (await peer.take("msgbus.cmd"))["ref"] == "hung"


@pytest_twisted.ensureDeferred
async def test_an_answer_whose_destination_is_not_known_yet_when_the_peer_stops_is_sent_by_the_next_one(
    make_peer: Any, address: Any, monkeypatch: Any
) -> None:
    first, second = make_peer(address), make_peer(address)
    taken: Deferred[None] = Deferred()

    async def look_up_for_ever(*arguments: Any) -> None:
        taken.callback(None)
        await Deferred()

    monkeypatch.setattr(gateway, "STOP_TIMEOUT_S", 0.1)
    monkeypatch.setattr(first.exchange, "send", look_up_for_ever)
    await first.gateway.start()
    await first.push(REPLY, ANSWER)
    await taken
    await first.gateway.stop()
    await second.gateway.start()
    await second.exchange.until_sent(1)
    assert [one.uid for one in second.exchange.answers] == ["uid"]


def without_relay(reactor: Any, address: Any) -> gateway.Gateway:
    """A peer of twin 1 that reaches no relay."""
    registry = MemoryRegistry()
    registry.add(1)
    registry.add(7)
    dead = f"ws://127.0.0.1:{free_port()}"
    return gateway.Gateway(
        reactor, address, lambda owner: Exchange(reactor, key_of(1), registry, [dead], owner, publish=False)
    )


@pytest.mark.parametrize("problem", ["away", "silent", "slow_update"])
def test_a_peer_that_stops_before_the_registry_has_answered_asks_it_no_more(problem: str) -> None:
    network, registry, outcome = MemoryNetwork(), MemoryRegistry(), list[Any]()
    registry.add(1, with_key=False)
    setattr(registry, problem, True)
    address = RedisAddress.parse("redis://127.0.0.1")
    peer = gateway.Gateway(
        network, address, lambda owner: Exchange(network, key_of(1), registry, ["ws://127.0.0.1"], owner)
    )
    ensureDeferred(peer.start()).addBoth(outcome.append)
    network.advance(100)
    assert outcome == []
    ensureDeferred(peer.stop()).addBoth(outcome.append)
    assert outcome == [None, None]
    assert network.getDelayedCalls() == []


@pytest_twisted.ensureDeferred
async def test_an_answer_that_no_relay_has_taken_when_the_peer_stops_is_sent_by_the_next_one(
    make_peer: Any, address: Any, reactor: Any
) -> None:
    first = without_relay(reactor, address)
    second: Peer = make_peer(address)
    await first.start()
    await second.push(REPLY, ANSWER)
    while not first.exchange.relays.in_haste:
        await deferLater(reactor, 0)
    await first.stop()
    assert await second.ask("llen", REPLY_TAKEN) == 1
    await second.gateway.start()
    await second.exchange.until_sent(1)
    assert [one.uid for one in second.exchange.answers] == ["uid"]
    await second.gateway.stop()
    assert await second.ask("exists", REPLY, REPLY_TAKEN) == 0


@pytest_twisted.ensureDeferred
async def test_only_the_last_answer_to_a_request_stays_in_redis_until_a_relay_takes_it(
    peer: Peer, address: Any, reactor: Any
) -> None:
    """A service answers twice; then the peer loses Redis, and is given what it had taken once more."""
    await peer.gateway.stop()
    one, taken = without_relay(reactor, address), Waiters[None]()
    take = one.services.take

    def note(data: bytes, done: Any) -> None:
        take(data, done)
        taken.fire(None)

    one.services.take = note  # type: ignore[method-assign]
    last = json.dumps({**ANSWER, "dat": "MTM="}).encode()
    await one.start()
    for message in (json.dumps(ANSWER).encode(), last):
        is_taken = taken.wait()
        await peer.push(REPLY, json.loads(message))
        await is_taken
    while await peer.ask("LLEN", REPLY_TAKEN) != 1:
        await deferLater(reactor, 0)
    is_taken = taken.wait()
    for words in (("MULTI",), ("CLIENT", "KILL", "TYPE", "normal")):
        await peer.ask(*words)
    await peer.ask("EXEC")
    await is_taken
    await one.stop()
    [left] = await peer.ask("LRANGE", REPLY_TAKEN, 0, -1)
    assert json.loads(left) == json.loads(last)
    await peer.ask("DEL", REPLY_TAKEN)


@pytest_twisted.ensureDeferred
async def test_a_redis_that_takes_no_writes_is_not_asked_by_each_answer_that_is_done(peer: Peer, reactor: Any) -> None:
    """Relays are back, and take all answers that waited. Redis has no replica, or cannot write to its disk."""
    waiting: list[Any] = []

    async def send(envelope: Envelope, taken: Any) -> None:
        waiting.append(taken)

    async def asked() -> int:
        found = re.search(rb"errorstat_NOREPLICAS:count=(\d+)", await peer.ask("INFO", "errorstats"))
        return int(found[1]) if found else 0

    peer.exchange.send = send  # type: ignore[method-assign]
    for number in range(200):
        await peer.push(REPLY, {**ANSWER, "ref": str(number)})
    while len(waiting) < 200:
        await deferLater(reactor, 0.01)
    await peer.ask("CONFIG", "RESETSTAT")
    await peer.ask("CONFIG", "SET", "min-replicas-to-write", "1")
    try:
        for taken in waiting:
            taken()
        while await asked() < 200:
            pass
        await deferLater(reactor, 0.5)
        assert await asked() < 230
    finally:
        await peer.ask("CONFIG", "SET", "min-replicas-to-write", "0")
    while await peer.ask("EXISTS", REPLY_TAKEN):
        await deferLater(reactor, 0.01)


@pytest_twisted.ensureDeferred
async def test_a_request_that_comes_while_the_peer_stops_and_cannot_be_handed_out_is_refused(
    make_peer: Any, redis_process: Any, monkeypatch: Any
) -> None:
    peer = make_peer(redis_process.address)  # Redis does not run

    async def look_up_for_ever(*arguments: Any) -> None:
        await Deferred()

    monkeypatch.setattr(peer.exchange, "send", look_up_for_ever)
    peer.gateway.services.take(json.dumps(ANSWER).encode(), lambda: None)
    stopping = ensureDeferred(peer.gateway.services.stop(0.1))
    peer.gateway.request_received(request_of(7, "calc.add"))
    await stopping
    assert (await refused(peer)).code == 109 and peer.gateway.services.waiting == 0


@pytest_twisted.ensureDeferred
async def test_the_recorded_requests_are_handed_out_as_they_were_recorded(peer: Peer, live: Any) -> None:
    by_uid = {one["json_out"]["ref"]: one["json_out"] for one in live["envelopes"] if "json_out" in one}
    for one in live["envelopes"]:
        if one["name"].startswith("signed request by an independent client"):
            peer.gateway.request_received(accepted(parse_envelope(bytes.fromhex(one["hex"]))))
    for expected in by_uid.values():
        if expected["cmd"] == "svc.s":
            continue  # the request of this one was not recorded
        found = await peer.take(f"msgbus.{expected['cmd']}")
        assert found == expected
        assert list(found) == list(expected)
        assert base64.b64decode(found["dat"]) == b"ask"
