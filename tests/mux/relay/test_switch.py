"""The relay's rules, one test each.

:ref:`spec-request-checks`, :ref:`spec-establishing`, :ref:`spec-other-frames`, :ref:`spec-closing`,
:ref:`spec-newest-wins`.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.events import Ready, Rejected
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.wire import (
    ACCEPT,
    ACK,
    CLOSE,
    EXTENDED_REQUEST_LIMIT_BYTES,
    FRAME_PAYLOAD_LIMIT_BYTES,
    FWD,
    OK,
    RECORD_PLAINTEXT_LIMIT_BYTES,
    REQUEST,
    CloseReason,
    encode_frame,
    split_frames,
)
from dmsg.mux.relay.limits import RelayLimits
from dmsg.mux.relay.member import Leg, Member
from dmsg.mux.relay.switch import Switch
from dmsg.sansio.rate import RecentIds
from dmsg.serving.events import Ending, MemberDropped, RequestRefused, TransportEnded, TransportStarted

ALICE, BOB, CAROL, DAVE = (
    SecretKey(hashlib.sha256(name).digest()).public_key for name in (b"alice", b"bob", b"carol", b"dave")
)
UP, DOWN = bytes(32), bytes(range(32))
Frame = tuple[int, int, bytes]


class Client:
    """A connection to the switch, and everything it says there."""

    def __init__(self, bench: Bench, key: PublicKey, *, extended: bool = False) -> None:
        self.bench = bench
        self.key = key
        self.records = RecordLayer(UP, DOWN)
        self.member, self.admission = bench.switch.add_member(key, RecordLayer(DOWN, UP), bench.now, extended=extended)
        assert self.frames() == [(OK, 0, b"")]

    def say_plain(self, *plaintexts: bytes) -> list[Any]:
        """Send records with ``plaintexts``; gives the events."""
        data = b"".join(map(self.records.seal, plaintexts))
        return list(self.member.receive_data(data, self.bench.now))

    def say(self, kind: int, transport_id: int, payload: bytes = b"") -> list[Any]:
        return self.say_plain(encode_frame(kind, transport_id, payload))

    def plaintexts(self) -> list[bytes]:
        """The records that are waiting, as the network takes them."""
        found = []
        while self.member.wants_write:
            found += self.records.open(self.member.data_to_send())
        return found

    def frames(self) -> list[Frame]:
        data = b"".join(self.plaintexts())
        frames, used = split_frames(data)
        assert used == len(data)
        return [(kind, transport_id, data[start:end]) for kind, transport_id, start, end in frames]

    def request(self, transport_id: int, other: Client) -> bytes:
        payload = self.key.raw + other.key.raw
        self.say(REQUEST, transport_id, payload)
        return payload

    def transport(self, transport_id: int, other: Client) -> int:
        """Open a transport to ``other``; gives its id there."""
        payload = self.request(transport_id, other)
        [(kind, there, same)] = other.frames()
        assert (kind, same) == (REQUEST, payload)
        assert [type(event) for event in other.say(ACCEPT, there, payload)] == [TransportStarted]
        assert self.frames() == [(ACCEPT, transport_id, payload)]
        return there

    def leave(self) -> list[Any]:
        return list(self.bench.switch.remove_member(self.member, self.bench.now))


class Bench:
    def __init__(self, **limits: Any) -> None:
        self.now = 1_000.0
        ids = iter(range(0x100, 0x10000, 0x100))
        self.random: Callable[[int], bytes] = lambda size: next(ids).to_bytes(size, "big")
        self.switch = Switch(RelayLimits(**limits), random=self.random)

    def connect(self, *keys: PublicKey) -> list[Client]:
        return [Client(self, key) for key in keys]

    def wait(self, seconds: float) -> list[Any]:
        self.now += seconds
        return list(self.switch.handle_timeout(self.now))

    def check_empty(self) -> None:
        """Nothing is left over: no rule, no byte, no pending request."""
        switch = self.switch
        assert (switch.queued_bytes, switch.open_transports) == (0, 0)
        assert switch.queues.next_timeout() is None
        for member in switch.members.values():
            assert (member.pending_requests, member.queued_from, member.queued_to) == (0, 0, 0)
            assert (len(member.legs), len(member.waiting), len(member.feeding)) == (0, 0, 0)


def close(transport_id: int, reason: int) -> Frame:
    return (CLOSE, transport_id, bytes((reason,)))


def data(size: int, sequence: int = 1) -> bytes:
    return sequence.to_bytes(2, "big") + bytes(size)


def held_halves() -> int:
    return sum(isinstance(each, Leg) for each in gc.get_objects())


# --- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", Ending)
def test_what_a_relay_ends_by_itself_has_the_number_of_its_close_reason(ending: Ending) -> None:
    assert CloseReason[ending.name] == ending


def test_ok_is_first_and_only_then_can_a_client_be_reached() -> None:
    """Also when a REQUEST comes in before the first flush (:ref:`spec-admission`)."""
    bench = Bench()
    [alice] = bench.connect(ALICE)
    records = RecordLayer(UP, DOWN)
    bob, _ = bench.switch.add_member(BOB, RecordLayer(DOWN, UP), bench.now)
    alice.say(REQUEST, 2, ALICE.raw + BOB.raw)
    [plaintext] = records.open(bob.data_to_send())
    assert [frame[0] for frame in split_frames(plaintext)[0]] == [OK, REQUEST]


def test_connection_limit_is_answered_with_a_reason() -> None:
    """A refusal is an OK that carries one. The same key may come again."""
    bench = Bench(connections=1)
    bench.connect(ALICE)
    assert bench.switch.refusal(ALICE) is None
    reason = bench.switch.refusal(BOB)
    assert reason == "too many connections"
    connection = Connection(BOB, RecordLayer(UP, DOWN), now=0.0)
    assert connection.receive_data(bench.switch.reject(RecordLayer(DOWN, UP), reason), 0.0) == [Rejected(reason)]


def test_a_draining_server_admits_no_client() -> None:
    bench = Bench()
    bench.switch.draining = True
    assert bench.switch.refusal(ALICE) == "server_draining"


def test_ok_of_an_admission_has_no_reason() -> None:
    bench = Bench()
    member, _ = bench.switch.add_member(ALICE, RecordLayer(DOWN, UP), bench.now)
    assert Connection(ALICE, RecordLayer(UP, DOWN), now=0.0).receive_data(member.data_to_send(), 0.0) == [Ready()]


def test_newest_connection_of_a_key_wins() -> None:
    """The older one is dropped, its peers are told, its end does not delete the new slot."""
    bench = Bench()
    old, bob = bench.connect(ALICE, BOB)
    there = old.transport(2, bob)
    [new] = bench.connect(ALICE)
    ended, dropped = new.admission
    assert isinstance(ended, TransportEnded) and (ended.reason, ended.by) == (CloseReason.PEER_GONE, "initiator")
    assert dropped == MemberDropped(old.member, "replaced")
    assert bob.frames() == [close(there, CloseReason.PEER_GONE)]
    assert old.leave() == []
    assert bench.switch.members[ALICE.raw] is new.member
    bob.transport(4, new)


def test_the_end_of_the_new_connection_deletes_the_slot() -> None:
    bench = Bench()
    _, bob = bench.connect(ALICE, BOB)
    [new] = bench.connect(ALICE)
    new.leave()
    bob.say(REQUEST, 2, BOB.raw + ALICE.raw)
    assert bob.frames() == [close(2, CloseReason.UNKNOWN_PEER)]


# --- REQUEST ---------------------------------------------------------------------------------------------------------


def test_request_makes_a_rule_and_accept_opens_it() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(0x2000, bob)
    assert there == 0x101, "odd, from the random start"
    assert bench.switch.open_transports == 1
    alice.say(FWD, 0x2000, b"\0\x01up")
    bob.say(FWD, there, b"\0\x02down")
    bob.say(ACK, there, b"\0\x01")
    assert bob.frames() == [(FWD, there, b"\0\x01up")]
    assert alice.frames() == [(FWD, 0x2000, b"\0\x02down"), (ACK, 0x2000, b"\0\x01")]
    assert alice.transport(0x2002, bob) == there + 2


def test_ids_of_the_server_step_over_those_in_use_and_wrap() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    first = alice.transport(2, bob)
    bob.member.next_id = 0xFFFF
    assert alice.transport(4, bob) == 0xFFFF
    assert alice.transport(6, bob) == 1
    bob.member.next_id = first
    assert alice.transport(8, bob) == first + 2


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ((ALICE.raw + BOB.raw)[:65], CloseReason.MALFORMED),
        (ALICE.raw + BOB.raw + b"\0", CloseReason.MALFORMED),
        (b"", CloseReason.MALFORMED),
        (CAROL.raw + BOB.raw, CloseReason.MALFORMED),
        (ALICE.raw + DAVE.raw, CloseReason.UNKNOWN_PEER),
        (ALICE.raw + bytes(33), CloseReason.UNKNOWN_PEER),
    ],
)
def test_request_contents_are_checked(payload: bytes, reason: int) -> None:
    bench = Bench()
    alice, bob, _ = bench.connect(ALICE, BOB, CAROL)
    [event] = alice.say(REQUEST, 2, payload)
    assert event == RequestRefused(alice.member, CloseReason(reason).name.lower())
    assert alice.frames() == [close(2, reason)]
    assert bob.frames() == []
    bench.check_empty()


def test_a_request_with_more_than_two_keys_is_for_clients_that_know_the_extension() -> None:
    bench = Bench()
    alice, carol = Client(bench, ALICE, extended=True), Client(bench, CAROL, extended=True)
    [bob] = bench.connect(BOB)
    assert alice.say(REQUEST, 2, ALICE.raw + BOB.raw + b"\0") == [RequestRefused(alice.member, "unsupported")]
    assert (alice.frames(), bob.frames()) == ([close(2, CloseReason.UNSUPPORTED)], [])
    longest = (ALICE.raw + CAROL.raw).ljust(EXTENDED_REQUEST_LIMIT_BYTES, b"\0")
    alice.say(REQUEST, 4, longest)
    [(_, _, passed_on)] = carol.frames()
    assert (passed_on, alice.frames()) == (longest, [])
    alice.say(REQUEST, 6, longest + b"\0")
    assert (alice.frames(), carol.frames()) == ([close(6, CloseReason.MALFORMED)], [])


def test_request_with_an_odd_id_is_refused() -> None:
    alice, bob = Bench().connect(ALICE, BOB)
    alice.request(0x2001, bob)
    assert alice.frames() == [close(0x2001, CloseReason.BAD_ID)]
    assert bob.frames() == []


@pytest.mark.parametrize("accepted", [True, False])
def test_request_for_an_id_in_use_ends_the_old_rule(accepted: bool) -> None:
    """The old peer is told."""
    bench = Bench()
    alice, bob, carol = bench.connect(ALICE, BOB, CAROL)
    if accepted:
        there = alice.transport(2, bob)
    else:
        alice.request(2, bob)
        [(_, there, _)] = bob.frames()
    ended, refused = alice.say(REQUEST, 2, ALICE.raw + CAROL.raw)
    assert (ended.reason, ended.by, ended.was_open) == (CloseReason.BAD_ID, "server", accepted)
    assert refused == RequestRefused(alice.member, "bad_id")
    assert alice.frames() == [close(2, CloseReason.BAD_ID)]
    assert bob.frames() == [close(there, CloseReason.BAD_ID)]
    assert carol.frames() == []
    bench.check_empty()
    alice.transport(2, carol)


def test_request_from_the_side_that_was_asked_for_that_id() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    bob.say(REQUEST, there, BOB.raw + ALICE.raw)
    assert bob.frames() == [close(there, CloseReason.BAD_ID)]
    assert alice.frames() == [close(2, CloseReason.BAD_ID)]
    bench.check_empty()


@pytest.mark.parametrize("what", ["odd", "in use", "malformed"])
def test_bad_requests_again_and_again_drop_the_connection(what: str) -> None:
    bench = Bench(stray_burst=5, request_burst=1000, pending_requests=1000)
    alice, bob = bench.connect(ALICE, BOB)
    with pytest.raises(RemoteProtocolError, match="abuse"):
        for n in range(12):
            if what == "odd":
                alice.request(2 * n + 1, bob)
            elif what == "malformed":
                alice.say(REQUEST, 2 * n, b"")
            else:
                alice.request(2, bob)


def test_request_of_oneself() -> None:
    bench = Bench()
    [alice] = bench.connect(ALICE)
    payload = alice.request(2, alice)
    assert alice.frames() == [(REQUEST, 0x101, payload)]
    alice.say(ACCEPT, 0x101, payload)
    assert alice.frames() == [(ACCEPT, 2, payload)]
    alice.say(FWD, 2, b"\0\x01there")
    alice.say(FWD, 0x101, b"\0\x01back")
    assert alice.frames() == [(FWD, 0x101, b"\0\x01there"), (FWD, 2, b"\0\x01back")]
    alice.say(CLOSE, 2, b"\0")
    assert alice.frames() == [close(0x101, 0)]
    bench.check_empty()


def test_the_end_of_a_connection_that_had_a_transport_to_itself() -> None:
    bench = Bench()
    [alice] = bench.connect(ALICE)
    alice.request(2, alice)
    alice.say(ACCEPT, 0x101, ALICE.raw * 2)
    alice.request(4, alice)
    events = alice.leave()
    assert [event.was_open for event in events] == [True, False]
    assert alice.leave() == []
    assert not alice.member.legs
    bench.check_empty()


# --- limits on requests ----------------------------------------------------------------------------------------------


def test_unanswered_requests_are_limited() -> None:
    bench = Bench(pending_requests=3)
    alice, bob = bench.connect(ALICE, BOB)
    for n in range(4):
        alice.request(2 * n, bob)
    assert alice.frames() == [close(6, CloseReason.RATE_LIMITED)]
    [first, *_] = bob.frames()
    bob.say(ACCEPT, first[1], first[2])
    alice.request(8, bob)
    assert [kind for kind, *_ in alice.frames()] == [ACCEPT]


def test_request_rate_is_limited() -> None:
    bench = Bench(request_burst=2, requests_per_s=1.0)
    alice, bob = bench.connect(ALICE, BOB)
    for n in range(3):
        alice.request(2 * n, bob)
    assert alice.frames() == [close(4, CloseReason.RATE_LIMITED)]
    bench.now += 1.0
    alice.request(6, bob)
    assert alice.frames() == []
    assert len(bob.frames()) == 3


def test_rate_limited_requests_are_no_reason_to_drop_the_connection() -> None:
    bench = Bench(request_burst=1, stray_burst=2)
    alice, bob = bench.connect(ALICE, BOB)
    for n in range(50):
        alice.request(2 * n, bob)
        alice.say(CLOSE, 2 * n, b"\0")
    assert [frame for frame in alice.frames() if frame[0] == CLOSE] == [
        close(2 * n, CloseReason.RATE_LIMITED) for n in range(1, 50)
    ]


def test_a_request_that_is_refused_while_the_client_gives_it_up_is_no_offence() -> None:
    bench = Bench(stray_burst=2)
    [alice] = bench.connect(ALICE)
    for n in range(50):
        alice.say(REQUEST, 2 * n, ALICE.raw + DAVE.raw)
        alice.say(CLOSE, 2 * n, b"\0")
    assert alice.frames() == [close(2 * n, CloseReason.UNKNOWN_PEER) for n in range(50)]


def test_dials_of_a_connection_are_limited() -> None:
    bench = Bench(transports_per_connection=4)
    alice, bob, carol, dave = bench.connect(ALICE, BOB, CAROL, DAVE)
    for transport_id, other in ((2, bob), (4, bob), (6, carol), (8, carol)):
        alice.transport(transport_id, other)
    alice.request(10, dave)
    assert alice.frames() == [close(10, CloseReason.BUSY)]
    alice.say(CLOSE, 2, b"\0")
    bob.frames()
    alice.transport(12, dave)


@pytest.mark.parametrize(("own", "others"), [(0, 2), (2, 2), (3, 1), (4, 0)])
def test_half_of_the_transports_of_a_connection_are_its_own(own: int, others: int) -> None:
    bench = Bench(transports_per_connection=4)
    alice, bob, carol, dave = bench.connect(ALICE, BOB, CAROL, DAVE)
    for n in range(own):
        alice.transport(2 * n, (bob, carol)[n % 2])
    for n in range(others):
        dave.transport(2 * n, alice)
    dave.request(100, alice)
    assert dave.frames() == [close(100, CloseReason.BUSY)]
    alice.frames()
    for n in range(own, 4 - others):
        alice.transport(2 * n, dave if n < 2 else bob)
    alice.request(100, bob)
    assert alice.frames() == [close(100, CloseReason.BUSY)], "what others opened counts, too"


def test_all_ids_taken_is_busy_at_once() -> None:
    many = 1 << 20
    bench = Bench(
        transports_per_connection=many,
        pending_requests=many,
        request_burst=many,
        pair_request_burst=many,
        stranger_request_burst=many,
        unanswered_per_target=many,
    )
    alice, bob, carol = bench.connect(ALICE, BOB, CAROL)
    frames = b"".join(encode_frame(REQUEST, n, ALICE.raw + BOB.raw) for n in range(0, 1 << 16, 2))
    alice.say_plain(*(frames[at : at + 65_000] for at in range(0, len(frames), 65_000)))
    assert len(bob.member.legs) == 1 << 15
    assert carol.say(REQUEST, 2, CAROL.raw + BOB.raw) == [RequestRefused(carol.member, "busy")]
    assert carol.frames() == [close(2, CloseReason.BUSY)]
    assert len({transport_id for _, transport_id, _ in bob.frames()}) == 1 << 15


def test_requests_to_a_client_that_takes_none() -> None:
    bench = Bench(control_backlog_bytes=600, pending_requests=1000)
    alice, bob = bench.connect(ALICE, BOB)
    bob.member.pause()
    for n in range(10):
        alice.request(2 * n, bob)
    refused = alice.frames()
    assert refused == [close(2 * n, CloseReason.BUSY) for n in range(5, 10)], "71 bytes each, and half for a stranger"


def test_a_draining_server_takes_no_requests() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    bench.switch.draining = True
    alice.request(4, bob)
    assert alice.frames() == [close(4, CloseReason.SERVER_DRAINING)]
    alice.say(FWD, 2, data(1))
    assert bob.frames() == [(FWD, there, data(1))], "open transports go on"


def test_stopping_ends_every_transport_on_both_sides_once() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    payload = alice.request(4, alice)
    own = alice.frames()[0][1]
    alice.say(ACCEPT, own, payload)
    alice.frames()
    events = bench.switch.drop_transports(CloseReason.SERVER_DRAINING)
    assert [(event.reason, event.by) for event in events] == [(CloseReason.SERVER_DRAINING, "server")] * 2
    reason = CloseReason.SERVER_DRAINING
    assert sorted(alice.frames()) == sorted([close(2, reason), close(4, reason), close(own, reason)])
    assert bob.frames() == [close(there, reason)]
    bench.check_empty()


def test_what_waits_when_a_relay_stops_arrives_on_both_sides() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    alice.member.pause()
    bob.member.pause()
    alice.say(FWD, 2, data(10))
    bob.say(FWD, there, data(20))
    bench.switch.drop_transports(CloseReason.SERVER_DRAINING)
    alice.member.resume()
    bob.member.resume()
    assert alice.frames() == [(FWD, 2, data(20)), close(2, CloseReason.SERVER_DRAINING)]
    assert bob.frames() == [(FWD, there, data(10)), close(there, CloseReason.SERVER_DRAINING)]
    bench.check_empty()


def test_what_waits_for_a_client_that_breaks_the_rules_is_dropped() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    bob.member.pause()
    alice.say(FWD, 2, data(10))
    bob.say(FWD, there, b"")
    bob.member.resume()
    assert bob.frames() == [close(there, CloseReason.MALFORMED)]
    assert alice.frames() == [close(2, CloseReason.MALFORMED)]
    bench.check_empty()


# --- ACCEPT ----------------------------------------------------------------------------------------------------------


def pending(bench: Bench) -> tuple[Client, Client, bytes, int]:
    alice, bob = bench.connect(ALICE, BOB)
    payload = alice.request(2, bob)
    [(_, there, _)] = bob.frames()
    return alice, bob, payload, there


def ended_both(alice: Client, bob: Client, there: int, reason: int = CloseReason.MALFORMED) -> None:
    assert alice.frames() == [close(2, reason)]
    assert bob.frames() == [close(there, reason)]
    alice.bench.check_empty()


@pytest.mark.parametrize("altered", [ALICE.raw + CAROL.raw, BOB.raw + ALICE.raw, b"", (ALICE.raw + BOB.raw)[:65]])
def test_accept_with_another_payload(altered: bytes) -> None:
    alice, bob, _, there = pending(Bench())
    bob.say(ACCEPT, there, altered)
    ended_both(alice, bob, there)


def test_accept_from_the_side_that_asked() -> None:
    alice, bob, payload, there = pending(Bench())
    alice.say(ACCEPT, 2, payload)
    ended_both(alice, bob, there)


def test_accept_twice() -> None:
    alice, bob, payload, there = pending(Bench())
    bob.say(ACCEPT, there, payload)
    alice.frames()
    bob.say(ACCEPT, there, payload)
    ended_both(alice, bob, there)


@pytest.mark.parametrize("kind", [FWD, ACK])
@pytest.mark.parametrize("who", ["asking", "asked"])
def test_data_before_accept(kind: int, who: str) -> None:
    alice, bob, _, there = pending(Bench())
    if who == "asking":
        alice.say(kind, 2, b"\0\x01")
    else:
        bob.say(kind, there, b"\0\x01")
    ended_both(alice, bob, there)


@pytest.mark.parametrize("what", ["accept", "early data", "short data"])
def test_frames_that_end_a_transport_again_and_again_drop_the_connection(what: str) -> None:
    bench = Bench(stray_burst=5, request_burst=1000)
    alice, bob = bench.connect(ALICE, BOB)

    def offend(transport_id: int) -> None:
        if what == "short data":
            alice.transport(transport_id, bob)
            alice.say(FWD, transport_id, b"\0")
        else:
            payload = alice.request(transport_id, bob)
            alice.say(ACCEPT if what == "accept" else FWD, transport_id, payload)
        alice.frames()
        bob.frames()

    for n in range(5):
        offend(2 * n)
    with pytest.raises(RemoteProtocolError, match="abuse"):
        offend(10)


def test_an_unanswered_request_is_closed_in_time() -> None:
    bench = Bench(request_timeout_s=10.0)
    alice, bob, payload, there = pending(bench)
    assert bench.switch.next_timeout() == bench.now + 10.0
    assert bench.wait(9.9) == []
    [event] = bench.wait(0.1)
    assert (event.reason, event.by, event.was_open) == (CloseReason.HANDSHAKE_TIMEOUT, "server", False)
    ended_both(alice, bob, there, CloseReason.HANDSHAKE_TIMEOUT)
    assert bench.switch.next_timeout() is None
    bob.say(ACCEPT, there, payload)
    assert alice.frames() == bob.frames() == [], "the answer that crossed it is no offence"


def test_a_request_that_waits_does_not_put_off_other_timeouts() -> None:
    bench = Bench(request_timeout_s=20.0, queue_stall_timeout_s=15.0)
    alice, bob, carol = bench.connect(ALICE, BOB, CAROL)
    alice.transport(2, bob)
    alice.request(4, carol)
    bob.member.pause()
    alice.say(FWD, 2, data(10))
    assert bench.switch.next_timeout() == bench.now + 15.0
    assert [event.reason for event in bench.wait(15.0)] == [CloseReason.SLOW_CONSUMER]
    assert bench.switch.next_timeout() == bench.now + 5.0


def test_answered_requests_have_no_timeout() -> None:
    bench = Bench(request_timeout_s=10.0)
    alice, bob, carol = bench.connect(ALICE, BOB, CAROL)
    alice.transport(2, bob)
    bench.now += 5.0
    carol.request(2, bob)
    assert bench.wait(5.0) == []
    assert bench.switch.next_timeout() == bench.now + 5.0
    [event] = bench.wait(5.0)
    assert event.asking.member is carol.member
    assert bench.switch.open_transports == 1


def test_refused_by_the_one_who_was_asked() -> None:
    bench = Bench()
    alice, bob, _, there = pending(bench)
    [event] = bob.say(CLOSE, there, bytes((CloseReason.REFUSED,)))
    assert (event.reason, event.by, event.was_open) == (CloseReason.REFUSED, "responder", False)
    assert alice.frames() == [close(2, CloseReason.REFUSED)]
    bench.check_empty()


def test_withdrawn_by_the_one_who_asked() -> None:
    bench = Bench()
    alice, bob, _, there = pending(bench)
    [event] = alice.say(CLOSE, 2, b"\0")
    assert (event.by, event.was_open) == ("initiator", False)
    assert bob.frames() == [close(there, 0)]
    bench.check_empty()


# --- CLOSE -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "forwarded"),
    [(b"", b""), (b"\0", b"\0"), (b"\x10", b"\x10"), (bytes(range(5, 40)), bytes(range(5, 23)))],
)
def test_close_is_passed_on_with_its_reason(payload: bytes, forwarded: bytes) -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    [event] = bob.say(CLOSE, there, payload)
    assert (event.reason, event.by, event.was_open) == (payload[0] if payload else 0, "responder", True)
    assert alice.frames() == [(CLOSE, 2, forwarded)]
    assert bob.frames() == []
    bench.check_empty()


def test_close_with_an_unknown_id_is_not_answered() -> None:
    [alice] = Bench().connect(ALICE)
    assert alice.say(CLOSE, 2, b"\0") == []
    assert alice.frames() == []


@pytest.mark.parametrize("kind", [ACCEPT, FWD, ACK])
def test_anything_else_with_an_unknown_id_is_answered_with_close(kind: int) -> None:
    [alice] = Bench().connect(ALICE)
    assert alice.say(kind, 2, bytes(2)) == []
    assert alice.frames() == [close(2, 0)]


@pytest.mark.parametrize("kind", [ACCEPT, CLOSE, FWD, ACK])
def test_frames_of_no_transport_are_limited(kind: int) -> None:
    """The reference answered 200,000 of them a second."""
    bench = Bench(stray_burst=10, strays_per_s=2.0)
    [alice] = bench.connect(ALICE)
    for n in range(10):
        alice.say(kind, n, bytes(2))
    bench.now += 1.0
    alice.say(kind, 20, bytes(2))
    alice.say(kind, 21, bytes(2))
    with pytest.raises(RemoteProtocolError) as caught:
        alice.say(kind, 22, bytes(2))
    assert (caught.value.stage, caught.value.reason) == ("frame", "abuse")


@pytest.mark.parametrize("kind", [ACCEPT, CLOSE, FWD, ACK])
def test_what_was_under_way_at_the_end_is_no_offence(kind: int) -> None:
    bench = Bench(stray_burst=1)
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    alice.say(CLOSE, 2, b"\0")
    bob.frames()
    for _ in range(50):
        assert bob.say(kind, there, b"\0\x01") == []
        assert alice.say(kind, 2, b"\0\x01") == []
    assert bob.frames() == alice.frames() == []


def test_only_the_latest_ends_are_remembered() -> None:
    bench = Bench(stray_burst=1, request_burst=20_000, pair_request_burst=20_000, stranger_request_burst=20_000)
    alice, bob = bench.connect(ALICE, BOB)

    def end(*ids: int) -> None:
        for each in ids:
            alice.request(each, bob)
            alice.say(CLOSE, each, b"\0")

    end(*range(0, 2 * RecentIds.CAPACITY, 2))
    alice.say(FWD, 0, data(1))
    assert alice.frames() == []
    end(*range(2 * RecentIds.CAPACITY, 4 * RecentIds.CAPACITY + 2, 2))
    alice.say(FWD, 2 * RecentIds.CAPACITY, data(1))
    assert alice.frames() == []
    alice.say(FWD, 0, data(1))
    assert alice.frames() == [close(0, 0)]


@pytest.mark.parametrize("kind", [OK, 4, 9, 0x0C, 0xFF])
def test_an_unknown_frame_type_drops_the_connection(kind: int) -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    alice.transport(2, bob)
    for transport_id in (0, 2):
        with pytest.raises(RemoteProtocolError, match="unknown type"):
            alice.say(kind, transport_id, bytes(2))


@pytest.mark.parametrize("kind", [FWD, ACK])
@pytest.mark.parametrize("payload", [b"", b"\0"])
def test_data_without_a_sequence_ends_the_transport(kind: int, payload: bytes) -> None:
    """What is shorter than a sequence is not passed on."""
    alice, bob, accept, there = pending(Bench())
    bob.say(ACCEPT, there, accept)
    alice.frames()
    alice.say(kind, 2, payload)
    ended_both(alice, bob, there)


def test_fwd_of_two_bytes_and_ack_of_three_are_passed_on() -> None:
    alice, bob = Bench().connect(ALICE, BOB)
    there = alice.transport(2, bob)
    alice.say(FWD, 2, b"\0\x01")
    alice.say(ACK, 2, bytes(3))
    assert bob.frames() == [(FWD, there, b"\0\x01"), (ACK, there, bytes(3))]


# --- connections that end --------------------------------------------------------------------------------------------


def test_peers_of_a_lost_connection_are_told_on_every_transport() -> None:
    bench = Bench()
    alice, bob, carol = bench.connect(ALICE, BOB, CAROL)
    first, second = alice.transport(2, bob), alice.transport(4, carol)
    third = carol.transport(6, alice)
    alice.request(8, bob)
    [(_, fourth, _)] = bob.frames()
    assert alice.frames() == []
    alice.say(FWD, 100, bytes(2))
    assert alice.member.wants_write, "the answer, which is never sent"
    events = alice.leave()
    assert [(event.by, event.was_open) for event in events] == [
        ("initiator", True),
        ("initiator", True),
        ("responder", True),
        ("initiator", False),
    ]
    assert third % 2
    gone = CloseReason.PEER_GONE
    assert bob.frames() == [close(first, gone), close(fourth, gone)]
    assert carol.frames() == [close(second, gone), close(6, gone)]
    bench.check_empty()
    assert alice.frames() == []


def test_a_request_of_a_client_that_is_gone_does_not_time_out() -> None:
    bench = Bench()
    alice, _, _, _ = pending(bench)
    alice.leave()
    assert bench.wait(100.0) == []
    assert bench.switch.next_timeout() is None


# --- receivers that do not read --------------------------------------------------------------------------------------


def test_other_transports_are_not_slowed_down() -> None:
    bench = Bench()
    alice, bob, carol = bench.connect(ALICE, BOB, CAROL)
    alice.transport(2, bob)
    to_carol = alice.transport(4, carol)
    bob.member.pause()
    for n in range(20):
        alice.say(FWD, 2, data(1_000, n))
        alice.say(FWD, 4, data(10, n))
    assert [payload for _, _, payload in carol.frames()] == [data(10, n) for n in range(20)]
    assert bench.switch.queued_bytes == 20 * 1_007
    assert to_carol


def test_what_waited_arrives_in_order_when_the_receiver_reads_again() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    alice.say(FWD, 2, data(10, 0))
    bob.member.pause()
    for n in range(1, 200):
        alice.say(FWD, 2, data(1_000, n))
    bob.member.resume()
    alice.say(FWD, 2, data(10, 200))
    assert [int.from_bytes(payload[:2], "big") for _, _, payload in bob.frames()] == list(range(201))
    assert bob.member.direct
    alice.say(FWD, 2, data(10, 201))
    assert bob.frames() == [(FWD, there, data(10, 201))]
    alice.say(CLOSE, 2, b"\0")
    bob.frames()
    bench.check_empty()


def test_queue_over_the_hard_limit_ends_the_transport_at_once() -> None:
    bench = Bench(queue_soft_bytes=10_000, queue_hard_bytes=20_000)
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    bob.member.pause()
    events = []
    for n in range(25):
        events += alice.say(FWD, 2, data(1_000, n))
    [event] = events
    assert (event.reason, event.by) == (CloseReason.SLOW_CONSUMER, "server")
    assert alice.frames() == [close(2, CloseReason.SLOW_CONSUMER)]
    assert bench.switch.queued_bytes == 0
    bob.member.resume()
    assert bob.frames() == [close(there, CloseReason.SLOW_CONSUMER)], "what waited is dropped"
    bench.check_empty()
    assert event.asking.other.queue_peak_bytes > 20_000


@pytest.mark.parametrize(
    ("extended", "carried", "borne"), [(True, 0, 0), (True, 1_000, 8_000), (True, 100_000, 50_000), (False, 100_000, 0)]
)
def test_more_waits_for_a_transport_that_has_carried_much_if_its_sender_knows_windows(
    extended: bool, carried: int, borne: int
) -> None:
    bench = Bench(queue_soft_bytes=10_000, queue_hard_bytes=20_000, window_bytes=50_000)
    alice, bob = Client(bench, ALICE, extended=extended), Client(bench, BOB)
    alice.transport(2, bob)
    for _ in range(carried // 1_000):
        alice.say(FWD, 2, data(998))
    assert len(bob.frames()) == carried // 1_000
    bob.member.pause()
    waiting = 0
    while not alice.say(FWD, 2, data(998)):
        waiting += 1_000
        assert waiting < 1_000_000
    assert 0.95 * (20_000 + borne) - 1_000 <= waiting <= 20_000 + borne
    assert alice.frames() == [close(2, CloseReason.SLOW_CONSUMER)]
    assert bench.switch.queued_bytes == 0


def test_queue_over_the_soft_limit_ends_the_transport_after_a_time_without_progress() -> None:
    bench = Bench(queue_soft_bytes=10_000, slow_consumer_timeout_s=10.0)
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    assert bench.wait(10.0) == []
    bob.member.pause()
    for n in range(9):
        alice.say(FWD, 2, data(1_000, n))
    assert bench.switch.next_timeout() == bench.now + 30.0, "the time of any queue"
    alice.say(FWD, 2, data(1_000, 9))
    alice.say(FWD, 2, data(1_000, 10))
    assert bench.switch.next_timeout() == bench.now + 10.0
    assert bench.wait(9.0) == []
    [event] = bench.wait(1.0)
    assert event.reason == CloseReason.SLOW_CONSUMER
    assert alice.frames() == [close(2, CloseReason.SLOW_CONSUMER)]
    bob.member.resume()
    assert bob.frames() == [close(there, CloseReason.SLOW_CONSUMER)]
    bench.check_empty()
    assert bench.switch.next_timeout() is None


def test_a_time_that_is_too_short_for_the_clock_ends_what_waits_and_holds_nothing_up() -> None:
    bench = Bench(queue_stall_timeout_s=1e-15)
    assert bench.now + 1e-15 == bench.now
    alice, bob = bench.connect(ALICE, BOB)
    alice.transport(2, bob)
    bob.member.pause()
    alice.say(FWD, 2, data(1_000))
    [event] = bench.wait(1.0)
    assert event.reason == CloseReason.SLOW_CONSUMER


def test_a_transport_that_is_stuck_in_both_directions_is_closed_once() -> None:
    bench = Bench(queue_soft_bytes=1_000, slow_consumer_timeout_s=10.0)
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    alice.member.pause()
    bob.member.pause()
    alice.say(FWD, 2, data(2_000))
    bob.say(FWD, there, data(2_000))
    [event] = bench.wait(10.0)
    assert event.reason == CloseReason.SLOW_CONSUMER
    for each, transport_id in ((alice, 2), (bob, there)):
        each.member.resume()
        assert each.frames() == [close(transport_id, CloseReason.SLOW_CONSUMER)]
    bench.check_empty()


def test_a_slow_receiver_that_makes_progress_is_left_alone() -> None:
    bench = Bench(queue_soft_bytes=100_000, slow_consumer_timeout_s=10.0)
    alice, bob = bench.connect(ALICE, BOB)
    alice.transport(2, bob)
    bob.member.pause()
    for n in range(400):
        alice.say(FWD, 2, data(1_000, n))
    for _ in range(4):
        bob.member.resume()
        bob.records.open(bob.member.data_to_send())  # 64 KiB, then nothing more
        bob.member.pause()
        assert bench.wait(10.0) == []
    assert bench.switch.open_transports == 1
    bob.member.resume()
    bob.frames()
    assert bench.wait(10.0) == []
    assert bench.switch.next_timeout() is None, "caught up"


def test_close_goes_behind_the_data_that_came_before_it() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    bob.member.pause()
    alice.say(FWD, 2, data(100))
    alice.say(CLOSE, 2, b"\0")
    assert bench.switch.open_transports == 0
    bob.member.resume()
    assert bob.frames() == [(FWD, there, data(100)), close(there, 0)]
    assert bench.wait(100.0) == []
    bench.check_empty()


def test_close_of_a_lost_connection_goes_behind_its_data_too() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    bob.member.pause()
    alice.say(FWD, 2, data(100))
    alice.leave()
    bob.member.resume()
    assert bob.frames() == [(FWD, there, data(100)), close(there, CloseReason.PEER_GONE)]
    bench.wait(100.0)
    bench.check_empty()


def test_what_waits_for_a_receiver_after_the_end_is_dropped_in_time() -> None:
    bench = Bench(slow_consumer_timeout_s=10.0)
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    bob.member.pause()
    alice.say(FWD, 2, data(100))
    alice.say(CLOSE, 2, b"\0")
    assert bench.switch.next_timeout() == bench.now + 10.0
    assert bench.wait(10.0) == []
    bench.check_empty()
    bob.member.resume()
    assert bob.frames() == [close(there, CloseReason.SLOW_CONSUMER)]


def test_what_waits_for_the_side_that_closes_is_dropped_at_once() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    bob.member.pause()
    alice.say(FWD, 2, data(100))
    bob.say(CLOSE, there, b"\0")
    bench.check_empty()
    bob.member.resume()
    assert bob.frames() == []
    assert alice.frames() == [close(2, 0)]


def test_a_receiver_that_is_lost_takes_its_queues_with_it() -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    alice.transport(2, bob)
    alice.transport(4, bob)
    bob.member.pause()
    for transport_id in (2, 4):
        alice.say(FWD, transport_id, data(100))
    alice.say(CLOSE, 4, b"\0")  # what waits there belongs to no transport any more
    bob.leave()
    assert alice.frames() == [close(2, CloseReason.PEER_GONE)]
    bench.wait(100.0)
    bench.check_empty()
    assert not bob.member.wants_write


def test_transports_of_one_receiver_take_turns() -> None:
    bench = Bench(queue_hard_bytes=10_000_000)
    alice, bob = bench.connect(ALICE, BOB)
    ids = [alice.transport(2 * n, bob) for n in range(4)]
    bob.member.pause()
    for n in range(4):
        for _ in range(60 if n == 0 else 20):
            alice.say(FWD, 2 * n, data(2_000))
    bob.member.resume()
    order = [transport_id for _, transport_id, _ in bob.frames()]
    quantum = 9  # frames of 2,007 bytes in 16 KiB, the last of them over it
    assert order[: 4 * quantum] == [one for one in ids for _ in range(quantum)]
    last_of_short = max(at for at, one in enumerate(order) if one != ids[0])
    assert order.count(ids[0]) == 60
    assert last_of_short < 20 * 4 + quantum, "20 frames of each were through before the long queue was"


def test_frames_that_are_no_data_overtake_what_waits() -> None:
    bench = Bench()
    alice, bob, carol = bench.connect(ALICE, BOB, CAROL)
    there = alice.transport(2, bob)
    bob.member.pause()
    alice.say(FWD, 2, data(1_000))
    carol.request(2, bob)
    bob.member.resume()
    assert [kind for kind, *_ in bob.frames()] == [REQUEST, FWD]
    assert there


def test_too_much_queued_in_all_closes_the_largest_queues_and_refuses_no_client() -> None:
    bench = Bench(queued_total_bytes=100_000)
    alice, bob, carol, dave = bench.connect(ALICE, BOB, CAROL, DAVE)
    alice.transport(2, bob)
    alice.transport(4, bob)
    carol.transport(2, bob)
    bob.member.pause()
    carol.say(FWD, 2, data(10_000))
    for n in range(4):
        alice.say(FWD, 2, data(11_000, n))
        alice.say(FWD, 4, data(11_000, n))
    assert bench.switch.open_transports == 3
    [event] = alice.say(FWD, 4, data(11_000, 4))
    assert (event.reason, event.by) == (CloseReason.SLOW_CONSUMER, "server")
    assert alice.frames() == [close(4, CloseReason.SLOW_CONSUMER)], "the longer one"
    assert carol.frames() == []
    assert bench.switch.queued_bytes == 10_007 + 4 * 11_007
    dave.transport(4, carol)


def test_a_client_that_takes_no_answers_is_not_read_from() -> None:
    bench = Bench(control_backlog_bytes=50)
    [alice] = bench.connect(ALICE)
    for n in range(9):
        alice.say(REQUEST, 2 * n, ALICE.raw + DAVE.raw)
    assert not alice.member.overloaded, "its network takes everything"
    alice.member.pause()
    assert alice.member.overloaded
    alice.member.resume()
    assert not alice.member.overloaded


# --- frames over the limit -------------------------------------------------------------------------------------------


def test_the_longest_frame_passes_whole_or_in_pieces() -> None:
    alice, bob = Bench().connect(ALICE, BOB)
    there = alice.transport(2, bob)
    frame = encode_frame(FWD, 2, data(FRAME_PAYLOAD_LIMIT_BYTES - 2))
    alice.say_plain(frame)
    alice.say_plain(frame[:100], frame[100:])
    expected = (FWD, there, data(FRAME_PAYLOAD_LIMIT_BYTES - 2))
    assert bob.frames() == [expected, expected]


@pytest.mark.parametrize("size", [65_511, 65_514, 65_515, 65_530, 65_535])
def test_a_longer_frame_in_split_records_is_refused(size: int) -> None:
    """65,511 to 65,514 killed the process of a base client behind a base server."""
    alice, bob = Bench().connect(ALICE, BOB)
    alice.transport(2, bob)
    frame = encode_frame(FWD, 2, bytes(size))
    with pytest.raises(RemoteProtocolError, match="payload over the limit"):
        alice.say_plain(frame[:40_000], frame[40_000:])
    assert bob.frames() == []


@pytest.mark.parametrize("apart", [False, True])
def test_frames_before_one_that_is_refused_are_passed_on(apart: bool) -> None:
    alice, bob = Bench().connect(ALICE, BOB)
    there = alice.transport(2, bob)
    good, bad = encode_frame(FWD, 2, data(10)), encode_frame(FWD, 2, bytes(65_535))[:40_000]
    unknown = encode_frame(REQUEST, 4, ALICE.raw + DAVE.raw)
    with pytest.raises(RemoteProtocolError, match="payload over the limit") as caught:
        alice.say_plain(*((good, unknown, bad) if apart else (good + unknown + bad,)))
    assert bob.frames() == [(FWD, there, data(10))]
    assert caught.value.events == [RequestRefused(alice.member, "unknown_peer")]


@given(st.lists(st.integers(0, FRAME_PAYLOAD_LIMIT_BYTES - 2), min_size=1, max_size=6), st.booleans())
@settings(max_examples=30)
def test_the_switch_emits_no_record_over_the_limit(sizes: list[int], congested: bool) -> None:
    bench = Bench()
    alice, bob = bench.connect(ALICE, BOB)
    there = alice.transport(2, bob)
    if congested:
        bob.member.pause()
    for n, size in enumerate(sizes):
        alice.say(FWD, 2, data(size, n))
    if congested:
        bob.member.resume()
    plaintexts = []
    while bob.member.wants_write:
        sealed = bob.member.data_to_send()
        position = 0
        while position < len(sealed):
            position += 2 + int.from_bytes(sealed[position : position + 2], "big")
        assert position == len(sealed), "no length field has wrapped"
        plaintexts += bob.records.open(sealed)
    assert all(len(plaintext) <= RECORD_PLAINTEXT_LIMIT_BYTES for plaintext in plaintexts)
    whole = b"".join(plaintexts)
    assert whole == b"".join(encode_frame(FWD, there, data(size, n)) for n, size in enumerate(sizes))


# --- anything at all -------------------------------------------------------------------------------------------------

chaos_frames = st.tuples(
    st.integers(0, 2),
    st.sampled_from([REQUEST, ACCEPT, CLOSE, FWD, ACK, REQUEST, ACCEPT]),
    st.sampled_from([2, 4, 0x101, 0x103, 0x201, 0x203, 0x301]),
    st.sampled_from(
        [b"", b"\0\x01", data(5_000), *(a.raw + b.raw for a in (ALICE, BOB, CAROL) for b in (ALICE, BOB, CAROL))]
    ),
)


@given(
    st.lists(
        st.one_of(
            chaos_frames,
            st.sampled_from(["pause", "resume", "wait", "leave", "flush", "connect"]).flatmap(
                lambda what: st.tuples(st.just(what), st.integers(0, 2))
            ),
        ),
        max_size=60,
    )
)
@settings(max_examples=200)
def test_any_frames_from_any_client_leave_consistent_counts(steps: list[Any]) -> None:
    keys = (ALICE, BOB, CAROL)
    bench = Bench(
        queue_soft_bytes=12_000,
        queue_hard_bytes=20_000,
        queued_total_bytes=30_000,
        stray_burst=10_000,
        request_burst=10_000,
        pending_requests=3,
    )
    clients: list[Client | None] = list(bench.connect(*keys))
    for step in steps:
        who = step[1] if isinstance(step[0], str) else step[0]
        client = clients[who]
        if client is None:
            if step[0] == "connect":
                clients[who] = Client(bench, keys[who])
            continue
        if step[0] == "pause":
            client.member.pause()
        elif step[0] == "resume":
            client.member.resume()
            client.frames()
        elif step[0] == "wait":
            bench.wait(6.0)
        elif step[0] == "leave":
            client.leave()
            clients[who] = None
        elif step[0] == "flush":
            if not client.member.congested:
                client.frames()
        elif not isinstance(step[0], str):
            client.say(*step[1:])
        live = [one.member for one in clients if one is not None]
        assert {id(member) for member in bench.switch.members.values()} == {id(member) for member in live}
        queued = sum(leg.queued_bytes for member in live for leg in member.waiting)
        assert bench.switch.queued_bytes == queued
        legs = [leg for member in live for leg in member.legs.values()]
        assert all(leg.other.member.legs[leg.other.id] is leg.other for leg in legs)
        assert bench.switch.open_transports == sum(leg.open and leg.initiator for leg in legs)
        for member in live:
            waits = sum(leg.initiator and not leg.open for leg in member.legs.values())
            assert member.pending_requests == waits
            assert member.direct <= (not member.congested and not member.waiting)
            assert len(member.waiting) == len(set(member.waiting))
    for client in clients:
        if client is not None:
            client.leave()
    bench.wait(100.0)
    bench.check_empty()
    assert not bench.switch.members
    assert bench.switch.next_timeout() is None


def test_default_limits_are_those_of_the_extension() -> None:
    limits = RelayLimits()
    assert (limits.handshake_timeout_s, limits.half_open, limits.half_open_per_address) == (5.0, 512, 64)
    assert (limits.connections, limits.transports_per_connection) == (10_000, 1_024)
    assert (limits.transports_per_source, limits.transports_per_pair, limits.unanswered_per_target) == (64, 64, 256)
    assert (limits.stranger_requests_per_s, limits.stranger_request_burst) == (100.0, 512)
    assert (limits.pair_requests_per_s, limits.pair_request_burst) == (10.0, 64)
    assert (limits.known_requests_per_s, limits.known_request_burst) == (400.0, 1_024)
    assert (limits.requests_per_s, limits.request_burst, limits.pending_requests) == (200.0, 500, 64)
    assert (limits.strays_per_s, limits.stray_burst) == (20.0, 100)
    assert (limits.queue_soft_bytes, limits.queue_hard_bytes) == (1 << 20, 5 << 18)
    assert (limits.slow_consumer_timeout_s, limits.queue_stall_timeout_s) == (10.0, 30.0)
    assert (limits.queued_per_connection_bytes, limits.queued_total_bytes) == (64 << 20, 256 << 20)
    assert (limits.bytes_per_s, limits.window_bytes) == (0, 32 << 20)
    assert limits.request_timeout_s == 10.0
    switch = Switch()
    assert switch.limits == limits
    assert switch._random is os.urandom
    assert isinstance(switch.add_member(ALICE, RecordLayer(UP, DOWN), 0.0)[0], Member)


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["closed", "refused", "slow", "drained", "gone", "to itself"])
def test_a_transport_that_is_over_is_let_go_of_without_the_garbage_collector(end: str) -> None:
    """Opening and closing transports must not grow a relay until its collector, which runs rarely, comes by."""
    bench = Bench(queue_hard_bytes=4_000, queue_soft_bytes=2_000)
    alice, bob = bench.connect(ALICE, BOB)
    gc.collect()
    gc.disable()
    try:
        before = held_halves()
        for transport_id in range(2, 12, 2):
            if end == "refused":
                alice.request(transport_id, bob)
                [(_, there, _)] = bob.frames()
                bob.say(CLOSE, there, bytes((CloseReason.REFUSED,)))
            elif end == "to itself":
                alice.request(transport_id, alice)
                alice.say(CLOSE, transport_id, b"\0")
            else:
                alice.transport(transport_id, bob)
            if end in ("slow", "drained"):
                bob.member.pause()
                for sequence in range(1, 6 if end == "slow" else 4):
                    alice.say(FWD, transport_id, data(1_000, sequence))
                bob.member.resume()
                bob.frames()
            if end in ("closed", "drained"):
                alice.say(CLOSE, transport_id, b"\0")
            alice.frames(), bob.frames()
        if end == "gone":
            bob.leave()
        bench.wait(0 if end == "drained" else 60)
        bench.check_empty()
        assert held_halves() == before
    finally:
        gc.enable()
