"""The schema: complete, primitive, without clashes, and what it promised before."""

import dataclasses
import subprocess
import sys

import pytest

from dmsg.eventlog import schema as events


def test_every_event_is_described_with_a_meaning_for_it_and_for_each_column() -> None:
    described = {doc.name: doc for doc in events.describe()}
    assert described.keys() == events.EVENTS.keys()
    for doc in described.values():
        assert doc.meaning and doc.meaning.endswith(".")
        assert doc.version >= 1
        assert all(column.meaning for column in doc.fields)
        assert {column.type for column in doc.fields} <= {str, int, float, bool}


def test_no_column_hides_one_of_the_envelope() -> None:
    envelope = {column.name for column in events.ENVELOPE}
    assert envelope == {"event", "v", "ts", "role", "node", "boot", "seq"}
    for doc in events.describe():
        assert not envelope & {column.name for column in doc.fields}


def test_one_name_always_has_one_type() -> None:
    types: dict[str, set[type]] = {}
    for doc in events.describe():
        for column in doc.fields:
            types.setdefault(column.name, set()).add(column.type)
    assert {name: kinds for name, kinds in types.items() if len(kinds) > 1} == {}


def test_events_have_slots_and_can_be_changed() -> None:
    for cls in events.EVENTS.values():
        event = cls(*[column.type() for column in events.describe_event(cls).fields])
        assert not hasattr(event, "__dict__")
        for column in events.describe_event(cls).fields:
            setattr(event, column.name, column.type())


def test_a_field_that_is_not_an_annotated_primitive_is_refused() -> None:
    @dataclasses.dataclass
    class Wrong(events.Event):
        """Wrong."""

        payload: bytes = b""

    with pytest.raises(TypeError, match=r"Wrong\.payload"):
        events.describe_event(Wrong)


#: What readers of old logs rely on. Adding to this list is fine; changing a line of it is not.
PROMISED = {
    "server_started": "public_key address version protocol",
    "server_stopped": "reason duration_s",
    "drained": "elapsed_ms transports",
    "connection_opened": "conn remote address handshake_ms extended",
    "connection_closed": "conn remote reason duration_s bytes_in bytes_out frames_in frames_out transports",
    "handshake_failed": "address stage reason elapsed_ms count",
    "transport_opened": "conn transport_id initiator responder server accept_ms security protocol",
    "transport_closed": "conn transport_id initiator responder server reason code by duration_s bytes_in bytes_out"
    " queue_peak_bytes security opened_id opened_server protocol",
    "transport_resumed": "transport_id initiator responder server reason elapsed_ms",
    "refused": "conn remote what reason count",
    "dial_finished": "target server ok reason elapsed_ms attempts security initiator protocol",
    "session_up": "server reason duration_s attempt protocol",
    "session_down": "server reason duration_s attempt protocol",
    "entry_published": "sequence kind elapsed_ms ok reason",
    "discovery_request": "method path status elapsed_ms reason key count",
    "ranks_loaded": "ok reason issuer issued relays",
    "twin_session_opened": "conn twin connection address handshake_ms",
    "twin_session_closed": "conn twin connection reason duration_s envelopes_in envelopes_out bytes_in bytes_out",
    "envelopes_routed": "received ingested local stored fetched federated expired refused bytes",
    "envelope_failed": "twin reason count",
    "rate_limited": "twin count",
    "federation_attempted": "relay ok reason elapsed_ms count",
    "relay_rank_changed": "relay failures_per_hour",
    "call_finished": "twin ok reason elapsed_ms count",
    "events_dropped": "count",
    "events_discarded": "files lines bytes",
    "file_shipped": "name lines bytes elapsed_ms attempt ok reason",
}


def test_every_event_is_promised() -> None:
    assert PROMISED.keys() == events.EVENTS.keys()


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_columns_are_never_renamed_removed_or_moved(name: str) -> None:
    columns = [column.name for column in events.describe_event(events.EVENTS[name]).fields]
    promised = PROMISED[name].split()
    assert columns[: len(promised)] == promised


def test_the_name_of_a_connection_is_told_by_a_digest() -> None:
    assert events.digest(None) == ""
    hostile = ["", "a", "a" * 1_000_000, "\x1b]0;owned", "\ud800"]
    found = [events.digest(name) for name in hostile]
    assert len(set(found)) == len(hostile)
    assert all(len(text) == 16 and set(text) <= set("0123456789abcdef") for text in found)


def test_the_schema_is_pure() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['twisted', 'zope', 'klein', 'treq', 'prometheus_client']))"
    subprocess.run([sys.executable, "-c", f"{blocked}; import dmsg.eventlog.schema"], check=True)
