"""What is known of a twin."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.errors import InvalidTwin
from dmsg.rmb.core.limits import MAX_RELAYS, MAX_RELAYS_BYTES
from dmsg.rmb.core.twin import Twin, check_relay, format_relays, parse_relays

from .conftest import DERIVED, LIVE

HOSTS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,9}[a-z0-9])?(\.[a-z0-9]{1,9}){0,3}(:[1-9][0-9]{0,3})?", fullmatch=True)


@pytest.mark.parametrize("case", DERIVED["relay-domains"]["cases"], ids=lambda case: case["chain"])
def test_relays_of_the_chain(case):
    relays = parse_relays(case["chain"])
    assert set(relays) == {host for host in case["set"] if host}
    assert parse_relays(format_relays(relays)) == relays


@given(st.sets(HOSTS, max_size=5))
def test_relays_go_through_a_text_in_one_order(hosts):
    assert parse_relays(format_relays(hosts)) == tuple(sorted(hosts))


@given(st.text())
def test_any_text_of_a_registry_can_be_read(text):
    for host in parse_relays(text):
        assert check_relay(host) == host


def test_what_others_put_into_the_registry_is_left_out():
    assert parse_relays("b.example_a/../x_a.example:81_b.example_-_[::1]_a.example:65536_\n_u@c_" + "d" * 254) == (
        "a.example:81",
        "b.example",
    )
    assert len(parse_relays("_".join(f"h{number}" for number in range(100)))) == MAX_RELAYS


@pytest.mark.parametrize(
    "hosts", [["a_b"], [""], ["a b"], ["a\n"], [f"h{n}" for n in range(17)], [f"{n}." * 120 + "x" for n in range(5)]]
)
def test_relays_that_no_registry_takes(hosts):
    with pytest.raises(InvalidTwin):
        format_relays(hosts)
    assert len("_".join(hosts)) <= MAX_RELAYS_BYTES or len(hosts) == 5


@pytest.mark.parametrize(
    "values",
    [(0, bytes(32)), (2**32, bytes(32)), (1, bytes(31)), (1, bytes(32), (), b""), (1, bytes(32), (), bytes(129))],
)
def test_what_is_no_twin(values):
    with pytest.raises(InvalidTwin):
        Twin(*values)


def test_recorded_twins():
    for one in LIVE["twins"]:
        relays = parse_relays(one["relay"] or "")
        twin = Twin(one["id"], bytes.fromhex(one["account"]), relays, bytes.fromhex(one["pk"] or "") or None)
        assert (format_relays(twin.relays) or None) == one["relay"]
