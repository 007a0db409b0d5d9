"""Documents of relay ranks: what is believed, what is refused and why, how they fade, and what they may do at most."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dmsg.crypto.keys import SecretKey
from dmsg.discovery import ranks as module
from dmsg.discovery.errors import RanksError
from dmsg.discovery.ranks import DOCUMENT_LIMIT_BYTES, KIND, Ranks, sign_ranks, weight

NOW_S = 1_700_000_000
OPERATOR = SecretKey(hashlib.sha256(b"operator").digest())
STRANGER = SecretKey(hashlib.sha256(b"stranger").digest())
RELAYS = [SecretKey(hashlib.sha256(b"relay %d" % number).digest()).public_key for number in range(5)]
TRUSTED = {OPERATOR.public_key}


def relay(score: int = 900, **parts: Any) -> dict[str, Any]:
    one = dict.fromkeys(("score", "success", "latency", "capacity", "drops"), score)
    return {**one, "dials": 12, "clients": 3, **parts}


def document(*scores: int, **members: Any) -> dict[str, Any]:
    return {
        "format": "dmsg-relay-ranks",
        "version": 1,
        "issued": NOW_S,
        "lifetime_s": 1000,
        "window_s": 500,
        "relays": {str(key): relay(score) for key, score in zip(RELAYS, scores, strict=False)},
        "excluded": {"clients": 1, "events": 2},
        **members,
    }


def signed(*scores: int, key: SecretKey = OPERATOR, **members: Any) -> bytes:
    return sign_ranks(document(*scores, **members), key)


def parse(data: bytes, now_s: float = NOW_S, **options: Any) -> Ranks:
    return Ranks.parse(data, TRUSTED, now_s, **options)


def refusal(data: bytes, now_s: float = NOW_S, **options: Any) -> str:
    with pytest.raises(RanksError) as caught:
        parse(data, now_s, **options)
    return caught.value.reason


# --- what is believed ------------------------------------------------------------------------------------------------


def test_a_signed_document_is_read() -> None:
    ranks = parse(signed(900, 100))
    assert (ranks.issued, ranks.lifetime_s, ranks.window_s) == (NOW_S, 1000, 500)
    assert ranks.issuer == OPERATOR.public_key
    assert dict(ranks.scores) == {RELAYS[0].raw: 900, RELAYS[1].raw: 100}


def test_the_signature_covers_the_canonical_form_whatever_form_it_came_in() -> None:
    plain = signed(900, 100)
    pretty = json.dumps(json.loads(plain), indent=4, sort_keys=False).encode()
    assert pretty != plain
    assert parse(pretty) == parse(plain)
    assert parse(pretty).document == plain


def test_the_canonical_form_is_fixed() -> None:
    unsigned = {"b": [1, {"d": "é", "c": None}], "a": True, "signature": "00"}
    assert KIND.canonical(unsigned) == b'{"a":true,"b":[1,{"c":null,"d":"\\u00e9"}]}'
    text = json.loads(signed(1))
    by_hand = OPERATOR.sign(b"dmsg-relay-ranks/1\0" + KIND.canonical(text))
    assert text["signature"] == by_hand.hex()


def test_members_of_later_versions_of_the_format_are_covered_and_ignored() -> None:
    assert parse(signed(900, region="eu", excluded={"clients": 0, "events": 0, "keys": []})).scores
    changed = json.loads(signed(900, region="eu"))
    changed["region"] = "us"
    assert refusal(json.dumps(changed).encode()) == "bad_signature"


def test_any_of_several_trusted_keys_will_do() -> None:
    both = {OPERATOR.public_key, STRANGER.public_key}
    assert Ranks.parse(signed(1, key=STRANGER), both, NOW_S).issuer == STRANGER.public_key


def test_tags_tell_documents_apart() -> None:
    assert parse(signed(900)).tag != parse(signed(901)).tag
    assert re.fullmatch(rb'"[0-9a-f]{32}"', parse(signed(900)).tag)


# --- what is refused -------------------------------------------------------------------------------------------------


def changed(**members: Any) -> bytes:
    """A document with a good signature over members that are no good."""
    return signed(900, **members)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_json"),
        (b"\xff", "not_json"),
        (b"[]", "wrong_format"),
        (b"{}", "wrong_format"),
        (b'"dmsg-relay-ranks"', "wrong_format"),
        (b"[" * 100_000, "not_json"),
        (b'{"format":"dmsg-relay-ranks","format":"dmsg-relay-ranks"}', "not_json"),
        (b" " * (DOCUMENT_LIMIT_BYTES + 1), "too_long"),
        (changed(format="dmsg-ranks"), "wrong_format"),
        (changed(version=2), "wrong_version"),
        (changed(version=True), "wrong_version"),
        (changed(version="1"), "wrong_version"),
        (signed(900, key=STRANGER), "untrusted"),
        (changed(issued=-1), "bad_field"),
        (changed(issued=float(NOW_S)), "bad_field"),
        (changed(issued=1 << 60), "bad_field"),
        (changed(issued=None), "bad_field"),
        (changed(lifetime_s=0), "bad_field"),
        (changed(lifetime_s=10**9), "bad_field"),
        (changed(window_s="500"), "bad_field"),
        (changed(relays=[]), "bad_field"),
        (changed(relays={"02" * 33: []}), "bad_field"),
        (changed(relays={"x": relay()}), "bad_field"),
        (changed(relays={"05" + "ab" * 32: relay()}), "bad_field"),
        (changed(relays={"02" + "AB" * 32: relay()}), "bad_field"),
        (changed(relays={"02" + "ab" * 32 + "\n": relay()}), "bad_field"),
        (changed(relays={"02" + "ab" * 32: relay(1001)}), "bad_field"),
        (changed(relays={"02" + "ab" * 32: relay(-1)}), "bad_field"),
        (changed(relays={"02" + "ab" * 32: relay(score=0.5)}), "bad_field"),
        (changed(relays={"02" + "ab" * 32: relay(score=True)}), "bad_field"),
        (changed(relays={"02" + "ab" * 32: relay(latency=None)}), "bad_field"),
        (changed(relays={"02" + "ab" * 32: relay(dials=-1)}), "bad_field"),
        (changed(excluded=None), "bad_field"),
        (changed(excluded={"clients": 1}), "bad_field"),
        (changed(issued=NOW_S + 301), "from_the_future"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, reason: str) -> None:
    assert refusal(data) == reason


def test_the_issuer_is_part_of_what_is_signed() -> None:
    theirs = json.loads(signed(900, key=STRANGER))
    theirs["issuer"] = str(OPERATOR.public_key)
    assert refusal(json.dumps(theirs).encode()) == "bad_signature"


@pytest.mark.parametrize("signature", [None, "", "00" * 65, "zz" * 65, "AB" * 65, 5, "00" * 66])
def test_bad_signatures_are_refused(signature: Any) -> None:
    bad = json.loads(signed(900))
    bad["signature"] = signature
    assert refusal(json.dumps(bad).encode()) == "bad_signature"
    del bad["signature"]
    assert refusal(json.dumps(bad).encode()) == "bad_signature"


@pytest.mark.parametrize("issuer", [None, "", 7, "02" * 33 + "00", "00" * 33, ["02"]])
def test_an_issuer_that_is_no_key_is_refused(issuer: Any) -> None:
    bad = json.loads(signed(900))
    bad["issuer"] = issuer
    assert refusal(json.dumps(bad).encode()) == "bad_field"


def test_numbers_that_json_does_not_have_are_refused() -> None:
    text = signed(900).replace(b'"issued":', b'"more":1e999,"issued":')
    assert refusal(text) == "bad_field"
    assert refusal(signed(900).replace(b'"issued":', b'"more":NaN,"issued":')) == "not_json"
    huge = b"9" * 5000
    assert refusal(signed(900).replace(b'"issued":', b'"more":%s,"issued":' % huge)) == "bad_field"


def test_more_relays_than_there_may_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RELAYS_LIMIT", 2)
    assert refusal(signed(1, 2, 3)) == "too_many_relays"
    assert len(parse(signed(1, 2)).scores) == 2


def test_a_document_with_as_many_relays_as_there_may_be_fits() -> None:
    relays = {f"02{number:064x}": relay(dials=10**7, clients=10**4) for number in range(module.RELAYS_LIMIT)}
    data = sign_ranks(document(relays=relays), OPERATOR)
    assert len(data) < DOCUMENT_LIMIT_BYTES
    assert len(parse(data).scores) == module.RELAYS_LIMIT


def test_a_clock_that_is_a_little_ahead_is_no_harm() -> None:
    ahead = parse(signed(900, issued=NOW_S + 300))
    assert ahead.effective(RELAYS[0].raw, NOW_S) == 900


# --- one after another -----------------------------------------------------------------------------------------------


def test_an_older_document_does_not_replace_a_newer_one() -> None:
    newer = parse(signed(900, issued=NOW_S - 10))
    assert refusal(signed(100, issued=NOW_S - 11), previous=newer) == "rolled_back"
    with pytest.raises(RanksError, match="rolled back: issued in the same second as the one in force, and differs"):
        parse(signed(100, issued=NOW_S - 10), previous=newer)
    assert parse(signed(100, issued=NOW_S - 9), previous=newer).effective(RELAYS[0].raw, NOW_S) == 100


def test_the_same_document_again_is_the_one_in_force() -> None:
    first = parse(signed(900))
    assert parse(json.dumps(json.loads(signed(900)), indent=1).encode(), previous=first) is first


# --- fading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_s", "effective"), [(-300, 900), (0, 900), (500, 900), (625, 800), (750, 700), (1000, 500), (10**9, 500)]
)
def test_scores_fade_to_neutral_over_the_second_half_of_the_lifetime(age_s: int, effective: float) -> None:
    ranks = parse(signed(900, 100))
    assert ranks.effective(RELAYS[0].raw, NOW_S + age_s) == pytest.approx(effective)
    assert ranks.effective(RELAYS[1].raw, NOW_S + age_s) == pytest.approx(1000 - effective)


def test_a_relay_that_is_not_named_is_neutral() -> None:
    assert parse(signed(900)).effective(RELAYS[3].raw, NOW_S) == 500


# --- what a score may do ---------------------------------------------------------------------------------------------


def test_weights_are_bounded_and_grow_with_the_score() -> None:
    assert weight(500) == 1.0
    assert weight(1000) == module.WEIGHT_LIMIT == 8.0
    assert weight(0) == weight(250) == module.WEIGHT_FLOOR == 0.125
    assert weight(-5) == 0.125 and weight(10**9) == 8.0
    weights = [weight(score) for score in range(1001)]
    assert weights == sorted(weights)


# --- hostile documents -----------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
MEMBERS = ("format", "version", "issued", "lifetime_s", "window_s", "issuer", "relays", "excluded", "signature")


@given(st.binary(max_size=300))
def test_any_bytes_are_ranks_or_a_refusal(data: bytes) -> None:
    with pytest.raises(RanksError):
        parse(data)


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_document_changed_on_the_way_says_what_was_signed_or_nothing(changes: list[tuple[int, int]]) -> None:
    data = bytearray(signed(900, 100))
    for at, value in changes:
        data[at % len(data)] = value
    try:
        ranks = parse(bytes(data))
    except RanksError:
        return
    assert dict(ranks.scores) == {RELAYS[0].raw: 900, RELAYS[1].raw: 100}


@settings(max_examples=200)
@given(st.sampled_from(MEMBERS), JSON)
@example("relays", {"02" + "ab" * 32: {"score": "\ud800"}})
def test_a_good_signature_brings_no_odd_number_into_force(name: str, value: Any) -> None:
    """Scores are whole numbers from 0 to 1,000 and weights from 1/8 to 8 in all ranks that are accepted."""
    try:
        data = sign_ranks({**document(900), name: value}, OPERATOR)
    except RanksError:  # a number that JSON does not have
        return
    try:
        ranks = parse(data)
    except RanksError:
        return
    assert 0 <= ranks.effective(RELAYS[0].raw, NOW_S + 600) <= 1000
    assert 0.125 <= weight(ranks.effective(RELAYS[0].raw, 0)) <= 8.0
    assert all(type(score) is int and 0 <= score <= 1000 for score in ranks.scores.values())
