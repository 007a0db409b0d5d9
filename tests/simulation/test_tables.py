"""The walk through every table, which finds what simulated relays and clients still hold at rest."""

from __future__ import annotations

from dmsg.clients.limits import ListenerLimits
from dmsg.clients.offers import Offers
from dmsg.clients.services import Services
from dmsg.serving.limits import ServingLimits
from dmsg.serving.queues import Queues
from tests.simulation.tables import held


def test_tables_are_found_however_deep() -> None:
    services: Services[Offers[str]] = Services(ListenerLimits())
    assert held(services, {}) == {}
    services.arrivals.add("an offer", "a key")
    assert held(services, {}) == {"Offers._offers": 1, "Offers._held": 1}


def test_counts_are_found_and_limits_are_none() -> None:
    queues = Queues(ServingLimits())
    assert held(queues, {}) == {}
    queues.queued_bytes = 7
    assert held(queues, {}) == {"Queues.queued_bytes": 7}


def test_what_is_known_is_named_by_its_class_a_base_class_or_where_it_is() -> None:
    services: Services[Offers[str]] = Services(ListenerLimits())
    services.arrivals.add("an offer", "a key")
    for name in ("Offers", "object", "arrivals"):
        assert held(services, {f"{name}._offers": "expected here", f"{name}._held": "expected here"}) == {}
