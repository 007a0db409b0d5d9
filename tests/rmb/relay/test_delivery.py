"""Envelopes for sessions that are not connected, or take nothing now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet.defer import Deferred, fail, succeed
from twisted.logger import formatEvent, globalLogPublisher

from dmsg.eventlog import schema as ev
from dmsg.glue.websocket import WebSocketUrl, connect_websocket
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.errors import RelayProblem
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.errors import StoreFull, StoreUnavailable
from dmsg.rmb.twins.errors import RegistryError
from dmsg.testing.link import Link

from .conftest import (
    Client,
    Federation,
    SlowStore,
    World,
    accept,
    errors,
    result_of,
    send_in_one_read,
    stored,
    uids,
)

# --- offline ---------------------------------------------------------------------------------------------------------


def test_what_comes_while_a_session_is_away_is_there_when_it_comes_in_order_and_once(world: World) -> None:
    alice = world.connect(1)
    sent = [str(at) for at in range(250)]
    alice.send(*[alice.envelope(2, uid=uid) for uid in sent])
    assert not alice.received and stored(world, 2) == sent
    bob = world.connect(2)
    world.settle()
    assert uids(bob) == sent
    alice.send(alice.envelope(2, uid="direct"))
    assert uids(bob)[-1] == "direct" and stored(world, 2) == []
    bob.leave()
    assert uids(world.connect(2)) == []


def test_a_long_queue_is_fetched_to_its_end(make_world: Callable[..., World]) -> None:
    world = make_world(page_envelopes=2)
    alice = world.connect(1)
    sent = [str(at) for at in range(1_000)]
    for at in range(0, 1_000, 100):
        alice.send(*[alice.envelope(2, uid=uid) for uid in sent[at : at + 100]])
    bob = world.connect(2)
    for _ in range(10):
        world.settle()
    assert uids(bob) == sent and stored(world, 2) == []


def test_a_session_gets_nothing_that_is_for_another_name_of_its_twin(world: World) -> None:
    alice = world.connect(1)
    alice.send(alice.envelope(SessionAddress(2)), alice.envelope(SessionAddress(2, "")))
    assert not world.connect(2, "other").received
    assert len(world.connect(2, "").received) == 1 and len(world.connect(2).received) == 1


def test_what_has_expired_in_the_store_is_not_delivered(world: World) -> None:
    alice = world.connect(1)
    alice.send(alice.envelope(2, uid="short", expiration=30), alice.envelope(2, uid="long", expiration=300))
    world.network.advance(31)
    assert uids(world.connect(2)) == ["long"]


def test_what_expires_while_other_relays_are_asked_for_its_session_is_not_delivered(
    world: World, federation: Federation
) -> None:
    alice = world.connect(1)
    alice.send(alice.envelope(2, uid="a", expiration=30))
    bob = world.connect(2)
    world.network.advance(31)
    federation.asked[0](False)
    world.turn()
    assert uids(bob) == [] and errors(alice) == [("a", 126, "message has expired")]


def test_what_has_expired_is_not_put_into_the_store(world: World) -> None:
    alice = world.connect(1)
    alice.send(alice.envelope(2, timestamp=int(world.unix_time()) - 400))
    assert [one.error.code for one in alice.envelopes] == [126] and stored(world, 2) == []


def test_what_comes_while_the_store_is_read_comes_behind_what_was_in_it(world: World) -> None:
    alice = world.connect(1)
    alice.send(*[alice.envelope(2, uid=str(at)) for at in range(3)])
    waiting: list[tuple[Deferred[Any], Any]] = []
    read = world.store.read

    def slow_read(*arguments: Any) -> Deferred[Any]:
        found = result_of(read(*arguments))
        waiting.append((Deferred(), found))
        return waiting[-1][0]

    world.store.read = slow_read  # type: ignore[method-assign]
    bob = world.connect(2)
    alice.send(alice.envelope(2, uid="meanwhile"))
    assert uids(bob) == []
    while waiting:
        answer, found = waiting.pop(0)
        answer.callback(found)
        world.turn()
    assert uids(bob) == ["0", "1", "2", "meanwhile"]


def test_what_a_session_has_not_written_when_it_ends_is_delivered_to_the_next(world: World) -> None:
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    sent = [str(at) for at in range(30)]
    alice.send(*[alice.envelope(2, uid=uid, plain=bytes(50_000)) for uid in sent])
    assert world.relay.switch.waiting_bytes > 1_000_000
    bob.leave()
    again = world.connect(2)
    world.settle()
    found = uids(again)
    # What was in the network's buffers is lost with it; all else comes, in order, and once.
    assert found == sent[-len(found) :] and len(found) >= 20
    assert world.relay.switch.waiting_bytes == 0


def test_a_newer_connection_gets_what_the_older_one_had_not_written(world: World) -> None:
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    sent = [str(at) for at in range(30)]
    alice.send(*[alice.envelope(2, uid=uid, plain=bytes(50_000)) for uid in sent])
    newer = world.connect(2)
    world.settle()
    found = uids(newer)
    assert found == sent[-len(found) :] and len(found) >= 20


def test_stored_envelopes_that_were_not_written_stay_and_those_that_were_do_not_come_again(
    make_world: Callable[..., World],
) -> None:
    world = make_world(page_envelopes=10)
    alice = world.connect(1)
    sent = [str(at) for at in range(40)]
    alice.send(*[alice.envelope(2, uid=uid, plain=bytes(30_000)) for uid in sent])
    slow = world.dial(f"?{world.token(SessionAddress(2))}")
    taken = uids(slow)
    slow.shell.hold("test", True)
    world.network.advance(1)
    slow.leave()
    again = world.connect(2)
    world.settle()
    rest = uids(again)
    assert rest == sent[len(sent) - len(rest) :] and len(taken) + len(rest) >= len(sent) - 10


def test_a_client_that_reads_slowly_slows_down_only_the_reading_from_the_store(world: World) -> None:
    alice = world.connect(1)
    alice.send(*[alice.envelope(2, uid=str(at), plain=bytes(50_000)) for at in range(100)])
    query = f"?{world.token(SessionAddress(2))}"
    slow = world.dial(query)
    slow.shell.hold("test", True)
    # Two pages at most are in memory, and 4.4 MB of 5 in the store.
    assert world.relay.switch.waiting_bytes < 600_000
    slow.shell.hold("test", False)
    world.settle()
    assert len(slow.received) == 100


def test_while_the_store_fails_sessions_get_what_is_sent_now_and_later_what_was_stored(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = world.connect(1)
    alice.send(alice.envelope(2, uid="stored"))

    with monkeypatch.context() as patch:
        patch.setattr(world.store, "read", lambda *arguments: fail(StoreUnavailable("gone")))
        bob = world.connect(2)
        alice.send(alice.envelope(2, uid="now"))
        world.network.advance(5)
        alice.send(alice.envelope(2, uid="still"))
        assert uids(bob) == ["now", "still"]
    world.network.advance(5)
    assert uids(bob) == ["now", "still", "stored"]


def test_that_the_disk_of_the_store_is_full_is_said_in_the_log_but_not_that_a_twin_has_no_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    globalLogPublisher.addObserver(observer := lambda event: said.append(formatEvent(event)))
    try:
        alice = world.connect(1)
        for scope in ("twin", "disk"):
            monkeypatch.setattr(world.store, "push", lambda *_, of=scope: fail(StoreFull(of)))
            alice.send(alice.envelope(2, uid=scope))
    finally:
        globalLogPublisher.removeObserver(observer)
    assert [text for text in said if "stored" in text] == ["an envelope cannot be stored: the disk is full"]


def test_a_store_that_cannot_delete_is_read_to_its_end_and_gives_nothing_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file on a disk that is full."""
    alice = world.connect(1)
    sent = [str(at) for at in range(250)]
    alice.send(*[alice.envelope(2, uid=uid) for uid in sent])
    delete = world.store.delete
    monkeypatch.setattr(world.store, "delete", lambda *arguments: fail(StoreUnavailable("full")))
    bob = world.connect(2)
    world.settle()
    assert uids(bob) == sent
    alice.send(alice.envelope(2, uid="direct"))
    assert uids(bob)[-1] == "direct"
    for _ in range(2):
        bob.leave()
        alice.send(alice.envelope(2, uid="next"))
        bob = world.connect(2)
        world.settle()
        assert uids(bob) == ["next"]
    assert len(stored(world, 2)) == 252
    monkeypatch.setattr(world.store, "delete", delete)
    world.network.advance(2)
    world.settle()
    assert uids(bob) == ["next"] and stored(world, 2) == []
    bob.leave()
    assert uids(world.connect(2)) == []


