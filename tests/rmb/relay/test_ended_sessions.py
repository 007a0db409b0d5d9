"""What ended sessions were not given, and what comes for them meanwhile, on its way to the store."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from twisted.internet.defer import Deferred, fail

from dmsg.eventlog import schema as ev
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.errors import StoreFull, StoreUnavailable

from .conftest import (
    Client,
    Federation,
    SlowStore,
    World,
    _Threads,
    accept,
    errors,
    result_of,
    stored,
    uids,
)


def test_what_comes_while_a_session_s_queue_is_put_into_the_store_comes_behind_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlowStore(world, monkeypatch)
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    alice.send(*[alice.envelope(2, uid=str(at), plain=bytes(1_000)) for at in range(1_000)])
    bob.leave()
    for at in range(1_000, 1_010):
        alice.send(alice.envelope(2, uid=str(at)))
        world.network.advance(0.01)
    bob = world.connect(2)
    alice.send(alice.envelope(2, uid="1010"))
    for _ in range(100):
        world.network.advance(0.01)
    world.settle()
    received = uids(bob)
    assert received == [str(at) for at in range(1_011 - len(received), 1_011)] and len(received) > 500
    assert store.most <= 300


def test_however_many_sessions_end_at_once_the_store_is_not_given_all_they_had_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store in a file takes 4,096 pushes at a time, and fails for what is more."""
    alice = world.connect(1)
    clients = [world.connect(2, str(at)) for at in range(20)]
    for client in clients:
        client.shell.hold("test", True)
        alice.send(*[alice.envelope(client.address, uid=str(at), plain=bytes(1_000)) for at in range(400)])
    store = SlowStore(world, monkeypatch)
    for client in clients:
        client.shell.cut()
    world.turn()
    for _ in range(100):
        world.network.advance(0.01)
    assert 1_000 < store.most <= 2_048 and not store.under_way
    for client in clients:
        assert stored(world, *client.address)[-100:] == [str(at) for at in range(300, 400)]


def test_a_long_queue_is_put_into_the_store_in_turns(world: World) -> None:
    """One of the shortest envelopes may have 300,000: they took 20 s at once."""
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    sent = [str(at) for at in range(5_000)]
    for at in range(0, 5_000, 500):
        alice.send(*[alice.envelope(2, uid=uid, plain=bytes(100)) for uid in sent[at : at + 500]])
    progress = [len(stored(world, 2))]

    def look() -> None:
        progress.append(len(stored(world, 2)))
        if progress[-1] > progress[-2] or len(progress) < 4:
            world.network.callLater(0, look)

    bob.shell.cut()
    world.network.callLater(0, look)
    world.settle()
    waiting = stored(world, 2)
    assert len(waiting) > 1_000 and waiting == sent[-len(waiting) :]
    assert max(after - before for before, after in pairwise(progress)) < 300


def test_short_queues_of_many_sessions_that_end_at_once_are_put_into_the_store_in_turns(world: World) -> None:
    """An address may have 1,000 sessions: with 64 envelopes each they took 4 s at once."""
    alice = world.connect(1)
    clients = [world.connect(2, str(at)) for at in range(60)]
    for client in clients:
        client.shell.hold("test", True)
        alice.send(alice.envelope(client.address, "long", plain=bytes(200_000)))
        alice.send(*[alice.envelope(client.address, str(at)) for at in range(40)])
    progress = [0]

    def look() -> None:
        progress.append(sum(len(stored(world, *client.address)) for client in clients))
        if progress[-1] < 60 * 40 and len(progress) < 100:
            world.network.callLater(0, look)

    for client in clients:
        client.shell.cut()
    world.network.callLater(0, look)
    world.settle()
    for client in clients:
        assert stored(world, *client.address) == [str(at) for at in range(40)]
    assert max(after - before for before, after in pairwise(progress)) <= 8 * 64


def test_a_session_that_comes_back_does_not_wait_until_the_queues_of_many_others_are_in_the_store(
    make_world: Callable[..., World], tmp_path: Path
) -> None:
    """Networks take turns: one with 200 sessions held up all others for 10 s."""
    world = make_world(store=f"sqlite:{tmp_path / 'queues'}")
    alice, bob = world.connect(1), world.connect(2, host="192.0.2.7")
    crowd = [world.connect(3, str(at), host="203.0.113.7") for at in range(200)]
    world.network.advance(1)
    for client in (*crowd, bob):
        client.shell.hold("test", True)
        alice.send(alice.envelope(client.address, "long", plain=bytes(200_000)))
        alice.send(*[alice.envelope(client.address, str(at)) for at in range(10)])
    for client in (*crowd, bob):
        client.shell.cut()
    world.turn()
    lines = world.relay.delivery.keeper._lines
    assert len(lines) == 201
    bob = world.connect(2, host="192.0.2.7")
    while not bob.received:
        world.network.advance(0.01)
    assert len(lines) > 150
    world.network.advance(5)
    assert uids(bob) == [str(at) for at in range(10)] and not lines


