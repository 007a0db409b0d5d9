"""The rates of handshakes: what floods from many networks leave to one more."""

from __future__ import annotations

import pytest

from dmsg.serving.admission import Origin
from dmsg.serving.handshake_rates import HandshakeRates
from dmsg.serving.limits import ServingLimits


@pytest.mark.parametrize(("networks", "per_s"), [(10, 110), (40, 110), (200, 20)])
def test_networks_that_use_up_the_rate_of_all_do_not_keep_another_out(networks: int, per_s: int) -> None:
    """Strangers with more handshakes than all may have, and one client that comes each second from a network of its own."""
    limits = ServingLimits()
    assert networks * min(per_s, limits.handshakes_per_s_per_network) >= limits.handshakes_per_s
    rates = HandshakeRates(limits, 0.0)
    refused, passed = [], 0
    for second in range(20):
        for step in range(per_s):
            for network in range(networks):
                now = second + (step + network / networks) / per_s
                passed += not rates.take(Origin.of(f"10.1.{network}.{step % 10}"), now)
            if step == per_s // 2 and (refusal := rates.take(Origin.of(f"10.2.{second}.1"), now)):
                refused.append(refusal)
    assert refused == []
    most = limits.handshake_burst + 20 * limits.handshakes_per_s
    assert 0.9 * most < passed <= most


def test_what_is_refused_by_one_limit_takes_nothing_of_another() -> None:
    limits = ServingLimits(handshake_burst=8, handshakes_per_s=1e-9, handshake_burst_per_network=3)
    rates = HandshakeRates(limits, 0.0)
    one, other, third = (Origin.of(f"10.1.{network}.1") for network in (1, 2, 3))
    assert [rates.take(one, 0.0) for _ in range(5)] == ["", "", "", *["handshakes_per_network"] * 2]
    assert [rates.take(other, 0.0) for _ in range(4)] == ["", "", "", "handshakes_per_network"]
    assert [rates.take(third, 0.0) for _ in range(3)] == ["", "handshakes", "handshakes"]


def test_half_of_the_rate_of_all_is_kept_for_those_that_prove_their_address() -> None:
    rates = HandshakeRates(ServingLimits(handshake_burst=20, handshakes_per_s=1e-9), 0.0)
    strangers = [rates.take(Origin.of(f"10.1.{network}.1"), 0.0, kept=0.5) for network in range(30)]
    assert strangers == [""] * 10 + ["handshakes"] * 20
    proved = [rates.take(Origin.of(f"10.2.{network}.1"), 0.0) for network in range(30)]
    assert proved == [""] * 10 + ["handshakes"] * 20