def test_a_store_that_cannot_delete_is_not_asked_to_for_each_page_and_session(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store in a file takes the transaction back then, and counts all that it has."""
    tried: list[float] = []

    def delete(*arguments: Any) -> Deferred[None]:
        tried.append(world.network.seconds())
        return fail(StoreUnavailable("full"))

    monkeypatch.setattr(world.store, "delete", delete)
    alice = world.connect(1)
    sent = [str(at) for at in range(250)]
    for name in "abc":
        alice.send(*[alice.envelope(SessionAddress(2, name), uid=uid) for uid in sent])
    for name in "abc":
        bob = world.connect(2, name)
        world.settle()
        assert uids(bob) == sent
        bob.leave()
    assert len(tried) <= 1 + (tried[-1] - tried[0]) / 2


@pytest.mark.parametrize("leaves", [True, False])
def test_thousands_that_could_not_be_deleted_are_deleted_some_at_a_time(
    world: World, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """A store in a file needs 300 ms for 10,000, and nothing else goes on there until then. It fails once in between, too."""
    alice = world.connect(1)
    for at in range(0, 2_400, 240):
        alice.send(*[alice.envelope(2, uid=str(one)) for one in range(at, at + 240)])
    numbers: list[int] = []
    failing = {0, 2}
    delete = world.store.delete

    def delete_some(address: SessionAddress, ids: list[str]) -> Deferred[None]:
        numbers.append(len(ids))
        return fail(StoreUnavailable("gone")) if len(numbers) - 1 in failing else delete(address, ids)

    monkeypatch.setattr(world.store, "delete", delete_some)
    bob = world.connect(2)
    world.settle()
    assert len(uids(bob)) == 2_400
    if leaves:
        bob.leave()
    for _ in range(4):
        world.network.advance(2)
        world.settle()
    assert not stored(world, 2)
    assert len(numbers) == 6 and max(numbers) <= 1_000
    again = world.connect(2)
    assert not uids(again) and len(uids(bob)) == 2_400


@pytest.mark.parametrize("fails", [True, False])
def test_what_cannot_be_deleted_for_ended_sessions_is_remembered_within_bounds(
    world: World, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr("dmsg.rmb.relay.keeper._UNDELETED", 25)
    alice = world.connect(1)
    delete = world.store.delete
    monkeypatch.setattr(world.store, "delete", lambda *arguments: fail(StoreUnavailable("full")))
    for name in "abc":
        address = SessionAddress(2, name)
        alice.send(*[alice.envelope(address, uid=str(at)) for at in range(10)])
        bob = world.connect(2, name)
        world.settle()
        assert len(uids(bob)) == 10
        bob.leave()
    if not fails:
        monkeypatch.setattr(world.store, "delete", delete)
    again = [len(uids(world.connect(2, name))) for name in "abc"]
    assert again == [10, 0, 0]


@pytest.mark.parametrize("stops", [False, True])
def test_what_could_not_be_deleted_for_ended_sessions_is_deleted_though_they_do_not_come_again(
    world: World, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """They may come to another process with the same store, or to the next one. The store fails for the first only."""
    alice = world.connect(1)
    for name in "abc":
        alice.send(*[alice.envelope(SessionAddress(2, name), uid=str(at)) for at in range(3)])
    delete, failures = world.store.delete, [StoreUnavailable("gone")]

    def delete_later(*arguments: Any) -> Deferred[None]:
        return fail(failures.pop()) if failures else delete(*arguments)

    monkeypatch.setattr(world.store, "delete", delete_later)
    for name in "abc":
        bob = world.connect(2, name)
        world.settle()
        assert uids(bob) == ["0", "1", "2"]
        bob.leave()
    assert not failures and len(stored(world, 2, "c")) == 3
    if stops:
        world.relay.stopService()
    world.network.advance(0 if stops else 2)
    world.settle()
    assert [stored(world, 2, name) for name in "abc"] == [[], [], []]


def test_a_relay_that_has_stopped_once_still_deletes_later_what_could_not_be_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = world.relay.stopService()
    world.network.advance(10)
    assert result_of(stopping) is None
    world.relay.startService()
    alice = world.connect(1)
    alice.send(alice.envelope(2))
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "delete", lambda *arguments: fail(StoreUnavailable("gone")))
        bob = world.connect(2)
        world.settle()
        bob.leave()
    assert len(uids(bob)) == len(stored(world, 2)) == 1
    world.network.advance(2)
    world.settle()
    assert not stored(world, 2)


def test_what_could_not_be_deleted_when_it_was_written_does_not_come_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = world.connect(1)
    alice.send(*[alice.envelope(2, uid=str(at)) for at in range(3)])
    delete, failures = world.store.delete, [StoreUnavailable("gone")] * 2

    def delete_later(*arguments: Any) -> Deferred[None]:
        return fail(failures.pop()) if failures else delete(*arguments)

    monkeypatch.setattr(world.store, "delete", delete_later)
    bob = world.connect(2)
    world.network.advance(10)
    alice.send(alice.envelope(2, uid="now"))
    assert uids(bob) == ["0", "1", "2", "now"] and not failures and stored(world, 2) == []


# --- slow receivers ---------------------------------------------------------------------------------------------------


def test_more_than_a_queue_holds_waits_in_the_store_and_comes_in_order(make_world: Callable[..., World]) -> None:
    world = make_world(queue_bytes=500_000)
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    sent = [str(at) for at in range(60)]
    for uid in sent:
        alice.send(alice.envelope(2, uid=uid, plain=bytes(40_000)))
    assert world.relay.switch.waiting_bytes <= 500_000 + 2 * 65_536 and len(stored(world, 2)) > 20
    bob.shell.hold("test", False)
    world.settle()
    assert uids(bob) == sent and stored(world, 2) == [] and world.relay.switch.waiting_bytes == 0
    alice.send(alice.envelope(2, uid="direct"))
    assert uids(bob)[-1] == "direct"


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_short_envelope_for_which_a_full_queue_has_room_does_not_overtake_a_long_one_before_it(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, is_slow: bool
) -> None:
    world = make_world(queue_bytes=500_000)
    alice, bob = world.connect(1), world.connect(2)
    store = SlowStore(world, monkeypatch) if is_slow else None
    bob.shell.hold("test", True)
    sizes = [40_000] * 30 + [10, 40_000, 20, 40_000, 40_000, 30]
    alice.send(*[alice.envelope(2, uid=str(at), plain=bytes(size)) for at, size in enumerate(sizes)])
    assert len(stored(world, 2)) > 2 or (store is not None and store.asked > 2)
    bob.shell.hold("test", False)
    for _ in range(10):
        world.network.advance(0.01)
        world.settle()
    assert uids(bob) == [str(at) for at in range(len(sizes))]


def test_a_session_that_takes_nothing_for_a_minute_is_cut_and_nothing_that_was_not_written_is_lost(
    world: World,
) -> None:
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    alice.send(*[alice.envelope(2, uid=str(at), plain=bytes(50_000), expiration=900) for at in range(30)])
    world.network.advance(59)
    assert SessionAddress(2) in world.relay.switch.sessions
    world.network.advance(2)
    assert SessionAddress(2) not in world.relay.switch.sessions and world.relay.switch.waiting_bytes == 0
    assert len(stored(world, 2)) >= 20


def test_a_session_that_takes_a_little_now_and_then_is_not_cut(world: World) -> None:
    alice, bob = world.connect(1), world.connect(2)
    alice.send(*[alice.envelope(2, uid=str(at), expiration=900) for at in range(3)])
    for at in range(10):
        bob.shell.hold("test", True)
        alice.send(*[alice.envelope(2, plain=bytes(50_000), uid=f"{at}.{number}") for number in range(10)])
        world.network.advance(30)
        bob.shell.hold("test", False)
        world.settle()
    assert not bob.lost and len(bob.received) == 103


def test_a_session_whose_network_takes_a_minute_and_a_half_for_one_long_envelope_gets_it(world: World) -> None:
    alice = world.connect(1)
    bob, slow = Client(world, SessionAddress(2)), Link(world.network, bits_per_s=80_000, buffer_bytes=32 * 1024)
    url = WebSocketUrl.parse(f"ws://relay/?{world.token(bob.address)}")
    opening = connect_websocket(world.network.through(slow), url, bob)
    world.network.advance(1)
    assert result_of(opening).open
    alice.send(alice.envelope(2, uid="long", plain=bytes(900_000)))
    world.network.advance(60)
    alice.send(alice.envelope(2, uid="next"))
    world.network.advance(40)
    assert uids(bob) == ["long", "next"] and not bob.lost


def test_many_envelopes_of_one_read_are_delivered_in_turns_and_in_order(world: World) -> None:
    alice, bob = world.connect(1), world.connect(2)
    progress = []

    def look() -> None:
        progress.append(world.relay.switch.counts.stored)
        if progress[-1] < 1_800 and len(progress) < 100:
            world.network.callLater(0, look)

    sent = [str(at) for at in range(1_800)]
    send_in_one_read(alice, sent)
    world.network.callLater(0, look)
    world.turn()
    assert len({count for count in progress if 0 < count < 1_800}) > 1, "others had their turns"
    alice.send(alice.envelope(5, "last"), alice.envelope(2, "to bob"))
    assert stored(world, 5) == [*sent, "last"] and uids(bob) == ["to bob"]
    assert not world.relay.delivery.pending.used


@pytest.mark.parametrize("room", [1 << 26, 2_000_000])
def test_what_comes_in_several_pieces_is_delivered_in_order_too(make_world: Callable[..., World], room: int) -> None:
    """As over TLS, which hands over all that it has read, a record at a time, though the session is not read from any more."""
    world = make_world(pending_total_bytes=room)
    alice, pieces = world.connect(1), []
    for at in range(0, 3_000, 600):
        for number in range(at, at + 600):
            alice.shell.core.send(alice.envelope(5, str(number)).SerializeToString())
        pieces.append(b"".join(iter(alice.shell.core.data_to_send, b"")))
    [session] = world.relay.switch.sessions.values()
    for piece in pieces:
        session.owner.dataReceived(piece)
    world.settle()
    alice.send(alice.envelope(5, "3000"))
    numbers, refused = [int(uid) for uid in stored(world, 5)], [int(uid) for uid, *_ in errors(alice)]
    assert numbers == sorted(numbers) and sorted(numbers + refused) == list(range(3_001))
    assert bool(refused) is (room < 1 << 26) and not world.relay.delivery.pending.used


def test_what_comes_in_a_further_piece_does_not_overtake_a_long_one_that_waits_for_its_turn(
    make_world: Callable[..., World],
) -> None:
    world = make_world(queue_bytes=500_000)
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    for at in range(20):
        alice.send(alice.envelope(2, uid=str(at), plain=bytes(40_000)))
    pieces = []
    for sent in ([*map(str, range(600))], ["long"], ["short"]):
        for uid in sent:
            to, size = (2, 40_000 if uid == "long" else 0) if len(sent) == 1 else (5, 0)
            alice.shell.core.send(alice.envelope(to, uid, plain=bytes(size)).SerializeToString())
        pieces.append(b"".join(iter(alice.shell.core.data_to_send, b"")))
    shell = world.relay.switch.sessions[alice.address].owner
    for piece in pieces:
        shell.dataReceived(piece)
    world.settle()
    bob.shell.hold("test", False)
    world.settle()
    assert uids(bob) == [*map(str, range(20)), "long", "short"]
    assert world.relay.switch.waiting_bytes == 0 and not world.relay.delivery.pending.used


def test_a_relay_that_stops_delivers_all_of_a_read_that_is_delivered_in_turns(world: World) -> None:
    alice = world.connect(1)
    stopping: list[Deferred[None]] = []

    def stop() -> None:
        if not stopping and world.relay.switch.counts.stored:
            stopping.append(world.relay.stopService())
        elif not stopping:
            world.network.callLater(0, stop)

    sent = [str(at) for at in range(1_000)]
    send_in_one_read(alice, sent)
    world.network.callLater(0, stop)
    world.network.advance(10)
    assert result_of(stopping[0]) is None and alice.closed is not None
    assert stored(world, 5) == sent
    world.relay.startService()


def test_envelopes_of_one_read_for_which_there_is_no_room_to_wait_are_delivered_at_once(
    make_world: Callable[..., World],
) -> None:
    world = make_world(pending_total_bytes=100_000)
    alice = world.connect(1)
    sent = [str(at) for at in range(1_000)]
    send_in_one_read(alice, sent)
    world.turn()
    assert stored(world, 5) == sent and not alice.received


def test_an_envelope_of_an_ended_session_for_which_there_is_no_room_any_more_is_answered_and_nothing_stays_counted(
    make_world: Callable[..., World],
) -> None:
    world = make_world(pending_total_bytes=18_000_000)
    alice, others = world.connect(1), [world.connect(6, str(at), host=f"192.0.{at}.2") for at in range(3)]
    world.registry.slow = slow = Deferred()
    for client, count, size in ((alice, 1_400, 0), *((other, 200, 20_000) for other in others)):
        for at in range(count):
            client.shell.core.send(client.envelope(5, str(at), plain=bytes(size)).SerializeToString())
        shell = world.relay.switch.sessions[client.address].owner
        for piece in iter(client.shell.core.data_to_send, b""):
            shell.dataReceived(piece)
    world.relay.switch.sessions[alice.address].owner.cut()  # most of its envelopes wait for their turn
    world.turn()
    for other in others:
        other.leave()
    world.registry.slow = None
    slow.callback(None)
    world.settle()
    assert world.relay.stats()["queued_bytes"] == 0
    world.network.advance(1)
    again = world.connect(1)
    world.settle()
    refused = [uid for uid, code, _ in errors(again) if code == 133]
    assert refused == [str(at) for at in range(1_400 - len(refused), 1_400)]


def test_all_that_waits_is_bounded_and_the_network_that_has_most_gives_way(make_world: Callable[..., World]) -> None:
    world = make_world(queued_total_bytes=3_000_000, queue_bytes=1_000_000)
    world.registry.add(*range(100, 120))
    alice = world.connect(1, host="203.0.113.1")
    honest = world.connect(2, host="203.0.113.2")
    honest.shell.hold("test", True)
    alice.send(*[alice.envelope(2, uid=str(at), plain=bytes(50_000)) for at in range(19)])
    slow = [world.connect(twin, host=f"198.51.100.{twin}") for twin in range(100, 120)]
    for client in slow:
        client.shell.hold("test", True)
    for client in slow:
        alice.send(*[alice.envelope(client.address, plain=bytes(50_000)) for _ in range(18)])
        assert world.relay.switch.waiting_bytes <= 3_000_000
    world.network.advance(6)
    assert sum(SessionAddress(twin) not in world.relay.switch.sessions for twin in range(100, 120)) >= 10
    assert SessionAddress(2) in world.relay.switch.sessions and not alice.lost


def test_what_waits_behind_a_store_that_hangs_is_bounded_too_and_costs_no_other_session_its_place(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(queued_total_bytes=3_000_000, queue_bytes=1_000_000)
    world.registry.add(*range(100, 110))
    alice, honest = world.connect(1, host="203.0.113.1"), world.connect(2, host="203.0.113.2")
    honest.shell.hold("test", True)
    alice.send(*[alice.envelope(2, str(at), plain=bytes(50_000)) for at in range(5)])
    reading: Deferred[Any] = Deferred()
    with monkeypatch.context() as patch:
        patch.setattr(world.store, "read", lambda *arguments: reading)
        for twin in range(100, 110):
            waiting = world.connect(twin, host=f"198.51.100.{twin}")
            alice.send(*[alice.envelope(waiting.address, plain=bytes(50_000)) for _ in range(18)])
            assert world.relay.switch.waiting_bytes <= 3_000_000
    assert SessionAddress(2) in world.relay.switch.sessions and len(world.relay.switch.sessions) >= 4
    reading.callback([])


# --- what cannot be delivered -----------------------------------------------------------------------------------------


def test_the_sender_hears_that_a_twin_is_unknown_or_has_no_relay(world: World) -> None:
    world.registry.add(8, relays=())
    alice = world.connect(1)
    alice.send(alice.envelope(99, uid="a"), alice.envelope(8, uid="b"))
    assert errors(alice) == [
        ("a", 123, "unknown twin destination"),
        ("b", 124, "relay info is not set for this twin"),
    ]


def test_a_registry_that_does_not_answer_is_said_so(world: World) -> None:
    alice = world.connect(1)
    world.registry.broken = True
    alice.send(alice.envelope(3))
    assert [(code, text) for _, code, text in errors(alice)] == [(131, "failed to get twin information")]


def test_an_error_for_a_session_that_has_gone_waits_for_it(world: World) -> None:
    alice = world.connect(1)
    world.registry.slow = Deferred()
    alice.send(alice.envelope(99, uid="a"))
    alice.leave()
    world.registry.slow.callback(None)
    world.registry.slow = None
    world.turn()
    assert errors(world.connect(1)) == [("a", 123, "unknown twin destination")]


def test_a_session_that_connects_while_its_twin_is_looked_up_gets_it_directly(world: World) -> None:
    alice = world.connect(1)
    world.registry.slow = waiting = Deferred()
    alice.send(alice.envelope(2, uid="a", tags="x fail-fast"))
    world.registry.slow = None
    bob = world.connect(2)
    waiting.callback(None)
    world.turn()
    assert uids(bob) == ["a"] and not alice.received


@pytest.mark.parametrize("answer", ["known", "unknown", "broken"])
@pytest.mark.parametrize("size", [0, 30_000])
def test_a_session_that_connects_while_its_twin_is_looked_up_gets_all_in_order(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, answer: str, size: int
) -> None:
    world = make_world(queue_bytes=200_000)
    alice, carol, bob = world.connect(1), world.connect(3), world.connect(2)
    bob.leave()
    waiting: list[Deferred[None]] = []
    get = world.registry.get

    async def slow(twin: int) -> Any:
        waiting.append(Deferred())
        await waiting[-1]
        if answer == "broken":
            raise RegistryError("unavailable")
        return await get(twin) if answer == "known" else None

    with monkeypatch.context() as patch:
        patch.setattr(world.registry, "get", slow)
        alice.send(alice.envelope(2, "0"), alice.envelope(2, "1"))
    world.network.advance(1)
    bob = world.connect(2)
    monkeypatch.setattr(world.registry, "get", slow)
    bob.shell.hold("test", size > 0)
    carol.send(carol.envelope(2, "carol's"))
    for at in range(2, 12):
        alice.send(alice.envelope(2, str(at), plain=bytes(size)))
    alice.send(alice.envelope(3, "to another"))
    assert uids(carol) == ["to another"]
    for asked in waiting:
        asked.callback(None)
    world.turn()
    alice.send(alice.envelope(2, "12"))
    bob.shell.hold("test", False)
    world.settle()
    assert uids(bob) == ["0", "1", "carol's", *map(str, range(2, 13))] and not alice.received
    assert not world.relay.delivery.pending.used


def test_envelopes_that_come_while_their_twin_is_looked_up_are_stored_in_order(world: World) -> None:
    alice = world.connect(1)
    world.registry.slow = slow = Deferred()
    sent = [str(at) for at in range(40)]
    alice.send(*[alice.envelope(5, uid) for uid in sent[:30]])
    alice.send(*[alice.envelope(5, uid) for uid in sent[30:]])
    world.registry.slow = None
    slow.callback(None)
    world.settle()
    assert stored(world, 5) == sent


def test_what_expires_while_its_twin_is_looked_up_is_not_delivered(world: World) -> None:
    alice = world.connect(1)
    world.registry.slow = waiting = Deferred()
    alice.send(alice.envelope(2, uid="a", expiration=30))
    world.registry.slow = None
    world.network.advance(31)
    bob = world.connect(2)
    waiting.callback(None)
    world.turn()
    assert uids(bob) == [] and errors(alice) == [("a", 126, "message has expired")]


@pytest.mark.parametrize("error", [StoreFull("queue"), StoreUnavailable("gone"), RuntimeError("a bug")])
def test_the_sender_hears_that_there_is_no_room_and_its_session_goes_on(
    world: World, error: Exception, monkeypatch: pytest.MonkeyPatch, logged_errors: Any
) -> None:
    alice = world.connect(1)
    monkeypatch.setattr(world.store, "push", lambda *arguments: fail(error))
    alice.send(alice.envelope(2, uid="a"))
    [(uid, code, text)] = errors(alice)
    assert (uid, code) == ("a", 130) and text.startswith("failed to route message to peer") and not alice.lost
    logged_errors.flush(RuntimeError)


def test_a_sender_with_too_many_envelopes_under_way_is_not_read_from(make_world: Callable[..., World]) -> None:
    world = make_world(pending_per_session=20)
    alice, bob, carol = world.connect(1), world.connect(2), world.connect(3)
    world.registry.slow = Deferred()
    alice.send(*[alice.envelope(9, uid=str(at)) for at in range(30)])
    alice.send(alice.envelope(2, uid="behind"))
    bob.send(bob.envelope(3, uid="neighbour"))
    assert uids(bob) == [] and uids(carol) == ["neighbour"]
    world.registry.slow.callback(None)
    world.registry.slow = None
    world.turn()
    assert uids(bob) == ["behind"] and len(stored(world, 9)) == 30


def test_all_envelopes_under_way_are_bounded(make_world: Callable[..., World]) -> None:
    world = make_world(pending_total_bytes=200_000)
    alice, mallory = world.connect(1, host="203.0.113.1"), world.connect(6, host="198.51.100.1")
    world.registry.slow = Deferred()
    mallory.send(*[mallory.envelope(9, uid=str(at), plain=bytes(30_000)) for at in range(4)])
    assert errors(mallory) == [("3", 133, "relay is overloaded, try again later")]
    alice.send(alice.envelope(9, uid="another network"))
    assert not alice.received
    world.registry.slow.callback(None)
    world.turn()
    assert stored(world, 9) == ["0", "1", "2", "another network"] and world.relay.delivery.pending.used == 0


def test_a_store_that_says_an_envelope_is_over_is_believed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    alice = world.connect(1)
    monkeypatch.setattr(world.store, "push", lambda *arguments: succeed(False))
    alice.send(alice.envelope(2, uid="a"))
    assert errors(alice) == [("a", 126, "message has expired")]


def test_a_session_may_end_while_the_store_fails(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: Any) -> Deferred[Any]:
        return fail(StoreUnavailable("gone"))

    alice = world.connect(1)
    with monkeypatch.context() as patch:
        for name in ("read", "push", "delete"):
            patch.setattr(world.store, name, failing)
        bob = world.connect(2)
        bob.shell.hold("test", True)
        alice.send(*[alice.envelope(2, uid=str(at), plain=bytes(50_000)) for at in range(10)])
        bob.leave()
        world.network.advance(5)
    assert world.relay.switch.waiting_bytes == 0 and uids(world.connect(2)) == []
    world.network.advance(1)
    assert {str(one.reason) for one in world.events.of(ev.EnvelopeFailed)} == {"failed to route message to peer"}


# --- other relays -----------------------------------------------------------------------------------------------------


def test_an_envelope_for_a_twin_of_other_relays_is_federated(world: World, federation: Federation) -> None:
    world.registry.add(50, relays=("b.example", "c.example"))
    alice = world.connect(1)
    alice.send(alice.envelope(50))
    assert federation.submitted == [(50, ("b.example", "c.example"))] and not alice.received
    federation.problem = RelayProblem.OVERLOADED
    alice.send(alice.envelope(50, uid="b"))
    assert errors(alice) == [("b", 133, "relay is overloaded, try again later")]


def test_the_public_counters_of_received_messages_leave_out_what_is_federated(
    world: World, federation: Federation
) -> None:
    world.registry.add(50, relays=("b.example",))
    federation.knows_others = False
    alice, bob = world.connect(1), world.connect(2)
    here, away = alice.envelope(2), alice.envelope(3)
    alice.send(alice.envelope(50), here, away)
    assert len(federation.submitted) == len(bob.received) == 1 and stored(world, 3) == ["u"]
    posted = bob.envelope(1)
    accept(world, posted)
    counters = world.relay.public_stats()
    assert counters["relay_message_rx"] == 3
    assert counters["relay_message_rx_bytes"] == sum(len(one.SerializeToString()) for one in (here, away, posted))


def test_an_envelope_for_a_twin_that_moves_to_this_relay_waits_here_and_is_found_out_about_anew(
    world: World, federation: Federation
) -> None:
    world.registry.add(50, relays=("b.example",))
    alice = world.connect(1)
    alice.send(alice.envelope(50, uid="a"), alice.envelope(50, uid="b"))
    world.registry.add(50, relays=("relay.example",))
    federation.knows_others = False
    for moved_here in federation.moved_here:
        moved_here(False)
    world.turn()
    assert stored(world, 50) == ["a", "b"] and not alice.received
    assert uids(world.connect(50)) == ["a", "b"]


def test_a_session_that_is_here_is_preferred_to_its_relays(world: World, federation: Federation) -> None:
    world.registry.add(50, relays=("b.example",))
    alice, bob = world.connect(1), world.connect(50)
    alice.send(alice.envelope(50))
    assert len(bob.received) == 1 and not federation.submitted
    assert world.registry.asked.count(50) == 1  # at its login


def test_a_twin_that_is_connected_to_another_of_its_relays_is_found_there(world: World, federation: Federation) -> None:
    world.registry.add(50, relays=("relay.example", "b.example"))
    alice = world.connect(1)
    alice.send(alice.envelope(50, uid="a"), alice.envelope(50, uid="b"), alice.envelope(50, uid="c", tags="fail-fast"))
    assert len(federation.asked) == 3 and stored(world, 50) == [] and not alice.received
    federation.asked[1](False)  # no relay has it
    federation.asked[2](False)
    world.turn()
    assert stored(world, 50) == ["b"] and errors(alice) == [("c", 125, "destination offline")]


def test_the_sender_is_not_told_that_a_session_is_offline_which_another_relay_may_have_found(
    world: World, federation: Federation
) -> None:
    world.registry.add(50, relays=("relay.example", "b.example"))
    alice = world.connect(1)
    alice.send(alice.envelope(50, uid="a", tags="fail-fast"))
    federation.asked[0](True)
    world.turn()
    assert errors(alice) == [("a", 130, "failed to route message to peer")]


def test_a_session_that_comes_while_other_relays_are_asked_gets_the_envelope(
    world: World, federation: Federation
) -> None:
    world.registry.add(50, relays=("relay.example", "b.example"))
    alice = world.connect(1)
    alice.send(alice.envelope(50, uid="a", tags="fail-fast"))
    bob = world.connect(50)
    federation.asked[0](False)
    world.turn()
    assert uids(bob) == ["a"] and not alice.received


def test_without_federation_twins_of_other_relays_are_offline(world: World) -> None:
    world.registry.add(50, relays=("b.example",))
    alice = world.connect(1)
    alice.send(alice.envelope(50, uid="a"))
    assert errors(alice) == [("a", 125, "destination offline")]


def test_an_envelope_that_no_other_relay_can_be_asked_about_waits_here(world: World, federation: Federation) -> None:
    world.registry.add(50, relays=("relay.example", "b.example"))
    federation.knows_others = False
    alice = world.connect(1)
    alice.send(alice.envelope(50, uid="a"))
    assert stored(world, 50) == ["a"]


def test_what_another_relay_brings_goes_to_the_session_or_waits_for_it(world: World, federation: Federation) -> None:
    bob = world.connect(2)
    envelope = bob.envelope(2, uid="a")
    envelope.source.twin = 70
    assert accept(world, envelope) == 202 and uids(bob) == ["a"]
    bob.leave()
    assert accept(world, envelope, True) == 404
    envelope.tags = "fail-fast"
    assert accept(world, envelope) == 404
    envelope.tags = ""
    assert accept(world, envelope) == 202 and stored(world, 2) == ["a"]
    assert not federation.submitted and not federation.asked  # what a relay brings goes to no other one


def test_what_another_relay_asks_about_a_session_that_is_not_here_does_not_count_as_posted(
    world: World, federation: Federation
) -> None:
    """It posts the envelope again, here or to another relay."""
    bob = world.connect(2)
    envelope = bob.envelope(2, uid="a")
    envelope.source.twin = 70
    size, counts = len(envelope.SerializeToString()), world.relay.switch.counts
    assert accept(world, envelope, True) == 202 and (counts.ingested, counts.bytes) == (1, size)
    bob.leave()
    assert accept(world, envelope, True) == 404 and (counts.ingested, counts.bytes) == (1, size)
    assert accept(world, envelope) == 202 and (counts.ingested, counts.bytes) == (2, 2 * size)


def test_what_is_given_up_while_the_store_does_not_answer_is_refused_without_a_traceback(
    world: World, monkeypatch: pytest.MonkeyPatch, logged_errors: Any
) -> None:
    """A post has 2 seconds, with up to 1,024 envelopes: each would have written one."""
    world.registry.add(2)
    monkeypatch.setattr(world.store, "push", lambda *arguments: Deferred())
    envelope = world.connect(1).envelope(2, uid="late")
    data = envelope if isinstance(envelope, bytes) else envelope.SerializeToString()
    statuses: list[int] = []
    accepting = world.relay.delivery.accept(Envelope.FromString(data), data, False)
    accepting.addCallback(statuses.append)
    accepting.cancel()
    assert statuses == [503] and not logged_errors.events()


@pytest.mark.parametrize("tags", ["", "fail-fast"])
def test_while_a_shared_store_is_away_what_is_for_a_connected_session_is_refused_without_a_traceback(
    world: World, monkeypatch: pytest.MonkeyPatch, logged_errors: Any, tags: str
) -> None:
    """Only the store can say whether the session is connected to another process."""
    monkeypatch.setattr(world.store, "shared", True)
    monkeypatch.setattr(world.store, "connected", lambda session: fail(StoreUnavailable("away")))
    bob = world.connect(2)
    envelope = bob.envelope(2, uid="a", tags=tags)
    bob.leave()
    assert accept(world, envelope, connected_only=not tags) == 503 and not logged_errors.events()
    assert world.relay.switch.counts.refused == 1


@pytest.mark.parametrize("has_it", [True, False])
def test_while_a_shared_store_is_away_other_relays_are_asked_for_the_session(
    world: World, federation: Federation, monkeypatch: pytest.MonkeyPatch, has_it: bool
) -> None:
    monkeypatch.setattr(world.store, "shared", True)
    for operation in ("connected", "push"):
        monkeypatch.setattr(world.store, operation, lambda *_, **__: fail(StoreUnavailable("away")))
    alice = world.connect(1)
    alice.send(alice.envelope(2, uid="a"))
    assert len(federation.asked) == 1 and errors(alice) == []
    if not has_it:
        federation.asked[0](False)
        world.turn()
        assert errors(alice) == [("a", 130, RelayProblem.NOT_STORED.text)]
    federation.knows_others = False
    alice.send(alice.envelope(2, uid="b"))
    assert errors(alice)[-1] == ("b", 130, RelayProblem.NOT_STORED.text)
