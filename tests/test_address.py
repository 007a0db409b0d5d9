"""Address values: read, printed, and read again."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.address import DmsgAddress, HostPort, PinnedServer, check_service_name
from dmsg.crypto.keys import SecretKey
from dmsg.errors import InvalidAddress

KEY, SERVER = (SecretKey(hashlib.sha256(name).digest()).public_key for name in (b"key", b"server"))

GOOD = [
    ("127.0.0.1:8080", "127.0.0.1", 8080),
    ("localhost:1", "localhost", 1),
    ("relay_1.example.com:65535", "relay_1.example.com", 65535),
    ("example.com.:80", "example.com.", 80),
    ("[::1]:80", "::1", 80),
    ("[2001:db8::5]:443", "2001:db8::5", 443),
    (f"{'a' * 63}.b:9", f"{'a' * 63}.b", 9),
]
BAD = [
    "",
    ":",
    ":80",
    "host",
    "host:",
    "host:0",
    "host:65536",
    "host:123456",
    "host:-1",
    "host:８０",
    "host: 80",
    "ho st:80",
    "-host:80",
    "host-:80",
    "a..b:80",
    ".a:80",
    f"{'a' * 64}:80",
    f"{'a.' * 127}a.b:80",
    "a" * 301,
    "[::1]",
    "[::1:80",
    "::1:80",
    "[host]:80",
    "[]:80",
    "höst:80",
    "host\n:80",
    "host:80\n",
    "<b>:80",
]


@pytest.mark.parametrize(("text", "host", "port"), GOOD)
def test_host_and_port(text: str, host: str, port: int) -> None:
    address = HostPort.parse(text)
    assert (address.host, address.port) == (host, port)
    assert str(address) == text
    assert HostPort.parse(str(address)) == address


@pytest.mark.parametrize("text", [*BAD, None, 80, b"host:80"])
def test_no_host_and_port(text: Any) -> None:
    with pytest.raises(InvalidAddress):
        HostPort.parse(text)


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_none(text: str) -> None:
    try:
        address = HostPort.parse(text)
    except InvalidAddress:
        return
    assert HostPort.parse(str(address)) == address


def test_pinned_servers() -> None:
    text = f"{SERVER}@[::1]:8080"
    pinned = PinnedServer.parse(text)
    assert (pinned.public_key, pinned.address) == (SERVER, HostPort("::1", 8080))
    assert str(pinned) == text


@pytest.mark.parametrize("text", ["", "localhost:80", "@localhost:80", "02@localhost:80", f"{SERVER}@", f"{SERVER}@x"])
def test_no_pinned_servers(text: str) -> None:
    with pytest.raises(InvalidAddress):
        PinnedServer.parse(text)


def test_service_names_are_bounded_in_bytes() -> None:
    assert check_service_name("") == ""
    assert check_service_name("é" * 127) == "é" * 127
    with pytest.raises(InvalidAddress):
        check_service_name("é" * 128)
    with pytest.raises(InvalidAddress):
        check_service_name("\ud800" * 86)


def test_ends_of_transports_print_what_they_know() -> None:
    assert str(DmsgAddress(KEY)) == f"dmsg:{KEY}"
    assert str(DmsgAddress(KEY, "ssh", SERVER)) == f"dmsg:{KEY}/ssh via {SERVER}"
    assert DmsgAddress(KEY) == DmsgAddress(KEY, "", None)
    assert len({DmsgAddress(KEY), DmsgAddress(KEY), DmsgAddress(KEY, "x")}) == 2
