"""The tables in the documentation say what the code says, and the numbers in its sentences do, too."""

from __future__ import annotations

import dataclasses
import json
import re
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import tables

from dmsg.cli.exits import MEANINGS
from dmsg.cli.redial import DIALS_AT_ONCE
from dmsg.cli.tunnels import MAX_PAIRS
from dmsg.clients.limits import ListenerLimits
from dmsg.discovery.entry import ENTRY_LIMIT_BYTES
from dmsg.discovery.errors import DISCOVERY_ERRORS
from dmsg.discovery.lookups import CallerLimits
from dmsg.eventlog import schema as ev
from dmsg.eventlog.reasons import Reason
from dmsg.glue import transport_state
from dmsg.messaging.core import channel
from dmsg.messaging.core import wire as messaging_wire
from dmsg.messaging.core.errors import END_ERRORS, ChannelEndReason
from dmsg.mux.client import transport
from dmsg.mux.core import record, stream, tlv, wire
from dmsg.mux.core.e2e_handshake import CONFIRM_TIMEOUT_S, RESUME_CONFIRM_TIMEOUT_S
from dmsg.mux.core.handshake import COOKIE_BYTES
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.core.window import AckGate
from dmsg.mux.relay.handshake_budget import COOKIE_SLOT_S
from dmsg.mux.relay.limits import RelayLimits
from dmsg.ops.settings import settings_of
from dmsg.relays.pool import PoolConfig
from dmsg.rmb.client.config import RmbConfig
from dmsg.rmb.core import limits as rmb
from dmsg.rmb.peer.commands import KEEP_COMMAND_S, UNSERVED_COMMANDS, UNSERVED_COMMANDS_OF_A_TWIN
from dmsg.rmb.peer.requests import KEPT_ANSWERS
from dmsg.rmb.peer.services import KEPT_REQUESTS, KEPT_REQUESTS_BYTES
from dmsg.rmb.relay.federation import FederationLimits
from dmsg.rmb.relay.limits import RelayLimits as RmbRelayLimits
from dmsg.rmb.relay.stores.base import QueueLimits
from dmsg.sansio.rate import RecentIds
from dmsg.sansio.websocket import WebSocketConfig
from dmsg.serving import member
from dmsg.taps.tables import SETTINGS

from .conftest import DOCS, ROOT


def rows(text: str) -> list[list[str]]:
    """The cells of the list-tables in ``text``, without their headers."""
    found: list[list[str]] = []
    header = True
    for line in text.splitlines():
        if line.startswith(".. list-table::"):
            header = True
        elif line.startswith("   * - "):
            found.append([line[7:]])
            if header:
                found.pop()
                header = False
                found.append([])
        elif re.match(r"     -( |$)", line) and found:
            found[-1].append(line[7:])
    return [row for row in found if row and not (row and len(row) < 2 and not row[0])]


@pytest.mark.parametrize("frame", wire.FRAMES, ids=lambda frame: frame.kind.name)
def test_each_frame_is_laid_out_byte_by_byte(frame: Any) -> None:
    text = tables.frame_bytes()
    start = text.index(f"**{frame.kind.name}**")
    following = [text.index(f"**{one.kind.name}**") for one in wire.FRAMES]
    end = min((at for at in following if at > start), default=len(text))
    table = rows(text[start:end])
    offset = 0
    for cells in table[-len(frame.fields) - 3 :]:
        assert int(cells[0]) == offset
        offset += int(cells[1]) if cells[1].isdigit() else 0
    assert [cells[2] for cells in table[-len(frame.fields) :]] == [name for name, _ in frame.fields] or not frame.fields
    assert offset == wire.HEADER_BYTES + sum(size for _, size in frame.fields)
    assert f"``{frame.kind:#04x}``" in tables.frame_summary()


