"""How many REQUESTs a relay passes on to one client: floods by strangers, and what friends notice of them.

:ref:`spec-request-rates`.
"""

from __future__ import annotations

import pytest

from dmsg.mux.core.wire import CLOSE, REQUEST, CloseReason, encode_frame


def refuse_all(victim):
    """What a client with an access list does; gives how many REQUESTs it got."""
    victim.read()
    count = len(victim.requests)
    for transport_id, _ in victim.requests:
        victim.say(CLOSE, transport_id, bytes((CloseReason.REFUSED,)))
    victim.requests.clear()
    return count


def friends_of(net, victim, count):
    friends = [net.join(f"friend {number}", f"home {number}") for number in range(count)]
    for friend in friends:
        assert not isinstance(friend.dial(victim), CloseReason)
    return friends


@pytest.mark.parametrize(("keys", "addresses"), [(24, 1), (24, 24), (200, 4)])
def test_a_flood_of_requests_reaches_the_client_at_a_rate(relay, keys, addresses):
    """38,000 in 8 s from strangers: the client gets its rate, and all that friends and a newcomer ask for."""
    net = relay()
    victim = net.join("victim")
    friends = friends_of(net, victim, 2)
    strangers = [net.join(f"stranger {number}", f"attacker {number % addresses}") for number in range(keys)]
    newcomer = net.join("newcomer")
    arrived = sent = 0
    accepted: list[object] = []
    for tick in range(80):
        while sent < (tick + 1) * 38_000 // 80:
            strangers[sent % keys].ask(victim)
            sent += 1
            if sent % 50 == 0:
                arrived += refuse_all(victim)
        arrived += refuse_all(victim)
        for friend in friends:
            accepted += [friend.dial(victim) for _ in range(2)]
        if tick >= 20 and tick % 5 == 0:  # two a second are less than an equal part of the rate
            newcomer.ask(victim)
            arrived += refuse_all(victim)
        for client in (newcomer, *strangers):
            client.read()
        net.advance(0.1)
    assert sent == 38_000
    assert arrived <= 512 + 8 * 100
    assert arrived >= 8 * 50, "what is allowed is used"
    assert not [answer for answer in accepted if isinstance(answer, CloseReason)]
    assert list(newcomer.closed.values()) == [CloseReason.REFUSED] * 12


def test_one_pair_of_strangers_has_a_rate(relay):
    """The rest of the rate towards the client is for others, and the rest of the stranger's own for other clients."""
    net = relay()
    stranger, victim, other = net.join("stranger"), net.join("victim"), net.join("other")
    arrived = 0
    for _ in range(20):
        for _ in range(10):
            stranger.ask(victim)
            arrived += refuse_all(victim)
        net.advance(0.1)
    assert arrived == net.limits.pair_request_burst + 2 * net.limits.pair_requests_per_s - 1
    assert not isinstance(stranger.dial(other), CloseReason)


def test_the_log_blames_no_client_for_what_others_have_asked_of_its_target(relay):
    """The client is told ``rate_limited`` either way; the ranks leave out keys of which the log says so often."""
    net = relay(stranger_request_burst=4, pair_request_burst=2)
    victim, flooder, late = net.join("victim"), net.join("flooder"), net.join("late")

    def refused(client):
        [event] = client.member.receive_data(encode_frame(REQUEST, 0x100, client.key.raw + victim.key.raw), net.now)
        client.read()
        assert client.closed[0x100] == CloseReason.RATE_LIMITED
        return event.reason

    for _ in range(2):
        flooder.ask(victim)
    assert refused(flooder) == "rate_limited"
    for number in range(2):
        net.join(f"stranger {number}").ask(victim)
    assert refused(late) == "requests_per_target"


def test_who_was_accepted_is_known(relay):
    """200 requests a second through one tunnel, after the first: also when none of its transports is open just then."""
    net = relay()
    here, there = net.join("here"), net.join("there")
    for _ in range(1_000):
        transport_id = here.dial(there)
        assert not isinstance(transport_id, CloseReason)
        here.say(CLOSE, transport_id, b"\0")
        net.advance(0.005)


def test_who_has_a_transport_is_known_however_many_were_accepted_since(relay):
    """An open listener accepts every key, so strangers can push a friend out of those that it accepted lately."""
    net = relay()
    victim, friend = net.join("victim"), net.join("friend")
    assert not isinstance(friend.dial(victim), CloseReason)
    for number in range(300):
        stranger = net.join(f"stranger {number}", f"attacker {number}")
        assert not isinstance(stranger.dial(victim), CloseReason)
        net.switch.remove_member(stranger.member, net.now)
        net.advance(0.1)
    asked, arrived = 4 * net.limits.pair_request_burst, 0
    for _ in range(asked):
        friend.ask(victim)
        arrived += refuse_all(victim)
        net.advance(0.01)
    assert arrived == asked


