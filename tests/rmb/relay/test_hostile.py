"""Clients that mean harm: what they cost the relay, and what they cannot do to others."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any

import pytest
from twisted.internet.defer import Deferred, ensureDeferred
from twisted.internet.task import deferLater

from dmsg.crypto import ed25519
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.wire import Envelope
from dmsg.rmb.relay.api import RelayApi
from dmsg.rmb.relay.ingest import Ingest
from dmsg.rmb.relay.peering import HEADER, Body, Signer, Verifier
from dmsg.rmb.twins.cache import TwinCache
from dmsg.sansio.websocket import apply_mask

from .conftest import HOST, Client, World, result_of

BINARY, CONTINUATION, FIN = 0x02, 0x00, 0x80


def frame(payload: bytes, first: int = FIN | BINARY, *, masked: bool = True, claimed: int | None = None) -> bytes:
    """A frame as a client that knows no rules may write it; ``claimed`` is the length it says."""
    size = len(payload) if claimed is None else claimed
    bit = 0x80 if masked else 0
    if size < 126:
        head = bytes((first, bit | size))
    elif size < 65536:
        head = struct.pack("!BBH", first, bit | 126, size)
    else:
        head = struct.pack("!BBQ", first, bit | 127, size)
    mask = os.urandom(4)
    return head + (mask + apply_mask(payload, mask) if masked else payload)


def write(client: Client, data: bytes) -> None:
    """Past the client's WebSocket."""
    if not client.lost:
        client.shell.transport.write(data)
    client.world.turn()


@pytest.fixture
def mallory(world: World) -> Client:
    return world.connect(6)


@pytest.fixture
def others(world: World) -> tuple[Client, Client]:
    return world.connect(1), world.connect(2)


@pytest.fixture(autouse=True)
def others_are_served(world: World, others: tuple[Client, Client]) -> object:
    yield
    alice, bob = others
    before = len(bob.received)
    alice.send(alice.envelope(2))
    assert len(bob.received) == before + 1 and not bob.lost and not alice.lost


def test_a_message_that_is_too_long_is_refused_at_its_header(world: World, mallory: Client) -> None:
    write(mallory, frame(b"", claimed=2**40))
    assert mallory.closed is not None and mallory.closed.code == 1009 and mallory.lost


def test_a_message_of_the_longest_length_passes_and_one_byte_more_does_not(
    world: World, others: tuple[Client, Client]
) -> None:
    _, bob = others
    sender = world.connect(3)
    room = world.relay.max_message_bytes - len(sender.envelope(2, plain=b"").SerializeToString())
    exact = sender.envelope(2, plain=bytes(room - 2))
    assert len(exact.SerializeToString()) == world.relay.max_message_bytes
    sender.send(exact)
    world.settle()
    assert len(bob.received) == 1
    sender.send(sender.envelope(2, plain=bytes(room - 1)))
    world.settle()
    assert len(bob.received) == 1 and sender.closed is not None and sender.closed.code == 1009


def test_fragments_without_an_end_are_refused_when_they_are_too_long(world: World, mallory: Client) -> None:
    write(mallory, frame(bytes(60_000), BINARY))
    for _ in range(30):
        write(mallory, frame(bytes(60_000), CONTINUATION))
    assert mallory.closed is not None and mallory.closed.code == 1009 and mallory.lost


def test_empty_fragments_without_an_end_are_refused(world: World, mallory: Client) -> None:
    write(mallory, frame(b"x", BINARY))
    for _ in range(40):
        write(mallory, frame(b"", CONTINUATION) * 10)
    assert mallory.lost


def test_messages_that_are_never_complete_are_bounded_for_all_together(make_world: Callable[..., World]) -> None:
    world = make_world(incoming_total_bytes=1_000_000)
    honest = world.connect(1, host="203.0.113.1")
    write(honest, frame(b"", claimed=300_000)[:8] + bytes(200_000))
    many = [world.connect(6, str(at)) for at in range(30)]
    for client in many:
        write(client, frame(b"", claimed=300_000)[:8] + bytes(60_000))
        assert world.relay.switch.incoming_total_bytes <= 1_000_000
    assert not honest.lost and 10 < sum(client.lost for client in many) < 25
    for client in many:
        client.leave()
    honest.leave()
    assert world.relay.switch.incoming_total_bytes == 0 and not world.relay.switch.incoming