@pytest.mark.parametrize("frame", messaging_wire.FRAMES, ids=lambda frame: frame.kind.name)
def test_each_frame_of_messaging_has_its_row(frame: Any) -> None:
    [row] = [cells for cells in rows(tables.messaging_frames()) if cells[0] == f"``{frame.kind:#04x}``"]
    assert row[1] == f"**{frame.kind.name}**" and row[3] == frame.meaning
    assert all(f"{name} ({size or 'rest'})" in row[2] for name, size in frame.fields)


def test_every_code_has_its_row() -> None:
    table = tables.close_codes()
    for code in wire.CloseReason:
        assert f"   * - {int(code)}\n     - ``{wire.reason_name(code)}``\n" in table
    for kind in tlv.Tlv:
        assert f"   * - {int(kind)}\n     - ``{kind.name.lower()}``\n" in tables.tlvs()
        assert f"\n``{kind.name.lower()}``\n" in (DOCS / "spec" / "secure.rst").read_text()
    for reason, cls in END_ERRORS.items():
        assert f"   * - ``{reason.value}``\n     - ``{cls.__name__}``\n" in tables.channel_ends()
    assert len(END_ERRORS) + 2 == len(ChannelEndReason)
    for code, meaning in MEANINGS.items():
        assert f"   * - ``{int(code)}``\n     - {meaning}\n" in tables.exit_codes()


def test_every_exception_has_its_row() -> None:
    both = tables.error_classes() + tables.close_codes()
    names = [name for module in tables.error_modules() for name in tables.own_errors(module)]
    assert {"DmsgError", "Busy", "ServerLost", "WrongTime", "ShippingError"} <= set(names)
    for name in names:
        assert both.count(f"   * - ``{name}``\n") + both.count(f"     - ``{name}``\n     - ") >= 1, name
    for text, cls in DISCOVERY_ERRORS.items():
        assert f"   * - ``{text}``\n     - {cls.status}\n     - {cls.reference_status}\n" in tables.discovery_errors()


@pytest.mark.parametrize("name", sorted(tables.LIMITS))
def test_every_limit_has_its_row(name: str) -> None:
    cls = tables.LIMITS[name]()
    table = tables.limits(name)
    for each in dataclasses.fields(cls):
        if not dataclasses.is_dataclass(tables.defaults(cls)[each.name]):
            assert table.count(f"``{each.name}``") == 1


def test_limits_come_with_the_comment_above_them() -> None:
    groups = {name: group for group in tables.field_groups(RelayLimits) for name in group.names}
    assert groups["queue_hard_bytes"] is groups["queue_soft_bytes"]
    assert groups["queue_soft_bytes"].comment.startswith("Bytes waiting for one transport's receiver")
    assert groups["connections"] is not groups["half_open"]
    assert all(group.comment for group in groups.values())


@pytest.mark.parametrize("role", sorted(SETTINGS))
def test_every_setting_has_its_row(role: str) -> None:
    table = tables.settings(role)
    for one in settings_of(SETTINGS[role]):
        assert f"``--{one.option}``" in table
        assert f"``{one.variable}``" in table
        assert f"``[{'.'.join((role, *one.place[:-1]))}] {one.place[-1]}``" in table


def test_every_event_and_column_is_there() -> None:
    text = tables.events()
    for event in ev.describe():
        start = text.index(f"``{event.name}``")
        for column in event.fields:
            assert f"``{column.name}``\n     - ``{column.type.__name__}``" in text[start:]


def test_every_reason_is_there() -> None:
    text = tables.reasons()
    assert all(f"``{reason}``" in text for reason in Reason if reason)


