"""The log of a real network of two relays, one of the messaging system and three clients, and what the tables say of it.

It ran in memory and is told in dmsg's tests (``tests/eventlog/test_network_log.py``): Alice has 5,000 bytes echoed by Bob, then
dials Carol, who does not listen, and a key without a client; Carol's transport to Bob outlives its relay, which is
drained; the other relay is killed at the end. Over the messaging relay Alice has 3,000 bytes echoed by Bob: both speak both
protocols with one key. A message takes 5 ms one way.
"""

from __future__ import annotations

from datetime import date, datetime

import coincurve
import pytest
from log_tables import LogTables
from pyspark.sql import SparkSession

DAY, HOUR = date(2026, 3, 2), datetime(2026, 3, 2, 9)


def _key(number: int) -> str:
    text: str = coincurve.PrivateKey(bytes(31) + bytes([number])).public_key.format().hex()
    return text


KILLED, DRAINED, MESSAGING, ALICE, BOB, CAROL, ABSENT = (_key(number) for number in (1, 2, 3, 11, 12, 13, 99))


@pytest.fixture(scope="module")
def tables(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> LogTables:
    return LogTables(spark, "network_log", tmp_path_factory.mktemp("tables"))


def test_every_line_is_good(tables: LogTables) -> None:
    summary = tables.summary
    assert (summary.files, summary.lines_in, summary.good, summary.missing) == (6, 79, 79, 0)
    assert (tables.manifest.violations, tables.manifest.findings) == ({}, {})


def test_connections_of_a_relay_that_was_killed_are_open(tables: LogTables) -> None:
    rows = [(DRAINED[:16], each, 15.0, "closed", "server_draining", "dmsg") for each in (ALICE, BOB, CAROL)]
    rows += [(KILLED[:16], each, 15.0, "open", None, "dmsg") for each in (ALICE, BOB, CAROL)]
    rows += [(MESSAGING[:16], each, 15.0, "closed", "closed by peer", "messaging") for each in (ALICE, BOB)]
    tables.check("connections", "node remote handshake_ms state reason protocol", rows)


def test_clients_see_one_transport_where_relays_see_two(tables: LogTables) -> None:
    columns = "node initiator responder server state reason bytes_in bytes_out security"
    ends = [
        (me[:16], initiator, BOB, began_at, "closed", "normal", size, size, "e2e")
        for initiator, began_at, size in ((ALICE, KILLED, 5_000), (CAROL, DRAINED, 2_000))
        for me in (initiator, BOB)
    ]
    tables.check("transports", columns, ends, "role = 'client' and protocol = 'dmsg'")
    relayed = [
        (KILLED, ALICE, BOB, "closed", "normal"),
        (DRAINED, CAROL, BOB, "closed", "server_draining"),
        (KILLED, CAROL, BOB, "open", None),
        (DRAINED, ALICE, CAROL, "refused", "no_such_service"),
        (KILLED, ALICE, CAROL, "refused", "no_such_service"),
    ]
    tables.check(
        "transports", "server initiator responder state reason", relayed, "role = 'server' and protocol = 'dmsg'"
    )


def test_a_channel_is_a_transport_of_the_messaging_system(tables: LogTables) -> None:
    """Channels have ids of their own on either side; the relay sees their data encrypted."""
    rows = [
        ("client", ALICE[:16], MESSAGING, 0, "closed", 3_000, 3_000, "e2e"),
        ("client", BOB[:16], MESSAGING, 255, "closed", 3_000, 3_000, "e2e"),
        ("server", MESSAGING[:16], MESSAGING, 0, "closed", 3_054, 3_072, "unknown"),
    ]
    columns = "role node server transport_id state bytes_in bytes_out security"
    tables.check("transports", columns, rows, "protocol = 'messaging'")


def test_the_transport_that_outlived_its_relay(tables: LogTables) -> None:
    """A request and its answer, 10 ms each way."""
    rows = [(DAY, KILLED, "server_draining", 1, 1, 20.0)]
    tables.check("resumptions", "date server reason resumptions transports elapsed_ms_max", rows)


def test_dials_that_failed_say_where_and_why(tables: LogTables) -> None:
    rows = [
        (DAY, DRAINED, "accept", "no_such_service", 1, 1, 1),
        (DAY, KILLED, "accept", "no_such_service", 1, 1, 1),
        (DAY, "", "discovery", "no entry", 1, 1, 1),
    ]
    tables.check("dial_failures", "date relay stage reason attempts dials clients", rows)
    dials = [
        (ALICE, BOB, KILLED, "dmsg", 1, 1, 20.0),
        (ALICE, BOB, MESSAGING, "messaging", 1, 1, 20.0),
        (CAROL, BOB, DRAINED, "dmsg", 1, 1, 20.0),
        (ALICE, CAROL, "", "dmsg", 1, 0, 40.0),
        (ALICE, ABSENT, "", "dmsg", 1, 0, 0.0),
    ]
    tables.check("pair_latency", "initiator responder server protocol dials dials_ok dial_ms_p50", dials, "dials > 0")


def test_an_hour_of_each_relay(tables: LogTables) -> None:
    columns = (
        "relay protocol hour connections_opened connections_closed connections_open_max transports_opened "
        "transports_closed"
    )
    rows = [
        (DRAINED, "dmsg", HOUR, 3, 3, 3, 1, 1),
        (KILLED, "dmsg", HOUR, 3, 0, 3, 2, 1),
        (MESSAGING, "messaging", HOUR, 2, 2, 2, 1, 1),
    ]
    tables.check("relay_hourly", columns, rows)


def test_who_talked_and_whose_log_has_an_end(tables: LogTables) -> None:
    columns = "role key protocol lines gaps gap_lines dup corrupt missing events_dropped ended"
    told = [("server", DRAINED, "dmsg", 14, True), ("server", KILLED, "dmsg", 9, False)]
    told += [("server", MESSAGING, "messaging", 11, True)]
    told += [("client", key, None, lines, None) for key, lines in ((ALICE, 17), (BOB, 15), (CAROL, 13))]
    tables.check("log_quality", columns, [(*who, lines, 0, 0, 0, 0, 0, 0, end) for *who, lines, end in told])
    assert tables.rows["top_talkers"] == 3
