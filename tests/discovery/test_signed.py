"""Signed documents: a signature of one kind is none of another."""

from __future__ import annotations

import itertools
import json

import pytest

from dmsg.crypto.keys import SecretKey, recover
from dmsg.discovery import ranks
from dmsg.discovery.entry import ClientPart, Entry
from dmsg.discovery.errors import Unauthorized
from dmsg.relays import operator_list as relay_list
from dmsg.relays.operator_list import ListedRelay, RelayList

NOW_S = 1_700_000_000
OPERATOR = SecretKey.generate()
TRUSTED = [OPERATOR.public_key]
RELAY = SecretKey.generate().public_key
#: One document that is good as any kind, but for its format.
BOTH = {
    "version": 1,
    "issued": NOW_S,
    "lifetime_s": 100,
    "window_s": 100,
    "expires": NOW_S + 100,
    "relays": {
        str(RELAY): dict.fromkeys(("score", "success", "latency", "capacity", "drops", "dials", "clients"), 1),
    },
    "excluded": {"clients": 0, "events": 0},
}
READERS = {ranks.KIND: ranks.Ranks.parse, relay_list.KIND: RelayList.parse}


def signature_of_an_entry() -> tuple[bytes, bytes]:
    """A signed text and its signature, as discovery has them."""
    entry = Entry("0.1.0", 0, 1, OPERATOR.public_key, ClientPart((RELAY,)), None).sign(OPERATOR)
    return entry.signed_json(), bytes.fromhex(entry.signature)


@pytest.mark.parametrize(("kind", "other"), list(itertools.permutations(READERS, 2)), ids=lambda kind: kind.format)
def test_a_signature_of_one_kind_is_none_of_another(kind, other):
    """One operator key signs ranks, relay lists and its own entry; each is only what it was signed as."""
    document = {**BOTH, "format": kind.format}
    good = kind.sign(document, OPERATOR)
    assert READERS[kind](good, TRUSTED, NOW_S)
    # signed for the other kind, over the same canonical text
    text = kind.canonical({**document, "issuer": str(OPERATOR.public_key)})
    elsewhere = OPERATOR.sign(other.tag + text).hex()
    for signature in (elsewhere, OPERATOR.sign(text).hex(), signature_of_an_entry()[1].hex()):
        spoiled = json.dumps({**json.loads(good), "signature": signature}).encode()
        with pytest.raises(kind.error) as caught:
            READERS[kind](spoiled, TRUSTED, NOW_S)
        assert caught.value.reason == "bad_signature"


@pytest.mark.parametrize("kind", list(READERS), ids=lambda kind: kind.format)
def test_a_documents_signature_is_none_of_an_entry(kind):
    signed = json.loads(kind.sign({**BOTH, "format": kind.format}, OPERATOR))
    entry = Entry("0.1.0", 0, 1, OPERATOR.public_key, ClientPart((RELAY,)), None, signed["signature"])
    with pytest.raises(Unauthorized):
        entry.verify()
    text, signature = signature_of_an_entry()
    assert recover(signature, text) == OPERATOR.public_key  # and an entry is signed without a tag
    assert not text.startswith(kind.tag)


def test_no_tag_is_the_beginning_of_another_or_of_json():
    tags = [kind.tag for kind in READERS]
    for one, other in itertools.permutations([*tags, b"{"], 2):
        assert not other.startswith(one)


def test_a_relay_with_and_without_an_address():
    listed = [ListedRelay(RELAY), ListedRelay.parse(f"{OPERATOR.public_key}@relay.example.org:80")]
    data = relay_list.sign_relay_list(listed, OPERATOR, issued=NOW_S, expires=NOW_S + 1)
    read = RelayList.parse(data, TRUSTED, NOW_S)
    assert set(read.relays) == set(listed) and (read.issued, read.expires) == (NOW_S, NOW_S + 1)
    assert [str(one) for one in listed] == [str(RELAY), f"{OPERATOR.public_key}@relay.example.org:80"]
    assert RelayList.parse(data, TRUSTED, NOW_S, previous=read) is read


def spoiled(**members):
    good = {
        "format": "dmsg-relay-list",
        "version": 1,
        "issued": NOW_S,
        "expires": NOW_S + 100,
        "relays": {str(RELAY): {}},
    }
    return relay_list.KIND.sign({**good, **members}, OPERATOR)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_json"),
        (b"[" * 100_000, "not_json"),
        (b"[]", "wrong_format"),
        (b" " * (relay_list.DOCUMENT_LIMIT_BYTES + 1), "too_long"),
        (spoiled(format="dmsg-relay-ranks"), "wrong_format"),
        (spoiled(version=2), "wrong_version"),
        (relay_list.KIND.sign(json.loads(spoiled()), SecretKey.generate()), "untrusted"),
        (spoiled().replace(b'"version":1', b'"version":1,"more":1'), "bad_signature"),
        (spoiled(issued=-1), "bad_field"),
        (spoiled(expires=NOW_S), "bad_field"),
        (spoiled(expires=NOW_S + 366 * 24 * 3600 + 1), "bad_field"),
        (spoiled(expires=True), "bad_field"),
        (spoiled(relays={}), "bad_field"),
        (spoiled(relays=[str(RELAY)]), "bad_field"),
        (spoiled(relays={"x": {}}), "bad_field"),
        (spoiled(relays={str(RELAY): {"address": "a:1"}, str(RELAY).upper(): {"address": "b:2"}}), "bad_field"),
        (spoiled(relays={str(RELAY): None}), "bad_field"),
        (spoiled(relays={str(RELAY): {"address": 5}}), "bad_field"),
        (spoiled(relays={str(RELAY): {"address": "nowhere"}}), "bad_field"),
        (spoiled(relays={f"02{number:064x}": {} for number in range(1001)}), "too_many_relays"),
        (spoiled(issued=NOW_S + 301, expires=NOW_S + 400), "from_the_future"),
        (spoiled(issued=NOW_S - 100, expires=NOW_S), "expired"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(data, reason):
    with pytest.raises(relay_list.RelayListError) as caught:
        RelayList.parse(data, TRUSTED, NOW_S)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"{", "not JSON (JSONDecodeError)"),
        (b'{"a":1,"a":1}', "not JSON: an object has two members of one name"),
        (b"[]", "wrong format: not an object"),
    ],
)
def test_what_is_wrong_with_a_list_is_said_once(data, text):
    with pytest.raises(relay_list.RelayListError) as caught:
        RelayList.parse(data, TRUSTED, NOW_S)
    assert str(caught.value) == text


def test_an_older_list_does_not_take_the_place_of_a_newer_one():
    newer = RelayList.parse(spoiled(issued=NOW_S + 1), TRUSTED, NOW_S)
    with pytest.raises(relay_list.RelayListError) as caught:
        RelayList.parse(spoiled(), TRUSTED, NOW_S, previous=newer)
    assert caught.value.reason == "rolled_back"


def test_a_list_no_reader_would_take_is_not_signed():
    with pytest.raises(relay_list.RelayListError):
        relay_list.sign_relay_list([], OPERATOR, issued=NOW_S, expires=NOW_S + 1)