@pytest.mark.parametrize(
    ("text", "transitions"),
    [
        (tables.stream_states(), stream.TRANSITIONS),
        (tables.transport_states(), transport_state.TRANSITIONS),
        (tables.path_states(), transport.PATH_TRANSITIONS),
        (tables.leg_states(), member.TRANSITIONS),
        (tables.channel_states(), channel.TRANSITIONS),
    ],
    ids=["stream", "transport", "path", "leg", "channel"],
)
def test_every_state_and_way_is_there(text: str, transitions: dict[Enum, frozenset[Enum]]) -> None:
    assert set(transitions) == set(type(next(iter(transitions))))
    assert text.count("<rect") == len(transitions)
    assert text.count("marker-end") == sum(map(len, transitions.values()))
    for state, targets in transitions.items():
        assert f">{state.name}</text>" in text
        row = text.partition(f"   * - ``{state.name}``\n")[2].partition("   * - ")[0]
        meaning = row.partition("\n")[0].removeprefix("     - ")
        assert meaning
        for target in targets:
            assert f"``{target.name}``" in row


def test_ways_back_are_drawn_on_the_other_side() -> None:
    class Step(Enum):
        ONE = 1
        TWO = 2

    drawing = tables.state_diagram({Step.ONE: {Step.TWO}, Step.TWO: {Step.ONE}})
    there, back = re.findall(r'd="M(\d+),[^"]*" fill="none"', drawing)
    assert int(back) < int(there)


def test_metrics_have_their_names_as_they_are_scraped() -> None:
    assert "``dmsg_refusals_total``" in tables.metrics()
    assert "``dmsg_handshake_seconds``" in tables.metrics()


@pytest.mark.parametrize(("generator", "target"), [("benchmarks", "bench"), ("soak", "soak")])
def test_figures_are_included_as_they_were_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generator: str, target: str
) -> None:
    monkeypatch.setattr(tables, generator.upper(), tmp_path / f"{generator}.txt")
    assert f"``make {target}``" in tables.GENERATORS[generator]()
    (tmp_path / f"{generator}.txt").write_text("bench  what\n-----  ----\n")
    assert tables.GENERATORS[generator]() == "::\n\n   bench  what\n   -----  ----\n"


# --- sentences -------------------------------------------------------------------------------------------------------

