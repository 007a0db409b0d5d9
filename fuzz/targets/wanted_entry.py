"""The entry that replaces the one in discovery: a program's own halves, and other halves unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from dmsg.discovery.entry import (
    BASE_VERSION,
    DMSG,
    MESSAGING,
    SECURE_VERSION,
    ClientPart,
    Entry,
    ServerPart,
    is_available,
    promises_security,
)
from dmsg.discovery.errors import DiscoveryError
from dmsg.discovery.wanted import Unmanaged, WantedEntry
from fuzz import words
from fuzz.choices import Choices
from fuzz.oracles import KEYS, outcome

DICTIONARY = words.ENTRY

_KEY = KEYS[0]
_KEYS = tuple(key.public_key for key in KEYS[1:4])
_VERSIONS = ("0.0.1", "0.1.0", "0.0.1+messaging", "0.1.0+messaging", "0.2", "0.0.1+", "0.0.1+dmsg", "1", "+x", "")
_CLIENTS = (None, ClientPart(None), ClientPart(()), ClientPart(_KEYS[:1]), ClientPart(_KEYS))
_SERVERS = (
    *(None, ServerPart("9.9.9.9:80", 5), ServerPart("9.9.9.9:80", 0), ServerPart("9.9.9.9", 5, "80")),
    *(ServerPart("9.9.9.9:80", 5, None), ServerPart("9.9.9.9:80", 5, "80"), ServerPart("9.9.9.8:80", 5)),
    *(ServerPart("9.9.9.9:80", 5, None, True), ServerPart("9.9.9.9:80", 5, None, True, "public")),
)


def one_input(data: bytes) -> None:
    """The first bytes choose the wanted halves, the next ones the entry that is found; or the rest is that entry.

    An entry needs publishing until it meets the wanted halves, and not after: otherwise a program would publish for ever,
    or never.
    """
    choices = Choices(data)
    client = choices.pick((Unmanaged.HALF, *_CLIENTS))
    server = choices.pick((Unmanaged.HALF, *_SERVERS[:3]))
    wanted = WantedEntry(
        client,
        server,
        choices.pick((BASE_VERSION, SECURE_VERSION)),
        choices.pick((DMSG, MESSAGING)),
    )
    found = _found(choices)
    for one in (wanted, wanted.withdrawn()):
        _check(one, found)
    withdrawn = wanted.withdrawn()
    assert withdrawn.withdrawn() == withdrawn
    assert (withdrawn.promise, withdrawn.protocol) == (wanted.promise, wanted.protocol)
    for before, after in ((client, withdrawn.client), (server, withdrawn.server)):
        assert (after == before) or (type(after) is type(before) and not isinstance(before, Unmanaged))
    left = withdrawn.halves(None)
    assert left[0] is None or not left[0].delegated_servers
    assert left[1] is None or not left[1].available_connections


def _found(choices: Choices) -> Entry | None:
    how = choices.byte()
    if how % 4 == 3:
        kind, entry = outcome(lambda: Entry.parse(choices.rest()), DiscoveryError)
        return entry if kind == "value" else None
    if how % 4 == 2:
        return None
    version = choices.pick(_VERSIONS)
    return Entry(version, 1, 1, _KEY.public_key, choices.pick(_CLIENTS), choices.pick(_SERVERS))


def _check(wanted: WantedEntry, found: Entry | None) -> None:
    client, server = wanted.halves(found)
    version = wanted.version(found)
    assert client is not None or server is not None
    for half, own, kept in (
        (client, wanted.client, found and found.client),
        (server, wanted.server, found and found.server),
    ):
        expected = kept if isinstance(own, Unmanaged) else own
        assert half == expected or (half == ClientPart(()) and expected is None and server is None)
    promise, _, protocol = version.partition("+")
    secure = promises_security(wanted.promise)
    if isinstance(wanted.client, Unmanaged) and found is not None and found.client is not None:
        secure = secure or promises_security(found.version)
    assert promises_security(promise) is secure
    if not isinstance(wanted.server, Unmanaged):
        assert (protocol or DMSG) == wanted.protocol
    elif found is not None and found.server is not None:
        assert server == found.server and (found.server.later or (protocol or DMSG) == found.protocol)
    else:
        assert not protocol

    published = Entry(version, 2, 2, _KEY.public_key, client, server)
    read = _as_stored(published)
    assert wanted.is_met_by(published) and wanted.is_met_by(read)
    if found is not None:
        again = wanted.halves(found), wanted.version(found)
        is_same = found.version == again[1] and found.client == again[0][0] and _same(found.server, again[0][1])
        assert wanted.is_met_by(found) is is_same
        assert not is_same or is_available(found) is is_available(published)
    if not isinstance(wanted.client, Unmanaged) and not isinstance(wanted.server, Unmanaged):
        assert not wanted.is_met_by(replace(published, version=version + "x"))
    if server is not None and not isinstance(wanted.server, Unmanaged):
        other = replace(server, available_connections=server.available_connections + 1)
        assert not wanted.is_met_by(replace(published, server=other))
        assert not wanted.is_met_by(replace(published, server=None))
        assert not wanted.is_met_by(replace(published, server=replace(server, address="9.9.9.7:80")))
    if not isinstance(wanted.client, Unmanaged):
        assert not wanted.is_met_by(replace(published, client=ClientPart(_KEYS[1:])))


def _same(one: ServerPart | None, other: ServerPart | None) -> bool:
    """Whether both say the same; an absent port is an empty one."""
    if one is None or other is None:
        return one is other
    return (one.address, one.port or "", one.available_connections, one.later) == (
        other.address,
        other.port or "",
        other.available_connections,
        other.later,
    )


@lru_cache(maxsize=4_096)
def _as_stored(entry: Entry) -> Entry:
    """``entry`` as it is found later. Entries with an empty version or half a surrogate pair are refused."""
    server = entry.server
    stored = replace(entry, server=None if server is None else replace(server, port=server.port or ""))
    kind, read = outcome(lambda: Entry.parse(stored.to_json()), DiscoveryError)
    return read if kind == "value" else entry


def seeds() -> Iterator[bytes]:
    """Everything that may be wanted, over what may be found, in parts and as text."""
    for client in range(6):
        for server in range(4):
            yield bytes((client, server, client % 2, server % 2, 2))
            for found in range(3):
                number = 7 * client + 3 * server + 5 * found
                yield bytes((client, server, number % 2, number // 2 % 2, 0, number % 10, number % 5, number % 9))
    for version in range(10):
        yield bytes((0, 0, version % 2, 0, 0, version, 3, version % 9))
    texts = [Entry(version, 1, 1, _KEY.public_key, _CLIENTS[3], _SERVERS[1]).to_json() for version in _VERSIONS[:4]]
    texts.append(Entry(_VERSIONS[0], 1, 1, _KEY.public_key, None, _SERVERS[8]).to_json())
    for text in texts:
        yield b"\x00\x01\x00\x00\x03" + text
        yield b"\x02\x00\x01\x01\x03" + text
