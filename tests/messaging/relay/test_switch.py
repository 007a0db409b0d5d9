"""The rules of a messaging relay, frame by frame, and what clients that keep no rule can do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.errors import RemoteProtocolError
from dmsg.messaging.core.wire import (
    CHANNEL_CLOSED,
    CHANNEL_OPENED,
    CLOSE_CHANNEL,
    GO,
    OPEN_CHANNEL,
    SEED,
    SEND,
    Layout,
)
from dmsg.messaging.relay.limits import RelayLimits
from dmsg.serving.events import (
    Ending,
    MemberDropped,
    RequestRefused,
    SwitchEvent,
    TransportEnded,
    TransportStarted,
)
from tests.links import MESSAGE, Said

from .conftest import Client, Relay

MakeRelay = Callable[..., Relay]
LAYOUTS = pytest.mark.parametrize("layout", [GO, SEED], ids=["go", "seed"])


def ended(events: list[SwitchEvent]) -> list[tuple[int, str]]:
    return [(event.reason, event.by) for event in events if isinstance(event, TransportEnded)]


def refused(events: list[SwitchEvent]) -> list[str]:
    return [event.reason for event in events if isinstance(event, RequestRefused)]


def check(relay: Relay) -> None:
    """What holds after every frame: the tables agree with each other and with the counts."""
    switch = relay.switch
    legs = [leg for member in switch.members.values() for leg in member.legs.values()]
    for leg in legs:
        assert leg.member.legs[leg.key] is leg
        assert leg.other.other is leg and leg.other.state is leg.state and leg.other.initiator is not leg.initiator
        assert leg.target is leg.other.member and switch.members[leg.target.remote.raw] is leg.target
        assert 0 <= leg.key < 256 if leg.open or not leg.initiator else 256 <= leg.key < 512
        assert leg.open or (not leg.closing and not leg.queue)
    assert switch.open_transports == sum(leg.open for leg in legs) / 2
    for member in switch.members.values():
        own = [leg for leg in member.legs.values() if leg.initiator]
        assert member.dials == len(own) and member.pending_requests == sum(not leg.open for leg in own)
        assert member.incoming.count + member.unanswered.count + len(own) == len(member.legs) <= 512
        called = [leg.id for leg in member.legs.values() if leg.open]
        assert len(called) == len(set(called)) or member.own_ids is None
        assert member.queued_to == sum(leg.queued_bytes for leg in member.legs.values())
    assert switch.queued_bytes == sum(leg.queued_bytes for leg in legs)


# --- opening ---------------------------------------------------------------------------------------------------------


def test_a_channel_carries_data_both_ways_under_the_ids_of_each_link(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    ours, theirs = alice.open(bob, 3)
    assert (ours, theirs) == (3, 255)
    alice.say(SEND, ours, b"there")
    bob.say(SEND, theirs, b"back")
    assert bob.take() == [Said(SEND, 255, b"there")]
    assert alice.take() == [Said(SEND, 3, b"back")]
    check(net)


def test_where_each_side_has_its_own_ids_an_answer_brings_the_one_of_the_side_that_answers(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice", own_ids=True), net.join("bob", own_ids=True)
    ours, theirs = alice.open(bob, 3, 5)
    assert (ours, theirs) == (255, 255), "both are the relay's"
    alice.say(SEND, ours, b"there")
    bob.say(SEND, theirs, b"back")
    assert bob.take() == [Said(SEND, 5, b"there")]
    assert alice.take() == [Said(SEND, 3, b"back")]
    check(net)


def test_many_channels_of_clients_with_their_own_ids_keep_apart(relay: MakeRelay) -> None:
    net = relay(request_burst=1000, pair_request_burst=1000)
    alice, bob = net.join("alice", own_ids=True), net.join("bob", own_ids=True)
    pairs = [alice.open(bob, number, 90 - number) for number in range(90)]
    for number, (ours, theirs) in enumerate(pairs):
        alice.say(SEND, ours, b"%d" % number)
        bob.say(SEND, theirs, b"%d" % -number)
    assert bob.take() == [Said(SEND, 90 - number, b"%d" % number) for number in range(90)]
    assert alice.take() == [Said(SEND, number, b"%d" % -number) for number in range(90)]
    check(net)


def test_the_log_has_the_ids_that_the_clients_use(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice", own_ids=True), net.join("bob", own_ids=True)
    alice.ask(bob, 3)
    [offer] = bob.take()
    [started] = bob.answer(offer.channel_id, 5)
    assert isinstance(started, TransportStarted)
    assert (started.asking.id, started.asking.other.id) == (3, 5)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "malformed"),
        (b"{bob}" + MESSAGE[:-1], "malformed"),
        (b"{bob}" + MESSAGE + b"\0", "malformed"),
        (b"{bob}\2" + b"\xff" * 32 + bytes(16), "malformed"),  # x >= p: clients of 2019 crash
        (b"{bob}" + bytes(49), "malformed"),
        (b"\2" * 33 + MESSAGE, "unknown_peer"),
        (bytes(33) + MESSAGE, "unknown_peer"),
        (b"{alice}" + MESSAGE, "refused"),
    ],
)
def test_what_cannot_be_opened_is_closed_at_once(relay: MakeRelay, payload: bytes, reason: str) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    alice.say(CHANNEL_CLOSED, 99)  # tells its layout
    payload = payload.replace(b"{bob}", bob.key.raw).replace(b"{alice}", alice.key.raw)
    assert refused(alice.say(OPEN_CHANNEL, 7, payload)) == [reason]
    assert alice.take() == [Said(CHANNEL_CLOSED, 7, b"")]
    assert bob.take() == []
    assert alice.open(bob, 7) == (7, 255), "the id is free"


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("own_ids", [False, True])
def test_an_id_that_is_in_use_ends_the_channel_that_has_it(relay: MakeRelay, own_ids: bool, answered: bool) -> None:
    net = relay()
    alice, bob = net.join("alice", own_ids=own_ids), net.join("bob", own_ids=own_ids)
    alice.open(bob, 0, 9)
    if answered:
        alice.member.own_ids = own_ids
    events = alice.ask(bob, 0)
    assert refused(events) == ["bad_id"] and ended(events) == [(Ending.BAD_ID, "server")]
    assert alice.take() == [Said(CHANNEL_CLOSED, 0, b"")]
    assert [said.kind for said in bob.take()] == [CHANNEL_CLOSED]
    assert not alice.member.legs and not bob.member.legs


def test_a_client_refuses_and_the_one_that_asked_is_told(relay: MakeRelay) -> None:
    for kind in (CHANNEL_CLOSED, CLOSE_CHANNEL):
        net = relay()
        alice, bob = net.join("alice"), net.join("bob")
        alice.ask(bob, 4)
        [offer] = bob.take()
        assert ended(bob.say(kind, offer.channel_id)) == [(Ending.REFUSED, "responder")]
        assert alice.take() == [Said(CHANNEL_CLOSED, 4, b"")]
        assert bob.take() == ([Said(CHANNEL_CLOSED, offer.channel_id, b"")] if kind == CLOSE_CHANNEL else [])
        check(net)


def test_a_request_is_given_up(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    alice.ask(bob, 4)
    [offer] = bob.take()
    assert ended(alice.say(CLOSE_CHANNEL, 4)) == [(Ending.NORMAL, "initiator")]
    assert alice.take() == [Said(CHANNEL_CLOSED, 4, b"")]
    assert bob.take() == [Said(CHANNEL_CLOSED, offer.channel_id, b"")]
    bob.answer(offer.channel_id)
    assert alice.take() == bob.take() == [], "an answer that was under way means nothing"
    check(net)


def test_a_request_that_is_not_answered_ends(relay: MakeRelay) -> None:
    net = relay(request_timeout_s=10.0)
    alice, bob = net.join("alice"), net.join("bob")
    alice.ask(bob, 4)
    [offer] = bob.take()
    assert ended(net.advance(10.0)) == [(Ending.HANDSHAKE_TIMEOUT, "server")]
    assert alice.take() == [Said(CHANNEL_CLOSED, 4, b"")]
    assert bob.take() == [Said(CHANNEL_CLOSED, offer.channel_id, b"")]


@pytest.mark.parametrize(("go_quirks", "kind"), [(False, CHANNEL_CLOSED), (True, CLOSE_CHANNEL)])
def test_a_late_answer_with_an_id_of_its_own_is_told_that_it_is_late(
    relay: MakeRelay, go_quirks: bool, kind: int
) -> None:
    """Before it the relay does not know what the client calls the channel, and could end another one."""
    net = relay(go_quirks=go_quirks)
    alice, bob = net.join("alice", own_ids=True), net.join("bob", own_ids=True)
    alice.open(bob, 0, 0)
    alice.ask(bob, 1)
    [offer] = bob.take()
    alice.say(CHANNEL_CLOSED, 1)
    net.advance(20.0)
    assert bob.take() == []
    bob.answer(offer.channel_id, 1)
    assert bob.take() == [Said(kind, 1, b"")]
    bob.say(CHANNEL_OPENED, offer.channel_id, bytes([0]) + MESSAGE)
    assert bob.take() == [], "0 is another channel's"


@pytest.mark.parametrize(("go_quirks", "kind"), [(False, CHANNEL_CLOSED), (True, CLOSE_CHANNEL)])
def test_requests_that_are_given_up_end_no_channel_of_a_client_that_has_only_dialled(
    relay: MakeRelay, go_quirks: bool, kind: int
) -> None:
    """Alice has ids of her own, which the relay cannot know before she answers: her 200 is not its 200."""
    net = relay(go_quirks=go_quirks)
    alice, bob, mallory = net.join("alice", own_ids=True), net.join("bob", own_ids=True), net.join("mallory")
    ours, theirs = alice.open(bob, 200, 5)
    came = []
    for _ in range(128):
        mallory.ask(alice)
        mallory.say(CLOSE_CHANNEL, 0)
        came += alice.take()
        net.advance(0.2)
    assert [said.kind for said in came if said.channel_id == 200] == [OPEN_CHANNEL]
    assert [said.kind for said in came if said.channel_id == 201] == [OPEN_CHANNEL, kind]
    bob.say(SEND, theirs, b"still there")
    alice.say(SEND, ours, b"so am I")
    assert alice.take() == [Said(SEND, 200, b"still there")] and bob.take() == [Said(SEND, 5, b"so am I")]
    alice.answer(200, 7)
    assert alice.take() == [Said(kind, 7, b"")], "the offer was taken back before it was answered"
    check(net)


@pytest.mark.parametrize("given_up", [True, False], ids=["given up", "timed out"])
@pytest.mark.parametrize("has_answered", [True, False])
def test_a_late_refusal_ends_no_other_channel(relay: MakeRelay, has_answered: bool, given_up: bool) -> None:
    """A client with ids of its own is not told that a request is over, and answers it when it has decided."""
    net = relay()
    alice, bob, mallory = net.join("alice", own_ids=True), net.join("bob", own_ids=True), net.join("mallory")
    if has_answered:
        alice.open(bob, 0, 50)
    mallory.ask(bob)
    [late] = bob.take()
    if given_up:
        mallory.say(CLOSE_CHANNEL, 0)
    net.advance(11.0)
    bob.take()
    for _ in range(127 - has_answered):  # with all other ids of the upper half
        mallory.ask(bob)
        [offer] = bob.take()
        bob.say(CHANNEL_CLOSED, offer.channel_id)
        net.advance(0.2)
    ours, theirs = bob.open(alice, 1, 51)
    assert ended(bob.say(CHANNEL_CLOSED, late.channel_id)) == []
    bob.say(SEND, ours, b"still there")
    alice.say(SEND, theirs, b"so am I")
    assert alice.take()[-1] == Said(SEND, 51, b"still there") and bob.take() == [Said(SEND, 1, b"so am I")]
    check(net)


@pytest.mark.parametrize("answer", [CHANNEL_OPENED, CHANNEL_CLOSED])
def test_an_id_is_used_again_once_the_request_that_had_it_is_answered(relay: MakeRelay, answer: int) -> None:
    net = relay()
    bob, mallory = net.join("bob", own_ids=True), net.join("mallory")
    mallory.ask(bob)
    mallory.say(CLOSE_CHANNEL, 0)
    assert bob.take()[0].channel_id == 255
    bob.say(answer, 255, bytes([9]) + MESSAGE if answer == CHANNEL_OPENED else b"")
    given = []
    for _ in range(128):
        mallory.ask(bob)
        [offer] = [said for said in bob.take() if said.kind == OPEN_CHANNEL]
        bob.say(CHANNEL_CLOSED, offer.channel_id)
        given.append(offer.channel_id)
        net.advance(0.2)
    assert given[-1] == 255


@pytest.mark.parametrize("own_ids", [True, False])
def test_when_no_request_is_answered_the_oldest_ids_are_used_again(relay: MakeRelay, own_ids: bool) -> None:
    """Where both sides share the ids, the lower ones are the client's, so they come last."""
    net = relay()
    alice, bob, mallory = net.join("alice", own_ids=own_ids), net.join("bob", own_ids=own_ids), net.join("mallory")
    alice.own_ids = own_ids
    if own_ids:
        alice.open(bob, 0, 50)
        net.leave(alice)
        bob.take()
    given = []
    for _ in range(300):
        mallory.ask(bob)
        given.append(bob.take()[0].channel_id)
        mallory.say(CLOSE_CHANNEL, 0)
        bob.take()
        net.advance(0.2)
    if own_ids:
        assert sorted(given[:256]) == list(range(256)) and given[256:] == given[:44]
    else:
        assert given == [*range(255, 127, -1), *range(255, 127, -1), *range(255, 211, -1)]


