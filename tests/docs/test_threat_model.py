"""The threat model names a test for each attack, has a row for each weakness of the reference, and the numbers of the code."""

from __future__ import annotations

import re

import pytest
import tables

from dmsg.cli.rmb.serve import CONCURRENCY, OUTPUT_LIMIT_BYTES, TIME_LIMIT_S
from dmsg.clients.limits import ListenerLimits
from dmsg.discovery.limits import DiscoveryLimits
from dmsg.discovery.listing import NETWORK_LIMIT
from dmsg.discovery.lookups import CallerLimits
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.messaging.core.limits import ConnectionConfig as MessagingConnectionConfig
from dmsg.messaging.relay.limits import RelayLimits as MessagingRelayLimits
from dmsg.mux.core.e2e_handshake import CONFIRM_TIMEOUT_S
from dmsg.mux.core.limits import ConnectionConfig
from dmsg.mux.relay.limits import RelayLimits
from dmsg.relays.race import RaceConfig
from dmsg.relays.state import GROUP_LIMIT, RELAYS_LIMIT
from dmsg.rmb.core import limits as rmb
from dmsg.rmb.peer.commands import UNSERVED_COMMANDS, UNSERVED_COMMANDS_OF_A_TWIN
from dmsg.rmb.relay.limits import RelayLimits as RmbRelayLimits

from .conftest import DOCS, ROOT

PAGE = (DOCS / "explanation" / "threat-model.rst").read_text()
#: The cells of a row, by its name.
ROWS = {
    name: re.split(r"^     -(?: |$)", text, flags=re.MULTILINE)
    for name, text in re.findall(
        r"^   \* - \*\*([a-z]+-\d+)\*\* (.*?)(?=^   \* - |^\S|\Z)", PAGE, re.MULTILINE | re.DOTALL
    )
}
_RELAY, _DISCOVERY, _LISTENER = RelayLimits(), DiscoveryLimits(), ListenerLimits()
_MESSAGING = MessagingRelayLimits()
_RMB = RmbRelayLimits()
_PROOFS, _RACE, _CALLERS = ProofLimits(), RaceConfig(), CallerLimits()


@pytest.mark.parametrize("name", ROWS)
def test_each_attack_is_shown_by_tests(name: str) -> None:
    attack, who, becomes, remains, tests = ROWS[name]
    assert all(cell.strip() for cell in (attack, who, becomes, remains))
    names = re.findall(r":test:`([^`]+)`", tests)
    assert names, "a row without a test"
    assert not [each for each in names if not tables.test_exists(each)]


def test_rows_are_counted_by_table() -> None:
    assert len(ROWS) == PAGE.count("   * - **")
    counts: dict[str, int] = {}
    for name in ROWS:
        table, _, number = name.partition("-")
        counts[table] = counts.get(table, 0) + 1
        assert int(number) == counts[table]
    assert set(
        re.findall(r"\b(?:relay|discovery|listener|client|sealed|messaging|rmb|files|logs|host)-\d+\b", PAGE)
    ) == set(ROWS)


