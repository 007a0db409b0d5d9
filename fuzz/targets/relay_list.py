"""An operator's list of relays."""

from __future__ import annotations

import json
from collections.abc import Iterator

from dmsg.crypto.errors import InvalidKey
from dmsg.errors import InvalidAddress
from dmsg.relays.errors import RelayListError
from dmsg.relays.operator_list import KIND, ListedRelay, RelayList, sign_relay_list
from fuzz import words
from fuzz.oracles import KEYS, check_memory
from fuzz.signing import ISSUER, NOW_S, signed

DICTIONARY = words.DOCUMENT

_TRUSTED = frozenset({ISSUER.public_key})


def one_input(data: bytes) -> None:
    """The input is a document, or what the trusted key signs; or one relay as it is written in a file."""
    _read(data, None)
    document = signed(KIND, data)
    found = None if document is None else _read(document, None)
    if document is not None and found is not None:
        assert _read(document, found) is found
        assert not found.expired(NOW_S)
        written = sign_relay_list(found.relays, ISSUER, issued=found.issued, expires=found.expires)
        again = _read(written, None)
        assert again is not None and set(again.relays) == set(found.relays)
    text = data.decode("utf-8", "replace")
    try:
        relay = ListedRelay.parse(text)
    except (InvalidKey, InvalidAddress):
        return
    assert ListedRelay.parse(str(relay)) == relay


def _read(data: bytes, previous: RelayList | None) -> RelayList | None:
    try:
        found = RelayList.parse(data, _TRUSTED, NOW_S, previous=previous)
    except RelayListError as error:
        assert error.reason.replace("_", "").isalnum()
        return None
    check_memory(found, len(data), times=128)
    return found


def seeds() -> Iterator[bytes]:
    """A list, unsigned and signed; its borders; single relays."""
    key, other = (str(each.public_key) for each in KEYS[1:3])
    relays = {key: {"address": "192.0.2.1:80"}, other: {}}
    document = {"issued": NOW_S - 60, "expires": NOW_S + 60, "relays": relays}
    for changed in (
        {},
        {"expires": NOW_S},
        {"issued": NOW_S + 301},
        {"relays": {}},
        {"relays": {key: {"address": ""}}},
    ):
        text = json.dumps({**document, **changed}).encode()
        yield text
        yield signed(KIND, text) or b""
    for text in (key, f"{key}@[2001:db8::1]:80", f"{key}@relay.example:443", f"{key}@", "@"):
        yield text.encode()