def test_an_answer_with_the_id_of_the_clients_own_request_ends_the_one_it_answers(relay: MakeRelay) -> None:
    net = relay()
    alice, bob, mallory = net.join("alice"), net.join("bob"), net.join("mallory", own_ids=True)
    alice.ask(mallory, 3)
    [offer] = mallory.take()
    mallory.ask(bob, 5)
    assert ended(mallory.answer(offer.channel_id, 5)) == [(Ending.MALFORMED, "server")]
    check(net)


@pytest.mark.parametrize(
    "payload",
    [b"", MESSAGE[:-1], MESSAGE + b"\0\0", b"\2" + b"\xff" * 32 + bytes(16), bytes(49), b"\0" + bytes(49)],
)
def test_an_answer_that_is_none_ends_the_request(relay: MakeRelay, payload: bytes) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    alice.ask(bob, 4)
    [offer] = bob.take()
    bob.say(CHANNEL_CLOSED, 99)  # tells its layout
    assert ended(bob.say(CHANNEL_OPENED, offer.channel_id, payload)) == [(Ending.MALFORMED, "server")]
    assert alice.take() == [Said(CHANNEL_CLOSED, 4, b"")]
    assert bob.take() == [Said(CHANNEL_CLOSED, offer.channel_id, b"")]
    check(net)