def test_each_weakness_of_the_reference_has_its_row() -> None:
    """Beside the page on differences, which says what the reference does; each row has at least one of its tests."""
    found = {}
    for cells in ROWS.values():
        if cited := re.match(r"\(:ref:`(W\d+) <weakness-[a-z-]+>`\)", cells[0]):
            found[cited[1]] = cells[4]
    assert sorted(found, key=lambda name: int(name[1:])) == [f"W{number}" for number in range(1, 25)]
    for name, tests in found.items():
        assert f"test_w{int(name[1:]):02}_" in tests


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("relay-7", f"{_RELAY.first_byte_timeout_s:g} s to the first byte, {_RELAY.handshake_timeout_s:g} s in all"),
        ("relay-7", f"At {_RELAY.half_open}, or {_RELAY.half_open_per_address} of one address"),
        (
            "relay-9",
            f"per address ({_RELAY.handshakes_per_s_per_address:g}/s), network "
            f"({_RELAY.handshakes_per_s_per_network:g}/s) and in all ({_RELAY.handshakes_per_s:,.0f}/s)",
        ),
        ("relay-14", f"{_RELAY.connections:,} connections, {_RELAY.connections_per_address:,} of one address"),
        ("relay-14", f"{_RELAY.requests_per_s:g} REQUESTs a second; {_RELAY.strays_per_s:g} stray frames a second"),
        ("relay-16", f"{_RELAY.stranger_requests_per_s:g} a second and {_RELAY.stranger_request_burst} at once"),
        ("relay-16", f"{_RELAY.pair_requests_per_s:g} and {_RELAY.pair_request_burst} from one"),
        ("relay-16", f"{_RELAY.known_requests_per_s:g} and {_RELAY.known_request_burst:,} from those the client knows"),
        ("relay-18", f"{_RELAY.queued_per_connection_bytes >> 20} MiB for a connection"),
        ("relay-18", f"{_RELAY.queued_total_bytes >> 20} MiB in all"),
        ("relay-18", f"nothing for {_RELAY.queue_stall_timeout_s:g} s"),
        ("discovery-1", f"again every {_PROOFS.interval_s:g} s"),
        ("discovery-1", f"{NETWORK_LIMIT} of a network at most"),
        ("discovery-2", f"Failed proofs: {_PROOFS.failures_per_address:g} for an address, then one a minute"),
        ("discovery-2", f"{_PROOFS.failures_per_network:g} for a network, then one each 10 s"),
        ("discovery-8", f"{_DISCOVERY.first_byte_timeout_s:g} s to the first byte"),
        ("discovery-8", f"{_DISCOVERY.request_timeout_s:g} s to the last, {_DISCOVERY.answer_timeout_s:g} s to take"),
        (
            "discovery-9",
            f"{_DISCOVERY.get_rate_per_s:,.0f} GETs a second for an address, {_DISCOVERY.get_burst:,.0f} at",
        ),
        (
            "discovery-9",
            f"{_DISCOVERY.total_get_rate_per_s:,.0f} each network keeps {_DISCOVERY.reserved_get_rate_per_s:g}",
        ),
        (
            "discovery-17",
            f"{_DISCOVERY.connect_rate_per_s:g} new connections a second for an address, {_DISCOVERY.connect_burst:,.0f} at",
        ),
        (
            "listener-1",
            f"{_LISTENER.offers} places, {_LISTENER.offers_per_key} for one key over one relay, the oldest gives way, "
            f"{CONFIRM_TIMEOUT_S:g} s to confirm",
        ),
        ("listener-3", f"Above {_LISTENER.crowd}, those unused for {_LISTENER.crowd_idle_s:g} s"),
        ("listener-5", f"at most {_CALLERS.at_once} at a time and {_CALLERS.per_s:g} a second"),
        ("listener-8", f"Closed at {ConnectionConfig().receive_limit_bytes >> 20} MiB"),
        (
            "messaging-9",
            f"{_MESSAGING.first_byte_timeout_s:g} s to the first byte, {_MESSAGING.handshake_timeout_s:g} s in all",
        ),
        ("messaging-9", f"Half of the {_MESSAGING.transports_per_connection} channels of a link"),
        ("messaging-10", f"the channel ends at {MessagingConnectionConfig().receive_limit_bytes >> 20} MiB"),
        ("rmb-2", f"messages live {rmb.MAX_TTL_S // 60} minutes"),
        ("rmb-6", f"over after {rmb.TOKEN_LIFETIME_S} s"),
        ("rmb-7", f"first byte over {rmb.MAX_ENVELOPE_BYTES >> 20} MiB"),
        ("rmb-7", f"all together {_RMB.incoming_total_bytes >> 20} MiB"),
        ("rmb-8", f"{_RMB.queue_bytes >> 20} MiB in memory, then the store"),
        ("rmb-8", f"after {_RMB.slow_consumer_timeout_s:g} s without progress"),
        ("rmb-8", f"given up after {_RMB.dead_after_s:g} s"),
        ("rmb-15", f"{UNSERVED_COMMANDS:,} lists that no service has taken from, {UNSERVED_COMMANDS_OF_A_TWIN} of one"),
        (
            "rmb-19",
            f"{CONCURRENCY} programs at a time, {TIME_LIMIT_S:g} s and {OUTPUT_LIMIT_BYTES / 2**20:.0f} MiB each",
        ),
        ("client-1", "three are raced, six after three were overtaken, 32 at most"),
        ("client-3", f"{RELAYS_LIMIT} relays, two of a network"),
    ],
)
def test_numbers_in_rows_are_the_codes(row: str, text: str) -> None:
    assert text in " ".join(" ".join(ROWS[row]).split())


def test_numbers_in_words_are_the_codes() -> None:
    assert (_RACE.width, _RACE.hurried_width, _RACE.attempts, GROUP_LIMIT) == (3, 6, 32, 2)


def test_other_pages_lead_here() -> None:
    for path in ("docs/explanation/trust.rst", "docs/index.rst", "SECURITY.rst", "README.rst"):
        assert "threat-model" in (ROOT / path).read_text()
    assert all(len(line) <= 120 for line in (ROOT / "SECURITY.rst").read_text().splitlines())
