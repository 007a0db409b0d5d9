"""What waits at a relay: attacks with receivers that do not read, and what honest ones may do.

:ref:`spec-queues`.
"""

from __future__ import annotations

import sys

import pytest
import pytest_twisted
from twisted.internet.protocol import Factory, Protocol

from dmsg.mux.core.wire import CLOSE, FWD, CloseReason
from dmsg.testing.memory import MemoryNetwork
from dmsg.testing.network import LocalNetwork

SLOW = CloseReason.SLOW_CONSUMER
MIB = 1 << 20


# --- attacks ---------------------------------------------------------------------------------------------------------


def test_two_keys_do_not_stop_the_transports_of_others(relay):
    """300 transports with 0.99 MB each to a receiver that does not read, at 5 MB/s: 15 of 15 others are accepted."""
    net = relay()
    sender, stuck = net.join("sender", "attacker"), net.join("stuck", "attacker")
    alice, bob = net.join("alice"), net.join("bob")
    ids = sender.dial_many(stuck, 300)
    stuck.pause()
    answers = []
    for at, transport_id in enumerate(ids):
        sender.send(transport_id, 990_000)
        net.advance(0.2)
        assert net.switch.queued_bytes <= net.limits.queued_total_bytes
        assert stuck.member.queued_to <= net.limits.queued_per_connection_bytes
        if at % 20 == 19:
            answers.append(alice.dial(bob))
    assert len(answers) == 15
    assert not [answer for answer in answers if isinstance(answer, CloseReason)]
    sender.read()
    assert set(sender.closed.values()) == {SLOW}
    net.advance(2 * net.limits.queue_stall_timeout_s)
    assert net.switch.queued_bytes == 0
    assert all(map(alice.is_open, answers))


@pytest.mark.parametrize("addresses", [1, 16])
def test_many_keys_do_not_make_an_honest_queue_the_largest(relay, addresses):
    """20 pairs of keys with 30 queues each, four times the total: a slow but reading receiver keeps its transports."""
    net = relay(queued_total_bytes=8 * MIB, queued_per_connection_bytes=2 * MIB, request_burst=10_000)
    alice, bob, carol = net.join("alice"), net.join("bob"), net.join("carol")
    honest = alice.dial_many(bob, 8)
    bob.pause()
    for transport_id in honest:
        alice.send(transport_id, 32_000)
    answers = []
    for pair in range(20):
        group = f"attacker {pair % addresses}"
        sender, stuck = net.join(f"sender {pair}", group), net.join(f"stuck {pair}", group)
        ids = sender.dial_many(stuck, 30)
        stuck.pause()
        for transport_id in ids:
            sender.send(transport_id, 55_000)
            net.advance(0.01)
            assert net.switch.queued_bytes <= net.limits.queued_total_bytes
        bob.read(1_000)
        bob.pause()
        alice.send(honest[pair % 8], 16_000)
        answers.append(carol.dial(alice))
    assert not [answer for answer in answers if isinstance(answer, CloseReason)]
    assert all(map(alice.is_open, honest))


def test_one_sender_with_many_receivers_has_one_budget(relay):
    net = relay(queued_per_connection_bytes=2 * MIB)
    sender = net.join("sender", "attacker")
    slow = net.join("slow")
    kept = sender.dial_many(slow, 1)[0]
    slow.pause()
    sender.send(kept, 20_000)
    for number in range(64):
        stuck = net.join(f"stuck {number}", f"attacker {number}")
        [transport_id] = sender.dial_many(stuck, 1)
        stuck.pause()
        sender.send(transport_id, 100_000)
        slow.read(1_000)
        slow.pause()
        sender.send(kept, 1_000)
        net.advance(1.0)
        assert sender.member.queued_from <= net.limits.queued_per_connection_bytes
    assert sender.is_open(kept), "its receiver reads"


