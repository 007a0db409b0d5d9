"""Metrics: what events come to, what levels are read, and that nothing can go wrong by counting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.eventlog import schema as ev
from dmsg.ops.metrics import LABEL_VALUES, CollectorRegistry, MetricsEventLog, add_gauges, exposition
from tests.memory_log import MemoryEventLog


def make() -> tuple[MetricsEventLog, MemoryEventLog]:
    inner = MemoryEventLog()
    return MetricsEventLog(inner, CollectorRegistry()), inner


def value(log: MetricsEventLog, name: str, **labels: str) -> float | None:
    return log.registry.get_sample_value(name, labels)


def test_every_event_is_handed_on() -> None:
    log, inner = make()
    for cls in ev.EVENTS.values():
        log.emit(cls(*[column.type() for column in ev.describe_event(cls).fields]))
    assert [type(event) for event in inner.events] == list(ev.EVENTS.values())
    assert value(log, "dmsg_metrics_errors_total") == 0.0


def test_times_are_in_seconds() -> None:
    sums: dict[str, float] = {}
    for cls in ev.EVENTS.values():
        log, _ = make()
        columns = ev.describe_event(cls).fields
        times = {one.name: 2500.0 if one.name.endswith("_ms") else 2.5 for one in columns if one.type is float}
        log.emit(cls(**{one.name: times.get(one.name, one.type()) for one in columns}))
        samples = [sample for metric in log.registry.collect() for sample in metric.samples]
        counts = {
            one.name.removesuffix("_count") for one in samples if one.name.endswith("_seconds_count") and one.value
        }
        sums |= {one.name: one.value for one in samples if one.name.removesuffix("_sum") in counts}
    assert len(sums) >= 12 and set(sums.values()) == {2.5}, sums


def test_shipped_files() -> None:
    log, _ = make()
    log.emit(ev.FileShipped("a", 10, 2000, 5.0, 1, True, ""))
    log.emit(ev.FileShipped("b", 30, 4000, 5.0, 1, False, "denied"))
    assert value(log, "dmsg_files_shipped_total", result="ok") == 1
    assert value(log, "dmsg_files_shipped_total", result="denied") == 1
    assert (value(log, "dmsg_shipped_lines_total"), value(log, "dmsg_shipped_bytes_total")) == (10, 2000)


def test_connections_and_transports() -> None:
    log, _ = make()
    log.emit(ev.ConnectionOpened(1, "k", "a", 20.0, True))
    log.emit(ev.ConnectionClosed(1, "k", "gone", 5.0, 10, 20, 3, 4, 0))
    log.emit(ev.ConnectionClosed(2, "k", "gone", 5.0, 1, 2, 3, 4, 0))
    log.emit(ev.HandshakeFailed("a", "record", "timeout", 1.0))
    log.emit(ev.TransportOpened(1, 2, "i", "r", "s", 30.0, "e2e"))
    log.emit(ev.TransportClosed(1, 2, "i", "r", "s", "normal", 0, "peer", 1.0, 100, 200, 300, "e2e"))
    assert value(log, "dmsg_connections_opened_total", extended="yes") == 1
    assert value(log, "dmsg_connections_closed_total", reason="gone") == 2
    assert value(log, "dmsg_connection_bytes_total", direction="in") == 11
    assert value(log, "dmsg_connection_bytes_total", direction="out") == 22
    assert value(log, "dmsg_connection_frames_total", direction="in") == 6
    assert value(log, "dmsg_connection_frames_total", direction="out") == 8
    assert value(log, "dmsg_handshakes_failed_total", stage="record", reason="timeout") == 1
    assert value(log, "dmsg_handshake_seconds_sum") == pytest.approx(0.02)
    assert value(log, "dmsg_transports_opened_total", security="e2e") == 1
    assert value(log, "dmsg_transports_closed_total", reason="normal", by="peer") == 1
    assert value(log, "dmsg_transport_bytes_total", direction="out") == 200
    assert value(log, "dmsg_transport_accept_seconds_sum") == pytest.approx(0.03)


def test_refusals_dials_sessions_and_discovery() -> None:
    log, _ = make()
    log.emit(ev.Refused(1, "k", "request", "busy", 5))
    log.emit(ev.Refused(1, "k", "request", "busy", 2))
    log.emit(ev.DialFinished("t", "s", True, "", 100.0, "[]", "e2e"))
    log.emit(ev.DialFinished("t", "", False, "unknown_peer", 10.0, "[]", ""))
    log.emit(ev.SessionUp("s", "first", 1.0, 1))
    log.emit(ev.SessionDown("s", "lost", 1.0, 0))
    log.emit(ev.EntryPublished(1, "server", 1.0, True, ""))
    log.emit(ev.EntryPublished(1, "server", 1.0, False, "timeout"))
    log.emit(ev.DiscoveryRequest("GET", "discovery/entries", 404, 2.0, "none", "k"))
    log.emit(ev.Drained(1.0, 0))
    assert value(log, "dmsg_refusals_total", what="request", reason="busy") == 7
    assert value(log, "dmsg_dials_total", result="ok", security="e2e") == 1
    assert value(log, "dmsg_dials_total", result="unknown_peer", security="") == 1
    assert value(log, "dmsg_dial_seconds_count", ok="no") == 1
    assert value(log, "dmsg_sessions_up_total", reason="first") == 1
    assert value(log, "dmsg_sessions_down_total", reason="lost") == 1
    assert value(log, "dmsg_entry_publications_total", kind="server", result="timeout") == 1
    requests = {"method": "GET", "path": "discovery/entries", "status": "404"}
    assert value(log, "dmsg_discovery_requests_total", **requests) == 1
    assert value(log, "dmsg_drained") == 1


def test_the_reliable_message_bus() -> None:
    log, _ = make()
    log.emit(ev.TwinSessionOpened(1, 7, "", "192.0.2.1:5", 20.0))
    log.emit(ev.TwinSessionClosed(1, 7, "", "replaced", 60.0, 4, 3, 400, 300))
    log.emit(ev.EnvelopesRouted(8, 2, 5, 1, 1, 2, 1, 1, 640))
    log.emit(ev.EnvelopesRouted(1, 0, 1, 0, 0, 0, 0, 0, 64))
    log.emit(ev.EnvelopeFailed(7, "destination offline", 3))
    log.emit(ev.RateLimited(7, 5))
    log.emit(ev.FederationAttempted("r1.example", True, "", 30.0))
    log.emit(ev.FederationAttempted("r2.example", False, "timeout", 3000.0))
    log.emit(ev.RelayRankChanged("r2.example", 1.0))
    log.emit(ev.CallFinished(9, True, "", 4.0))
    log.emit(ev.CallFinished(9, False, "timeout", 5000.0))
    assert value(log, "dmsg_rmb_sessions_opened_total") == 1
    assert value(log, "dmsg_rmb_sessions_closed_total", reason="replaced") == 1
    assert value(log, "dmsg_rmb_session_duration_seconds_sum") == 60
    ways = {"received": 9, "ingested": 2, "local": 6, "stored": 1, "fetched": 1, "federated": 2, "expired": 1}
    for way, times in {**ways, "refused": 1}.items():
        assert value(log, "dmsg_rmb_envelopes_total", way=way) == times
    assert value(log, "dmsg_rmb_envelope_bytes_total") == 704
    assert value(log, "dmsg_rmb_envelopes_failed_total", reason="destination offline") == 3
    assert value(log, "dmsg_rmb_rate_limited_total") == 5
    assert value(log, "dmsg_rmb_federation_attempts_total", relay="r1.example", result="ok") == 1
    assert value(log, "dmsg_rmb_federation_attempts_total", relay="r2.example", result="timeout") == 1
    assert value(log, "dmsg_rmb_federation_seconds_count", ok="no") == 1
    assert value(log, "dmsg_rmb_rank_changes_total", relay="r2.example") == 1
    assert value(log, "dmsg_rmb_calls_total", result="ok") == 1
    assert value(log, "dmsg_rmb_call_seconds_sum", ok="no") == 5


def test_dropped_events_are_read_from_the_log() -> None:
    log, inner = make()
    assert value(log, "dmsg_events_dropped") == 0
    inner.dropped = 7
    assert value(log, "dmsg_events_dropped") == 7


def test_a_label_takes_a_bounded_number_of_values() -> None:
    log, _ = make()
    for number in range(10 * LABEL_VALUES):
        log.emit(ev.SessionDown("s", f"reason {number}", 1.0, 0))
    assert exposition(log.registry).count(b"dmsg_sessions_down_total{") == LABEL_VALUES + 1
    assert value(log, "dmsg_sessions_down_total", reason="other") == 9 * LABEL_VALUES


def test_gauges_are_read_at_each_scrape() -> None:
    registry = CollectorRegistry()
    numbers: dict[str, float] = {}
    add_gauges(registry, "dmsg_server_", lambda: numbers)
    assert registry.get_sample_value("dmsg_server_transports") is None
    numbers["transports"] = 3
    assert registry.get_sample_value("dmsg_server_transports") == 3
    assert b"dmsg_server_transports 3.0" in exposition(registry)


def test_gauges_that_fail_cost_only_themselves(logged_errors: Any) -> None:
    registry = CollectorRegistry()
    add_gauges(registry, "bad_", lambda: {}["missing"])
    add_gauges(registry, "good_", lambda: {"one": 1.0})
    assert b"good_one 1.0" in exposition(registry)
    assert len(logged_errors.flush(KeyError)) == 1


@given(st.sampled_from(list(ev.EVENTS.values())), st.sampled_from([None, "x", -1, float("nan"), object()]))
def test_wrong_values_never_raise_and_lose_no_event(cls: type[ev.Event], wrong: Any) -> None:
    log, inner = make()
    log.emit(cls(*[wrong for _ in ev.describe_event(cls).fields]))
    assert len(inner.events) == 1
    exposition(log.registry)