def test_only_the_client_that_was_asked_can_answer_and_once(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    alice.ask(bob, 4)
    [offer] = bob.take()
    assert alice.answer(4) == [] and alice.take() == bob.take() == []
    bob.answer(offer.channel_id)
    alice.take()
    assert bob.answer(offer.channel_id) == [] and alice.take() == bob.take() == []
    assert bob.member.legs[offer.channel_id].open


def test_clients_that_number_channels_differently_are_kept_apart(relay: MakeRelay) -> None:
    net = relay()
    alice, bob, carol = net.join("alice"), net.join("bob"), net.join("carol", own_ids=True)
    bob.open(alice)  # alice has answered: she is known to have one id for both directions
    alice.ask(carol, 1)
    [offer] = carol.take()
    assert ended(carol.answer(offer.channel_id, 7)) == [(Ending.UNSUPPORTED, "server")]
    assert alice.take() == [Said(CHANNEL_CLOSED, 1, b"")]
    assert carol.take() == [Said(CHANNEL_CLOSED, 7, b"")]
    bob.ask(alice, 5)
    assert [offer.channel_id for offer in alice.take()] == [254]  # behind the 255 of bob's first: the answer took none
    check(net)


def test_how_a_client_numbers_channels_is_learnt_from_itself_alone(relay: MakeRelay) -> None:
    """Mallory answers in the other form; Alice can go on to open channels to others, and be asked."""
    net = relay()
    alice, bob, mallory = net.join("alice"), net.join("bob"), net.join("mallory", own_ids=True)
    alice.ask(mallory, 0)
    [offer] = mallory.take()
    mallory.answer(offer.channel_id, 0)
    alice.take()
    assert alice.open(bob, 1) == (1, 255)
    bob.open(alice)
    check(net)


def test_an_id_that_a_hostile_peer_made_the_relay_give_out_costs_one_dial(relay: MakeRelay) -> None:
    """Mallory answers in the other form, so the relay gives Alice an id; it is the one of a channel she opens later."""
    net = relay()
    alice, bob, mallory = net.join("alice"), net.join("bob"), net.join("mallory", own_ids=True)
    alice.ask(mallory, 0)
    mallory.answer(mallory.take()[0].channel_id, 0)
    assert [said.payload[0] for said in alice.take()] == [255]
    alice.ask(bob, 255)
    [offer] = bob.take()
    assert ended(bob.answer(offer.channel_id)) == [(Ending.BUSY, "server")]
    assert alice.take() == [Said(CHANNEL_CLOSED, 255, b"")] and len(bob.take()) == 1
    assert alice.open(bob, 1) == (1, 254)
    check(net)


# --- ids -------------------------------------------------------------------------------------------------------------


def test_ids_go_down_from_255_and_are_used_again_last(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    given = []
    for _ in range(130):
        _, theirs = alice.open(bob)
        given.append(theirs)
        alice.say(CHANNEL_CLOSED, 0)
        bob.take()
        net.advance(0.2)
    assert given == [*range(255, 127, -1), 255, 254]


def test_an_id_is_not_used_again_before_the_last_frames_of_its_channel_have_left(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    assert alice.open(bob) == (0, 255)
    bob.member.pause()
    alice.say(SEND, 0, b"it is late")
    alice.say(CHANNEL_CLOSED, 0)
    for number in range(130):
        net.join(f"stranger {number}", f"address {number}").ask(bob)
        for key in list(bob.member.legs):
            bob.say(CHANNEL_CLOSED, key)
    bob.member.resume()
    assert 255 not in [said.channel_id for said in bob.take() if said.kind == OPEN_CHANNEL]


def test_a_crowded_link_gets_lower_ids_and_none_that_its_client_asks_with(relay: MakeRelay) -> None:
    many = 10_000
    net = relay(
        transports_per_connection=600, unanswered_per_target=600, pending_requests=many, request_burst=many,
        pair_request_burst=many, stranger_request_burst=many, known_request_burst=many,
        transports_per_source=many, transports_per_pair=many,
    )  # fmt: skip
    alice, bob, carol = net.join("alice"), net.join("bob"), net.join("carol")
    for number in range(20):
        bob.ask(carol, number)
    for number in range(250):
        alice.ask(bob, number)
    given = [said.channel_id for said in bob.take()]
    assert given == list(range(255, 19, -1))
    assert [said.kind for said in alice.take()] == [CHANNEL_CLOSED] * 14, "there are no more"


def test_a_caller_whose_link_has_no_id_left_is_busy(relay: MakeRelay) -> None:
    many = 10_000
    net = relay(
        transports_per_connection=many, unanswered_per_target=many, pending_requests=many, request_burst=many,
        pair_request_burst=many, known_request_burst=many,
    )  # fmt: skip
    alice, bob = net.join("alice", own_ids=True), net.join("bob", own_ids=True)
    carols = [net.join(f"carol {number}", own_ids=True) for number in range(3)]
    for number in range(255):
        alice.open(carols[number // 100], number, number % 100)
    alice.ask(carols[2], 255)
    bob.ask(alice)
    [offer] = carols[2].take()
    assert ended(carols[2].answer(offer.channel_id, 200)) == [(Ending.BUSY, "server")]
    assert carols[2].take() == [Said(CHANNEL_CLOSED, 200, b"")]
    assert [said.kind for said in alice.take()] == [OPEN_CHANNEL, CHANNEL_CLOSED]
    check(net)


# --- closing ---------------------------------------------------------------------------------------------------------


def test_closing_takes_a_frame_from_each_side_and_data_still_comes_back(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    ours, theirs = alice.open(bob)
    alice.say(CLOSE_CHANNEL, ours)
    alice.say(CLOSE_CHANNEL, ours)
    alice.say(SEND, ours, b"too late")
    assert bob.take() == [Said(CLOSE_CHANNEL, theirs, b"")]
    bob.say(SEND, theirs, b"not too late")
    assert ended(bob.say(CHANNEL_CLOSED, theirs)) == [(Ending.NORMAL, "initiator")]
    assert alice.take() == [Said(SEND, ours, b"not too late"), Said(CHANNEL_CLOSED, ours, b"")]
    assert not net.switch.open_transports
    check(net)


def test_both_sides_close_at_once(relay: MakeRelay) -> None:
    net = relay(go_quirks=True)
    alice, bob = net.join("alice"), net.join("bob")
    ours, theirs = alice.open(bob)
    alice.say(CLOSE_CHANNEL, ours)
    bob.say(CLOSE_CHANNEL, theirs)
    assert bob.take() == [Said(CLOSE_CHANNEL, theirs, b"")]
    assert alice.take() == [Said(CLOSE_CHANNEL, ours, b"")]
    alice.say(CHANNEL_CLOSED, ours)
    bob.say(CHANNEL_CLOSED, theirs)
    assert bob.take() == [Said(CHANNEL_CLOSED, theirs, b"")] and alice.take() == []
    check(net)


@pytest.mark.parametrize(("go_quirks", "kind"), [(False, CHANNEL_CLOSED), (True, CLOSE_CHANNEL)])
def test_a_channel_that_a_client_gives_up_ends_as_the_other_one_understands(
    relay: MakeRelay, go_quirks: bool, kind: int
) -> None:
    net = relay(go_quirks=go_quirks)
    alice, bob = net.join("alice"), net.join("bob")
    ours, theirs = alice.open(bob)
    alice.say(CHANNEL_CLOSED, ours)
    assert [(said.kind, said.channel_id) for said in bob.take()] == [(kind, theirs)]
    assert bob.say(CHANNEL_CLOSED, theirs) == [] and alice.take() == []
    assert not net.switch.open_transports


def test_a_cut_is_no_orderly_end_for_a_client_that_is_none_of_2019(relay: MakeRelay) -> None:
    """None of those writes the layout of the description, and a CloseChannel means that all has been sent."""
    net = relay(go_quirks=True)
    alice, bob, carol = net.join("alice"), net.join("bob", layout=SEED), net.join("carol")
    bob.say(CHANNEL_CLOSED, 99)  # tells its layout
    _, theirs = alice.open(bob)
    _, hers = alice.open(carol, 2)
    net.leave(alice)
    assert [(said.kind, said.channel_id) for said in bob.take()] == [(CHANNEL_CLOSED, theirs)]
    assert [(said.kind, said.channel_id) for said in carol.take()] == [(CLOSE_CHANNEL, hers)]


@pytest.mark.parametrize(("go_quirks", "kind"), [(False, CHANNEL_CLOSED), (True, CLOSE_CHANNEL)])
def test_a_side_that_does_not_close_its_half_has_a_time_limit(relay: MakeRelay, go_quirks: bool, kind: int) -> None:
    net = relay(go_quirks=go_quirks, close_timeout_s=10.0)
    alice, bob = net.join("alice"), net.join("bob")
    ours, theirs = alice.open(bob)
    alice.say(CLOSE_CHANNEL, ours)
    bob.take()
    assert net.advance(9.9) == []
    assert ended(net.advance(0.1)) == [(Ending.NORMAL, "initiator")]
    assert alice.take() == [Said(CHANNEL_CLOSED, ours, b"")]
    assert bob.take() == [Said(kind, theirs, b"")]
    assert net.switch.next_timeout() is None


def test_channel_closed_ends_an_open_channel(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    ours, theirs = alice.open(bob)
    assert ended(bob.say(CHANNEL_CLOSED, theirs)) == [(Ending.NORMAL, "responder")]
    assert alice.take() == [Said(CHANNEL_CLOSED, ours, b"")] and bob.take() == []


def test_a_close_comes_behind_the_data_that_was_sent_before(relay: MakeRelay) -> None:
    for kind in (CLOSE_CHANNEL, CHANNEL_CLOSED):
        net = relay()
        alice, bob = net.join("alice"), net.join("bob")
        ours, theirs = alice.open(bob)
        bob.member.pause()
        alice.say(SEND, ours, b"last words")
        alice.say(kind, ours)
        bob.member.resume()
        assert bob.take() == [Said(SEND, theirs, b"last words"), Said(kind, theirs, b"")]
        check(net)


@pytest.mark.parametrize(("go_quirks", "kind"), [(False, CHANNEL_CLOSED), (True, CLOSE_CHANNEL)])
def test_peers_of_a_link_that_is_lost_are_told(relay: MakeRelay, go_quirks: bool, kind: int) -> None:
    net = relay(go_quirks=go_quirks)
    alice, bob, carol = net.join("alice"), net.join("bob"), net.join("carol")
    _, theirs = alice.open(bob)
    carol.ask(alice, 8)
    alice.ask(carol, 1)
    offer = carol.take()[0].channel_id
    assert sorted(ended(net.leave(alice))) == [(Ending.PEER_GONE, "initiator")] * 2 + [(Ending.PEER_GONE, "responder")]
    assert bob.take() == [Said(kind, theirs, b"")]
    assert sorted((said.kind, said.channel_id) for said in carol.take()) == sorted([(CHANNEL_CLOSED, 8), (kind, offer)])
    bob.say(CHANNEL_CLOSED, theirs)
    assert bob.take() == []
    check(net)


def test_the_newest_link_of_a_key_wins(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    _, theirs = alice.open(bob)
    again = net.join("alice")
    assert ended(again.joined) == [(Ending.PEER_GONE, "initiator")] and again.joined[-1] == MemberDropped(
        alice.member, "replaced"
    )
    assert bob.take() == [Said(CHANNEL_CLOSED, theirs, b"")]
    assert again.open(bob) == (0, 254)
    check(net)


# --- layouts ---------------------------------------------------------------------------------------------------------


@LAYOUTS
def test_frames_are_translated_between_layouts(relay: MakeRelay, layout: Layout) -> None:
    net = relay(layout=layout)
    alice, bob = net.join("alice", layout=GO), net.join("bob", layout=SEED)
    alice.ask(bob, 1)
    first = bob.member.data_to_send()
    assert first == layout.encode(OPEN_CHANNEL, 255, alice.key.raw + MESSAGE), "bob has said nothing yet"
    bob.answer(255)
    assert alice.member.data_to_send() == GO.encode(CHANNEL_OPENED, 1, MESSAGE)
    alice.say(SEND, 1, b"there")
    bob.say(SEND, 255, b"back")
    assert bob.member.data_to_send() == SEED.encode(SEND, 255, b"there")
    assert alice.member.data_to_send() == GO.encode(SEND, 1, b"back")
    alice.say(CLOSE_CHANNEL, 1)
    assert bob.member.data_to_send() == SEED.encode(CLOSE_CHANNEL, 255)


def test_a_frame_that_the_other_layout_cannot_carry_ends_its_channel(relay: MakeRelay) -> None:
    net = relay()
    alice, bob, carol = net.join("alice", layout=SEED), net.join("bob"), net.join("carol", layout=SEED)
    ours, theirs = alice.open(bob)
    alice.ask(carol, 1)
    carol.member.data_to_send()
    carol.answer(255)
    alice.take()
    longest = bytes(SEED.body_limit_bytes - 1)
    assert alice.say(SEND, 1, longest) == []
    assert carol.member.data_to_send() == SEED.encode(SEND, 255, longest)
    assert ended(alice.say(SEND, ours, longest)) == [(Ending.MALFORMED, "server")]
    assert bob.take() == [Said(CHANNEL_CLOSED, theirs, b"")] and alice.take() == [Said(CHANNEL_CLOSED, ours, b"")]


@LAYOUTS
@given(cut=st.integers(1, 60))
def test_frames_may_come_in_pieces(layout: Layout, cut: int) -> None:
    net = Relay()
    alice, bob = net.join("alice", layout=layout), net.join("bob", layout=layout)
    data = layout.encode(OPEN_CHANNEL, 1, bob.key.raw + MESSAGE) + layout.encode(SEND, 9) + layout.encode(SEND, 8)
    for at in range(0, len(data), cut):
        alice.send(data[at : at + cut])
    assert [said.channel_id for said in bob.take()] == [255]


# --- frames that mean nothing, and worse -----------------------------------------------------------------------------


def test_frames_that_mean_nothing_are_ignored(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    ours, theirs = alice.open(bob)
    for kind in (CHANNEL_OPENED, CLOSE_CHANNEL, CHANNEL_CLOSED, SEND, 5, 255):
        assert alice.say(kind, 200, b"data") == []
    for kind in (5, 255):
        assert alice.say(kind, ours, b"data") == []
    bob.member.data_to_send()
    assert alice.take() == bob.take() == []
    alice.say(SEND, ours)
    assert bob.take() == [Said(SEND, theirs, b"")]


@pytest.mark.parametrize("data", [b"\0\0\0\0", b"\xff\xff\0\0", b"GET / HTTP/1.1\r\n", b"\0\0\x54"])
def test_a_first_frame_of_no_layout_ends_the_link(relay: MakeRelay, data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        relay().join("alice").send(data)


@LAYOUTS
def test_a_frame_without_an_id_or_over_the_limit_ends_the_link(relay: MakeRelay, layout: Layout) -> None:
    net = relay()
    bob = net.join("bob")
    for number, header in enumerate(([0, 0, 4], [0, 1, 4], [255, 255, 4]) if layout is GO else ([4, 0, 0],)):
        alice = net.join(f"alice {number}", layout=layout)
        alice.ask(bob)
        with pytest.raises(RemoteProtocolError):
            alice.send(bytes(header) + b"\0")


def test_nothing_new_is_opened_while_the_relay_drains(relay: MakeRelay) -> None:
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    ours, theirs = alice.open(bob)
    net.switch.draining = True
    assert refused(alice.ask(bob, 1)) == ["server_draining"]
    assert net.switch.refusal(alice.key) == "server_draining"
    net.switch.drop_transports(Ending.SERVER_DRAINING)
    assert [said.channel_id for said in alice.take()] == [1, ours] and [said.channel_id for said in bob.take()] == [
        theirs
    ]


# --- crowds and slow clients -----------------------------------------------------------------------------------------


def test_a_thousand_keys_of_one_stranger_keep_nobody_out(relay: MakeRelay) -> None:
    """It asks without end, answers to itself, and holds every place that it is given."""
    net = relay()
    victim, friend = net.join("victim", "home"), net.join("friend", "elsewhere")
    for number in range(1_000):
        stranger = net.join(f"stranger {number}", f"attacker {number % 4}")
        for channel_id in range(3):
            stranger.ask(victim, channel_id)
            for offer in victim.take():
                if offer.kind == OPEN_CHANNEL and number % 2:
                    victim.answer(offer.channel_id)
        net.advance(0.01)
        if number % 50 == 0:
            check(net)
    for offer in victim.take():
        victim.say(CHANNEL_CLOSED, offer.channel_id)
    assert len(victim.member.legs) < 255
    net.advance(1.0)
    friend.ask(victim)
    [offer] = [said for said in victim.take() if said.kind == OPEN_CHANNEL]
    victim.answer(offer.channel_id)
    assert [said.kind for said in friend.take()] == [CHANNEL_OPENED]
    victim.take()
    assert victim.open(friend) == (0, 255), "its own dials have places of their own"
    check(net)


def test_unanswered_requests_of_strangers_leave_ids_to_others(relay: MakeRelay) -> None:
    net = relay()
    victim, friend = net.join("victim", "home"), net.join("friend", "elsewhere")
    for number in range(300):
        net.join(f"stranger {number}", "attacker").ask(victim)
        net.advance(0.01)
    assert len(victim.member.legs) <= net.switch.limits.unanswered_per_target
    victim.take()
    friend.ask(victim)
    assert [said.kind for said in victim.take()][-1] == OPEN_CHANNEL
    check(net)


def test_an_answer_for_which_there_is_no_place_any_more_is_busy(relay: MakeRelay) -> None:
    net = relay(transports_per_connection=4)
    victim, crowd = net.join("victim"), net.join("crowd")
    for number in range(3):
        crowd.ask(victim, number)
    offers = [said.channel_id for said in victim.take()]
    events = [event for offer in offers for event in victim.answer(offer)]
    assert ended(events) == [(Ending.BUSY, "server")]
    assert victim.take() == [Said(CHANNEL_CLOSED, offers[2], b"")]
    assert [(said.kind, said.channel_id) for said in crowd.take()][-1] == (CHANNEL_CLOSED, 2)
    check(net)


def test_an_answer_for_which_there_is_no_place_takes_no_id(relay: MakeRelay) -> None:
    net = relay(transports_per_connection=4)
    victim, crowd, friend = (net.join(name, own_ids=True) for name in ("victim", "crowd", "friend"))
    for number in range(3):
        crowd.ask(victim, number)
    events = [event for offer in victim.take() for event in victim.answer(offer.channel_id, offer.channel_id)]
    assert ended(events) == [(Ending.BUSY, "server")]
    friend.ask(crowd)
    assert [said.channel_id for said in crowd.take() if said.kind == OPEN_CHANNEL] == [
        253
    ]  # behind those of two channels
    check(net)


def test_requests_have_rates(relay: MakeRelay) -> None:
    net = relay(request_burst=10, requests_per_s=1.0, pair_request_burst=3, pair_requests_per_s=1.0)
    alice, bob, carol = net.join("alice"), net.join("bob"), net.join("carol")
    assert [bool(refused(alice.ask(bob, number))) for number in range(4)] == [False, False, False, True]
    assert [bool(refused(alice.ask(carol, 10 + number))) for number in range(4)] == [False, False, False, True]
    for number in range(20, 22):
        alice.say(OPEN_CHANNEL, number, bytes(33) + MESSAGE)
    assert refused(alice.say(OPEN_CHANNEL, 30, bytes(33) + MESSAGE)) == ["rate_limited"]
    net.advance(1.0)
    assert refused(alice.say(OPEN_CHANNEL, 30, bytes(33) + MESSAGE)) == ["unknown_peer"]


def test_a_channel_that_closes_does_not_put_off_other_timeouts(relay: MakeRelay) -> None:
    net = relay(close_timeout_s=60.0, queue_stall_timeout_s=15.0)
    alice, bob = net.join("alice"), net.join("bob")
    alice.open(bob, 0)
    slow, _ = alice.open(bob, 1)
    alice.say(CLOSE_CHANNEL, 0)
    bob.member.pause()
    alice.say(SEND, slow, b"data")
    assert net.switch.next_timeout() == net.now + 15.0


def test_messages_that_are_no_points_have_a_rate_too(relay: MakeRelay) -> None:
    net = relay(stray_burst=3)
    alice, bob = net.join("alice"), net.join("bob")
    request = bob.key.raw + bytes(49)
    for _ in range(3):
        assert refused(alice.say(OPEN_CHANNEL, 0, request)) == ["malformed"]
    with pytest.raises(RemoteProtocolError, match="abuse"):
        alice.say(OPEN_CHANNEL, 0, request)


def test_malformed_requests_have_a_rate_and_more_of_them_end_the_link(relay: MakeRelay) -> None:
    """One of four bytes costs the relay as much as a whole one."""
    net = relay(stray_burst=3, strays_per_s=2.0)
    alice, bob = net.join("alice"), net.join("bob")
    alice.open(bob, 9)
    for _ in range(3):
        [refused] = alice.say(OPEN_CHANNEL, 0)
        assert refused == RequestRefused(alice.member, "malformed")
    net.advance(1.0)
    malformed = GO.encode(OPEN_CHANNEL, 0)
    with pytest.raises(RemoteProtocolError) as caught:
        alice.send(GO.encode(CLOSE_CHANNEL, 9) + malformed * 3)
    assert caught.value.reason == "abuse" and len(caught.value.events) == 2, "two more in a second"
    assert [said.kind for said in bob.take()] == [CLOSE_CHANNEL], "what came before it was handled"
    assert alice.take() == [Said(CHANNEL_CLOSED, 0, b"")] * 5
    alice.open(bob, 1)
    check(net)


def test_a_client_that_takes_nothing_loses_its_channels_and_stops_nobody(relay: MakeRelay) -> None:
    net = relay(queue_soft_bytes=20_000, queue_hard_bytes=30_000)
    alice, bob, carol = net.join("alice"), net.join("bob"), net.join("carol")
    slow, _ = alice.open(bob, 0)
    quick, there = alice.open(carol, 1)
    bob.member.pause()
    events: list[SwitchEvent] = []
    for _ in range(10):
        events += alice.say(SEND, slow, bytes(5_000))
        alice.say(SEND, quick, b"on")
    assert ended(events) == [(Ending.SLOW_CONSUMER, "server")]
    assert carol.take() == [Said(SEND, there, b"on")] * 10
    assert alice.take() == [Said(CHANNEL_CLOSED, slow, b"")]
    assert net.switch.queued_bytes == 0
    check(net)


def test_a_queue_without_progress_has_a_time_limit(relay: MakeRelay) -> None:
    net = relay(queue_stall_timeout_s=30.0)
    alice, bob = net.join("alice"), net.join("bob")
    ours, _ = alice.open(bob)
    bob.member.pause()
    alice.say(SEND, ours, b"data")
    assert ended(net.advance(30.0)) == [(Ending.SLOW_CONSUMER, "server")]


def test_refusals_do_not_pile_up_for_a_client_that_takes_none(relay: MakeRelay) -> None:
    net = relay(control_backlog_bytes=1_000, stray_burst=1_000)
    alice = net.join("alice")
    alice.say(CHANNEL_CLOSED, 99)  # tells its layout
    alice.member.pause()
    number = 0
    while not alice.member.overloaded:
        alice.say(OPEN_CHANNEL, number % 256, b"")
        number += 1
    assert alice.member.control_backlog_bytes < 1_010


def test_the_ids_of_a_link_are_enough_for_its_limits() -> None:
    limits = RelayLimits()
    assert limits.transports_per_connection + limits.unanswered_per_target < 255


# --- any frames ------------------------------------------------------------------------------------------------------

FRAMES = st.tuples(
    st.sampled_from(
        [OPEN_CHANNEL, OPEN_CHANNEL, CHANNEL_OPENED, CHANNEL_OPENED, CLOSE_CHANNEL, CHANNEL_CLOSED, SEND, 9]
    ),
    st.sampled_from([0, 1, 2, 253, 254, 255]),
    st.integers(0, 4),
)
ACTIONS = st.one_of(
    FRAMES,
    FRAMES,
    FRAMES,
    st.sampled_from(["offer", "offer", "pause", "resume", "take", "leave", "rejoin", "wait"]),
)


def _payload(net: list[Client], kind: int, variant: int) -> bytes:
    """A payload that mostly fits ``kind``."""
    if kind == OPEN_CHANNEL:
        return net[variant % len(net)].key.raw + MESSAGE
    if kind == CHANNEL_OPENED:
        return (MESSAGE, b"\0" + MESSAGE, b"\1" + MESSAGE, bytes(49), MESSAGE)[variant]
    return bytes(1_000 * variant) if kind == SEND else bytes(variant)


@settings(deadline=None, max_examples=150)
@given(st.booleans(), st.lists(st.tuples(st.integers(0, 3), ACTIONS), max_size=80))
def test_any_sequence_of_frames_keeps_the_tables_together_and_bounded(
    go_quirks: bool, steps: list[tuple[int, tuple[int, int, int] | str]]
) -> None:
    net = Relay(go_quirks=go_quirks, queue_soft_bytes=2_000, queue_hard_bytes=4_000, queued_per_connection_bytes=6_000)
    clients = [net.join(str(number), str(number % 2), layout=(GO, SEED)[number % 2]) for number in range(4)]
    for number, action in steps:
        client = clients[number]
        if isinstance(action, tuple):
            kind, channel_id, variant = action
            if net.switch.members.get(client.key.raw) is client.member:
                try:
                    client.say(kind, channel_id, _payload(clients, kind, variant))
                except RemoteProtocolError:  # the first frame of a link was of no layout
                    net.leave(client)
        elif action == "offer":  # what a client does that accepts
            for leg in list(client.member.legs.values()):
                if not leg.initiator and not leg.open:
                    client.own_ids = bool(number % 2)
                    client.answer(leg.key, leg.key ^ 0xFF)
        elif action == "pause":
            client.member.pause()
        elif action == "resume":
            client.member.resume()
        elif action == "take":
            client.member.data_to_send()
        elif action == "leave":
            net.leave(client)
        elif action == "rejoin":
            clients[number] = net.join(str(number), str(number % 2), layout=client.layout)
        else:
            net.advance(4.0)
        check(net)
        assert net.switch.queued_bytes <= 4 * 6_000 + 4_100
    for client in clients:
        net.leave(client)
    assert not net.switch.members and not net.switch.open_transports and not net.switch.queued_bytes
    net.advance(60.0)
    assert net.switch.next_timeout() is None