def test_what_came_while_a_long_queue_was_put_into_the_store_is_stored_in_turns(world: World) -> None:
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    queued, sent = [str(at) for at in range(500)], [str(at) for at in range(500, 1_500)]
    alice.send(alice.envelope(2, "long", plain=bytes(200_000)), *[alice.envelope(2, uid) for uid in queued])
    for uid in sent:
        alice.shell.core.send(alice.envelope(2, uid).SerializeToString())
    pieces, progress = [b"".join(iter(alice.shell.core.data_to_send, b""))], [0]

    def look() -> None:
        progress.append(len(stored(world, 2)))
        if progress[-1] and pieces:
            world.relay.switch.sessions[alice.address].owner.dataReceived(pieces.pop())
        if progress[-1] < 1_500 and len(progress) < 100:
            world.network.callLater(0, look)

    bob.shell.cut()
    world.network.callLater(0, look)
    world.settle()
    assert stored(world, 2) == [*queued, *sent] and not world.relay.delivery.pending.used
    assert max(after - before for before, after in pairwise(progress)) <= 64 + 256
    assert uids(world.connect(2)) == [*queued, *sent]


def test_what_came_while_the_queues_of_many_sessions_were_put_into_the_store_is_stored_in_turns(world: World) -> None:
    alice = world.connect(1)
    clients = [world.connect(2, str(at)) for at in range(8)]
    for client in clients:
        client.shell.hold("test", True)
        alice.send(alice.envelope(client.address, "long", plain=bytes(200_000)))
        alice.send(*[alice.envelope(client.address, str(at)) for at in range(100)])
    pieces, progress = [], [0]
    for client in clients:
        for at in range(100, 300):
            alice.shell.core.send(alice.envelope(client.address, str(at)).SerializeToString())
        pieces.append(b"".join(iter(alice.shell.core.data_to_send, b"")))

    def look() -> None:
        progress.append(sum(len(stored(world, *client.address)) for client in clients))
        while progress[-1] and pieces:
            world.relay.switch.sessions[alice.address].owner.dataReceived(pieces.pop(0))
        if progress[-1] < 8 * 300 and len(progress) < 200:
            world.network.callLater(0, look)

    for client in clients:
        client.shell.cut()
    world.network.callLater(0, look)
    world.settle()
    for client in clients:
        assert stored(world, *client.address) == [str(at) for at in range(300)]
    assert max(after - before for before, after in pairwise(progress)) <= 8 * 64 + 256


