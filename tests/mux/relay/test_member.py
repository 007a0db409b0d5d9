"""A server's end of a connection: what goes out, in what order, and what is counted."""

from __future__ import annotations

import hashlib

import pytest

from dmsg.crypto.keys import SecretKey
from dmsg.mux.core.record import RecordLayer
from dmsg.mux.core.wire import ACK, CLOSE, FWD, HEADER_BYTES, OK, encode_close, encode_frame, split_frames
from dmsg.mux.relay.member import Leg, Member
from dmsg.mux.relay.switch import Switch

ALICE, BOB = (SecretKey(hashlib.sha256(name).digest()).public_key for name in (b"alice", b"bob"))
UP, DOWN = bytes(32), bytes(range(32))
REQUEST = ALICE.raw + BOB.raw


class Line:
    """Two members of a switch with one open transport between id 2 here and id 3 there."""

    def __init__(self) -> None:
        self.switch = Switch(random=lambda size: (3).to_bytes(size, "big"))
        self.here = self.switch.add_member(ALICE, RecordLayer(DOWN, UP), 5.0)[0]
        self.there = self.switch.add_member(BOB, RecordLayer(DOWN, UP), 5.0)[0]
        self.sealer, self.reader = RecordLayer(UP, DOWN), RecordLayer(UP, DOWN)
        self.take()
        asking, asked = Leg(self.here, 2, initiator=True), Leg(self.there, 3, initiator=False)
        asking.join(asked, 5.0)
        asking.open_both(6.0)
        self.asking, self.asked = asking, asked

    def send(self, *frames: bytes) -> None:
        self.here.receive_data(self.sealer.seal(b"".join(frames)), 7.0)

    def take(self) -> list[bytes]:
        """The records of one ``data_to_send`` at the far end."""
        return self.reader.open(self.there.data_to_send())


@pytest.fixture
def line() -> Line:
    return Line()


def fwd(size: int, transport_id: int = 2) -> bytes:
    return encode_frame(FWD, transport_id, b"\0\x01" + bytes(size))


def test_halves_of_a_transport_know_each_other(line: Line) -> None:
    assert (line.asking.side, line.asked.side) == ("initiator", "responder")
    assert line.asking.other is line.asked and line.asked.other is line.asking
    assert line.asking.target is line.there and line.asked.target is line.here
    assert (line.asking.since, line.asking.opened_at) == (5.0, 6.0)
    assert (line.asking.fwd_prefix, line.asked.ack_prefix) == (b"\x0a\0\x03", b"\x0b\0\x02")
    assert len(line.asking.fwd_prefix) == HEADER_BYTES - 2


def test_only_the_first_accept_of_the_side_asked_is_right() -> None:
    switch = Switch()
    here, there = (switch.add_member(key, RecordLayer(DOWN, UP), 0.0)[0] for key in (ALICE, BOB))
    asking, asked = (
        Leg(member, number, initiator=member is here, request=REQUEST) for member, number in ((here, 2), (there, 3))
    )
    asking.join(asked, 0.0)
    assert not asking.accepts(REQUEST)
    assert not asked.accepts(REQUEST + b"\0")
    assert asked.accepts(REQUEST)
    asking.open_both(0.0)
    assert not asked.accepts(REQUEST)
    assert not asked.accepts(b""), "the request is not kept once it is answered"


def test_a_closed_leg_is_remembered_by_its_id(line: Line) -> None:
    assert 3 not in line.there.recent
    line.asked.close()
    assert 3 in line.there.recent and 3 not in line.there.legs
    assert line.there.transports == 1
    again = Leg(line.there, 3, initiator=False)
    Leg(line.here, 4, initiator=True).join(again, 8.0)
    assert 3 not in line.there.recent
    with pytest.raises(AssertionError):
        line.asked.close()
    assert line.there.legs[3] is again, "an old leg does not take a new one's place away"


def test_frames_of_one_read_leave_as_one_record_with_new_ids(line: Line) -> None:
    line.send(fwd(3), encode_frame(ACK, 2, b"\0\x09"), encode_close(2, 0))
    assert line.take() == [
        encode_frame(FWD, 3, b"\0\x01\0\0\0") + encode_frame(ACK, 3, b"\0\x09") + encode_frame(CLOSE, 3, b"\0")
    ]
    assert line.there.data_to_send() == b""


def test_counters(line: Line) -> None:
    before = line.there.frames_out, line.there.bytes_out
    assert before[0] == 1, "its OK"
    line.send(fwd(3), fwd(4), encode_close(2, 0))
    sealed = line.there.data_to_send()
    assert (line.here.frames_in, line.there.frames_out) == (3, before[0] + 3)
    assert line.there.bytes_out == before[1] + len(sealed)
    assert line.here.bytes_in == 22 + 10 + 11 + 6
    assert line.asking.bytes == 5 + 6
    line.there.pause()
    assert line.there.frames_out == before[0] + 3


def test_frames_that_waited_are_counted_too(line: Line) -> None:
    line.there.pause()
    line.send(fwd(3), fwd(4))
    line.there.resume()
    line.take()
    assert line.there.frames_out == 3