_CONFIG = ConnectionConfig()
FWD_DATA_LIMIT_BYTES = wire.FRAME_PAYLOAD_LIMIT_BYTES - wire.SEQUENCE_BYTES
_LIMITS = RelayLimits()
_LISTENER = ListenerLimits()
_CALLERS = CallerLimits()
_POOL = PoolConfig()
_RMB, _STORES, _CALLS, _WEBSOCKET = RmbRelayLimits(), QueueLimits(), RmbConfig(), WebSocketConfig()
#: Page, what its text has to contain.
NUMBERS = [
    ("spec/frames.rst", f"at most **{wire.FRAME_PAYLOAD_LIMIT_BYTES:,}** bytes"),
    ("spec/frames.rst", f"at most {FWD_DATA_LIMIT_BYTES:,} bytes of data"),
    ("spec/frames.rst", f"exactly {wire.REQUEST_BYTES} bytes"),
    ("spec/frames.rst", f"up to {wire.EXTENDED_REQUEST_LIMIT_BYTES - wire.REQUEST_BYTES:,} more"),
    ("spec/connection.rst", f"0 to {wire.RECORD_PLAINTEXT_LIMIT_BYTES:,} bytes of plaintext"),
    ("spec/connection.rst", f"shorter than {record.RECORD_MIN_BYTES} bytes"),
    ("spec/transports.rst", f"at most {AckGate.THRESHOLD_BYTES:,}, the ACK goes out"),
    ("spec/transports.rst", f"takes {_CONFIG.send_window_bytes >> 10} KiB"),
    ("spec/transports.rst", f"more than {_CONFIG.receive_limit_bytes >> 20} MiB"),
    ("spec/transports.rst", f"Two of {_CONFIG.frame_data_bytes:,} bytes"),
    ("spec/transports.rst", f"within {_LIMITS.request_timeout_s:g} seconds"),
    ("spec/server.rst", f"up to {wire.EXTENDED_REQUEST_LIMIT_BYTES:,})"),
    ("spec/secure.rst", f"A list has at most {tlv.LIST_LIMIT_BYTES:,} bytes"),
    ("spec/secure.rst", f"Data is at most {FWD_DATA_LIMIT_BYTES - 16:,} bytes"),
    ("spec/discovery.rst", f"413 for a body over {ENTRY_LIMIT_BYTES >> 10} KiB"),
    (
        "spec/discovery.rst",
        f"after {_POOL.backoff_first_s:g} seconds, then twice as long each time up to {_POOL.backoff_limit_s:g}",
    ),
    ("spec/discovery.rst", f"for the list every {_POOL.poll_s:g} seconds"),
    ("spec/discovery.rst", f"down to every {_POOL.poll_limit_s / 60:g} minutes"),
    ("explanation/flow-control.rst", f"Above {_CONFIG.pause_bytes >> 10} KiB the producer"),
    ("explanation/flow-control.rst", f"below {_CONFIG.resume_bytes >> 10} KiB"),
    ("explanation/flow-control.rst", f"cut off at {_CONFIG.pending_limit_bytes >> 20} MiB"),
    ("explanation/limits.rst", f"{_LIMITS.half_open}, {_LIMITS.half_open_per_address} from one address"),
    ("explanation/limits.rst", f"for {_LIMITS.handshake_timeout_s:g} seconds"),
    ("explanation/limits.rst", f"and {_LIMITS.first_byte_timeout_s:g} second until the first byte"),
    (
        "explanation/limits.rst",
        f"{_LIMITS.handshakes_per_s_per_address:g} handshakes a second for one address "
        f"with {_LIMITS.handshake_burst_per_address} at once, {_LIMITS.handshakes_per_s_per_network:g} for one network "
        f"with {_LIMITS.handshake_burst_per_network} at once, {_LIMITS.handshakes_per_s:,.0f} in all "
        f"with {_LIMITS.handshake_burst:,} at once",
    ),
    ("spec/connection.rst", f"A cookie is exactly {COOKIE_BYTES} bytes long"),
    ("spec/connection.rst", f"the time slot ({COOKIE_SLOT_S:g} seconds)"),
    ("explanation/limits.rst", f"{_LIMITS.connections:,} connections"),
    ("explanation/limits.rst", f"{_LIMITS.connections_per_address:,} from one address"),
    ("explanation/limits.rst", f"{_LIMITS.requests_per_s:g} requests a second, {_LIMITS.request_burst} at once"),
    ("explanation/limits.rst", f"{_LIMITS.pending_requests} unanswered"),
    ("explanation/limits.rst", f"{_LIMITS.transports_per_connection:,} transports"),
    (
        "explanation/limits.rst",
        f"{_LIMITS.stranger_requests_per_s:g} a second, {_LIMITS.stranger_request_burst} at once, from all strangers",
    ),
    (
        "explanation/limits.rst",
        f"at most {_LIMITS.stranger_request_burst + 8 * _LIMITS.stranger_requests_per_s:,.0f} that way",
    ),
    (
        "explanation/limits.rst",
        f"sends {_LIMITS.pair_requests_per_s:g} a second and {_LIMITS.pair_request_burst} at once",
    ),
    (
        "explanation/limits.rst",
        f"{_LIMITS.known_requests_per_s:g} a second and {_LIMITS.known_request_burst:,} at once",
    ),
    ("explanation/limits.rst", f"The other {_LIMITS.transports_per_connection // 2} places are lent"),
    ("explanation/limits.rst", f"only up to {_LIMITS.transports_per_source} places"),
    ("explanation/limits.rst", f"at most {_LIMITS.unanswered_per_target} unanswered ones"),
    ("explanation/limits.rst", f"{_LIMITS.queue_stall_timeout_s:g} seconds in which nothing"),
    ("explanation/limits.rst", f"{_LIMITS.queued_per_connection_bytes >> 20} MiB for one connection"),
    ("explanation/limits.rst", f"{_LIMITS.strays_per_s:g} a second, {_LIMITS.stray_burst} at once"),
    ("explanation/limits.rst", f"at least the last {RecentIds.CAPACITY:,}"),
    ("explanation/limits.rst", f"{_LIMITS.queued_total_bytes >> 20} MiB in all"),
    ("explanation/limits.rst", f"There are {_LISTENER.offers} places, one key has at most {_LISTENER.offers_per_key}"),
    ("explanation/limits.rst", f"{_LISTENER.open_transports:,} transports may be open at one listener"),
    (
        "explanation/limits.rst",
        f"Above {_LISTENER.crowd}, three quarters of the {_LIMITS.transports_per_connection // 2}",
    ),
    ("explanation/limits.rst", f"have not moved for {_LISTENER.crowd_idle_s:g} seconds"),
    ("explanation/limits.rst", f"at most {_CALLERS.at_once} look-ups at one time and {_CALLERS.per_s:g} a second"),
    ("explanation/limits.rst", f"An offer without a proof ends after {CONFIRM_TIMEOUT_S:g} seconds"),
    ("explanation/limits.rst", f"carry {MAX_PAIRS} connections at one time"),
    ("explanation/limits.rst", f"dials for {DIALS_AT_ONCE} of them at a time"),
    ("spec/secure.rst", f"Without it within {CONFIRM_TIMEOUT_S:g} seconds"),
    ("spec/secure.rst", f"(:doc:`resumption`) has {RESUME_CONFIRM_TIMEOUT_S:g} seconds"),
    ("spec/resumption.rst", f"without data, for at most {RESUME_CONFIRM_TIMEOUT_S:g} seconds"),
    ("explanation/limits.rst", f"**Messages** have {rmb.MAX_ENVELOPE_BYTES >> 20} MiB"),
    ("explanation/limits.rst", f"a message has {_WEBSOCKET.message_timeout_s:g} seconds"),
    (
        "explanation/limits.rst",
        f"lives {rmb.MAX_TTL_S:,} seconds at most. A receiver remembers {rmb.SEEN_MESSAGES:,} of them",
    ),
    ("explanation/limits.rst", f"may be {rmb.MAX_AHEAD_S} seconds ahead, and {rmb.LATE_S} behind"),
    ("explanation/limits.rst", f"{_RMB.queue_bytes >> 20} MiB for one session"),
    ("explanation/limits.rst", f"after {_RMB.slow_consumer_timeout_s:g} seconds without any progress"),
    ("explanation/limits.rst", f"{_RMB.queued_total_bytes >> 20} MiB for all sessions"),
    ("explanation/limits.rst", f"meanwhile has {_RMB.pending_total_bytes >> 20} MiB"),
    ("explanation/limits.rst", f"no more than {_RMB.pending_per_session} of its envelopes wait"),
    ("spec/rmb-relay.rst", f"the session they are for: {_RMB.pending_total_bytes >> 20} MiB in all"),
    (
        "explanation/limits.rst",
        f"{_STORES.queue_envelopes:,} of them and {_STORES.queue_bytes >> 20} MiB for a session, "
        f"{_STORES.twin_bytes >> 20} MiB for a twin and, in memory or a file, {_STORES.store_bytes >> 20} MiB in all",
    ),
    ("explanation/limits.rst", f"a twin {_RMB.sessions_per_twin} sessions"),
    ("explanation/limits.rst", f"have {_RMB.posts_per_s_per_address:g} a second for an address"),
    ("explanation/limits.rst", f"under way has {FederationLimits().outstanding_bytes >> 20} MiB"),
    ("explanation/limits.rst", f"has {_CALLS.calls:,} calls under way with {_CALLS.calls_bytes >> 20} MiB"),
    ("explanation/limits.rst", f"serves {_CALLS.handlers} requests at once, {_CALLS.waiting_requests:,} wait"),
    ("spec/rmb.rst", f"more than {rmb.MAX_TTL_S:,} seconds"),
    ("spec/rmb.rst", f"more than {rmb.MAX_AHEAD_S} seconds ahead"),
    ("spec/rmb.rst", f"allow {rmb.LATE_S} seconds more"),
    ("spec/rmb-relay.rst", f"for {_RMB.ping_after_s:g} s is pinged"),
    ("spec/rmb-relay.rst", f"more than {_RMB.sessions_per_twin} sessions"),
    ("spec/rmb-relay.rst", f"a queue of {_RMB.queue_bytes >> 20} MiB"),
    ("spec/rmb-federation.rst", f"{_STORES.queue_envelopes:,} envelopes and {_STORES.queue_bytes >> 20} MiB"),
    ("spec/rmb-peer.rst", f"newest {KEPT_ANSWERS:,}"),
    ("spec/rmb-peer.rst", f"at most {KEPT_REQUESTS:,} requests and {KEPT_REQUESTS_BYTES >> 20} MiB"),
    ("spec/rmb-peer.rst", f"kept for {KEEP_COMMAND_S // 60} minutes"),
    ("spec/rmb-peer.rst", f"at most {UNSERVED_COMMANDS:,} lists, {UNSERVED_COMMANDS_OF_A_TWIN} of one twin"),
    ("tutorial/access-policy.rst", f"one of {_LISTENER.offers} places"),
]


