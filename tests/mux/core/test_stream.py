"""One end of a transport as bookkeeping (:ref:`spec-data`, :ref:`spec-stream-states`)."""

from __future__ import annotations

import hashlib

import pytest

from dmsg.crypto.keys import SecretKey
from dmsg.errors import LocalProtocolError
from dmsg.mux.core.e2e_handshake import UPGRADE_MAGIC
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.plain_stream import PlainStream
from dmsg.mux.core.stream import FWD_OVERHEAD_BYTES, TRANSITIONS, Stream, StreamFault, StreamState
from dmsg.mux.core.wire import ACK, FWD, CloseReason, encode_frame
from dmsg.mux.relay.limits import RelayLimits

BOB = SecretKey(hashlib.sha256(b"bob").digest()).public_key


def stream(*, initiator: bool = True, window_bytes: int = 1000, first_sequence: int = 0xFFFF) -> Stream:
    return PlainStream(6, BOB, b"", initiator=initiator, window_bytes=window_bytes, first_sequence=first_sequence)


def test_begins_as_what_it_is() -> None:
    assert stream(initiator=True).state is StreamState.REQUESTED
    assert stream(initiator=False).state is StreamState.OFFERED


@pytest.mark.parametrize("start", StreamState)
@pytest.mark.parametrize("end", StreamState)
def test_goes_where_the_table_leads_and_nowhere_else(start: StreamState, end: StreamState) -> None:
    one = stream()
    one.state = start
    if end in TRANSITIONS[start]:
        one.move(end)
        assert one.state is end
    else:
        with pytest.raises(AssertionError):
            one.move(end)
        assert one.state is start


def test_every_state_leads_to_the_end() -> None:
    assert set(TRANSITIONS) == set(StreamState)
    for state in StreamState:
        assert state is StreamState.CLOSED or StreamState.CLOSED in TRANSITIONS[state]


def test_frames_within_window_and_limit() -> None:
    one = stream(window_bytes=10)
    assert not one.sendable
    one.pending.append(b"abcdefghijklm")
    assert one.sendable
    head, data = one.next_fwd(4)
    assert head + data == encode_frame(FWD, 6, b"\xff\xffabcd")
    assert len(head) == FWD_OVERHEAD_BYTES
    head, data = one.next_fwd(400)
    assert head + data == encode_frame(FWD, 6, b"\0\0efghij"), "the window holds 10 bytes"
    assert not one.sendable
    assert (one.sent_bytes, one.acked_bytes, len(one.pending)) == (10, 0, 3)
    one.receive_ack(b"\xff\xff")
    one.receive_ack(b"\xff\xff")
    assert one.acked_bytes == 4
    assert one.sendable and not one.drained
    one.next_fwd(400)
    one.receive_ack(b"\x00\x00")
    assert not one.drained
    one.receive_ack(b"\x00\x01")
    assert one.drained
    assert (one.sent_bytes, one.acked_bytes) == (13, 13)


@pytest.mark.parametrize("size", [1, 4, 64, 16_384])
def test_what_waits_at_the_relay_is_bounded_however_small_the_writes_are(size: int) -> None:
    """Frames and all, a full window stays below what a relay takes for honest."""
    one = stream(window_bytes=ConnectionConfig().send_window_bytes)
    one.pending.append(bytes(1 << 20))
    waiting = 0
    while one.sendable:
        waiting += sum(map(len, one.next_fwd(size)))
    assert waiting < RelayLimits().queue_soft_bytes


def test_acknowledges_what_the_gate_lets_through() -> None:
    one = stream()
    payload = b"\0\x07" + bytes(65_535)
    assert one.receive_fwd(b"before" + payload, 6, 6 + len(payload)) == (payload[2:], encode_frame(ACK, 6, b"\0\x07"))
    assert one.receive_fwd(b"\x12\x34!", 0, 3) == (b"!", b"")
    assert one.received_bytes == 65_536
    assert one.ack_frame(0x1234) == encode_frame(ACK, 6, b"\x12\x34")


def test_repr_names_peer_and_state() -> None:
    assert repr(stream()) == f"<PlainStream 6 requested with {BOB}>"


def test_an_upgrade_is_no_data_for_a_listener_in_the_clear() -> None:
    """What a peer that trusts our entry sends first must not reach an application that did not ask for it."""
    payload = b"\0\0" + UPGRADE_MAGIC + bytes(49)
    with pytest.raises(StreamFault) as caught:
        stream(initiator=False).receive_fwd(payload, 0, len(payload))
    assert caught.value.code == CloseReason.UNSUPPORTED
    later = stream(initiator=False)
    later.receive_fwd(b"\0\0first", 0, 7)
    assert later.receive_fwd(payload, 0, len(payload))[0] == payload[2:]


def test_a_plain_stream_has_one_path_and_no_ends_of_its_own() -> None:
    one = stream()
    assert (one.resumable, one.half_closes, one.complete, one.end_acked) == (False, False, False, False)
    assert one.resume_bytes == one.received_bytes
    with pytest.raises(LocalProtocolError):
        one.backlog()
    with pytest.raises(LocalProtocolError):
        one.go_on_from(stream(), 0, 0)
