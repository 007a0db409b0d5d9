"""How a stream becomes secure, with either carrier, through a real switch.

:ref:`spec-downgrade-rule`, :ref:`spec-carriers`, :ref:`spec-confirmation`.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dmsg.crypto.keys import SecretKey
from dmsg.crypto.noise import KnownPeer
from dmsg.errors import LocalProtocolError, RemoteProtocolError
from dmsg.mux.core.connection import Connection
from dmsg.mux.core.e2e_handshake import Resume
from dmsg.mux.core.e2e_negotiation import KNOWN_PEERS, Carrier, EndToEnd
from dmsg.mux.core.errors import IntegrityError
from dmsg.mux.core.events import (
    Confirmed,
    DataReceived,
    EndReceived,
    Event,
    StreamClosed,
    StreamOffered,
    StreamOpened,
    UpgradeReceived,
)
from dmsg.mux.core.held_acks import HELD_S
from dmsg.mux.core.openings import PATHS_REMEMBERED
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.resumption import ResumeAttempts
from dmsg.mux.core.sealed_stream import SealedStream
from dmsg.mux.core.stream import Stream, StreamState
from dmsg.mux.core.wire import ACCEPT, CLOSE, FWD, OK, REQUEST, REQUEST_BYTES, CloseReason, encode_frame, split_frames
from dmsg.mux.relay.switch import Switch
from dmsg.sansio.rate import TokenBucket

ALICE, BOB, SERVER, MALLORY = (SecretKey(bytes((n,)) * 32) for n in (0x11, 0x22, 0x33, 0x66))
E2E: Any = json.loads((Path(__file__).parents[2] / "vectors" / "e2e.json").read_text("utf-8"))
CARRIERS = [Carrier.REQUEST, Carrier.FORWARD]


class Net:
    """Alice and Bob on one switch."""

    def __init__(
        self,
        *,
        extended: tuple[bool, bool] = (True, True),
        fixed: bool = False,
        relay: SecretKey = SERVER,
        **randoms: Any,
    ) -> None:
        self.switch = Switch()
        self.ends: list[Connection] = []
        self.members = []
        self.frames: list[tuple[int, bytes]] = []
        """Type and payload of what went to the switch."""
        self.taps = []
        sides = ("initiator", "responder")
        for n, (key, side) in enumerate(zip((ALICE, BOB), sides, strict=True)):
            up, down = os.urandom(32), os.urandom(32)
            member, _ = self.switch.add_member(key.public_key, RecordLayer(down, up), 0, extended=extended[n])
            # the first two bytes are the first id, the next the first sequence of a base stream
            start = E2E["upgrade_sequences"][side].to_bytes(2, "big")
            random = (lambda size, start=start: start[:size]) if fixed else os.urandom
            # Alice takes the relay for the one whose key she is given
            server = (relay, SERVER)[n].public_key
            self.ends.append(
                Connection(
                    key.public_key,
                    RecordLayer(up, down),
                    now=0,
                    extended=extended[n],
                    random=random,
                    end_to_end=EndToEnd(key, server, random=randoms.get(side, os.urandom)),
                )
            )
            self.members.append(member)
            self.taps.append(RecordLayer(down, up))
        assert [len(events) for events in self.turn()] == [1, 1]

    def turn(self) -> list[list[Event]]:
        """Everything is delivered until there are events."""
        events: list[list[Event]] = [[], []]
        while not any(events):
            moved = False
            for end, member, tap in zip(self.ends, self.members, self.taps, strict=True):
                if data := end.data_to_send():
                    moved = True
                    for record in tap.open(data):
                        self.frames += [(kind, record[a:b]) for kind, _, a, b in split_frames(record)[0]]
                    member.receive_data(data, 0)
            for n, member in enumerate(self.members):
                if data := member.data_to_send():
                    moved = True
                    events[n] += self.ends[n].receive_data(data, 0)
            if not moved:
                break
        return events

    def handshake(
        self, carrier: Carrier, *, resume: Resume | None = None, answer: Resume | None = None
    ) -> tuple[Resume | None, Stream, Stream]:
        """What the initiator is told about resuming, and the streams of both ends."""
        alice, bob = self.ends
        asked = alice.open(BOB.public_key, carrier, service="" if resume else "web", resume=resume)
        [offered] = self.turn()[1]
        assert isinstance(offered, StreamOffered)
        stream = offered.stream
        assert stream.wants_seal is (carrier is Carrier.REQUEST)
        if carrier is Carrier.FORWARD:
            bob.accept_for_upgrade(stream)
            assert self.turn() == [[], [UpgradeReceived(stream)]]
        assert bob.read_offer(stream) == ("" if resume else "web", resume)
        assert stream.wants_seal
        if answer is None:
            theirs = bob.accept(stream)
        else:
            attempts = ResumeAttempts(stream, TokenBucket(1, 1, 0))
            theirs, displaced = bob.accept_path(stream, answer, attempts)
            assert displaced is None
        assert theirs.state is StreamState.CONFIRMING and stream.state is StreamState.CLOSED
        [opened] = self.turn()[0]
        assert isinstance(opened, StreamOpened)
        assert asked.state is StreamState.CLOSED
        assert self.turn() == [[], [Confirmed(theirs)]]
        return opened.resume, opened.stream, theirs


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_secure_stream_with_either_carrier(carrier: Carrier) -> None:
    extended = (carrier is Carrier.REQUEST,) * 2
    net = Net(extended=extended)
    resume, ours, theirs = net.handshake(carrier)
    assert resume is None
    assert isinstance(ours, SealedStream) and isinstance(theirs, SealedStream)
    assert ours.security == theirs.security == "e2e"
    assert ours.token == theirs.token
    assert ours.remote == BOB.public_key and theirs.remote == ALICE.public_key
    assert net.ends[0].streams == {ours.id: ours} and net.ends[1].streams == {theirs.id: theirs}
    for sender, stream, receiver in ((0, ours, theirs), (1, theirs, ours)):
        net.ends[sender].send_data(stream, b"there and back")
        assert net.turn()[1 - sender] == [DataReceived(receiver, b"there and back")]
    for end in net.ends:
        assert end.handle_timeout(HELD_S) == []
    net.turn()
    assert not any(b"there and back" in payload for _, payload in net.frames)
    assert ours.drained and theirs.drained


@pytest.mark.parametrize("carrier", CARRIERS)
def test_both_sides_learn_what_the_other_has(carrier: Carrier) -> None:
    asked, answered = Resume(b"t" * 16, 7), Resume(b"t" * 16, 2**50)
    told, *_ = Net().handshake(carrier, resume=asked, answer=answered)
    assert told == answered


@pytest.mark.parametrize("carrier", CARRIERS)
def test_what_travels_is_what_the_vectors_say(carrier: Carrier) -> None:
    ephemerals = {side: bytes.fromhex(E2E["ephemerals"][side]) for side in ("initiator", "responder")}
    net = Net(fixed=True, **{side: (lambda size, v=value: v[:size]) for side, value in ephemerals.items()})
    net.frames.clear()
    net.handshake(carrier)
    vector = E2E["carriers"][carrier.value]
    sent = [(kind, payload.hex()) for kind, payload in net.frames]
    expected = [(REQUEST, vector["request_payload"]), (ACCEPT, vector["accept_payload"])]
    if carrier is Carrier.FORWARD:
        expected += [(FWD, vector["initiator_fwd_payload"]), (FWD, vector["responder_fwd_payload"])]
    assert sent[: len(expected)] == expected
    assert sent[len(expected) :] == [(0xB, E2E["session"]["frames"]["initiator_ack_nothing_yet"])]


def test_without_a_carrier_it_is_a_base_stream() -> None:
    net = Net()
    stream = net.ends[0].open(BOB.public_key, Carrier.NONE)
    [request] = net.turn()[1]
    assert isinstance(request, StreamOffered)
    net.ends[1].accept(request.stream)
    assert net.turn()[0] == [StreamOpened(stream)]
    assert stream.security == "hop"
    assert stream.state is StreamState.OPEN


def test_an_extended_request_to_a_base_hop_is_unsupported() -> None:
    net = Net(extended=(True, False))
    stream = net.ends[0].open(BOB.public_key, Carrier.REQUEST)
    assert net.turn()[0] == [StreamClosed(stream, CloseReason.UNSUPPORTED, local=False)]


@pytest.mark.parametrize("is_read", [False, True])
def test_a_second_handshake_message_is_malformed(is_read: bool) -> None:
    net = Net()
    alice, bob = net.ends
    asked = alice.open(BOB.public_key, Carrier.FORWARD)
    [offered] = net.turn()[1]
    assert isinstance(offered, StreamOffered) and asked.handshake is not None
    bob.accept_for_upgrade(offered.stream)
    assert net.turn() == [[], [UpgradeReceived(offered.stream)]]
    if is_read:
        bob.read_offer(offered.stream)
    alice.send_control(asked.upgrade_frame(asked.handshake.message))
    assert net.turn()[1] == [StreamClosed(offered.stream, CloseReason.MALFORMED, local=True)]


@pytest.mark.parametrize("first", [b"", b"hello", b"\xff" * 16 + b"almost"])
def test_a_first_fwd_without_the_magic_is_a_downgrade(first: bytes) -> None:
    net = Net()
    stream = net.ends[0].open(BOB.public_key)
    [request] = net.turn()[1]
    assert isinstance(request, StreamOffered)
    net.ends[1].accept_for_upgrade(request.stream)
    net.turn()
    net.ends[0].send_control(encode_frame(FWD, stream.id, b"\0\0" + first))
    assert net.turn() == [[], [StreamClosed(request.stream, CloseReason.DOWNGRADE, local=True)]]
    assert net.turn()[0] == [StreamClosed(stream, CloseReason.DOWNGRADE, local=False)]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_answer_that_is_not_the_peers(carrier: Carrier) -> None:
    net = Net()
    alice, bob = net.ends
    stream = alice.open(BOB.public_key, carrier)
    [offered] = net.turn()[1]
    assert isinstance(offered, StreamOffered)
    if carrier is Carrier.REQUEST:
        accept = offered.stream.request[:REQUEST_BYTES] + bytes(49)
        bob.send_control(encode_frame(ACCEPT, offered.stream.id, accept))
        [closed] = net.turn()[0]
    else:
        bob.accept_for_upgrade(offered.stream)
        assert net.turn() == [[], [UpgradeReceived(offered.stream)]]
        bob.send_control(offered.stream.upgrade_frame(bytes(49)))
        [closed] = net.turn()[0]
    assert isinstance(closed, StreamClosed)
    assert (closed.stream, closed.code, closed.local) == (stream, CloseReason.INTEGRITY, True)
    assert "not authentic" in closed.detail


def test_a_request_that_is_not_for_this_relay() -> None:
    net = Net(relay=MALLORY)
    net.ends[0].open(BOB.public_key, Carrier.REQUEST)
    [request] = net.turn()[1]
    assert isinstance(request, StreamOffered)
    with pytest.raises(IntegrityError) as caught:
        net.ends[1].read_offer(request.stream)
    assert caught.value.code == CloseReason.INTEGRITY


def asked_and_answered(net: Net, carrier: Carrier, count: int) -> list[Stream]:
    """Streams of Alice's that Bob has accepted; his answers are on their way."""
    alice, bob = net.ends
    streams: list[Stream] = [alice.open(BOB.public_key, carrier) for _ in range(count)]
    for event in net.turn()[1]:
        assert isinstance(event, StreamOffered)
        if event.stream.wants_seal:
            bob.read_offer(event.stream)
            bob.accept(event.stream)
        else:
            bob.accept_for_upgrade(event.stream)
    net.members[1].receive_data(bob.data_to_send(), 0)
    return streams