def test_one_search_frees_enough_however_little_waits_for_each_receiver(relay):
    """10,000 receivers with 26 KB each: every 26 KB sent to them cost a search of all, 8 ms each."""
    net = relay(queued_total_bytes=64_000)
    sender = net.join("sender")
    receivers = [net.join(f"receiver {number}", f"address {number % 4}") for number in range(150)]
    before = 0
    for receiver in receivers:
        [transport_id] = sender.dial_many(receiver, 1)
        receiver.pause()
        before = net.switch.queued_bytes
        sender.send(transport_id, 500)
        if net.switch.queued_bytes < before:
            break
    assert before > 63_000
    assert 62_000 <= net.switch.queued_bytes <= 63_000
    sender.read()
    assert list(sender.closed.values()) == [SLOW] * 3


def test_of_one_address_the_connection_with_the_most_loses_a_queue(relay):
    net = relay(queued_per_connection_bytes=400_000)
    many, one = net.join("many", "home"), net.join("one", "home")
    receiver = net.join("receiver")
    ids, [longest] = many.dial_many(receiver, 3), one.dial_many(receiver, 1)
    receiver.pause()
    one.send(longest, 150_000)
    for transport_id in ids:
        many.send(transport_id, 100_000)
    assert one.is_open(longest)
    assert sum(map(many.is_open, ids)) == 2


def test_one_receiver_keeps_the_queue_of_a_friend(relay):
    """Strangers with many keys of one address fill the queues of a slow receiver: theirs are closed, not the friend's."""
    net = relay(queued_per_connection_bytes=2 * MIB)
    bob, friend = net.join("bob"), net.join("friend", "home")
    [kept] = friend.dial_many(bob, 1)
    ids = []
    for number in range(16):
        stranger = net.join(f"stranger {number}", "attacker")
        ids += [(stranger, transport_id) for transport_id in stranger.dial_many(bob, 4)]
    bob.pause()
    friend.send(kept, 500_000)
    for stranger, transport_id in ids:
        stranger.send(transport_id, 60_000)
        assert bob.member.queued_to <= net.limits.queued_per_connection_bytes
    assert friend.is_open(kept)
    assert bob.member.queued_to > MIB, "no more is closed than has to be"


def test_who_reads_a_little_does_not_put_the_loss_on_who_stalls_for_a_moment(relay):
    """Receivers that read 1 KiB of their 2 MiB each half second are closed before one that stalls with 100 KB."""
    net = relay(queued_total_bytes=8 * MIB, queued_per_connection_bytes=3 * MIB, request_burst=10_000)
    alice, bob = net.join("alice"), net.join("bob")
    [kept] = alice.dial_many(bob, 1)
    bob.pause()
    alice.send(kept, 100_000)
    pairs = []
    for pair in range(4):
        sender, slow = net.join(f"sender {pair}", "attacker"), net.join(f"slow {pair}", f"attacker {pair}")
        pairs.append((sender, slow, sender.dial_many(slow, 4)))
        slow.pause()
    for _ in range(40):
        net.advance(0.5)
        for sender, slow, ids in pairs:
            slow.read(1)
            for transport_id in ids:
                if transport_id in sender.member.legs:
                    sender.send(transport_id, 64_000)
    sender, slow, ids = pairs[0]
    sender.read()
    assert SLOW in sender.closed.values()
    assert alice.is_open(kept)


def test_a_receiver_that_takes_something_now_and_then_is_not_stalled(relay):
    net = relay(queued_total_bytes=MIB)
    senders = [net.join(f"sender {number}") for number in range(2)]
    slow, stuck = receivers = [net.join(f"receiver {number}") for number in range(2)]
    ids = [sender.dial_many(receiver, 1)[0] for sender, receiver in zip(senders, receivers, strict=True)]
    slow.pause()
    stuck.pause()
    senders[1].send(ids[1], 300_000)
    senders[0].send(ids[0], 256_000)
    for _ in range(10):
        senders[0].send(ids[0], 96_000)
        net.advance(0.5)
        slow.read(1)
        assert slow.member.waiting
    senders[0].send(ids[0], 530_000)
    assert senders[0].is_open(ids[0]), "300 KB that wait for five seconds count more"
    assert not senders[1].is_open(ids[1])


