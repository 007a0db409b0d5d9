"""Discovery entries, as received and as they are written again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dmsg.address import HostPort
from dmsg.crypto.errors import InvalidKey, InvalidSignature
from dmsg.crypto.keys import PublicKey, recover
from dmsg.discovery.entry import (
    ENTRY_LIMIT_BYTES,
    ClientPart,
    Entry,
    ServerPart,
    check_iteration,
    is_available,
    promises_security,
    version_with,
)
from dmsg.discovery.errors import (
    BadInput,
    DiscoveryError,
    NilKeys,
    NoClientOrServer,
    NoSignature,
    NoVersion,
    Unauthorized,
    WrongSequence,
    WrongTime,
)
from dmsg.errors import InvalidAddress
from dmsg.http import json_text
from dmsg.http.errors import MalformedJson
from fuzz import words
from fuzz.oracles import KEYS, check_memory, outcome

DICTIONARY = words.ENTRY

_OWNER = KEYS[0]
_KEY = re.compile(r"0[23][0-9a-fA-F]{64}", re.ASCII)
_NULL_KEYS = ("", "0" * 66)
_SIGNATURE = re.compile(r"[0-9a-fA-F]{130}", re.ASCII)
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_VERSION = re.compile(r"(\d{1,20})\.(\d{1,20})(?:\.[^+]*)?(?:\+.*)?", re.ASCII | re.DOTALL)
#: Letters that are one of the Latin alphabet in another case.
_FOLDED = {"s": "\u017f", "k": "\u212a"}


class _Bad(Exception):
    """Raised if a value is no entry."""


@dataclass
class _Plain:
    """An entry according to the specification. Keys are texts in lower case."""

    version: str
    sequence: int
    timestamp: int
    static: str | None
    client: tuple[list[str] | None] | None
    client_type: str
    server: dict[str, Any] | None
    signature: str

    def text(self, *, port: bool = True, signature: bool = False) -> bytes:
        """Canonical JSON, made by a writer that is not ours."""
        members: dict[str, Any] = {
            "version": self.version,
            "sequence": self.sequence,
            "timestamp": self.timestamp,
            "static": self.static,
        }
        if self.client is not None:
            members["client"] = {"delegated_servers": self.client[0]}
        if self.client_type:
            members["client_type"] = self.client_type
        server = self.server
        if server is not None and server["later"]:
            members["server"] = {"address": server["address"], "availableSessions": server["available_connections"]}
            if server["server_type"]:
                members["server"]["serverType"] = server["server_type"]
        elif server is not None:
            ports = {"port": server["port"] or ""} if port else {}
            left = server["available_connections"]
            members["server"] = {"address": server["address"], **ports, "available_connections": left}
        if signature and self.signature:
            members["signature"] = self.signature
        text = json.dumps(members, ensure_ascii=False, separators=(",", ":"))
        for one in "<>&\u2028\u2029":
            text = text.replace(one, f"\\u{ord(one):04x}")
        return text.encode()

    def signs(self, *, port: bool) -> bool:
        """Whether the signature is that of the key over the text."""
        if not _SIGNATURE.fullmatch(self.signature):
            return False
        try:
            return str(recover(bytes.fromhex(self.signature), self.text(port=port))) == self.static
        except InvalidSignature:
            return False

    @property
    def formless(self) -> type[DiscoveryError] | None:
        """The error for the form of the entry, if it has one."""
        if not self.version:
            return NoVersion
        if not self.signature:
            return NoSignature
        return NoClientOrServer if self.client is None and self.server is None else None


def _pick(value: Any, names: Sequence[str]) -> dict[str, Any]:
    """The members of an object that are known and not null, under their names in lower case."""
    if not isinstance(value, dict):
        raise _Bad
    found: dict[str, Any] = {}
    for written, content in value.items():
        for name in (written,) if written in names else names:
            if name == written or _is_in_other_case(name, written):
                if name in found:
                    raise _Bad
                found[name] = content
    return found


def _is_in_other_case(name: str, written: str) -> bool:
    return len(name) == len(written) and all(
        got in (one, one.upper(), _FOLDED.get(one)) for one, got in zip(name, written, strict=True)
    )


def _text(members: dict[str, Any], name: str) -> str:
    value = members.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or _HALF_PAIR.search(value):
        raise _Bad
    return value


def _number(members: dict[str, Any], name: str, first: int, last: int) -> int:
    value = members.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not first <= value <= last:
        raise _Bad
    return value


def _read(value: Any) -> _Plain:
    """An entry from a JSON value, by the words of the specification."""
    names = ("version", "sequence", "timestamp", "static", "client", "client_type", "server", "signature")
    members = _pick(value, names) if value is not None else {}
    version = _text(members, "version")
    if len(version.encode()) > 32:
        raise _Bad
    static: str | None = _text(members, "static").lower()
    if static in _NULL_KEYS:
        static = None
    elif not _KEY.fullmatch(static or "") or outcome(lambda: PublicKey.parse(static or ""), InvalidKey)[0] == "error":
        raise _Bad
    return _Plain(
        version,
        _number(members, "sequence", 0, 2**64 - 1),
        _number(members, "timestamp", -(2**63), 2**63 - 1),
        static,
        None if members.get("client") is None else (_read_keys(members["client"]),),
        _text(members, "client_type"),
        None if members.get("server") is None else _read_server(members["server"]),
        _text(members, "signature"),
    )


def _read_keys(value: Any) -> list[str] | None:
    keys = _pick(value, ("delegated_servers",)).get("delegated_servers")
    if keys is None:
        return None
    if not isinstance(keys, list) or len(keys) > 64:
        raise _Bad
    if not all(isinstance(one, str) and _KEY.fullmatch(one) for one in keys):
        raise _Bad
    return [one.lower() for one in keys]


def _read_server(value: Any) -> dict[str, Any]:
    members = _pick(value, ("address", "port", "available_connections", "availablesessions", "servertype"))
    address, port, kind = _text(members, "address"), _text(members, "port"), _text(members, "servertype")
    connections = _number(members, "available_connections", -(2**63), 2**63 - 1)
    sessions = _number(members, "availablesessions", -(2**63), 2**63 - 1)
    later = members.get("availablesessions") is not None and "available_connections" not in members
    return {
        "address": address,
        "port": None if later or members.get("port") is None else port,
        "available_connections": sessions if later else connections,
        "later": later,
        "server_type": kind if later else "",
    }


def _expected(data: bytes) -> type[DiscoveryError] | tuple[_Plain, bool, bytes]:
    """The entry in ``data``, whether it is signed without ``port``, and its canonical text; or the error."""
    try:
        plain = _read(json_text.decode(data, ENTRY_LIMIT_BYTES))
    except (_Bad, MalformedJson):
        return BadInput
    if plain.static is None:
        return plain.formless or NilKeys
    server = plain.server
    bare = server is not None and not server["later"] and server["port"] is None and plain.signs(port=False)
    written = plain.text(port=not bare, signature=True)
    return BadInput if len(written) > ENTRY_LIMIT_BYTES else (plain, bare, written)


def one_input(data: bytes) -> None:
    """The input is the entry. It is also signed with the right key, so that signed entries are arbitrary, too."""
    kind, entry = outcome(lambda: Entry.parse(data), DiscoveryError)
    expected = _expected(data)
    if kind == "error":
        assert entry is expected
        return
    assert isinstance(expected, tuple)
    plain, bare, written = expected
    check_memory(entry, len(data))
    assert entry.to_json() == written == entry.to_json() and len(written) <= ENTRY_LIMIT_BYTES
    _check_read(entry, plain)
    again = Entry.parse(written)
    assert again.to_json() == written
    assert again.static == entry.static and again.delegated_servers == entry.delegated_servers
    _check_form(entry, plain)
    wanted: type[DiscoveryError] | None = None
    if not (bare or plain.signs(port=True)):
        wanted = Unauthorized
    elif any(outcome(key.check_point, InvalidKey)[0] == "error" for key in entry.delegated_servers):
        wanted = BadInput
    for one in (entry, entry, again):
        assert outcome(one.verify, DiscoveryError)[1] is wanted
    _check_iterations(entry)
    _check_signed(entry, plain)


def _check_read(entry: Entry, plain: _Plain) -> None:
    """Nothing of the input is lost."""
    assert entry.version == plain.version and entry.signature == plain.signature
    assert entry.sequence == plain.sequence and entry.timestamp == plain.timestamp
    assert str(entry.static) == plain.static and entry.client_type == plain.client_type
    keys = None if plain.client is None else plain.client[0]
    assert (entry.client is None) == (plain.client is None)
    assert [str(one) for one in entry.delegated_servers] == (keys or [])
    assert entry.client is None or (entry.client.delegated_servers is None) == (keys is None)
    server, expected = entry.server, plain.server
    assert (server is None) == (expected is None)
    if server is not None and expected is not None:
        assert server.address == expected["address"] and server.server_type == expected["server_type"]
        assert server.available_connections == expected["available_connections"]
        assert server.later == expected["later"] and (server.later or server.port == expected["port"])
    assert is_available(entry) == bool(expected and expected["available_connections"] > 0 and not expected["later"])


def _check_form(entry: Entry, plain: _Plain) -> None:
    """The promises of a version, and the form of the entry; a separate port counts if the address has none."""
    promise, _, protocol = plain.version.partition("+")
    later = plain.server is not None and plain.server["later"]
    assert entry.promise == promise and entry.protocol == ("dmsg-2023" if later else protocol or "dmsg")
    assert version_with(promise, "dmsg") == promise and version_with(promise, "messaging") == f"{promise}+messaging"
    numbers = _VERSION.fullmatch(plain.version)
    if numbers or "." not in promise:
        assert promises_security(plain.version) == bool(numbers and (int(numbers[1]) or int(numbers[2])))
    wanted = plain.formless
    if plain.server is not None:
        address, port = plain.server["address"], plain.server["port"]
        texts = (address, f"{address}:{port}", f"[{address}]:{port}") if port else (address,)
        place = next((one for one in map(_place, texts) if one is not None), None)
        server = entry.server
        assert server is not None
        kind, found = outcome(lambda: server.host_port, InvalidAddress)
        assert (kind == "error") == (place is None)
        if place is not None:
            assert found == place and str(found).isprintable()
        elif wanted is None:
            wanted = BadInput
    assert outcome(entry.validate, DiscoveryError)[1] is wanted


def _place(text: str) -> HostPort | None:
    try:
        return HostPort.parse(text)
    except InvalidAddress:
        return None


def _check_iterations(entry: Entry) -> None:
    """The next entry has the next sequence and a later time; no other entry may follow."""
    sequence, timestamp = entry.sequence, entry.timestamp
    following = (sequence + 1) % 2**64
    check_iteration(following, timestamp + 1, sequence, timestamp)
    assert _refused(following, timestamp, entry) is _refused(following, timestamp - 1, entry) is WrongTime
    assert _refused(sequence, timestamp + 1, entry) is _refused(sequence + 2, timestamp, entry) is WrongSequence
    assert outcome(lambda: entry.check_iteration(entry), DiscoveryError)[1] is WrongSequence


def _refused(sequence: int, timestamp: int, old: Entry) -> object:
    return outcome(lambda: check_iteration(sequence, timestamp, old.sequence, old.timestamp), DiscoveryError)[1]


def _check_signed(entry: Entry, plain: _Plain) -> None:
    ours = replace(entry, static=_OWNER.public_key)
    assert outcome(lambda: ours.sign(KEYS[1]), InvalidKey)[0] == "error"
    try:
        signed = ours.sign(_OWNER)
    except InvalidKey:
        raise AssertionError("an entry with our key could not be signed") from None
    body = signed.to_json()
    if len(body) > ENTRY_LIMIT_BYTES:
        return
    text = replace(plain, static=str(_OWNER.public_key)).text()
    assert body == b'%s,"signature":"%s"}' % (text[:-1], signed.signature.encode())
    read = Entry.parse(body)
    kind, _ = outcome(read.verify, DiscoveryError)
    points = all(outcome(key.check_point, InvalidKey)[0] == "value" for key in entry.delegated_servers)
    assert (kind == "value") == points
    altered = replace(read, timestamp=read.timestamp ^ 1)
    assert outcome(altered.verify, DiscoveryError)[0] == "error"


def seeds() -> Iterator[bytes]:
    """Entries of a client, of a relay and of both, of both generations; other letter case; the null key; without port."""
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
    yield from _more_seeds(client, server, later)


def _more_seeds(client: Entry, server: Entry, later: Entry) -> Iterator[bytes]:
    """Signed without port; incomplete forms; values just within and just beyond each limit."""
    without = replace(server, server=ServerPart("192.0.2.1", 0, port=None))
    bare = replace(without, signature=_OWNER.sign(without.signed_json(with_port=False)).hex())
    yield bare.to_json()
    yield bare.to_json().replace(b'"address"', b'"port":null,"address"')
    yield replace(bare, signature=bare.signature[:-1]).to_json()
    yield replace(bare, signature=bare.signature[:-1] + "g").to_json()
    signed = replace(server, server=ServerPart("192.0.2.1", 1, port="80"), version="0.0.1+messaging").sign(_OWNER)
    yield signed.to_json()
    yield signed.to_json().replace(b'"available_connections":1', b'"availableSessions":1,"available_connections":null')
    yield b"null"
    yield b"{}"
    yield b'{"version":"1"}'
    yield b'{"version":"1","signature":"a"}'
    yield b'{"version":"1","signature":"a","client":{}}'
    yield b'{"version":"1","signature":"a","server":null,"static":"","client":null}'
    yield later.to_json().replace(b',"serverType":"public"', b"")
    yield b'{"static":"%s","STATIC":null}' % str(server.static).encode()
    yield b'{"static":"%s","client":{"delegated_servers":[]}}' % str(server.static).encode()
    yield b'{"static":"%s","client":{"delegated_servers":[null]}}' % str(server.static).encode()
    yield b'{"static":"%s","client":{"delegated_servers":[""]}}' % str(server.static).encode()
    yield b'{"static":"%s","client":{"delegated_servers":1}}' % str(server.static).encode()
    yield b'{"static":1,"client":[]}'
    for version in ("x" * 32, "x" * 33, "\u00e4" * 16, "0.0", "0.1", "1.0", "0.x", "1"):
        yield replace(client, version=version).sign(_OWNER).to_json()
    keys = (KEYS[1].public_key,)
    for count in (0, 64, 65):
        yield replace(client, client=ClientPart(keys * count)).sign(_OWNER).to_json().replace(b"[]", b"null")
    for number in (-(2**63) - 1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**64):
        yield replace(server, sequence=number, timestamp=0).to_json()
        yield replace(server, timestamp=number).to_json()
        yield replace(server, server=ServerPart("192.0.2.1:80", number)).to_json()
    # "<" takes six bytes when escaped; an entry of three thousand other characters takes no more than it has.
    room = ENTRY_LIMIT_BYTES - len(replace(server, client_type="x").to_json()) + 1
    for size in (room, room + 1):
        text = "<" * (size // 6) + "x" * (size % 6)
        yield replace(server, client_type=text).to_json().replace(b"\\u003c", b"<")
    yield replace(server, client_type="x" * 3_000).sign(_OWNER).to_json()