def test_many_answers_in_one_read_are_finished_in_turns() -> None:
    """What the first handshakes lead to can be sent before the others are calculated."""
    net = Net()
    asked_and_answered(net, Carrier.REQUEST, 20)
    alice = net.ends[0]
    turns = [alice.receive_data(net.members[0].data_to_send(), 0)]
    while alice.answers:
        turns.append(alice.open_more())
    assert [len(turn) for turn in turns] == [8, 8, 4]
    assert all(isinstance(event, StreamOpened) for turn in turns for event in turn)
    assert alice.open_more() == []


@pytest.mark.parametrize("carrier", CARRIERS)
def test_an_answer_with_a_close_right_behind_it_opens_nothing(carrier: Carrier) -> None:
    net = Net()
    [stream] = asked_and_answered(net, carrier, 1)
    net.ends[1].abort(next(iter(net.ends[1].streams.values())), CloseReason.BUSY)
    net.members[1].receive_data(net.ends[1].data_to_send(), 0)
    assert net.turn()[0] == [StreamClosed(stream, CloseReason.BUSY, local=False)]
    assert not net.ends[0].streams
    assert net.ends[0].wants_write is (carrier is Carrier.FORWARD), "only carrier B has sent its message by then"
    assert net.turn() == [[], []], "which comes too late, and is no offence"
    assert not net.ends[0].wants_write


