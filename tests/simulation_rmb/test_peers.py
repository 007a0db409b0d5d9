"""A peer and its Redis, in the network of the simulation, where time is virtual."""

from __future__ import annotations

import pytest

from .world import World


@pytest.mark.parametrize("pause_s", [0.0, 0.2, 5.0])
def test_what_redis_gives_to_a_connection_of_the_process_before_is_taken_once_more(pause_s: float) -> None:
    """For Redis, a process whose machine has lost its power waits for a message for one more second."""
    world = World(0, faults=("peer",))
    world.network.delay_s = 0.001
    with world.observed():
        world.start()
        world.network.advance(5.5)
        peer = world.peers[0]
        peer.kill(silently=True)
        world.network.advance(pause_s)
        peer.start()
        world.network.advance(0.1)
        ask = peer.ask((world.clients[0].address.twin,), size=10, life_s=10, how="never")
        world.network.advance(11)
        assert len(ask.answers) == 1 and not world.failures
