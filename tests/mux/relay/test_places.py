"""Places for transports at one member of a relay: attacks by strangers who take them all, and honest bursts.

:ref:`spec-places`.
"""

from __future__ import annotations

import pytest

from dmsg.mux.core.wire import ACCEPT, CLOSE, FWD, CloseReason

BUSY = CloseReason.BUSY


def take_all(net, victim, keys, addresses):
    """``keys`` strangers of ``addresses`` addresses open what they get, up to 1,024 in all; gives them with their ids."""
    held = []
    for number in range(keys):
        stranger = net.join(f"stranger {number}", f"attacker {number % addresses}")
        for _ in range(1_024 // keys):
            answer = stranger.dial(victim)
            net.advance(0.01)
            if isinstance(answer, CloseReason):
                assert answer == BUSY
            else:
                held.append((stranger, answer))
    return held


@pytest.mark.parametrize("active", [False, True])
@pytest.mark.parametrize(("keys", "addresses"), [(1, 1), (16, 1), (16, 16)])
def test_strangers_with_all_places_keep_no_other_client_out(relay, keys, addresses, active):
    """1,024 transports of one key, of 16 keys of one address, of 16 addresses; kept busy with data or not."""
    net = relay()
    victim, friend = net.join("victim"), net.join("friend")
    held = take_all(net, victim, keys, addresses)
    assert len(held) >= 512
    kept = []
    for _ in range(8):
        if active:
            for stranger, transport_id in held:
                if transport_id in stranger.member.legs:
                    stranger.say(FWD, transport_id, bytes(3))
        kept.append(friend.dial(victim))
        net.advance(10.0)
    assert not [answer for answer in kept if isinstance(answer, CloseReason)]
    for stranger, _ in held:
        stranger.dial(victim)
    assert all(map(friend.is_open, kept)), "the strangers do not get the places back"
    other = net.join("other")
    for _ in range(500):
        assert not isinstance(victim.dial(other), CloseReason), "half of the places are the victim's own"
        net.advance(0.01)


def test_a_stranger_on_the_friends_address_does_not_keep_it_out(relay):
    """Behind one router: in one group the connection with the most places yields."""
    net = relay()
    victim, stranger, friend = net.join("victim"), net.join("stranger", "router"), net.join("friend", "router")
    stranger.dial_many(victim, 512)
    kept = friend.dial_many(victim, 20)
    assert stranger.dial(victim) == BUSY
    assert all(map(friend.is_open, kept))
    assert len(stranger.member.legs) == 492


def test_a_burst_through_one_tunnel_gets_every_place(relay):
    net = relay()
    here, there = net.join("here"), net.join("there")
    ids = here.dial_many(there, 512)
    assert here.dial(there) == BUSY
    assert all(map(here.is_open, ids))


def test_the_longest_idle_transport_yields(relay):
    net = relay(transports_per_connection=8)
    victim, crowd, friend = net.join("victim"), net.join("crowd"), net.join("friend")
    ids = crowd.dial_many(victim, 4)
    for transport_id in ids:
        crowd.say(FWD, transport_id, bytes(3))
    net.advance(10.0)
    net.join("curious").ask(victim)  # with most places taken a request is the time to look who is active
    net.advance(10.0)
    for transport_id in (ids[0], ids[1], ids[3]):
        crowd.say(FWD, transport_id, bytes(3))
    assert not isinstance(friend.dial(victim), CloseReason)
    crowd.read()
    assert crowd.closed == {ids[2]: BUSY}


def test_a_transport_that_says_as_much_as_it_is_told_is_not_idle(relay):
    """What passes in both directions counts together: an echo is as active as an upload."""
    net = relay(transports_per_connection=8)
    victim, crowd, friend = net.join("victim"), net.join("crowd"), net.join("friend")
    ids = crowd.dial_many(victim, 4)
    echoed = crowd.member.legs[ids[0]].other.key
    for transport_id in ids[1:]:
        crowd.say(FWD, transport_id, bytes(3))
    net.advance(10.0)
    net.join("curious").ask(victim)
    net.advance(10.0)
    crowd.say(FWD, ids[0], bytes(3))
    victim.say(FWD, echoed, bytes(3))
    assert not isinstance(friend.dial(victim), CloseReason)
    crowd.read()
    assert crowd.closed == {ids[1]: BUSY}


def test_nothing_is_left_of_sources_whose_transports_are_over(relay):
    """Keys cost nothing: a client that is up for months is asked by more of them than it could remember."""
    net = relay()
    victim = net.join("victim")
    for number in range(20):
        stranger = net.join(f"stranger {number}", f"attacker {number}")
        for _ in range(2):
            assert not isinstance(stranger.dial(victim), CloseReason)
        stranger.ask(victim)
        assert stranger.member in victim.member.incoming
        assert stranger.member in victim.member.unanswered
        net.switch.remove_member(stranger.member, net.now)
        assert stranger.member not in victim.member.incoming
        assert stranger.member not in victim.member.unanswered
        net.advance(1.0)


def test_a_source_with_its_share_displaces_no_more(relay):
    """Strangers of one address cannot squeeze a tunnel for more than what one source may claim."""
    net = relay(transports_per_connection=200, transports_per_source=10)
    victim, tunnel = net.join("victim"), net.join("tunnel")
    ids = tunnel.dial_many(victim, 100)
    taken = 0
    for number in range(20):
        stranger = net.join(f"stranger {number}", "attacker")
        taken += sum(not isinstance(stranger.dial(victim), CloseReason) for _ in range(5))
    held = sum(len(member.legs) for member in net.switch.members.values() if member.group == "attacker")
    assert held == 10
    assert taken >= held
    assert sum(map(tunnel.is_open, ids)) == 90


def test_of_two_sources_with_nearly_as_many_places_none_yields_to_the_other(relay):
    net = relay(transports_per_connection=10)
    victim, one, other = net.join("victim"), net.join("one"), net.join("other")
    kept = one.dial_many(victim, 3), other.dial_many(victim, 2)
    for _ in range(3):
        assert other.dial(victim) == BUSY
    assert all(map(one.is_open, kept[0])) and all(map(other.is_open, kept[1]))


def test_a_connection_with_its_share_displaces_no_more_of_its_own_address(relay):
    net = relay(transports_per_connection=20, transports_per_pair=2)
    victim, many, other = net.join("victim"), net.join("many", "home"), net.join("other", "home")
    ids = many.dial_many(victim, 10)
    other.dial_many(victim, 2)
    assert other.dial(victim) == BUSY
    assert sum(map(many.is_open, ids)) == 8


def test_who_is_refused_by_the_client_takes_no_place(relay):
    """At a full target a stranger's REQUEST costs no transport; only an accepted one does."""
    net = relay(transports_per_connection=8)
    victim, tunnel, stranger = net.join("victim"), net.join("tunnel"), net.join("stranger")
    ids = tunnel.dial_many(victim, 4)
    for _ in range(20):
        stranger.ask(victim)
        victim.read()
        for transport_id, _ in victim.requests:
            victim.say(CLOSE, transport_id, bytes((CloseReason.REFUSED,)))
        victim.requests.clear()
        net.advance(1.0)
    stranger.read()
    assert set(stranger.closed.values()) == {CloseReason.REFUSED}
    assert all(map(tunnel.is_open, ids))


def test_places_that_went_while_the_client_thought_are_not_taken_twice(relay):
    net = relay(transports_per_connection=8)
    victim, first, second = net.join("victim"), net.join("first"), net.join("second")
    asked = [first.ask(victim) for _ in range(6)]
    asked_too = second.ask(victim)
    victim.accept_all()
    first.read()
    second.read()
    assert second.accepted == {asked_too}
    assert set(first.closed.values()) == {BUSY}
    assert set(first.closed) == {asked[0], asked[4], asked[5]}, "the last two, and one for the second"
    victim.read()
    assert victim.member.incoming.count == 4
    assert victim.member.unanswered.count == 0


def test_unanswered_requests_of_strangers_keep_no_other_client_out(relay):
    """The oldest of the source with the most goes, and the friend's is answered."""
    net = relay(unanswered_per_target=16)
    victim, stranger, friend = net.join("victim"), net.join("stranger"), net.join("friend")
    own = victim.ask(stranger)
    ids = []
    for _ in range(20):
        net.advance(0.01)
        ids.append(stranger.ask(victim))
    stranger.read()
    assert stranger.closed == dict.fromkeys(ids[16:], BUSY)
    transport_id = friend.ask(victim)
    stranger.read()
    assert stranger.closed == dict.fromkeys([*ids[16:], ids[0]], BUSY)
    assert victim.is_open(own), "a request of its own takes none of these places"
    [(there, payload)] = [request for request in victim.requests if request[1].startswith(friend.key.raw)]
    victim.say(ACCEPT, there, payload)
    assert friend.is_open(transport_id)


def test_a_member_that_dials_itself_holds_a_place_like_any_other(relay):
    net = relay(transports_per_connection=8)
    alice, friend = net.join("alice"), net.join("friend")
    for _ in range(4):
        assert not isinstance(alice.dial(alice), CloseReason)
    assert alice.dial(alice) == BUSY
    assert not isinstance(friend.dial(alice), CloseReason)
    net.switch.remove_member(alice.member, net.now)
    assert alice.member.incoming.count == alice.member.unanswered.count == alice.member.dials == 0
    assert friend.member.dials == 0
