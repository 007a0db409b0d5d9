"""Flow control of a stream: the window we send in, and when a base receiver acknowledges (:ref:`spec-data`)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmsg.mux.core.window import OUTSTANDING_LIMIT, SEQUENCE_MODULUS, AckGate, SendWindow

# --- sending ---------------------------------------------------------------------------------------------------------


@given(
    st.integers(0, 200),
    st.integers(0, 0x1FFFF),
    st.lists(st.one_of(st.integers(0, 80), st.tuples(st.integers(0, 0xFFFF))), max_size=60),
)
def test_send_window_like_a_dict_of_what_is_out(limit: int, first: int, steps: list[int | tuple[int]]) -> None:
    window = SendWindow(limit, first)
    out: dict[int, int] = {}
    following = first % SEQUENCE_MODULUS
    for step in steps:
        if isinstance(step, int):
            assert window.send(step) == following
            out[following] = step
            following = (following + 1) % SEQUENCE_MODULUS
        else:
            # near the sequences in use, so that some are hit, some not, some twice
            sequence = (first + step[0] % 70) % SEQUENCE_MODULUS
            assert window.acknowledge(sequence) == out.pop(sequence, 0)
        assert window.outstanding_bytes == sum(out.values())
        assert window.room_bytes == max(0, limit - sum(out.values()))
        assert window.idle == (not out)


def test_sequences_wrap() -> None:
    window = SendWindow(100, 0xFFFE)
    assert [window.send(1) for _ in range(4)] == [0xFFFE, 0xFFFF, 0, 1]


def test_never_more_than_65535_outstanding_whatever_their_size() -> None:
    window = SendWindow(1 << 30, 7)
    for _ in range(OUTSTANDING_LIMIT):
        assert window.room_bytes > 0
        window.send(1)
    assert window.room_bytes == 0
    assert window.acknowledge(1000) == 1
    assert window.room_bytes == (1 << 30) - OUTSTANDING_LIMIT + 1


def test_empty_frames_are_outstanding_too() -> None:
    window = SendWindow(10, 0)
    sequence = window.send(0)
    assert not window.idle
    assert window.acknowledge(sequence) == 0
    assert window.idle


# --- acknowledging ---------------------------------------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.tuples(st.just("in"), st.integers(0, 65_508)), st.tuples(st.just("out"), st.floats(0, 1))))
)
def test_ack_gate_like_the_rule_in_words(steps: list[tuple[str, float]]) -> None:
    """:ref:`spec-plain-acks`: B += n; at once if B <= 65535, else held; B -= m; all held, in order, if B < 65535."""
    gate, unread, held = AckGate(), 0, []
    for sequence, (direction, amount) in enumerate(steps):
        if direction == "in":
            unread += int(amount)
            at_once = unread <= 65535
            assert gate.arrived(sequence, int(amount)) is at_once
            if not at_once:
                held.append(sequence)
        else:
            taken = int(amount * unread)
            unread -= taken
            assert gate.consumed(taken) == (held if unread < 65535 else [])
            if unread < 65535:
                held = []
        assert gate.unread_bytes == unread


def test_at_once_up_to_65535_and_held_from_65536_on() -> None:
    gate = AckGate()
    assert gate.arrived(1, 65_534)
    assert gate.arrived(2, 1)
    assert not gate.arrived(3, 1)
    assert gate.consumed(1) == [], "exactly 65535 left: the limit is strict"
    assert gate.consumed(1) == [3]
    assert gate.consumed(1) == [], "released once only"


def test_an_empty_frame_at_65535_is_acknowledged_at_once_and_held_above() -> None:
    gate = AckGate()
    assert gate.arrived(1, 65_535)
    assert gate.arrived(2, 0)
    assert not gate.arrived(3, 1)
    assert not gate.arrived(4, 0)
    assert gate.consumed(2) == [3, 4]


def test_the_numbers_of_the_third_recording() -> None:
    gate = AckGate()
    sequences = [0xFFFE, 0xFFFF, 0, 1, 2, 3]
    assert [gate.arrived(sequence, 20_000) for sequence in sequences] == [True, True, True, False, False, False]
    assert gate.consumed(45_000) == []
    assert gate.consumed(9_465) == []
    assert gate.unread_bytes == 65_535
    assert gate.consumed(1) == [1, 2, 3]
