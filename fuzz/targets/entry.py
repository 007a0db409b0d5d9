"""Discovery entries, as received and as they are written again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from dmsg.crypto.errors import InvalidKey
from dmsg.discovery.entry import ENTRY_LIMIT_BYTES, ClientPart, Entry, ServerPart
from dmsg.discovery.errors import DiscoveryError
from fuzz import words
from fuzz.oracles import KEYS, check_memory, outcome

DICTIONARY = words.ENTRY

_OWNER = KEYS[0]


def one_input(data: bytes) -> None:
    """The input is the entry. It is also signed with the right key, so that what is signed is arbitrary, too."""
    kind, entry = outcome(lambda: Entry.parse(data), DiscoveryError)
    if kind == "error":
        return
    check_memory(entry, len(data))
    written = entry.to_json()
    assert len(written) <= ENTRY_LIMIT_BYTES
    json.loads(written)
    again = Entry.parse(written)
    assert again.to_json() == written
    assert again.static == entry.static and again.delegated_servers == entry.delegated_servers
    valid, _ = outcome(entry.validate, DiscoveryError)
    verified, _ = outcome(entry.verify, DiscoveryError)
    if verified == "value":
        assert outcome(again.verify, DiscoveryError)[0] == "value"
    if valid == "value" and entry.server is not None:
        assert str(entry.server.host_port).isprintable()
    _check_signed(entry)


def _check_signed(entry: Entry) -> None:
    try:
        signed = replace(entry, static=_OWNER.public_key).sign(_OWNER)
    except InvalidKey:
        raise AssertionError("an entry with our key could not be signed") from None
    body = signed.to_json()
    if len(body) > ENTRY_LIMIT_BYTES:
        return
    read = Entry.parse(body)
    kind, _ = outcome(read.verify, DiscoveryError)
    points = all(outcome(key.check_point, InvalidKey)[0] == "value" for key in entry.delegated_servers)
    assert (kind == "value") == points
    altered = replace(read, timestamp=read.timestamp ^ 1)
    assert outcome(altered.verify, DiscoveryError)[0] == "error"


def seeds() -> Iterator[bytes]:
    """A client's, a relay's, one of both, of both generations; other letter case; the null key; without port."""
    key, relay = _OWNER.public_key, KEYS[1].public_key
    client = Entry("0.0.1", 3, 1_700_000_000_000_000_000, key, client=ClientPart((relay,)))
    server = Entry("0.1.0", 0, 1, key, server=ServerPart("192.0.2.1:80", 100))
    later = Entry("0.0.1", 0, 1, key, server=ServerPart("[2001:db8::1]:80", 9, later=True, server_type="public"))
    for entry in (client, server, later, replace(client, server=server.server, client_type="visor")):
        signed = entry.sign(_OWNER).to_json()
        yield signed
        yield signed.replace(b'"port":"",', b"")
        yield signed.replace(b'"static"', b'"\xc5\xbftatic"').replace(b'"version"', b'"VERSION"')
        yield signed.replace(str(key).encode(), b"0" * 66)
    yield client.to_json().replace(str(relay).encode(), b"02" + b"ff" * 32)
    yield replace(server, server=ServerPart("a<b>&\u2028", -1, port="80")).sign(_OWNER).to_json()
