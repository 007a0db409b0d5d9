"""The room for envelopes on their way to other relays, against a model that counts everything anew."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.twin import Twin
from dmsg.rmb.core.wire import Envelope, outline
from dmsg.rmb.relay.lanes import OUTGOING_BYTES, Outgoing
from dmsg.rmb.relay.shares import Shares

LIMIT = 24 * OUTGOING_BYTES
RELAYS = ("a", "b", "c")


def made(source: int, size: int) -> Outgoing:
    envelope = Envelope()
    envelope.source.twin = source
    return Outgoing(outline(envelope), bytes(size), Twin(7, bytes(32), RELAYS), 0.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add"] * 6 + ["charge", "remove"]),
            st.integers(1, 3),
            st.sampled_from(RELAYS),
            st.integers(0, 9),
        ),
        max_size=80,
    )
)
def test_each_has_its_share_and_the_largest_makes_room(steps: list[tuple[str, int, str, int]]) -> None:
    shares, there = Shares(LIMIT), list[Outgoing]()
    for what, source, relay, number in steps:
        if what == "add":
            new = made(source, 900 * number)
            for surplus in shares.room_for(source, relay, new.size):
                of_sender, of_relay, of_pair = counted(there)
                if surplus is None:
                    assert of_sender[source] + new.size > LIMIT // 2 or (
                        of_relay[relay] + new.size > LIMIT // 2 or of_sender.total() + new.size > LIMIT
                    )
                    break
                if of_sender[source] + new.size > LIMIT // 2:
                    assert surplus.source == source
                    assert of_pair[source, surplus.charged] == max(of_pair[source, one] for one in RELAYS)
                    assert of_pair[source, surplus.charged] > of_pair[source, relay] + new.size
                else:
                    assert surplus.source != source
                there.remove(surplus)
                shares.remove(surplus)
            else:
                there.append(new)
                shares.add(new, relay)
                of_sender = counted(there)[0]
                assert of_sender[source] <= LIMIT // 2 and of_sender.total() <= LIMIT
        elif there:
            one = there[number % len(there)]
            there.remove(one)
            if what == "remove":
                shares.remove(one)
            else:
                shares.charge(one, relay)
                there.append(one)
        of_sender, of_relay, of_pair = counted(there)
        assert shares.held.used == of_sender.total()
        assert {one: held.used for one, held in shares.by_relay.items()} == dict(of_relay)
        assert len(shares._full) <= 2
        for sender, full in shares._full.items():
            assert [full.of(one) for one in RELAYS] == [of_pair[sender, one] for one in RELAYS]
    for one in there:
        shares.remove(one)
    assert not shares.held.used and not shares.by_relay and not shares._full


def test_a_sender_has_half_of_the_room_however_many_relays_it_writes_to() -> None:
    shares, there = Shares(LIMIT), list[Outgoing]()
    for number in range(30):
        new, relay = made(1, 0), RELAYS[number % 3]
        for surplus in shares.room_for(1, relay, new.size):
            if surplus is None:
                break
            there.remove(surplus)
            shares.remove(surplus)
        else:
            there.append(new)
            shares.add(new, relay)
    assert LIMIT // 2 - new.size < shares.held.of(1) <= LIMIT // 2


def counted(there: list[Outgoing]) -> tuple[Counter[int], Counter[str], Counter[tuple[int, str]]]:
    of_sender, of_relay, of_pair = Counter[int](), Counter[str](), Counter[tuple[int, str]]()
    for one in there:
        of_sender[one.source] += one.size
        of_relay[one.charged] += one.size
        of_pair[one.source, one.charged] += one.size
    return of_sender, of_relay, of_pair
