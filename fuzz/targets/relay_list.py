"""An operator's list of relays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from dmsg.address import HostPort
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.errors import InvalidAddress
from dmsg.relays import operator_list as module
from dmsg.relays.errors import RelayListError
from dmsg.relays.operator_list import KIND, ListedRelay, RelayList, sign_relay_list
from fuzz import words
from fuzz.oracles import KEYS, check_memory, outcome
from fuzz.signing import ISSUER, NOW_S, signed

DICTIONARY = words.DOCUMENT

_TRUSTED = frozenset({ISSUER.public_key})
_YEAR_S = 366 * 86_400
_MOST = 1 << 53


def one_input(data: bytes) -> None:
    """The input is a document, or text that the trusted key signs; or one relay as written in a file.

    A second reader finds the same content or faults.
    """
    _read(data)
    document = signed(KIND, data)
    found = None if document is None else _read(document)
    if document is not None and found is not None:
        plain = json.loads(document)
        assert found.issuer == ISSUER.public_key
        assert (found.issued, found.expires) == (plain["issued"], plain["expires"])
        assert [(str(one.public_key), one.address) for one in found.relays] == [
            (key.lower(), None if relay.get("address") is None else HostPort.parse(relay["address"]))
            for key, relay in plain["relays"].items()
        ]
        for now_s in (NOW_S, found.expires - 1, found.expires - 0.5, found.expires, found.expires + 1):
            assert found.expired(now_s) == (now_s >= plain["expires"])
        _check_again(found, document)
        _check_written(found)
    _check_line(data.decode("utf-8", "replace"))


def _read(data: bytes) -> RelayList | None:
    complaints = _complaints(data)
    try:
        found = RelayList.parse(data, _TRUSTED, NOW_S)
    except RelayListError as error:
        assert complaints is None or error.reason in complaints, (error, complaints)
        return None
    assert complaints == set(), complaints
    check_memory(found, len(data), times=128)
    return found


def _complaints(data: bytes) -> set[str] | None:
    """The possible faults of a document that the trusted key signed; ``None`` for any other document."""
    try:
        document, _ = KIND.open(data, _TRUSTED)
    except RelayListError:
        return None
    found: set[str] = set()
    issued: Any = document.get("issued")
    expires: Any = document.get("expires")
    relays: Any = document.get("relays")
    numbers = type(issued) is int and type(expires) is int
    if not numbers or not 0 <= issued <= _MOST or not 0 < expires - issued <= _YEAR_S:
        found.add("bad_field")
    else:
        if issued > NOW_S + 300:
            found.add("from_the_future")
        if expires <= NOW_S:
            found.add("expired")
    if (
        not isinstance(relays, dict)
        or not relays
        or not all(_is_relay(*relay) for relay in relays.items())
        or len({key.lower() for key in relays}) < len(relays)
    ):
        found.add("bad_field")
    return found


def _is_relay(key: str, relay: Any) -> bool:
    if not isinstance(relay, dict) or outcome(lambda: PublicKey.parse(key), InvalidKey)[0] == "error":
        return False
    address = relay.get("address")
    return address is None or outcome(lambda: HostPort.parse(address), InvalidAddress)[0] == "value"


def _check_again(found: RelayList, document: bytes) -> None:
    """The same content is the list in force, although it is signed anew; another list must be newer.

    The limit of relays is made as small as the list, then smaller.
    """
    other = replace(found, expires=found.expires + 1)
    with mock.patch.object(module, "RELAYS_LIMIT", len(found.relays)):
        assert RelayList.parse(document, _TRUSTED, NOW_S, previous=replace(found)) == found
        assert RelayList.parse(document, _TRUSTED, NOW_S, previous=found) is found
        assert _refused(document, other) == "rolled_back"
        assert RelayList.parse(document, _TRUSTED, NOW_S, previous=replace(other, issued=found.issued - 1)) == found
    with mock.patch.object(module, "RELAYS_LIMIT", len(found.relays) - 1):
        assert _refused(document, None) == "too_many_relays"


def _refused(data: bytes, previous: RelayList | None) -> str | None:
    try:
        RelayList.parse(data, _TRUSTED, NOW_S, previous=previous)
    except RelayListError as error:
        return error.reason
    return None


def _check_written(found: RelayList) -> None:
    """A written list reads the same; nothing is written that no reader would accept."""
    written = sign_relay_list(found.relays, ISSUER, issued=found.issued, expires=found.expires)
    again = RelayList.parse(written, _TRUSTED, NOW_S)
    assert (again.issued, again.expires, again.issuer) == (found.issued, found.expires, found.issuer)
    assert {one.public_key: one.address for one in again.relays} == {
        one.public_key: one.address for one in found.relays
    }
    assert len({one.public_key for one in again.relays}) == len(again.relays)
    for relays, expires in (
        ((), found.expires),
        (found.relays, found.issued),
        (found.relays, found.issued + _YEAR_S + 1),
    ):
        kind, reason = outcome(
            lambda relays=relays, expires=expires: sign_relay_list(  # type: ignore[misc]
                relays, ISSUER, issued=found.issued, expires=expires
            ),
            RelayListError,
        )
        assert (kind, reason) == ("error", RelayListError)


def _check_line(text: str) -> None:
    """A relay is a key, or a key and an address for the address reader; its ``str`` reads the same."""
    key, at, address = text.partition("@")
    try:
        relay = ListedRelay.parse(text)
    except InvalidKey:
        assert outcome(lambda: PublicKey.parse(key), InvalidKey)[0] == "error"
    except InvalidAddress:
        assert at and outcome(lambda: HostPort.parse(address), InvalidAddress)[0] == "error"
    else:
        assert relay.public_key == PublicKey.parse(key)
        assert relay.address == (HostPort.parse(address) if at else None)
        assert ListedRelay.parse(str(relay)) == relay
        assert str(relay).startswith(key.lower()) and ("@" in str(relay)) == bool(at)


def seeds() -> Iterator[bytes]:
    """A list, unsigned and signed; its borders on both sides; single relays."""
    key, other = (str(each.public_key) for each in KEYS[1:3])
    relays = {key: {"address": "192.0.2.1:80"}, other: {}}
    document = {"issued": NOW_S - 60, "expires": NOW_S + 60, "relays": relays}
    borders: list[dict[str, Any]] = [
        {},
        {"expires": NOW_S},
        {"issued": NOW_S + 301},
        {"relays": {}},
        {"relays": {key: {"address": ""}}},
    ]
    for changed in borders:
        text = json.dumps({**document, **changed}).encode()
        yield text
        yield signed(KIND, text) or b""
    for line in (key, f"{key}@[2001:db8::1]:80", f"{key}@relay.example:443", f"{key}@", "@"):
        yield line.encode()
    wrong: list[Any] = [[], None, {key: None}, {key: []}, {key[:-1]: {}}, {"02" + "0" * 64: {}}]
    addresses: list[Any] = [None, 80, [], "relay.example", "relay.example:0"]
    borders = [
        *({"expires": NOW_S + 1}, {"issued": NOW_S, "expires": NOW_S}, {"issued": NOW_S, "expires": NOW_S + 1}),
        *({"issued": NOW_S + more, "expires": NOW_S + 600} for more in (299, 300, 301)),
        *({"issued": NOW_S, "expires": NOW_S + _YEAR_S + more} for more in (-1, 0, 1)),
        *({"issued": 0, "expires": 1}, {"issued": -1, "expires": NOW_S}, {"issued": True}, {"expires": 1.5}),
        *({"issued": _MOST - 1, "expires": _MOST}, {"issued": _MOST + 1, "expires": _MOST + 2}),
        *({"relays": one} for one in wrong),
        *({"relays": {key: {"address": one}}} for one in addresses),
        *({"relays": {key: {"address": f"relay.example:{one}"}}} for one in (1, 65_535, 65_536)),
        {"relays": {key: {"address": "a:1"}, key.upper(): {"address": "b:2"}}},
        {"relays": {key.upper(): {"address": "[2001:db8::1]:80", "added": 1}}, "added": "x"},
        {"relays": {str(each.public_key): {} for each in KEYS}},
    ]
    for changed in borders:
        yield json.dumps({**document, **changed}).encode()
    for line in (key.upper(), f"{key}@a@b:80", f"{key}@relay.example:65536", f"{key} "):
        yield line.encode()