def test_what_was_answered_before_a_broken_frame_is_told() -> None:
    net = Net()
    [stream] = asked_and_answered(net, Carrier.REQUEST, 1)
    net.members[0].send_control(encode_frame(OK, 0))
    with pytest.raises(RemoteProtocolError) as caught:
        net.ends[0].receive_data(net.members[0].data_to_send(), 0)
    [opened] = caught.value.events
    assert isinstance(opened, StreamOpened) and opened.stream.id == stream.id


@pytest.mark.parametrize("carrier", CARRIERS)
def test_without_keys_there_are_plain_streams_only(carrier: Carrier) -> None:
    connection = Connection(ALICE.public_key, RecordLayer(bytes(32), bytes(32)), now=0)
    connection.receive_data(RecordLayer(bytes(32), bytes(32)).seal(encode_frame(OK, 0)), 0)
    with pytest.raises(LocalProtocolError):
        connection.open(BOB.public_key, carrier)
    assert connection.open(BOB.public_key).security == "hop"


# --- known peers -----------------------------------------------------------------------------------------------------


def test_the_paths_of_a_bounded_number_of_peers_are_remembered() -> None:
    records = RecordLayer(bytes(32), bytes(32))
    path = Connection(ALICE.public_key, records, now=0, clock=lambda: 0.0)._openings._path
    peers = [SecretKey(number.to_bytes(32, "big")).public_key for number in range(1, PATHS_REMEMBERED + 2)]
    first = [path(peer) for peer in peers[:PATHS_REMEMBERED]]
    assert path(peers[0]) is first[0]
    path(peers[-1])
    assert path(peers[0]) is first[0], "the one used longest ago is forgotten"
    assert path(peers[1]) is not first[1]