def test_a_port_is_dirty_once_until_it_is_flushed(line: Line) -> None:
    line.switch.dirty.clear()
    line.send(fwd(1))
    line.send(fwd(1))
    assert line.switch.dirty == [line.there]
    line.switch.dirty.clear()
    line.take()
    line.send(fwd(1))
    assert line.switch.dirty == [line.there]


def test_a_drain_is_bounded(line: Line) -> None:
    line.there.pause()
    for _ in range(100):
        line.send(fwd(1_000))
    assert not line.there.out
    line.there.resume()
    assert not line.there.direct, "what comes now has to wait behind what waits"
    sizes = []
    while line.there.wants_write:
        sizes.append(sum(map(len, line.take())))
    assert sum(sizes) == 100 * 1_007
    assert max(sizes) <= 64 * 1024 + 16 * 1024 + 1_007
    assert line.there.direct


def test_a_congested_port_stays_indirect_when_its_queue_is_empty(line: Line) -> None:
    line.there.pause()
    line.send(fwd(1))
    line.take()
    assert not line.there.waiting and not line.there.direct
    line.there.resume()
    assert line.there.direct


def test_queues_are_measured_on_both_sides(line: Line) -> None:
    line.there.pause()
    line.send(fwd(93), fwd(193))
    assert (line.asked.queued_bytes, line.asked.queue_peak_bytes) == (300, 300)
    assert (line.here.queued_from, line.switch.queued_bytes) == (300, 300)
    assert (line.there.queued_to, line.here.feeding) == (300, {line.asked})
    line.switch.queues.drop(line.asked)
    line.switch.queues.drop(line.asked)
    assert (line.asked.queued_bytes, line.here.queued_from, line.switch.queued_bytes) == (0, 0, 0)
    assert not line.there.waiting
    assert not line.here.feeding
    assert line.asked.queue_peak_bytes == 300


def test_a_transport_waits_in_the_row_once(line: Line) -> None:
    line.there.pause()
    line.send(fwd(1), fwd(2))
    assert list(line.there.waiting) == [line.asked]
    line.there.resume()
    line.take()
    line.there.pause()
    line.send(fwd(1))
    assert list(line.there.waiting) == [line.asked]


def test_output_of_a_lost_connection_is_forgotten(line: Line) -> None:
    line.there.send_control(encode_frame(OK, 0))
    line.there.pause()
    line.send(fwd(93))
    line.switch.queues.drop_all(line.there)
    line.there.discard_output()
    assert not line.there.wants_write
    assert line.switch.queued_bytes == line.here.queued_from == 0


def test_what_is_no_data_is_measured_while_the_network_takes_nothing(line: Line) -> None:
    limit = line.switch.limits.control_backlog_bytes
    line.there.pause()
    line.there.send_control(bytes(limit))
    assert (line.there.control_backlog_bytes, line.there.overloaded) == (limit, False)
    line.there.send_control(b"x")
    assert line.there.overloaded
    line.there.resume()
    assert (line.there.control_backlog_bytes, line.there.overloaded) == (0, False)


def test_what_has_not_moved_between_two_looks_is_stale(line: Line) -> None:
    frame = fwd(1_000)
    half, rest = frame[:300], frame[300:]
    line.send(fwd(10) + half)
    record = line.sealer.seal(rest)
    assert line.here.stale_bytes() == 0, "it may have come just now"
    assert line.here.stale_bytes() == len(half)
    line.here.receive_data(record[:-1], 7.0)
    assert line.here.stale_bytes() == len(half) + len(record) - 1
    line.here.receive_data(record[-1:], 7.0)
    assert line.here.stale_bytes() == line.here.stale_bytes() == 0
    line.send(half)
    assert line.here.stale_bytes() == 0


def test_what_the_network_does_not_take_between_two_looks_is_stale(line: Line) -> None:
    line.send(fwd(5_000))
    data = line.there.data_to_send()
    assert line.there.stale_bytes() == line.there.stale_bytes() == 0, "the network took it"
    line.there.pause()
    line.there.send_control(encode_close(5, 0))
    assert line.there.stale_bytes() == 0
    assert line.there.stale_bytes() == len(data) + len(encode_close(5, 0))
    line.there.resume()
    line.there.data_to_send()
    line.there.pause()
    assert line.there.stale_bytes() == 0, "it took that, and not yet this"


def test_more_than_fits_a_record_goes_out_in_several(line: Line) -> None:
    line.send(fwd(60_000))
    line.send(fwd(60_000))
    records = line.take()
    assert len(records) == 2
    frames, used = split_frames(b"".join(records))
    assert len(frames) == 2 and used == 2 * 60_007


def test_ids_are_odd_and_none_is_left_when_all_are_taken(line: Line) -> None:
    member = Member(line.switch, ALICE, RecordLayer(DOWN, UP), 0.0)
    drawn: list[int] = []

    def random(size: int) -> bytes:
        drawn.append(size)
        return b"\xff\xfe"

    assert [member.free_id(random), member.free_id(random)] == [0xFFFF, 1]
    assert drawn == [2], "drawn when first needed, once"
    member.legs = dict.fromkeys(range(1, 1 << 16, 2), line.asking)
    assert member.free_id(random) is None


def test_a_port_has_no_timers_of_its_own(line: Line) -> None:
    assert line.here.next_timeout() is None
    assert line.here.handle_timeout(1_000.0) == ()
