"""Sessions at a relay and the envelopes between them."""

from __future__ import annotations

from dmsg.rmb.core.address import SessionAddress
from tests.rmb.relay.conftest import World


def test_envelopes_go_unchanged_from_one_session_to_another_in_order(world: World) -> None:
    alice, bob = world.connect(1), world.connect(2, "work")
    to = SessionAddress(2, "work")
    sent = [alice.envelope(to, uid=str(number), plain=bytes(100 * number)).SerializeToString() for number in range(50)]
    alice.send(*sent)
    assert bob.received == sent and not alice.received