@pytest.mark.parametrize("end", ["resume", "cut"])
def test_stored_pages_of_many_sessions_are_read_and_deleted_in_turns(
    world: World, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """An address may have 1,000 sessions: with 50 envelopes each that they were given they took 1.3 s at once."""
    alice, deleted = world.connect(1), [0]
    sent = [str(at) for at in range(90)]
    for twin in range(40):
        alice.send(*[alice.envelope(SessionAddress(2, str(twin)), uid, plain=bytes(2_800)) for uid in sent])
    keeper, delete = world.relay.delivery.keeper, world.store.delete
    with monkeypatch.context() as patch:
        patch.setattr(keeper, "fetch", lambda session: None)  # until all of them take nothing
        clients = [world.connect(2, str(twin)) for twin in range(40)]
    for client in clients:
        client.shell.hold("test", True)
    for client in clients:
        keeper.stored(client.address)
    world.turn()

    def counted(session: SessionAddress, ids: Iterable[str]) -> Deferred[None]:
        deleted[-1] += len(list(ids))
        return delete(session, ids)

    monkeypatch.setattr(world.store, "delete", counted)

    def look() -> None:
        deleted.append(0)
        if len(deleted) < 100:
            world.network.callLater(0, look)

    for client in clients:
        client.shell.hold("test", False) if end == "resume" else client.shell.cut()
    world.network.callLater(0, look)
    world.settle()
    assert sum(deleted) > 1_000 and max(deleted) <= 8 * 90
    for at, client in enumerate(clients):
        left = stored(world, 2, str(at))
        assert (uids(client) == sent and not left) if end == "resume" else left == sent[-len(left) :]


def test_what_neither_the_store_nor_the_next_session_has_room_for_is_given_up_in_turns(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(queue_bytes=200_000)
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    alice.send(alice.envelope(2, "long", plain=bytes(190_000)))
    for _ in range(10):
        alice.send(*[alice.envelope(2, "short") for _ in range(300)])
    SlowStore(world, monkeypatch).full = True
    bob.shell.cut()
    world.network.advance(0)
    bob = world.connect(2)
    bob.shell.hold("test", True)
    alice.send(alice.envelope(2, "long", plain=bytes(190_000)))
    refused = [world.relay.switch.counts.refused]

    def look() -> None:
        refused.append(world.relay.switch.counts.refused)
        if len(refused) < 100:
            world.network.callLater(0, look)

    world.network.callLater(0.01, look)
    world.network.advance(0.02)
    assert refused[-1] - refused[0] > 1_000 and max(after - before for before, after in pairwise(refused)) <= 512


@pytest.mark.parametrize("scope", ["queue", "twin"])
def test_what_a_full_queue_in_the_store_does_not_take_of_a_sender_is_not_tried_for_each_envelope_of_an_ended_session(
    world: World, monkeypatch: pytest.MonkeyPatch, scope: str
) -> None:
    """Of 300,000 short ones the store takes 10,000: to refuse the others took half a minute."""
    alice, bob, carol = world.connect(1), world.connect(2), world.connect(3)
    queue_for(bob, alice, [])
    for at in range(0, 1_000, 100):
        alice.send(*[alice.envelope(2, f"long {one}", plain=bytes(200)) for one in range(at, at + 100)])
        carol.send(carol.envelope(2, f"carol {at}", plain=bytes(200)))
        alice.send(alice.envelope(2, f"short {at}"))
    push, asked = world.store.push, []

    def full(session: Any, data: bytes, now: float, expires_at: float, source: int = 0) -> Deferred[bool]:
        uid = Envelope.FromString(data).uid
        asked.append(uid)
        if uid.startswith("long"):
            return fail(StoreFull(scope))
        return push(session, data, now, expires_at, source)

    monkeypatch.setattr(world.store, "push", full)
    bob.shell.cut()
    world.settle()
    taken = [f"{which} {at}" for at in range(0, 1_000, 100) for which in ("carol", "short")]
    assert stored(world, 2) == taken and [uid for uid in asked if "long" not in uid] == taken
    assert len(asked) == len(taken) + (1 if scope == "queue" else 1_000)
    assert world.relay.switch.counts.refused == 1_000


def test_a_sender_for_whom_a_queue_in_the_store_was_full_is_tried_again_after_two_seconds(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob, carol = world.connect(1), world.connect(2), world.connect(3)
    queue_for(bob, alice, [])
    for at in range(0, 1_024, 256):  # four times as many as are brought to the store at a time
        alice.send(*[alice.envelope(2, str(at)) for _ in range(255)])
        carol.send(carol.envelope(2, str(at)))
    asked: list[tuple[float, int]] = []

    def full_for_alice(session: Any, data: bytes, now: float, expires_at: float, source: int = 0) -> Deferred[bool]:
        asked.append((world.network.seconds() - began, source))
        done: Deferred[bool] = Deferred()
        if source == 1:
            world.network.callLater(0.9, done.errback, StoreFull("queue"))
        else:
            world.network.callLater(0.9, done.callback, True)
        return done

    monkeypatch.setattr(world.store, "push", full_for_alice)
    began = world.network.seconds()
    bob.shell.cut()
    for _ in range(50):
        world.network.advance(0.1)
    rounds = [sum(source == 1 for at, source in asked if low <= at < low + 0.9) for low in (0, 0.85, 1.75, 2.65)]
    assert rounds[:3] == [255, 0, 0] and rounds[3] and sum(source == 3 for _, source in asked) == 4
    assert world.relay.switch.counts.refused == 4 * 255


def test_a_sender_for_whom_a_queue_in_the_store_was_full_is_tried_again_though_the_session_waited_for_many_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sessions at a time are brought back; of thousands each may wait for minutes between two turns."""
    alice, bob = world.connect(1), world.connect(2)
    queue_for(bob, alice, [])
    alice.send(*[alice.envelope(2, str(at)) for at in range(300)])  # more than are brought to the store at a time
    others = [world.connect(3, str(at), host=f"192.0.{at}.7") for at in range(16)]
    for other in others:
        queue_for(other, alice, ["one"])
    asked: list[float] = []

    def full_for_a_while(session: Any, data: bytes, *_: Any) -> Deferred[bool]:
        done: Deferred[bool] = Deferred()
        if session.twin == 2:
            asked.append(world.network.seconds() - began)
            if asked[-1] < 1:
                world.network.callLater(0.1, done.errback, StoreFull("queue"))
                return done
        world.network.callLater(3, done.callback, True)
        return done

    monkeypatch.setattr(world.store, "push", full_for_a_while)
    began = world.network.seconds()
    for client in (bob, *others):
        client.shell.cut()
    for _ in range(150):
        world.network.advance(0.1)
    assert len(asked) == 300 and asked[255] < 1 and asked[256] > 3
    assert world.relay.switch.counts.refused == 256


def test_notes_of_senders_for_whom_a_queue_in_the_store_was_full_take_little_memory_and_go_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its traceback each error took 4 kB, until the garbage was collected: there may be one for each of thousands."""
    bob = world.connect(2)
    senders = [world.connect(twin) for twin in (1, 3, 4, 5)]
    queue_for(bob, senders[0], [])
    for sender in senders:
        sender.send(sender.envelope(2, "full"))
    frames: list[weakref.ref[Deferred[None]]] = []

    async def push(*_: Any) -> bool:
        held: Deferred[None] = Deferred()  # as long as the frame of this call
        frames.append(weakref.ref(held))
        raise StoreFull("queue")

    monkeypatch.setattr(world.store, "push", lambda *arguments: Deferred.fromCoroutine(push(*arguments)))
    gc.collect()
    gc.disable()
    try:
        bob.shell.cut()
        world.settle()
        assert len(frames) == 4 and not any(frame() for frame in frames)
    finally:
        gc.enable()


def test_no_call_is_left_of_a_relay_that_has_stopped_while_it_put_a_queue_into_the_store(world: World) -> None:
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    alice.send(alice.envelope(2, "long", plain=bytes(200_000)), *[alice.envelope(2, str(at)) for at in range(100)])
    alice.shell.cut()
    world.settle()
    left: list[str] = []

    def look(_: object) -> None:
        due = [call for call in world.network.getDelayedCalls() if call.getTime() <= world.network.seconds()]
        left.extend(map(repr, due))

    def stop() -> None:
        if world.relay.switch.sessions:
            world.network.callLater(0, stop)
        else:
            world.relay.stopService().addCallback(look)

    bob.shell.cut()
    world.network.callLater(0, stop)
    world.settle()
    assert stored(world, 2) == [str(at) for at in range(100)] and not world.relay.running
    assert left == []


@pytest.mark.parametrize("of", ["envelopes", "answers"])
def test_a_flood_of_new_envelopes_leaves_a_store_in_a_file_room_for_what_ended_sessions_were_not_given(
    make_world: Callable[..., World], tmp_path: Path, of: str
) -> None:
    world = make_world(store=f"sqlite:{tmp_path / 'queues'}")
    alice, bob = world.connect(1, host="203.0.113.1"), world.connect(2, host="203.0.113.1")
    mallory = [world.connect(6, str(number)) for number in range(6)]
    world.network.advance(1)
    bob.shell.hold("test", True)
    sent = [str(at) for at in range(400)]
    alice.send(alice.envelope(2, "long", plain=bytes(200_000)), *[alice.envelope(2, uid) for uid in sent])
    for client in mallory:
        to = 5 if of == "envelopes" else 99  # there is no such twin
        pieces = [client.envelope(to).SerializeToString()] * 1_500
        for piece in (
            pieces if of == "envelopes" else [*pieces, b"\xff\xff\xff"]
        ):  # who sends that is not there for answers
            client.shell.send(piece)
        client.shell.flush()
    world.turn()
    bob.shell.cut()
    world.network.advance(2)
    failed = world.events.of(ev.EnvelopeFailed)
    assert any(one.reason == "failed to route message to peer" for one in failed), "there was no room for all of them"
    again = world.connect(2)
    world.network.advance(2)
    assert uids(again) == sent and not errors(alice)


def test_a_flood_of_new_envelopes_from_one_network_leaves_others_room_in_a_store_in_a_file(
    make_world: Callable[..., World], tmp_path: Path
) -> None:
    world = make_world(store=f"sqlite:{tmp_path / 'queues'}")
    alice = world.connect(1, host="203.0.113.1")
    mallory = [world.connect(6, str(number), host=f"198.51.100.{number}") for number in range(8)]
    world.network.advance(1)
    for client in mallory:
        for _ in range(1_500):
            client.shell.core.send(client.envelope(5).SerializeToString())
        for piece in iter(client.shell.core.data_to_send, b""):
            world.relay.switch.sessions[client.address].owner.dataReceived(piece)
    world.turn()
    alice.send(*[alice.envelope(2, str(at)) for at in range(100)])
    world.network.advance(2)
    assert any(errors(client) for client in mallory), "there was no room for all of them"
    assert not errors(alice) and world.relay.switch.counts.stored == 4_096 + 100
    bob = world.connect(2)
    world.network.advance(1)
    assert uids(bob) == [str(at) for at in range(100)]


def test_what_ended_sessions_were_not_given_finds_room_in_a_file_for_which_thousands_of_sessions_wait(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = make_world(store=f"sqlite:{tmp_path / 'queues'}")
    alice, bob = world.connect(1), world.connect(2)
    world.network.advance(1)
    bob.shell.hold("test", True)
    sent = [str(at) for at in range(400)]
    alice.send(alice.envelope(2, "long", plain=bytes(200_000)), *[alice.envelope(2, uid) for uid in sent])
    hung: list[tuple[Callable[..., object], tuple[object, ...]]] = []
    with monkeypatch.context() as patch:
        patch.setattr(_Threads, "callInThread", lambda self, work, *arguments: hung.append((work, arguments)))
        for at in range(10_000):  # as many sessions as a relay has
            reading = world.store.read(SessionAddress(9, str(at)), None, 100, 1 << 18, world.unix_time())
            reading.addErrback(lambda failure: failure.trap(StoreUnavailable))
        bob.shell.cut()
        world.turn()
    for work, arguments in hung:
        work(*arguments)
    world.network.advance(5)
    bob = world.connect(2)
    world.network.advance(1)
    assert uids(bob) == sent


class HungStore:
    """A store that answers no push before :meth:`answer`."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way: list[tuple[Deferred[bool], Any]] = []
        self._push = world.store.push
        self._is_hung = True
        monkeypatch.setattr(world.store, "push", self.push)

    def push(self, *arguments: Any) -> Deferred[bool]:
        if not self._is_hung:
            return self._push(*arguments)
        self.under_way.append((Deferred(), arguments))
        return self.under_way[-1][0]

    def answer(self) -> None:
        self._is_hung = False
        for done, arguments in self.under_way:
            self._push(*arguments).chainDeferred(done)
        self.under_way.clear()


def test_what_ended_sessions_were_not_given_is_bounded_while_the_store_hangs_and_nothing_that_was_taken_is_lost(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(queued_total_bytes=5_000_000, pending_total_bytes=500_000, pending_per_session=1_000)
    alice, honest = world.connect(1), world.connect(3, host="203.0.113.3")
    store = HungStore(world, monkeypatch)
    for part in range(20):
        bob = world.connect(2, host="192.0.2.66")
        bob.shell.hold("test", True)
        for at in range(20 * part, 20 * part + 20):
            alice.send(alice.envelope(2, uid=str(at), plain=bytes(50_000)))
        bob.leave()
    refused = [uid for uid, code, _ in errors(alice) if code == 133]
    stats = world.relay.stats()
    assert 2_000_000 < stats["queued_bytes"] < 3_500_000 and stats["pending_bytes"] < 500_000
    alice.send(alice.envelope(3, uid="of another network"))
    assert uids(honest) == ["of another network"]
    store.answer()
    for _ in range(5):
        world.network.advance(1)
    # The first few were in the network's buffers.
    taken = 400 - len(refused)
    assert stored(world, 2) == [str(at) for at in range(3, taken)] and refused == [str(at) for at in range(taken, 400)]
    assert world.relay.stats()["queued_bytes"] == world.relay.stats()["pending_bytes"] == 0


def queue_for(client: Client, sender: Client, uids: Iterable[str]) -> None:
    """Let envelopes wait in the queue of ``client``, which takes nothing more."""
    client.shell.hold("test", True)
    sender.send(sender.envelope(client.address, "long", plain=bytes(200_000)))
    sender.send(*[sender.envelope(client.address, uid) for uid in uids])


def test_envelopes_that_wait_until_a_queue_is_in_the_store_stop_none_that_their_sender_sends_to_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger who asked something and went away made a service mute for all others."""
    alice, bob, carol = world.connect(1, host="203.0.113.1"), world.connect(2), world.connect(3)
    store = HungStore(world, monkeypatch)
    before = [str(at) for at in range(20)]
    queue_for(bob, alice, before)
    bob.leave()
    sent = [str(at) for at in range(100, 700)]
    for uid in sent:
        alice.send(alice.envelope(2, uid))
    alice.send(alice.envelope(3, "to another"))
    assert uids(carol) == ["to another"] and not errors(alice)
    assert world.relay.stats()["pending_bytes"] > 3_000_000
    store.answer()
    world.network.advance(1)
    assert stored(world, 2) == [*before, *sent] and not errors(alice)
    assert world.relay.stats()["pending_bytes"] == 0 == len(world.relay.delivery.waiting._of)


def test_envelopes_that_wait_until_a_queue_is_in_the_store_count_for_its_session_though_other_relays_are_known_to_be_away(
    world: World, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay asks none of them then, and knows at once that none has the session."""

    def elsewhere(envelope: Any, data: bytes, twin: Any, expires_at: float, otherwise: Callable[[bool], None]) -> bool:
        otherwise(False)
        return True

    monkeypatch.setattr(federation, "elsewhere", elsewhere)
    alice, bob = world.connect(1, host="203.0.113.1"), world.connect(2)
    store = HungStore(world, monkeypatch)
    queue_for(bob, alice, ["before"])
    bob.leave()
    sent = [str(at) for at in range(20)]
    alice.send(*[alice.envelope(2, uid) for uid in sent])
    delivery = world.relay.delivery
    assert delivery.pending.used == 0 < 20 * 5_000 < delivery.waiting.used
    store.answer()
    world.network.advance(1)
    assert stored(world, 2) == ["before", *sent] and delivery.waiting.used == 0 == delivery.pending.used


@pytest.mark.parametrize("asks", [True, False])
def test_what_waits_until_a_queue_is_in_the_store_is_bounded_and_shared_by_receivers_and_senders(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    world = make_world(pending_total_bytes=800_000)
    if asks:
        world.relay.delivery.federation = federation = Federation()
    alice, mallory = world.connect(1, host="203.0.113.1"), world.connect(6, host="198.51.100.1")
    bob, carol = world.connect(2, host="192.0.2.7"), world.connect(3, host="192.0.3.7")
    store = HungStore(world, monkeypatch)
    before = [str(at) for at in range(20)]
    for client in (bob, carol):
        queue_for(client, alice, before)
        client.leave()

    def send(client: Client, to: int, count: int) -> list[str]:
        """Send ``count`` envelopes to a twin, and return the names of those that were refused."""
        client.received.clear()
        for at in range(count):
            client.send(client.envelope(to, f"{client.address.twin}-{at}"))
            while asks and federation.asked:
                federation.asked.pop()(False)
        world.turn()
        assert {code for _, code, _ in errors(client)} <= {133}
        return uids(client)

    refused = send(mallory, 2, 100)
    assert 60 < len(refused) < 90 and refused == [f"6-{at}" for at in range(100 - len(refused), 100)]
    assert send(alice, 2, 5) == send(alice, 3, 5) == send(mallory, 3, 5) == []
    assert world.relay.delivery.pending.used == 0 < world.relay.stats()["pending_bytes"] < 800_000
    send(alice, 9, 5)  # the receivers' share is none of what is sent from anywhere
    assert world.relay.delivery.pending.used
    store.answer()
    world.network.advance(1)
    taken = [f"6-{at}" for at in range(100 - len(refused))]
    assert stored(world, 2) == [*before, *taken, *(f"1-{at}" for at in range(5))]
    assert len(stored(world, 3)) == 30 and world.relay.stats()["pending_bytes"] == 0


def test_texts_of_an_envelope_that_are_kept_while_its_twin_is_looked_up_count_too(world: World) -> None:
    alice = world.connect(1)
    world.registry.slow = Deferred()
    alice.send(alice.envelope(9, tags=100_000 * "t"))
    assert world.relay.stats()["pending_bytes"] > 300_000
    world.registry.slow.callback(None)
    world.turn()
    assert world.relay.stats()["pending_bytes"] == 0


def test_what_other_relays_did_not_take_counts_as_under_way_while_the_store_hangs(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(pending_total_bytes=200_000)
    world.relay.delivery.federation = federation = Federation()
    store = HungStore(world, monkeypatch)
    alice = world.connect(1)
    for at in range(50):
        alice.send(alice.envelope(9, uid=str(at), plain=bytes(10_000)))
        while federation.asked:
            federation.asked.pop()(False)
    refused = [uid for uid, code, _ in errors(alice) if code == 133]
    assert len(store.under_way) < 20 and len(store.under_way) + len(refused) == 50
    store.answer()
    world.turn()
    assert sorted(stored(world, 9) + refused) == sorted(str(at) for at in range(50))
    assert world.relay.stats()["pending_bytes"] == 0


def test_posts_that_were_given_up_count_until_a_store_that_hangs_has_answered(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(queued_total_bytes=500_000)
    store = HungStore(world, monkeypatch)
    envelope = world.connect(1).envelope(2, plain=bytes(10_000))
    data = envelope.SerializeToString()
    for _ in range(100):
        accepting = world.relay.delivery.accept(envelope, data, False)
        if isinstance(accepting, Deferred):
            accepting.cancel()
            assert result_of(accepting) == 503
        else:
            assert accepting == 503
    assert 40 < len(store.under_way) < 60
    store.answer()
    assert accept(world, envelope) == 202


def test_a_session_that_comes_back_while_the_store_is_away_gets_what_its_last_connection_was_not_given(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = world.connect(1), world.connect(2)
    others = [world.connect(3, str(at)) for at in range(30)]
    for client in (*others, bob):
        client.shell.hold("test", True)
        alice.send(*[alice.envelope(client.address, uid=str(at), plain=bytes(1_000)) for at in range(600)])
    SlowStore(world, monkeypatch).away = True
    for client in (*others, bob):
        client.shell.cut()
    world.turn()
    bob = world.connect(2)
    alice.send(alice.envelope(2, uid="600"))
    for _ in range(5):
        world.network.advance(1)
        world.settle()
    assert sorted(map(int, uids(bob)))[-300:] == list(range(301, 601))
    assert world.relay.delivery.pending.used == 0


@pytest.mark.parametrize("back", [False, True])
def test_a_store_that_is_away_is_not_given_what_thousands_of_ended_sessions_were_not_given_all_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch, back: bool
) -> None:
    """For 3,000 envelopes of 40 sessions that took 20 s in one turn."""
    alice = world.connect(1)
    clients = [world.connect(2, str(at)) for at in range(40)]
    for client in clients:
        client.shell.hold("test", True)
        alice.send(alice.envelope(client.address, "long", plain=bytes(200_000)))
        alice.send(*[alice.envelope(client.address, str(at)) for at in range(300)])
    store = SlowStore(world, monkeypatch)
    store.away = True
    asked, refused = [0], [world.relay.switch.counts.refused]
    pushed = store._pushed

    def look(times: int = 100) -> None:
        asked.append(store.asked)
        refused.append(world.relay.switch.counts.refused)
        if times:
            world.network.callLater(0, look, times - 1)

    def answer() -> None:
        look()
        pushed()

    store._pushed = answer  # type: ignore[method-assign]
    for client in clients:
        client.shell.cut()
    world.network.advance(1.5)
    assert 0 < refused[-1] <= 8 * 256
    world.network.advance(5)  # a Redis is started again
    store.away = not back
    world.network.advance(15)
    assert max(after - before for row in (asked, refused) for before, after in pairwise(row)) <= 8 * 256
    monkeypatch.undo()
    left = [stored(world, *client.address) for client in clients]
    assert world.relay.switch.counts.refused + sum(map(len, left)) >= 40 * 300
    assert sum(map(len, left)) >= 40 * 300 - 8 * 256 - 7 * 8 if back else not any(left)
    assert all(row == [str(at) for at in range(300 - len(row), 300)] for row in left)
    assert not world.relay.switch.returning.used and not world.relay.delivery.keeper.pushing_bytes


def test_what_comes_back_from_a_store_that_is_away_needs_no_more_room_than_it_had_on_its_way_there(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(queued_total_bytes=800_000)
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    alice.send(*[alice.envelope(2, uid=str(at), plain=bytes(1_000)) for at in range(600)])
    SlowStore(world, monkeypatch).away = True
    bob.leave()
    assert world.relay.switch.returning.used > 400_000
    bob = world.connect(2)
    for _ in range(5):
        world.network.advance(1)
        world.settle()
    assert uids(bob)[-300:] == list(map(str, range(300, 600)))
    assert world.relay.stats()["queued_bytes"] == 0


def test_what_a_full_store_does_not_take_of_a_session_s_queue_stays_there_and_is_not_tried_for_each_envelope_that_comes(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(queue_bytes=50_000)
    alice, carol = world.connect(1), world.connect(3)
    alice.send(alice.envelope(2, uid="0"))
    read, push = world.store.read, world.store.push
    reading: Deferred[Any] = Deferred()
    monkeypatch.setattr(world.store, "read", lambda *arguments: reading)  # so that all that comes waits behind this
    asked: list[int] = []

    def full_for_alice(*arguments: Any) -> Deferred[Any]:
        asked.append(arguments[4])
        return fail(StoreFull("queue")) if arguments[4] == 1 else push(*arguments)

    monkeypatch.setattr(world.store, "push", full_for_alice)
    bob = world.connect(2)
    sent = [str(at) for at in range(1, 3_001)]
    for at in range(0, 3_000, 100):
        alice.send(*[alice.envelope(2, uid=uid) for uid in sent[at : at + 100]])
    refused = [uid for uid, code, _ in errors(alice) if code == 130]
    assert 500 < len(refused) < 2_500 and len(asked) <= 300
    world.network.advance(3)
    alice.send(*[alice.envelope(2, uid=f"late {at}") for at in range(10)])
    carol.send(carol.envelope(2, uid="carol's"))
    assert len(asked) <= 600 and asked[-1] == 3 and not carol.received
    assert [uid for uid, *_ in errors(alice)[-10:]] == [f"late {at}" for at in range(10)]
    monkeypatch.setattr(world.store, "read", read)
    world.network.advance(0)
    reading.callback(result_of(read(bob.address, None, 100, 1 << 20, world.unix_time())))
    world.settle()
    received = uids(bob)
    assert received == ["0", "carol's", *sent[: 3_000 - len(refused)]]
    assert world.relay.switch.waiting_bytes == 0 and world.relay.delivery.pending.used == 0


def test_a_session_that_comes_back_while_the_store_is_full_keeps_what_it_was_not_given_at_little_cost(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(queue_bytes=250_000)
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    for at in range(0, 1_500, 100):
        alice.send(*[alice.envelope(2, uid=str(uid), plain=bytes(100)) for uid in range(at, at + 100)])
    store = SlowStore(world, monkeypatch)
    store.full = True
    for _ in range(10):
        bob.shell.cut()
        world.turn()
        bob = world.connect(2)
        bob.shell.hold("test", True)
        # Nothing is read from the store before the session ends again.
        monkeypatch.setattr(world.relay.delivery.keeper, "fetch", lambda session: None)
        for _ in range(20):
            world.network.advance(0.01)
        assert world.relay.switch.waiting_bytes <= 250_000 + 2 * 65_536
    assert 0 < store.asked <= 10 * 300
    monkeypatch.undo()
    bob.shell.hold("test", False)
    world.relay.delivery.keeper.stored(bob.address)
    world.settle()
    assert uids(bob)[-500:] == [str(at) for at in range(1_000, 1_500)]


def test_while_the_store_is_away_what_a_session_has_no_room_for_is_refused_and_its_queue_stays(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(queue_bytes=50_000)
    alice = world.connect(1)
    alice.send(alice.envelope(2, uid="0"))
    reading: Deferred[Any] = Deferred()
    monkeypatch.setattr(world.store, "read", lambda *arguments: reading)  # so that all that comes waits behind this
    bob = world.connect(2)
    store = SlowStore(world, monkeypatch)
    store.away = True
    uid = "x" * 36
    for _ in range(100):
        alice.send(*[alice.envelope(2, uid=uid) for _ in range(200)])
        world.network.advance(0.1)
    world.network.advance(5)
    monkeypatch.undo()
    reading.callback([])
    world.settle()
    received, refused = uids(bob).count(uid), [code for _, code, _ in errors(alice)].count(130)
    assert 700 < received < 900 and received + refused > 15_000


def test_a_store_that_fails_is_asked_again_at_one_rate_however_much_is_put_there_and_not_after_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def failing(*arguments: Any) -> Deferred[Any]:
        asked.append(world.network.seconds())
        return fail(StoreUnavailable("gone"))

    monkeypatch.setattr(world.store, "read", failing)
    bob = world.connect(2)
    for _ in range(10):
        world.network.advance(0.1)
        world.relay.delivery.keeper.stored(SessionAddress(2))  # another process put something there
    asked.clear()
    world.network.advance(20)
    assert len(asked) <= 11
    bob.leave()
    world.network.advance(4)
    assert len(asked) <= 11