def test_strangers_leave_friends_room_in_what_a_client_has_not_taken_yet(relay):
    """Four keys of one address and a network that takes nothing for three seconds: friends were refused as busy."""
    net = relay()
    victim = net.join("victim")
    friends = friends_of(net, victim, 2)
    strangers = [net.join(f"stranger {number}", "attacker") for number in range(8)]
    for client in (victim, *friends, *strangers):
        client.member.extended = True
    victim.pause()
    for _ in range(30):
        for stranger in strangers:
            for _ in range(10):
                stranger.ask(victim, bytes(1_200))
            stranger.read()
        net.advance(0.1)
    assert CloseReason.BUSY in strangers[0].closed.values()
    asked = [friend.ask(victim, bytes(1_200)) for friend in friends for _ in range(40)]
    victim.member.resume()
    victim.accept_all()
    for friend in friends:
        friend.read()
        assert CloseReason.BUSY not in friend.closed.values()
    assert sum(len(friend.accepted) for friend in friends) == len(asked) + len(friends)


def test_friends_do_not_fill_the_memory_of_a_relay_for_a_client_that_takes_nothing(relay):
    net = relay(control_backlog_bytes=1_000)
    victim = net.join("victim")
    [friend] = friends_of(net, victim, 1)
    victim.pause()
    asked = [friend.ask(victim) for _ in range(30)]
    friend.read()
    assert friend.closed == dict.fromkeys(asked[15:], CloseReason.BUSY), "71 bytes each"


def test_what_is_unanswered_may_come_at_once(relay):
    net = relay()
    here, there = net.join("here"), net.join("there")
    ids = [here.ask(there) for _ in range(net.limits.pending_requests)]
    there.accept_all()
    here.read()
    assert here.accepted == set(ids)


def test_a_friend_that_used_up_its_rate_gets_no_new_burst_because_strangers_ask_for_nothing(relay):
    net = relay(known_requests_per_s=10.0, known_request_burst=100)
    victim = net.join("victim")
    [friend] = friends_of(net, victim, 1)
    arrived = []
    for _ in range(3):
        for _ in range(100):
            friend.ask(victim)
            refuse_all(victim)
        friend.read()
        arrived.append(list(friend.closed.values()).count(CloseReason.REFUSED))
        friend.closed.clear()
        net.advance(1.0)
    assert arrived[0] >= 40 and max(arrived[1:]) <= 11


def test_strangers_to_many_clients_do_not_get_their_rates_forgotten(relay):
    """A table that forgets what was asked longest ago would give a new burst to who asks 256 others in between."""
    net = relay(requests_per_s=1e6, request_burst=10**6)
    victim, stranger = net.join("victim"), net.join("stranger")
    others = [net.join(f"other {number}") for number in range(300)]
    arrived = 0
    for _ in range(5):
        for _ in range(100):
            stranger.ask(victim)
            arrived += refuse_all(victim)
        for other in others:
            stranger.ask(other)
            refuse_all(other)
        stranger.read()
    assert arrived == net.limits.pair_request_burst
    assert len(stranger.member.pairs) <= 256
    net.advance(60.0)
    for other in others:
        assert not isinstance(stranger.dial(other), CloseReason)
        net.advance(0.01)


def test_a_stranger_that_asks_one_client_all_the_time_may_ask_others_one_after_the_other(relay):
    net = relay(requests_per_s=1e6, request_burst=10**6)
    victim, stranger = net.join("victim"), net.join("stranger")
    others = [net.join(f"other {number}") for number in range(300)]
    for _ in range(10):
        stranger.ask(victim)
    arrived = 0
    for other in others:
        stranger.ask(other)
        arrived += refuse_all(other)
        stranger.ask(victim)
        refuse_all(victim)
        stranger.read()
        net.advance(0.02)
    assert arrived == len(others)


def test_little_is_remembered_of_floods_that_are_over(relay):
    net = relay(requests_per_s=1e6, request_burst=10**6, pending_requests=1_000)
    stranger = net.join("stranger")
    clients = [net.join(f"member {number}") for number in range(200)]
    targets = net.switch._rates._targets
    for client in clients:
        stranger.ask(client)
    assert set(targets) == {client.member for client in clients}
    net.advance(10.0)
    stranger.ask(clients[0])
    assert set(targets) == {clients[0].member}
    assert [client for client in clients if client.member.rates is not None] == [clients[0]]
    net.switch.remove_member(clients[0].member, net.now)
    assert not targets


def test_strangers_that_ask_many_clients_take_little_memory(relay):
    """10,000 free keys, each with buckets towards 256 clients: they are forgotten when they are full again."""
    net = relay(requests_per_s=1e6, request_burst=10**6, pending_requests=1_000)
    targets = [net.join(f"target {number}") for number in range(256)]
    strangers = [net.join(f"stranger {number}") for number in range(20)]
    for stranger in strangers:
        for target in targets:
            stranger.ask(target)
    assert sum(len(stranger.member.pairs) for stranger in strangers) == 20 * 256
    for _ in range(2):
        net.advance(1.0)
        targets[0].ask(targets[1])
    assert sum(len(stranger.member.pairs) for stranger in strangers) == 0
    strangers[0].ask(targets[0])
    net.switch.remove_member(strangers[0].member, net.now)
    assert set(net.switch._rates._sources) <= {targets[0].member}
