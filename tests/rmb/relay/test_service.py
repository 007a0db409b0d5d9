"""Sessions at a relay: how they begin, replace each other, make room, and end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from twisted.internet.defer import CancelledError

from dmsg.eventlog import schema as ev
from dmsg.eventlog.reasons import Reason
from dmsg.rmb.core.address import SessionAddress
from dmsg.rmb.core.limiter import Limit
from dmsg.sansio.errors import WebSocketRefused

from .conftest import World, result_of


def test_envelopes_go_unchanged_from_one_session_to_another_in_order(world: World) -> None:
    alice, bob = world.connect(1), world.connect(2, "work")
    to = SessionAddress(2, "work")
    sent = [alice.envelope(to, uid=str(number), plain=bytes(100 * number)).SerializeToString() for number in range(50)]
    alice.send(*sent)
    assert bob.received == sent and not alice.received


def test_the_newest_connection_of_a_session_wins_and_only_the_older_one_is_closed(world: World) -> None:
    older, alice = world.connect(7), world.connect(1)
    newer = world.connect(7)
    assert older.closed is not None and older.closed.code == 4001 and older.lost
    alice.send(alice.envelope(7))
    newer.send(newer.envelope(1))
    assert len(newer.received) == len(alice.received) == 1 and not newer.lost and newer.closed is None
    third = world.connect(7)
    assert newer.lost and not third.lost
    assert len(world.relay.switch.sessions) == 2


def test_a_malformed_envelope_ends_its_session_with_a_code_and_leaves_nothing_behind(world: World) -> None:
    alice, mallory = world.connect(1), world.connect(6)
    mallory.send(b"\xff\xff\xff")
    assert mallory.closed is not None and mallory.closed.code == 4002 and mallory.lost
    alice.send(alice.envelope(6, tags="fail-fast"))
    [error] = alice.envelopes
    assert (error.error.code, error.error.message) == (125, "destination offline")


def test_a_text_message_ends_the_session_with_a_code(world: World) -> None:
    mallory = world.connect(6)
    mallory.shell.send("text")
    mallory.shell.flush()
    world.turn()
    assert mallory.closed is not None and mallory.closed.code == 1003 and mallory.lost


def test_what_comes_before_a_text_message_is_delivered_at_once(world: World) -> None:
    alice, mallory = world.connect(1), world.connect(6)
    mallory.shell.core.send(mallory.envelope(1, "before").SerializeToString())
    mallory.shell.core.send("text")
    mallory.shell.flush()
    world.turn()
    assert [envelope.uid for envelope in alice.envelopes] == ["before"] and mallory.lost


def test_a_session_that_is_silent_is_pinged_and_one_that_does_not_answer_is_closed(world: World) -> None:
    healthy, dead = world.connect(1), world.connect(2)
    dead.shell.core.listening = True
    pipe = world.network.pipes_to(80)[1]
    world.network.advance(45)  # both answer pings
    assert not dead.lost and not healthy.lost
    pipe.freeze()
    world.network.advance(70)
    assert not healthy.lost and SessionAddress(2) not in world.relay.switch.sessions
    healthy.send(healthy.envelope(2, plain=b"later"))
    pipe.thaw()
    world.turn()
    again = world.connect(2)
    assert [one.plain for one in again.envelopes] == [b"later"]  # it was not lost in the half-open connection


def test_one_twin_has_so_many_sessions_and_the_one_idle_longest_makes_room(make_world: Callable[..., World]) -> None:
    world = make_world(sessions_per_twin=3)
    others = world.connect(2)
    sessions = []
    for name in "abc":
        sessions.append(world.connect(1, name))
        world.network.advance(1)
    sessions[0].send(sessions[0].envelope(2))
    world.connect(1, "d")
    assert [one.lost for one in sessions] == [False, True, False] and not others.lost
    assert sessions[1].closed is not None and sessions[1].closed.code == 4005


def test_a_network_with_a_thousand_twins_cannot_take_the_places_of_others(make_world: Callable[..., World]) -> None:
    world = make_world(connections=40, connections_per_address=10)
    world.registry.add(*range(100, 200))
    honest = [world.connect(twin, host=f"203.0.{twin}.1") for twin in range(1, 6)]
    strangers = 0
    for twin in range(100, 200):
        query = f"?{world.token(SessionAddress(twin))}"
        strangers += not isinstance(world.dial(query, host=f"198.51.100.{twin % 8}"), Exception)
    assert strangers > 40 and not any(one.lost for one in honest)
    late = world.connect(9, host="192.0.2.77")
    assert not any(one.lost for one in (*honest, late)) and len(world.relay.switch.sessions) <= 40


def test_an_address_that_has_all_its_places_in_use_is_turned_away(make_world: Callable[..., World]) -> None:
    world = make_world(connections_per_address=2)
    for twin in (1, 2):
        client = world.connect(twin)
        client.send(client.envelope(9))
    refused = world.dial(f"?{world.token(SessionAddress(3))}")
    assert isinstance(refused, WebSocketRefused) and refused.status == 503
    assert [str(one.reason) for one in world.events.of(ev.HandshakeFailed)] == ["connections_per_address"]
    world.network.advance(1)
    assert not world.connect(3, host="203.0.113.1").lost
    assert not world.connect(1).lost  # a connection that replaces one needs no place


def test_a_session_that_moves_to_an_address_needs_a_place_there(make_world: Callable[..., World]) -> None:
    """Else sessions that move would fill all places of the relay from one address."""
    world = make_world(connections_per_address=2, sessions_per_twin=1)
    here = [world.connect(twin) for twin in (1, 2)]
    elsewhere = world.connect(3, host="203.0.113.1")
    world.network.advance(1)  # a token is good from one network
    moved = world.connect(3)  # one that was idle here has made room
    assert elsewhere.lost and [one.lost for one in here].count(True) == 1 and not moved.lost
    [left] = [one for one in here if not one.lost]
    for client in (left, moved):
        client.send(client.envelope(9))
    elsewhere = world.connect(4, host="203.0.113.1")
    world.network.advance(1)
    for address in (SessionAddress(4), SessionAddress(4, "the twin has too many sessions")):
        refused = world.dial(f"?{world.token(address)}")
        assert isinstance(refused, WebSocketRefused) and refused.status == 503
        world.network.advance(1)
    assert not any(one.lost for one in (left, moved, elsewhere))
    assert not world.connect(3).lost and moved.lost and not left.lost  # it has been here before


def test_a_relay_that_stops_says_so_and_stores_what_it_has_not_written(world: World) -> None:
    alice, bob = world.connect(1), world.connect(2)
    bob.shell.hold("test", True)
    sent = [alice.envelope(2, uid=str(at), plain=bytes(60_000)).SerializeToString() for at in range(20)]
    alice.send(*sent)
    stopping = world.relay.stopService()
    world.network.advance(0)
    assert alice.closed is not None and alice.closed.code == 1001
    refused = world.dial(f"?{world.token(SessionAddress(3))}")
    assert isinstance(refused, WebSocketRefused) and refused.status == 503
    world.network.advance(10)
    assert result_of(stopping) is None and not world.relay.switch.waiting_bytes
    waiting = result_of(world.store.read(SessionAddress(2), None, 100, 1 << 24, world.unix_time()))
    assert waiting and [one.data for one in waiting] == sent[-len(waiting) :]
    world.relay.startService()


def test_a_relay_that_is_started_twice_goes_on(world: World) -> None:
    """As one that a program starts, and then gives to a parent that runs."""
    world.relay.startService()
    alice, bob = world.connect(1), world.connect(2)
    alice.send(alice.envelope(2, plain=b"x"))
    assert [one.plain for one in bob.envelopes] == [b"x"]


def test_a_relay_that_stops_closes_its_sessions_in_turns(make_world: Callable[..., World]) -> None:
    world = make_world(connections=300, handshake_burst_per_address=300)
    sessions = [world.connect(1 + at % 9, f"s{at}") for at in range(300)]
    stopping = world.relay.stopService()
    assert 0 < world.relay.stats()["sessions"] < 300, "others have their turn"
    sessions[299].leave()
    world.network.advance(10)
    assert result_of(stopping) is None and not world.relay.switch.sessions
    assert [one.closed.code for one in sessions[:299] if one.closed is not None] == [1001] * 299
    world.relay.startService()


def test_a_relay_whose_end_is_not_waited_for_stops_nevertheless(make_world: Callable[..., World]) -> None:
    world = make_world(connections=300, handshake_burst_per_address=300)
    sessions = [world.connect(1 + at % 9, f"s{at}") for at in range(300)]
    stopping = world.relay.stopService()
    stopping.cancel()
    assert result_of(stopping).check(CancelledError)
    world.network.advance(10)
    assert all(one.lost for one in sessions) and not world.relay.switch.sessions
    world.relay.startService()


@pytest.mark.parametrize("waits", [True, False])
def test_a_relay_that_is_started_before_it_has_stopped_lets_sessions_in_then(world: World, waits: bool) -> None:
    alice = world.connect(1)
    stopping = world.relay.stopService()
    if not waits:
        stopping.cancel()
        assert result_of(stopping).check(CancelledError)
    world.relay.startService()
    assert not world.relay.ready
    refused = world.dial(f"?{world.token(SessionAddress(3))}")
    assert isinstance(refused, WebSocketRefused) and refused.status == 503
    world.network.advance(10)
    assert alice.lost and world.relay.ready and world.relay.running
    alice, bob = world.connect(1), world.connect(2)
    alice.send(alice.envelope(2, plain=b"x"))
    assert [one.plain for one in bob.envelopes] == [b"x"]
    world.network.advance(10)
    assert [one.local for one in world.events.of(ev.EnvelopesRouted)] == [1], "counts are told again"


def test_a_relay_that_is_stopped_again_before_it_lets_sessions_in_stays_stopped(world: World) -> None:
    world.connect(1)
    first = world.relay.stopService()
    world.relay.startService()
    second = world.relay.stopService()
    world.network.advance(10)
    assert result_of(first) is None and result_of(second) is None and not world.relay.ready
    refused = world.dial(f"?{world.token(SessionAddress(1))}")
    assert isinstance(refused, WebSocketRefused) and refused.status == 503
    world.relay.startService()
    assert not world.connect(1).lost


def test_sessions_are_in_the_event_log_without_the_names_twins_gave_them(world: World) -> None:
    alice, bob = world.connect(1, "my secret name"), world.connect(2)
    alice.send(alice.envelope(2, plain=b"x"))
    bob.leave()
    world.connect(1, "my secret name")
    opened, closed = world.events.of(ev.TwinSessionOpened), world.events.of(ev.TwinSessionClosed)
    assert [(one.twin, one.connection) for one in opened[:2]] == [(1, ev.digest("my secret name")), (2, "")]
    assert [(one.twin, one.reason) for one in closed] == [(2, Reason.CLOSED_BY_PEER), (1, Reason.REPLACED)]
    assert (closed[1].envelopes_in, closed[0].envelopes_out) == (1, 1) and closed[1].bytes_in == closed[0].bytes_out
    assert "secret" not in repr(list(world.events))
    world.network.advance(10)
    [routed] = world.events.of(ev.EnvelopesRouted)
    assert (routed.received, routed.local, routed.stored) == (1, 1, 0) and routed.bytes == closed[1].bytes_in


def test_failures_are_in_the_event_log_once_a_second_for_each_twin_and_reason(make_world: Callable[..., World]) -> None:
    world = make_world(limit=Limit(5, 10_000))
    alice = world.connect(1)
    alice.send(*[alice.envelope(SessionAddress(0)) for _ in range(8)])
    world.network.advance(1)
    [failed], [limited] = world.events.of(ev.EnvelopeFailed), world.events.of(ev.RateLimited)
    assert (failed.twin, failed.reason, failed.count) == (1, Reason.NO_DESTINATION, 5)
    assert (limited.twin, limited.count) == (1, 3)


def test_a_twin_over_its_limit_hears_so_and_keeps_its_session(make_world: Callable[..., World]) -> None:
    world = make_world(limit=Limit(2, 10_000))
    alice, bob = world.connect(1), world.connect(2)
    alice.send(*[alice.envelope(2, uid=str(at)) for at in range(3)])
    [error] = alice.envelopes
    assert (error.uid, error.error.message) == ("2", "exceeded rate limits, dropping message")
    assert len(bob.received) == 2 and not alice.lost
    world.network.advance(60)
    alice.send(alice.envelope(2))
    assert len(bob.received) == 3


def test_every_reason_of_the_relay_is_one_the_event_log_knows() -> None:
    for text in (
        "replaced",
        "evicted",
        "slow_consumer",
        "too many connections",
        "connections_per_address",
        "registry failed",
        "unknown twin",
        "replayed",
        "keepalive",
        "malformed",
        "handshakes_per_address",
        "handshakes_per_network",
        "handshakes",
    ):
        assert Reason.of(text) is not Reason.OTHER, text