@pytest.mark.parametrize(("page", "text"), NUMBERS)
def test_numbers_in_sentences_are_the_codes(page: str, text: str) -> None:
    words = " ".join((DOCS / page).read_text().split())
    assert text in words


def test_every_difference_and_weakness_is_listed_with_its_tests() -> None:
    text = (DOCS / "explanation" / "differences.rst").read_text()
    entries = re.split(r"^   \* - ", text, flags=re.MULTILINE)[1:]
    found = {entry.partition("\n")[0]: re.findall(r":test:`([^`]+)`", entry) for entry in entries}
    expected = [f"D{number}" for number in range(1, 38)] + [f"W{number}" for number in range(1, 25)]
    assert [name for name in found if name != "no."] == expected
    for name in expected:
        assert found[name], f"{name} names no test"
        for test in found[name]:
            assert tables.test_exists(test), f"{name}: {test} does not exist"


@pytest.mark.parametrize("page", ["connection", "frames", "secure", "resumption"])
def test_vectors_that_pages_point_at_are_there(page: str) -> None:
    text = (DOCS / "spec" / f"{page}.rst").read_text()
    last = text.rpartition("\nVectors: ")[2]
    names, (file,) = re.findall(r"``([a-zA-Z_]+)``", last), re.findall(r"``tests/vectors/(\w+\.json)``", last)
    vectors = json.loads((ROOT / "tests" / "vectors" / file).read_text())
    assert names
    assert set(names) <= set(vectors)