def test_what_is_freed_lasts_for_a_while_so_that_not_each_read_causes_a_search(
    make_world: Callable[..., World],
) -> None:
    world = make_world(incoming_total_bytes=640_000)
    many = [world.connect(6, str(at)) for at in range(65)]
    for client in many:
        write(client, frame(b"", claimed=300_000)[:8] + bytes(10_000))
    assert sum(client.lost for client in many) == 2
    assert world.relay.switch.incoming_total_bytes < 630_000


def test_what_the_networks_buffers_hold_counts_as_well(make_world: Callable[..., World]) -> None:
    world = make_world(queued_total_bytes=3_000_000)
    alice = world.connect(3, host="203.0.113.1")
    slow = [world.connect(6, str(at)) for at in range(8)]
    for client in slow:
        client.shell.hold("test", True)
        alice.send(*[alice.envelope(client.address, plain=bytes(900_000)) for _ in range(1)])
        world.settle()
    assert 0 < sum(client.lost for client in slow) < 8 and world.relay.switch.waiting_bytes <= 3_000_000
    for client in slow:
        client.leave()
    assert world.relay.switch.waiting_bytes == 0 and not world.relay.switch.stalled


def test_answers_of_the_relay_that_are_not_read_count_as_well(make_world: Callable[..., World]) -> None:
    """A network that takes nothing holds a few bytes of small pongs then; what counts is the large one behind them."""
    world = make_world(queued_total_bytes=3_000_000)
    switch = world.relay.switch
    honest = world.connect(1, host="203.0.113.1")
    silent = [world.connect(6, str(at)) for at in range(8)]
    for client in silent:
        client.shell.hold("test", True)
        session = switch.sessions[client.address]
        while session not in switch.stalled:
            client.send(*[client.envelope(ping={}, plain=bytes(100))] * 20)
        client.send(client.envelope(ping={}, plain=bytes(1_000_000)))
        world.settle()
        assert switch.waiting_bytes <= 3_000_000
        assert sum(one.queued_bytes + one.buffered_bytes for one in switch.sessions.values()) <= 3_000_000
    assert 5 <= sum(client.address not in switch.sessions for client in silent) < 8 and not honest.lost
    for client in silent:
        client.leave()
    assert switch.waiting_bytes == 0 and not switch.stalled


def test_a_close_behind_envelopes_of_the_same_read_ends_the_session_after_them(
    world: World, others: tuple[Client, Client], mallory: Client
) -> None:
    _, bob = others
    forged = mallory.envelope(SessionAddress(0))
    close = frame(b"\x03\xe8", FIN | 0x8)
    write(mallory, frame(mallory.envelope(2).SerializeToString()) + frame(forged.SerializeToString()) + close)
    assert len(bob.received) == 1 and mallory.lost and (6, None) not in world.relay.switch.sessions


def test_a_message_that_never_ends_is_given_up(world: World, mallory: Client) -> None:
    write(mallory, frame(b"x", BINARY))
    for _ in range(13):
        world.network.advance(10)
        write(mallory, frame(b"x", CONTINUATION))
    assert mallory.lost


@pytest.mark.parametrize(
    "data",
    [
        frame(b"x", masked=False),
        frame(b"x", 0xF2),
        frame(b"x", FIN | 0x7),
        frame(b"x", FIN | CONTINUATION),
        b"GET / HTTP",
    ],
    ids=["unmasked", "reserved bits", "unknown kind", "continuation of nothing", "another protocol"],
)
def test_what_is_no_websocket_ends_the_session(world: World, mallory: Client, data: bytes) -> None:
    write(mallory, data)
    assert mallory.lost and (6, None) not in world.relay.switch.sessions


def test_a_flood_of_pings_is_ended(world: World, mallory: Client) -> None:
    for _ in range(20):
        write(mallory, frame(b"ping", FIN | 0x9) * 100)
    assert mallory.lost


def test_a_flood_of_application_pings_by_one_that_reads_nothing_stops_being_read(world: World, mallory: Client) -> None:
    mallory.shell.hold("test", True)
    ping = mallory.envelope(None, plain=bytes(20_000))
    ping.ping.SetInParent()
    for _ in range(60):
        mallory.shell.send(ping.SerializeToString())
        mallory.shell.flush()
        world.turn()
    world.settle()
    [session] = [one for one in world.relay.switch.sessions.values() if one.address.twin == 6]
    assert session.queued_bytes < 500_000 and session.envelopes_in < 60


def test_a_flood_to_twins_that_do_not_exist_costs_no_more_than_its_sender(world: World, mallory: Client) -> None:
    mallory.send(*[mallory.envelope(1_000 + at, uid=str(at)) for at in range(2_000)])
    world.settle()
    assert len(mallory.received) == 2_000 and {one.error.code for one in mallory.envelopes} == {123}
    assert world.relay.delivery.pending.used == 0