def known_peers() -> int:
    gc.collect()
    return sum(isinstance(one, KnownPeer) for one in gc.get_objects())


def test_a_connection_knows_so_many_peers_and_takes_them_with_it() -> None:
    before = known_peers()
    ends = EndToEnd(ALICE, SERVER.public_key)
    names = [SecretKey(number.to_bytes(32, "big")).public_key for number in range(1, KNOWN_PEERS + 50)]
    for name in names:
        ends.initiate(name, "", None)
        with pytest.raises(IntegrityError):
            ends.respond(name, bytes(400))
    assert known_peers() == before + KNOWN_PEERS
    del ends
    assert known_peers() == before


def test_a_peer_that_was_forgotten_is_learned_again() -> None:
    ends, peer = EndToEnd(ALICE, SERVER.public_key), EndToEnd(BOB, SERVER.public_key)
    for _ in range(2):
        dial = ends.initiate(BOB.public_key, "web", None)
        responder = peer.respond(ALICE.public_key, dial.message)
        answer, keys = responder.answer()
        assert responder.service == "web" and dial.finish(answer)[0].send_key == keys.receive_key
        for number in range(1, KNOWN_PEERS + 1):
            ends.initiate(SecretKey(number.to_bytes(32, "big")).public_key, "", None)


# --- the proof -------------------------------------------------------------------------------------------------------


def accepted(net: Net) -> Stream:
    """Alice has asked, Bob has accepted, and his answer has just been read: gives Alice's end."""
    net.ends[0].open(BOB.public_key, Carrier.REQUEST)
    [offered] = net.turn()[1]
    assert isinstance(offered, StreamOffered)
    net.ends[1].read_offer(offered.stream)
    net.ends[1].accept(offered.stream)
    [opened] = net.turn()[0]
    assert isinstance(opened, StreamOpened)
    net.frames.clear()
    return opened.stream


def test_what_is_written_at_once_is_the_proof() -> None:
    net = Net()
    net.ends[0].send_data(accepted(net), b"first words")
    _, [confirmed, came] = net.turn()
    assert isinstance(confirmed, Confirmed) and isinstance(came, DataReceived) and came.data == b"first words"
    assert [kind for kind, _ in net.frames] == [FWD]


def test_the_end_of_a_stream_without_a_word_is_the_proof() -> None:
    net = Net()
    net.ends[0].close(accepted(net))
    _, events = net.turn()
    assert [type(one) for one in events] == [Confirmed, EndReceived]
    assert [kind for kind, _ in net.frames] == [FWD]


def test_the_proof_does_not_wait_behind_the_data_of_others() -> None:
    net = Net()
    first, second = net.handshake(Carrier.REQUEST)[1], accepted(net)
    net.ends[0].send_data(first, bytes(200_000))
    net.ends[0].send_data(second, b"first words")
    net.ends[0].data_to_send()
    assert second.sent_bytes == len(b"first words") and first.sent_bytes < 200_000


def test_a_dial_that_is_given_up_at_once_proves_nothing() -> None:
    net = Net()
    net.ends[0].abort(accepted(net))
    _, events = net.turn()
    assert [type(one) for one in events] == [StreamClosed]
    assert [kind for kind, _ in net.frames] == [CLOSE]