def test_a_receiver_that_stalls_just_now_was_not_stalled_while_nothing_waited_for_it(relay):
    net = relay(queued_total_bytes=MIB)
    senders = [net.join(f"sender {number}") for number in range(2)]
    friend, stuck = receivers = [net.join(f"receiver {number}") for number in range(2)]
    ids = [sender.dial_many(receiver, 1)[0] for sender, receiver in zip(senders, receivers, strict=True)]
    stuck.pause()
    senders[1].send(ids[1], 300_000)
    net.advance(5.0)
    friend.pause()
    senders[0].send(ids[0], 780_000)
    assert senders[0].is_open(ids[0]), "300 KB that wait for five seconds count more"
    assert not senders[1].is_open(ids[1])


def test_small_frames_take_little_more_memory_than_they_count(relay):
    """9-byte frames, each an object of its own, would take six times what the limits count."""
    net = relay()
    sender, stuck = net.join("sender"), net.join("stuck")
    [transport_id] = sender.dial_many(stuck, 1)
    stuck.pause()
    count = 20_000
    sender.send(transport_id, count, frame_bytes=1)
    [queue] = stuck.member.waiting
    held = sys.getsizeof(queue.queue) + sum(map(sys.getsizeof, queue.queue))
    assert held < 1.2 * queue.queued_bytes
    stuck.read()
    assert stuck.taken[queue.id] == count
    assert stuck.member.frames_out == count + 2, "with OK and REQUEST: each is counted, and once"


def test_answers_to_a_client_that_takes_none_take_little_memory(relay):
    net = relay(control_backlog_bytes=100_000)
    sender, gone = net.join("sender"), net.join("gone")
    net.switch.remove_member(gone.member, net.now)
    sender.pause()
    for _ in range(10_000):
        sender.ask(gone)
    assert sender.member.control_backlog_bytes == 10_000 * 6
    assert sum(map(sys.getsizeof, sender.member.out)) < 80_000
    sender.read()
    assert len(sender.closed) == 10_000
    assert sender.member.frames_out == 10_001


# --- time without progress -------------------------------------------------------------------------------------------


def test_a_queue_of_one_frame_has_a_time_limit(relay):
    net = relay()
    alice, bob, carol = net.join("alice"), net.join("bob"), net.join("carol")
    [stalled], [other] = alice.dial_many(bob, 1), alice.dial_many(carol, 1)
    idle = alice.dial(bob)
    bob.pause()
    alice.say(FWD, stalled, bytes(2))
    net.advance(net.limits.queue_stall_timeout_s - 0.1)
    assert alice.is_open(stalled)
    net.advance(0.1)
    assert alice.closed == {}
    alice.read()
    assert alice.closed == {stalled: SLOW}
    assert alice.is_open(other)
    assert alice.is_open(idle), "nothing waits there"
    bob.read()
    assert list(bob.closed.values()) == [SLOW]
    assert net.switch.next_timeout() is None


def test_more_data_for_a_receiver_that_takes_nothing_gives_it_no_more_time(relay):
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    one, two = alice.dial_many(bob, 2)
    bob.pause()
    alice.say(FWD, one, bytes(2))
    net.advance(net.limits.queue_stall_timeout_s - 1.0)
    alice.say(FWD, two, bytes(2))
    net.advance(1.0)
    alice.read()
    assert alice.closed == {one: SLOW, two: SLOW}