def test_a_flood_to_twins_that_do_not_exist_does_not_keep_others_from_being_looked_up(
    world: World, mallory: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = world.registry.twins

    async def ask_the_chain(number: int) -> Any:
        await deferLater(world.network, 0.1)  # type: ignore[arg-type]
        return there.get(number)

    world.registry.add(*range(100, 120))
    alice = world.connect(3, host="203.0.113.1")
    monkeypatch.setattr(world.registry, "get", TwinCache(world.network, ask_the_chain).get)  # type: ignore[arg-type]
    for at in range(20):
        mallory.send(*[mallory.envelope(1_000 * at + number) for number in range(1_000, 2_000)])
        alice.send(alice.envelope(100 + at))
        world.network.advance(0.05)
    newcomer = ensureDeferred(world.relay.login(world.token(SessionAddress(4)), "203.0.113.2"))
    world.network.advance(0.3)
    assert result_of(newcomer) == SessionAddress(4)
    assert alice.envelopes == [] and len(mallory.envelopes) < 1_000
    world.network.advance(200)


def test_posts_of_strangers_that_wait_for_look_ups_leave_places_to_relays_that_are_known(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, chain = world.registry.twins, Deferred[None]()

    async def ask_the_chain(number: int) -> Any:
        if number not in there:
            await chain
        return there.get(number)

    monkeypatch.setattr(world.registry, "get", ask_the_chain)
    friend, relay = ed25519.SigningKey(bytes(32)), world.relay
    verifier = Verifier(frozenset({HOST}), {"friend.example": friend.public_key})
    ingest = Ingest(
        relay.delivery.accept,
        world.registry,
        verifier,
        world.unix_time,
        domains=frozenset({HOST}),
        open_to_all=True,
        clock=world.network,
        flush=relay.flush,
    )
    world.site.resource = RelayApi(relay, {}, ingest)

    def envelope(twin: int) -> bytes:
        made = Envelope(uid="x", timestamp=int(world.unix_time()), expiration=60)
        made.source.twin, made.destination.twin = 1, twin
        made.request.command = "work"
        return made.SerializeToString()

    def answers(host: str) -> list[str]:
        return [world.http("POST", "/", envelope(100 + at), host=host)[9:12].decode() for at in range(60)]

    assert answers("203.0.113.1") == [""] * 24 + ["429"] * 36
    assert answers("203.0.113.2") == ["429"] * 60  # it is in the same network
    assert answers("203.0.114.1") == [""] * 12 + ["429"] * 48
    body = envelope(2)
    header = Signer("friend.example", friend, os.urandom).header(HOST, Body.ONE, body, world.unix_time()).decode()
    assert world.http("POST", "/", body, f"{HEADER}: {header}\r\n", host="203.0.113.3")[9:12] == b"202"
    chain.callback(None)
    world.network.advance(3)
    assert world.site.bodies == 0
    assert answers("203.0.113.1")[:24] == ["404"] * 24


def test_an_envelope_cannot_be_sent_in_the_name_of_others(world: World, mallory: Client) -> None:
    victim = world.connect(3)
    forged = mallory.envelope(3)
    for source in (SessionAddress(1), SessionAddress(6, "other"), SessionAddress(0)):
        source.write_to(forged.source)
        mallory.send(forged)
    assert not victim.received and {one.error.code for one in mallory.envelopes} == {121}


def test_a_session_that_opens_and_closes_leaves_nothing(world: World) -> None:
    for at in range(50):
        client = world.connect(5, str(at % 7))
        client.send(client.envelope(5))
        client.leave()
    switch = world.relay.switch
    assert len(switch.sessions) == 2 and not switch.stalled and not switch.waiting_bytes
    assert len(world.relay.admission.admitted) == 2


def test_a_receiver_that_reads_nothing_does_not_stop_its_senders(
    make_world: Callable[..., World], world: World
) -> None:
    mallory, carol, dave = world.connect(6), world.connect(3), world.connect(4)
    mallory.shell.hold("test", True)
    for at in range(40):
        carol.send(carol.envelope(6, plain=bytes(300_000)), carol.envelope(4, uid=str(at)))
        world.settle()
    assert [one.uid for one in dave.envelopes] == [str(at) for at in range(40)] and not carol.received
    assert world.relay.switch.waiting_bytes <= world.relay.limits.queue_bytes + 2 * 300_000
    waiting = result_of(world.store.read(SessionAddress(6), None, 100, 1 << 26, world.unix_time()))
    assert waiting  # what did not fit into the queue
