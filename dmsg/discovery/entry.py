"""A discovery entry: what an entity publishes about itself, signed. Pure.

:ref:`spec-entries`, :ref:`spec-entry-signature`, :ref:`spec-entry-checks`. The signature covers the canonical
JSON without the ``signature`` member: Go's struct order, no spaces, Go's escaping, ``"port":""`` always there. The
implementation of 2023 signs the same way over other members (:ref:`spec-later-entries`); both forms are read, verified
and written.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

from dmsg.address import HostPort
from dmsg.crypto.errors import InvalidKey, InvalidSignature
from dmsg.crypto.keys import SIGNATURE_BYTES, PublicKey, SecretKey, recover
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

#: Largest entry in bytes, as received and as we write it. An entry with as many relays as it may name has 5 KiB; the rest is
#: room for white space and unknown members.
ENTRY_LIMIT_BYTES: Final = 16 * 1024
#: Most relays an entry may name. Clients name a handful; each costs a reader a square root, and room in the store.
DELEGATED_SERVERS_LIMIT: Final = 64
#: Longest version in bytes of UTF-8: "0.0.1" has 5.
VERSION_LIMIT_BYTES: Final = 32
#: Keys of relays remembered as points of the curve: most entries name the same few.
_KNOWN_POINTS: Final = 4096
#: The version of entries that promise the base protocol only, and of those that promise end-to-end security.
BASE_VERSION: Final = "0.0.1"
SECURE_VERSION: Final = "0.1.0"
#: Protocols of relays (:ref:`spec-entry-protocol`): the dmsg protocol, which entries do not name; the messaging system; and
#: the dmsg protocol of 2023, which the form of an entry shows.
DMSG: Final = "dmsg"
MESSAGING: Final = "messaging"
LATER_DMSG: Final = "dmsg-2023"
#: Protocols of which a discovery lists relays.
PROTOCOLS: Final = (DMSG, MESSAGING)

_UINT64_MODULUS: Final = 1 << 64
_INT64_MIN: Final = -(1 << 63)
_INT64_MAX: Final = (1 << 63) - 1
_VERSION: Final = re.compile(r"([0-9]+)\.([0-9]+)(?:\.|\Z)")
_NULL_KEY_TEXTS: Final = ("", "0" * 66)
#: Most bytes that one byte of input can become in canonical form ("<" becomes six).
_GROWTH: Final = 6


def promises_security(version: str) -> bool:
    """Whether the version of an entry or a hello promises :ref:`spec-extension`: major.minor of at least 0.1."""
    numbers = _VERSION.match(version.partition("+")[0])
    return numbers is not None and bool((numbers[1] + numbers[2]).strip("0"))


def version_with(promise: str, protocol: str) -> str:
    """The version of an entry that promises ``promise`` and whose relay, if it has one, speaks ``protocol``."""
    return promise if protocol == DMSG else f"{promise}+{protocol}"


@dataclass(frozen=True, slots=True)
class ClientPart:
    """A client's half of an entry: the relays through which it can be reached.

    ``None`` stands for Go's nil list, which is written ``null`` and not ``[]``; both mean no relays.
    """

    delegated_servers: tuple[PublicKey, ...] | None

    def _json(self) -> str:
        if self.delegated_servers is None:
            return '{"delegated_servers":null}'
        keys = ",".join(f'"{key}"' for key in self.delegated_servers)
        return f'{{"delegated_servers":[{keys}]}}'


@dataclass(frozen=True, slots=True)
class ServerPart:
    """A relay's half of an entry: its ``address`` and how many connections it has left.

    ``port`` is almost always empty, or repeats the port in ``address``. It is ``None`` when it was not received, which only
    matters for the signature (:ref:`spec-canonical-json`).

    ``later`` marks the form of 2023: ``availableSessions`` instead of ``available_connections``, no ``port``, and
    ``server_type`` unless that is empty. A relay of that generation speaks :data:`LATER_DMSG`.
    """

    address: str
    available_connections: int
    port: str | None = ""
    later: bool = False
    server_type: str = ""

    def _json(self, with_port: bool) -> str:
        address = json_text.quote(self.address)
        if self.later:
            kind = f',"serverType":{json_text.quote(self.server_type)}' if self.server_type else ""
            return f'{{"address":{address},"availableSessions":{self.available_connections}{kind}}}'
        port = f'"port":{json_text.quote(self.port or "")},' if with_port else ""
        return f'{{"address":{address},{port}"available_connections":{self.available_connections}}}'

    @property
    def host_port(self) -> HostPort:
        """Where to connect. Raises ``InvalidAddress`` for anything but ASCII host and port.

        ``port`` counts when ``address`` has none; an IPv6 address then needs no brackets.
        """
        try:
            return HostPort.parse(self.address)
        except InvalidAddress:
            if not self.port:
                raise
        bare = ":" in self.address and not self.address.startswith("[")
        return HostPort.parse(f"[{self.address}]:{self.port}" if bare else f"{self.address}:{self.port}")


@dataclass(frozen=True, slots=True)
class Entry:
    """An entity's entry. It is immutable: each iteration is a new object.

    ``sequence`` counts iterations from 0 (unsigned, 64 bits), ``timestamp`` is Unix time in nanoseconds (signed, 64
    bits), ``static`` the entity's key, ``signature`` 130 hex digits or empty. At least one of ``client`` and ``server``
    is there in a valid entry; an entity may be both. ``client_type`` is of the form of 2023: empty when absent.
    """

    version: str
    sequence: int
    timestamp: int
    static: PublicKey
    client: ClientPart | None = None
    server: ServerPart | None = None
    signature: str = ""
    client_type: str = ""
    # The two texts, cached on first use: an entry is written far more often than made.
    _signed_text: bytes = field(default=b"", init=False, repr=False, compare=False)
    _whole_text: bytes = field(default=b"", init=False, repr=False, compare=False)
    # Whether the signature was checked and is valid.
    _verified: bool = field(default=False, init=False, repr=False, compare=False)
    # Whether the signature covers the text without ``port``; ``None`` until that was checked.
    _without_port: bool | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def delegated_servers(self) -> tuple[PublicKey, ...]:
        """The relays through which the entity can be reached as a client; empty when it is no client, or on no relay."""
        return (self.client.delegated_servers or ()) if self.client is not None else ()

    @property
    def promise(self) -> str:
        """The version without the relay's protocol."""
        return self.version.partition("+")[0]

    @property
    def protocol(self) -> str:
        """The entity's protocol as a relay (:ref:`spec-entry-protocol`); :data:`DMSG` when the entry names none."""
        if self.server is not None and self.server.later:
            return LATER_DMSG
        return self.version.partition("+")[2] or DMSG

    # --- reading -------------------------------------------------------------------------------------------------

    @classmethod
    def parse(cls, data: bytes) -> Entry:
        """Read an entry as received: at most :data:`ENTRY_LIMIT_BYTES`, members in any order and letter case.

        Unknown members are ignored and ``null`` counts as absent, as in Go. Raises ``BadInput`` for a malformed entry,
        and the error of :meth:`validate` for one with the null key, which no ``Entry`` can hold. The signature is not
        checked, nor whether delegated servers are points of the curve: see :meth:`verify`.
        """
        try:
            value = json_text.decode(data, ENTRY_LIMIT_BYTES)
        except MalformedJson as error:
            raise BadInput(str(error)) from None
        entry = cls.from_object(value)
        if len(data) * _GROWTH > ENTRY_LIMIT_BYTES and len(entry.to_json()) > ENTRY_LIMIT_BYTES:
            raise BadInput(f"longer than {ENTRY_LIMIT_BYTES} bytes when written out")
        return entry

    @classmethod
    def from_object(cls, value: Any) -> Entry:
        """As :meth:`parse`, from JSON that :func:`dmsg.http.json_text.decode` has read."""
        members = _members(value, _ENTRY_MEMBERS)
        version = members.get("version") or ""
        if len(version.encode()) > VERSION_LIMIT_BYTES:
            raise BadInput(f"the version is longer than {VERSION_LIMIT_BYTES} bytes")
        signature = members.get("signature") or ""
        client, server = members.get("client"), members.get("server")
        static = members.get("static")
        if static is None:
            _validate(version, signature, client is None and server is None)
            raise NilKeys
        return cls(
            version=version,
            sequence=members.get("sequence") or 0,
            timestamp=members.get("timestamp") or 0,
            static=static,
            client=client,
            server=server,
            signature=signature,
            client_type=members.get("client_type") or "",
        )

    # --- writing -------------------------------------------------------------------------------------------------

    def signed_json(self, *, with_port: bool = True) -> bytes:
        """The text that the signature covers (:ref:`spec-canonical-json`); ``with_port=False`` leaves ``port`` out."""
        if with_port and self._signed_text:
            return self._signed_text
        client = f',"client":{self.client._json()}' if self.client is not None else ""
        kind = f',"client_type":{json_text.quote(self.client_type)}' if self.client_type else ""
        server = f',"server":{self.server._json(with_port)}' if self.server is not None else ""
        text = (
            f'{{"version":{json_text.quote(self.version)},"sequence":{self.sequence},"timestamp":{self.timestamp},'
            f'"static":"{self.static}"{client}{kind}{server}}}'
        ).encode()
        if with_port:
            object.__setattr__(self, "_signed_text", text)
        return text

    def to_json(self) -> bytes:
        """The whole entry in canonical JSON, signature included.

        An entry that was received and signed without ``port`` is written without it again, so that its readers hash the
        text that was signed.
        """
        if self._whole_text:
            return self._whole_text
        body = self.signed_json(with_port=not self._is_signed_without_port())
        if self.signature:
            body = b'%s,"signature":%s}' % (body[:-1], json_text.quote(self.signature).encode())
        object.__setattr__(self, "_whole_text", body)
        return body

    def sign(self, secret_key: SecretKey) -> Entry:
        """This entry with a signature by ``secret_key``. Raises ``InvalidKey`` unless that is the secret key of ``static``."""
        if secret_key.public_key != self.static:
            raise InvalidKey("an entry is signed with the secret key of its own static key")
        server = self.server
        entry = replace(self, server=replace(server, port=server.port or "") if server is not None else None)
        return replace(entry, signature=secret_key.sign(entry.signed_json()).hex())

    # --- checking ------------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Raise ``Unauthorized`` unless the signature is that of ``static``.

        A server half that came without ``port`` may be signed with ``"port":""`` or without
        (:ref:`spec-canonical-json`). Raise ``BadInput`` for a delegated server that is not a point of the curve: it would
        crash a base client. That is checked after the signature, so that a forger cannot cause this work.
        """
        if self._verified:
            return
        signature = self._signature_bytes()
        if not self._is_signature_over(signature, self.signed_json()) and not self._is_signed_without_port():
            raise Unauthorized
        try:
            for key in self.delegated_servers:
                _check_point(key)
        except InvalidKey as error:
            raise BadInput(str(error)) from None
        object.__setattr__(self, "_verified", True)

    def _signature_bytes(self) -> bytes:
        try:
            if len(self.signature) == 2 * SIGNATURE_BYTES:
                return bytes.fromhex(self.signature)
        except ValueError:
            pass
        raise Unauthorized("a signature is 130 hex digits")

    def _is_signature_over(self, signature: bytes, text: bytes) -> bool:
        try:
            return recover(signature, text) == self.static
        except InvalidSignature:
            return False

    def _is_signed_without_port(self) -> bool:
        if self.server is None or self.server.port is not None:
            return False
        without = self._without_port
        if without is None:
            try:
                without = self._is_signature_over(self._signature_bytes(), self.signed_json(with_port=False))
            except Unauthorized:
                without = False
            object.__setattr__(self, "_without_port", without)
        return without

    def validate(self) -> None:
        """Check the form, in the reference's order and with its errors: there is a version, a signature, at least one half.

        A last check is our own: a server's address must be ASCII ``host:port``, else ``BadInput``. Signature and sequence
        are not checked. (:meth:`parse` has already refused the null key.)
        """
        _validate(self.version, self.signature, self.client is None and self.server is None)
        if self.server is not None:
            try:
                self.server.host_port  # noqa: B018 - parsed for its errors
            except InvalidAddress as error:
                raise BadInput(str(error)) from None

    def check_iteration(self, old: Entry) -> None:
        """Raise ``WrongSequence`` or ``WrongTime`` unless this entry may replace ``old`` (:ref:`spec-entry-checks`)."""
        check_iteration(self.sequence, self.timestamp, old.sequence, old.timestamp)


def is_available(entry: Entry) -> bool:
    """Whether ``entry`` is of an available server: a relay with room that is not of 2023."""
    server = entry.server
    return server is not None and server.available_connections > 0 and not server.later


def check_iteration(sequence: int, timestamp: int, old_sequence: int, old_timestamp: int) -> None:
    """The iteration rules: the sequence is the old one plus 1 (mod 2^64), then the timestamp is strictly later."""
    if sequence != next_sequence(old_sequence):
        raise WrongSequence
    if timestamp <= old_timestamp:
        raise WrongTime


def next_sequence(sequence: int) -> int:
    """The sequence after ``sequence``; 2^64-1 is followed by 0."""
    return (sequence + 1) % _UINT64_MODULUS


def _validate(version: str, signature: str, halves_missing: bool) -> None:
    failed: type[DiscoveryError] | None = None
    if not version:
        failed = NoVersion
    elif not signature:
        failed = NoSignature
    elif halves_missing:
        failed = NoClientOrServer
    if failed is not None:
        raise failed


# --- members of the JSON objects: name -> reader; a reader gets a value that is not null, or raises BadInput ----------


def _text(value: Any) -> str:
    if type(value) is not str:
        raise BadInput("a text is expected")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadInput("a text has half a surrogate pair") from None
    return value


def _uint64(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _UINT64_MODULUS:
        raise BadInput("an integer from 0 to 2^64-1 is expected")
    return value


def _int64(value: Any) -> int:
    if type(value) is not int or not _INT64_MIN <= value <= _INT64_MAX:
        raise BadInput("an integer from -2^63 to 2^63-1 is expected")
    return value


def _key(value: Any, read: Callable[[str], PublicKey] = PublicKey.parse) -> PublicKey | None:
    if type(value) is not str:
        raise BadInput("a key is a text")
    if value in _NULL_KEY_TEXTS:
        return None
    try:
        return read(value)
    except InvalidKey as error:
        raise BadInput(str(error)) from None


def _keys(value: Any) -> tuple[PublicKey, ...]:
    if type(value) is not list:
        raise BadInput("delegated_servers is a list")
    if len(value) > DELEGATED_SERVERS_LIMIT:
        raise BadInput(f"more than {DELEGATED_SERVERS_LIMIT} delegated servers")
    keys = []
    for one in value:
        key = _key(one, PublicKey.parse_unchecked)
        if key is None:
            raise BadInput("a delegated server is the null key")
        keys.append(key)
    return tuple(keys)


def _client(value: Any) -> ClientPart:
    return ClientPart(_members(value, _CLIENT_MEMBERS).get("delegated_servers"))


def _server(value: Any) -> ServerPart:
    members = _members(value, _SERVER_MEMBERS)
    address, sessions = members.get("address") or "", members.get("availablesessions")
    if sessions is not None and "available_connections" not in members:
        return ServerPart(address, sessions, later=True, server_type=members.get("servertype") or "")
    return ServerPart(address, members.get("available_connections") or 0, port=members.get("port"))


_check_point: Final = lru_cache(maxsize=_KNOWN_POINTS)(PublicKey.check_point)

_Readers = dict[str, Callable[[Any], Any]]
_ENTRY_MEMBERS: Final[_Readers] = {
    "version": _text,
    "sequence": _uint64,
    "timestamp": _int64,
    "static": _key,
    "client": _client,
    "client_type": _text,
    "server": _server,
    "signature": _text,
}
_CLIENT_MEMBERS: Final[_Readers] = {"delegated_servers": _keys}
_SERVER_MEMBERS: Final[_Readers] = {
    "address": _text,
    "port": _text,
    "available_connections": _int64,
    "availablesessions": _int64,
    "servertype": _text,
}


def _members(value: Any, readers: _Readers) -> dict[str, Any]:
    """The known members of a JSON object, read. Letter case is folded as Go folds it (long s and Kelvin sign too)."""
    if value is None:
        return {}
    if type(value) is not dict:
        raise BadInput("an object is expected")
    found: dict[str, Any] = {}
    for written, content in value.items():
        name = written if written in readers else written.lower().replace("\u017f", "s")
        if name not in readers:
            continue
        if name in found:
            raise BadInput(f"{name} is there twice")
        found[name] = None if content is None else readers[name](content)
    return found
