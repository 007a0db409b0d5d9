"""The relay addresses that a discovery accepts, in any spelling."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from dmsg.address import HostPort, is_global
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.errors import AddressNotGlobal
from dmsg.discovery.relay_addresses import RelayAddresses, is_ip
from dmsg.errors import InvalidAddress
from fuzz.choices import Choices
from fuzz.oracles import KEYS, as_text, outcome

DICTIONARY = (
    b"127.0.0.1",
    b"10.0.0.1",
    b"::ffff:",
    b"64:ff9b::",
    b"2002:",
    b"fe80::",
    b"%eth0",
    b"224.0.0.1",
    b"fc00::",
)

_KEY: PublicKey = KEYS[0].public_key
_PLACES = ("", "127.0.0.1", "::1", "10.0.0.1", "fd00::1", "0.0.0.0", "::", "9.9.9.9", "2600::1", "relay.example")
_IPS = (
    *("127.0.0.1", "127.255.0.9", "10.0.0.1", "192.168.1.1", "100.64.0.1", "169.254.1.1", "0.0.0.0", "0.1.2.3"),
    *(
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "9.9.9.9",
        "192.0.2.1",
        "::1",
        "::",
        "fd00::1",
        "fe80::1",
        "ff02::1",
    ),
    *("2600::1", "2001:db8::1", "64:ff9b::7f00:1", "64:ff9b::909:909", "2002:7f00:1::", "2002:909:909::", "::7f00:1"),
)


def one_input(data: bytes) -> None:
    """The first bytes choose what discovery accepts and where it listens; the rest is a host, as a number or as text."""
    choices = Choices(data)
    private = choices.pick((None, True, False))
    addresses = RelayAddresses(private)
    places = [choices.pick(_PLACES) for _ in range(choices.below(3))]
    for place in places:
        addresses.listens_on(place)
    how = choices.byte() % 4
    if how == 0:
        host = choices.pick(_IPS)
    elif how == 1:
        host = str(ipaddress.IPv4Address(choices.below(1 << 32)))
    elif how == 2:
        host = str(ipaddress.IPv6Address(choices.below(1 << 128)))
    else:
        host = as_text(choices.rest())
    takes = addresses.takes(host)
    assert takes is _expected(host, private, places)
    assert not RelayAddresses(False).takes(host) or takes
    assert not takes or RelayAddresses(True).takes(host)
    _check_spellings(addresses, host, takes)
    _check_entry(addresses, host, takes)


def _expected(host: str, private: bool | None, places: list[str]) -> bool:
    """Whether a relay at ``host`` is acceptable according to the documentation."""
    address = _parsed(host)
    assert is_ip(host) is (address is not None)
    if address is None or is_global(host):
        return True
    if private is not None:
        loopback = inside = private
    else:
        own = [one for one in map(_parsed, places) if one is not None and not one.is_unspecified]
        own = [one for one in own if not one.is_global]
        inside = any(not one.is_loopback for one in own)
        loopback = bool(own)
    if address.is_loopback:
        return loopback
    if address.is_multicast or address.is_unspecified or address.is_reserved or address.is_link_local:
        return False
    return inside


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _check_spellings(addresses: RelayAddresses, host: str, takes: bool) -> None:
    """A host is the same in any spelling, and an IPv4 host has no advantage when it is written as IPv6."""
    address = _parsed(host)
    if address is None:
        return
    for spelt in (address.exploded, address.exploded.upper(), f"{address.compressed}%eth0"):
        assert addresses.takes(spelt) is takes
    if address.version == 4:
        number = int(address)
        mapped = ipaddress.IPv6Address(0xFFFF << 32 | number)
        assert addresses.takes(str(mapped)) is addresses.takes(mapped.exploded) is takes
        translated = ipaddress.IPv6Address((0x64_FF9B << 96) | number)
        assert addresses.takes(str(translated)) is is_global(host)
        tunnelled = ipaddress.IPv6Address(0x2002 << 112 | number << 80)
        assert RelayAddresses(False).takes(str(tunnelled)) is is_global(host)


def _check_entry(addresses: RelayAddresses, host: str, takes: bool) -> None:
    text = f"[{host}]:80" if ":" in host else f"{host}:80"
    kind, _ = outcome(lambda: HostPort.parse(text), InvalidAddress)
    if kind == "error":
        return
    for server in (ServerPart(text, 1), ServerPart(text[:-3], 1, "80")):
        entry = Entry("0.0.1", 0, 1, _KEY, None, server)
        kind, _ = outcome(lambda entry=entry: addresses.check(entry), AddressNotGlobal)  # type: ignore[misc]
        assert (kind == "value") is takes
    addresses.check(Entry("0.0.1", 0, 1, _KEY, ClientPart(())))


def seeds() -> Iterator[bytes]:
    """Addresses of every kind, for a discovery of every kind; names, and texts that are neither."""
    kinds = [b"\x01\x00", b"\x02\x01\x01", b"\x00\x00", *(bytes((0, 1, place)) for place in range(len(_PLACES)))]
    for kind in (*kinds, b"\x00\x02\x01\x03"):
        for number in range(len(_IPS)):
            yield kind + bytes((0, number))
    for host in (
        b"relay.example",
        b"",
        b"1.2.3",
        b"::ffff:10.0.0.1",
        b"fe80::1%eth0",
        b"[::1]",
        b"\xff\x00",
        b"9.9.9.9%1",
    ):
        yield b"\x00\x01\x01\x03" + host
    yield b"\x00\x00\x01\x7f\x00\x00\x01"
    yield b"\x00\x00\x02\x20\x02" + bytes(14)