def test_more_data_in_a_long_queue_gives_it_no_more_time(relay):
    net = relay(queue_soft_bytes=100_000, slow_consumer_timeout_s=10.0, queue_stall_timeout_s=30.0)
    alice, bob = net.join("alice"), net.join("bob")
    [stalled] = alice.dial_many(bob, 1)
    bob.pause()
    alice.send(stalled, 110_000)
    for _ in range(9):
        net.advance(1.0)
        alice.say(FWD, stalled, bytes(2))
    assert alice.is_open(stalled)
    net.advance(1.0)
    assert not alice.is_open(stalled)


def test_a_queue_that_is_not_long_any_more_has_the_time_of_any_queue(relay):
    net = relay(queue_soft_bytes=100_000, slow_consumer_timeout_s=10.0, queue_stall_timeout_s=30.0)
    alice, bob = net.join("alice"), net.join("bob")
    [stalled] = alice.dial_many(bob, 1)
    bob.pause()
    alice.send(stalled, 110_000)
    net.advance(9.0)
    bob.read(1)
    assert 0 < net.switch.queued_bytes < 100_000
    net.advance(29.0)
    assert alice.is_open(stalled)


def test_a_receiver_that_took_everything_has_the_time_of_one_stall_when_it_stalls_again(relay):
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    [stalled] = alice.dial_many(bob, 1)
    for _ in range(2):
        bob.pause()
        alice.say(FWD, stalled, bytes(2))
        net.advance(10.0)
        bob.read()
        assert net.switch.queued_bytes == 0
    bob.pause()
    alice.say(FWD, stalled, bytes(2))
    net.advance(net.limits.queue_stall_timeout_s - 0.1)
    alice.read()
    assert alice.closed == {}
    net.advance(0.1)
    alice.read()
    assert alice.closed == {stalled: SLOW}


def test_a_receiver_that_takes_something_has_more_time(relay):
    """However many transports share its network: what counts is that bytes leave for its socket."""
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    ids = alice.dial_many(bob, 40)
    bob.pause()
    for transport_id in ids:
        alice.send(transport_id, 100_000)
    for _ in range(20):
        net.advance(25.0)
        bob.read(1)
        bob.pause()
    assert all(map(alice.is_open, ids))
    net.advance(2 * net.limits.queue_stall_timeout_s)
    alice.read()
    assert set(alice.closed.values()) == {SLOW}
    assert net.switch.queued_bytes == 0


def test_what_was_sent_before_a_close_arrives_on_a_slow_network_however_many_wait_for_their_turn(relay):
    """100 transports of base clients, which send and close at once: each has a turn in 25 seconds."""
    net = relay()
    alice, bob = net.join("alice"), net.join("bob")
    ids = alice.dial_many(bob, 100)
    bob.pause()
    for transport_id in ids:
        alice.send(transport_id, 50_000)
        alice.say(CLOSE, transport_id, b"\0")
    while net.switch.queued_bytes:
        net.advance(1.0)
        bob.read(1)  # 64 KiB
    assert sorted(bob.taken.values()) == [50_000] * 100
    assert set(bob.closed.values()) == {CloseReason.NORMAL}


@pytest_twisted.ensureDeferred
async def test_an_application_that_pauses_for_long_keeps_its_transport():
    """Its client goes on reading: what it withholds are acknowledgements, and nothing waits at the relay."""

    class Paused(Protocol):
        received = 0

        def connectionMade(self):
            self.transport.pauseProducing()
            made.append(self)

        def dataReceived(self, data):
            self.received += len(data)

    made = []
    size = 3 * MIB
    memory = MemoryNetwork()
    async with LocalNetwork(memory, relays=1, discovery=None) as network:
        alice, bob = await network.client(), await network.client()
        bob.listen(Factory.forProtocol(Paused))
        sender = await network.wait(alice.connect(Factory.forProtocol(Protocol), bob.public_key))
        sender.transport.write(bytes(size))
        await network.settle()
        [server] = network.relays
        for _ in range(20):
            memory.advance(10.0)
            await network.settle()
        assert server.switch.queued_bytes == 0
        made[0].transport.resumeProducing()
        while made[0].received < size:
            memory.advance(0.1)
            await network.settle()