def test_a_test_that_does_not_exist_is_noticed() -> None:
    assert tables.test_exists("docs/test_generated.py::test_a_test_that_does_not_exist_is_noticed")
    assert not tables.test_exists("docs/test_generated.py::test_that_does_not_exist")
    assert not tables.test_exists("docs/test_nowhere.py::test_a")
    assert not tables.test_exists("docs/test_generated.py")


def test_every_page_is_plain_about_where_it_stands() -> None:
    """Every page is in a table of contents, and nothing in it points into this machine."""
    listed = {"index"}
    for page in DOCS.rglob("*.rst"):
        text = page.read_text()
        assert "/work/" not in text
        for block in re.findall(r"^\.\. toctree::\n((?:   .*\n|\n)+)", text, re.MULTILINE):
            folder = page.parent.relative_to(DOCS)
            listed |= {str(folder / line.strip()) for line in block.splitlines() if line.strip() and ":" not in line}
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.rst")}
    assert {page for page in pages if not page.startswith(("examples/", "_build/"))} == listed


def test_the_readme_points_at_what_is_there() -> None:
    text = (ROOT / "README.rst").read_text()
    for path in re.findall(r"``((?:docs|CONTRIBUTING|LICENSE)[^`]*)``", text):
        assert (ROOT / path).exists(), path
