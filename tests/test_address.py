"""Address values: read, printed, and read again."""

from __future__ import annotations

import hashlib
import json
import pickle
from copy import copy, deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.address import (
    DmsgAddress,
    HostPort,
    PinnedServer,
    RedisAddress,
    address_group,
    check_http_url,
    check_service_name,
    is_global,
    network_group,
)
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
    ("[fe80::1%eth0.100]:443", "fe80::1%eth0.100", 443),
    (f"{'a' * 63}.b:9", f"{'a' * 63}.b", 9),
]
BAD = [
    "",
    "[::1%et 0]:80",
    "[::1%\x1b[2J]:80",
    "[::1%\n]:80",
    "[::1%]:80",
    "[::1%" + "a" * 16 + "]:80",
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


@pytest.mark.parametrize(
    "text", ["", "localhost:80", "@localhost:80", "02@localhost:80", f"{SERVER}@", f"{SERVER}@x", None, b""]
)
def test_no_pinned_servers(text: Any) -> None:
    with pytest.raises(InvalidAddress):
        PinnedServer.parse(text)


def test_service_names_are_bounded_in_bytes() -> None:
    assert check_service_name("") == ""
    assert check_service_name("é" * 127) == "é" * 127
    with pytest.raises(InvalidAddress):
        check_service_name("é" * 128)


@pytest.mark.parametrize("name", ["\ud800", "a\udcff", b"chat", None])
def test_a_service_name_that_no_peer_could_ask_for_is_refused(name: Any) -> None:
    with pytest.raises(InvalidAddress, match="Unicode"):
        check_service_name(name)


@pytest.mark.parametrize("url", ["http://host:80", "https://host", "http://[::1]:80/path"])
def test_urls_of_discoveries(url: str) -> None:
    assert check_http_url(url) == check_http_url(f"{url}//") == url


@pytest.mark.parametrize(
    "url", ["host:80", "http://", "http://u@host", *[f"http://host:80{end}" for end in "?#"], None]
)
def test_urls_to_which_no_path_can_be_added_are_refused(url: Any) -> None:
    """What is added after a ``?``, even an empty one, would be no path."""
    with pytest.raises(InvalidAddress):
        check_http_url(url)


def test_ends_of_transports_can_be_copied_and_stored() -> None:
    address = DmsgAddress(KEY, "chat", SERVER)
    assert pickle.loads(pickle.dumps(address)) == copy(address) == deepcopy(address) == address


def test_ends_of_transports_print_what_they_know() -> None:
    assert str(DmsgAddress(KEY)) == f"dmsg:{KEY}"
    assert str(DmsgAddress(KEY, "ssh", SERVER)) == f"dmsg:{KEY}/ssh via {SERVER}"
    assert DmsgAddress(KEY) == DmsgAddress(KEY, "", None)
    assert (DmsgAddress(KEY, "ssh").host, DmsgAddress(KEY, "ssh").port) == (str(KEY), 0)
    assert len({DmsgAddress(KEY), DmsgAddress(KEY), DmsgAddress(KEY, "x")}) == 2


@pytest.mark.parametrize(
    ("host", "address", "network"),
    [
        ("192.0.2.7", "192.0.2.7", "192.0.2.0/24"),
        ("192.0.2.255", "192.0.2.255", "192.0.2.0/24"),
        ("::ffff:192.0.2.7", "192.0.2.7", "192.0.2.0/24"),
        ("2001:db8:1:2:3:4:5:6", "20010db800010002::/64", "2001:db8:1::/48"),
        ("2001:db8:1:ffff::1", "20010db80001ffff::/64", "2001:db8:1::/48"),
        ("fe80::1%eth0", "fe80000000000000::/64", "fe80::/48"),
        ("Relay.example.org", "relay.example.org", "name"),
        ("1.2.3", "1.2.3", "name"),
    ],
)
def test_hosts_are_grouped_for_limits(host: str, address: str, network: str) -> None:
    assert (address_group(host), network_group(host)) == (address, network)


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "192.168.0.1", "169.254.1.1", "0.0.0.0", "::1", "fc00::1"])
def test_an_address_of_a_closed_network_is_not_global(host: str) -> None:
    assert not is_global(host)


@pytest.mark.parametrize("host", ["224.0.0.1", "ff0e::1", "::ffff:10.0.0.1", "relay.example.org", ""])
def test_neither_groups_of_hosts_nor_names_are_global(host: str) -> None:
    assert not is_global(host)


@pytest.mark.parametrize("host", ["9.9.9.9", "2620:fe::fe", "::ffff:9.9.9.9"])
def test_an_address_on_the_public_internet_is_global(host: str) -> None:
    assert is_global(host)


@pytest.mark.parametrize(
    ("url", "text", "credentials"),
    [
        ("redis://localhost", "redis://localhost:6379/0", (None, None)),
        ("redis://localhost:1/", "redis://localhost:1/0", (None, None)),
        ("redis://[::1]:6380/3", "redis://[::1]:6380/3", (None, None)),
        ("redis://:secret@10.0.0.1/15", "redis://10.0.0.1:6379/15", (None, "secret")),
        ("redis://me:a%40b@host:7/65535", "redis://host:7/65535", ("me", "a@b")),
        ("rediss://:secret@redis.example/1", "rediss://redis.example:6379/1", (None, "secret")),
        ("redis+unix:///run/redis.sock", "redis+unix:///run/redis.sock?db=0", (None, None)),
        ("redis+unix://me:secret@/a%20%3F/b?db=3", "redis+unix:///a%20%3F/b?db=3", ("me", "secret")),
        ("REDISS://host", "rediss://host:6379/0", (None, None)),
    ],
)
def test_a_redis_url_is_read_and_shown_without_credentials(url: str, text: str, credentials: Any) -> None:
    address = RedisAddress.parse(url)
    assert str(address) == text
    assert (address.username, address.password) == credentials
    assert "secret" not in repr(address) and "a@b" not in repr(address)
    again = RedisAddress.parse(text)
    assert (again.server, again.database, again.secure) == (address.server, address.database, address.secure)


@pytest.mark.parametrize(
    "url",
    [
        "", "redis:", "redis://", "http://host", "redis://host:0", "redis://host:65536", "redis://host:x", "redis://host/a",
        "redis://host/-1", "redis://host/65536", "redis://host/1/2", "redis://host/1?a=b", "redis://host#f", "redis://h ost",
        "redis://:pass word@h\nost", "redis://[::1", "redis://host/99999999999999999999", "redis://host/٣",
        "rediss:", "rediss://host?ssl_cert_reqs=none", "redis+unix:", "redis+unix://host/path", "redis+unix:run/redis.sock",
        "redis+unix:///a?db=65536", "redis+unix:///a?db=1&db=2", "redis+unix:///a?password=b", "redis+unix:///a%0A",
        "redis+unix:///" + 107 * "a", "redis+unix:///a#f", "unix:///a", "redis+unix:///a?3", "redis+unix:///a?=3",
        "redis+unix://:6379/a", "redis+unix://:12/34@/a", "redis+unix:///%FF",
    ],
)  # fmt: skip
def test_what_is_no_redis_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(InvalidAddress) as caught:
        RedisAddress.parse(url)
    assert str(caught.value) == (
        "a Redis URL is redis://host:port/db, rediss://host:port/db (TLS) or redis+unix:///path?db=0"
    )


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_is_stored_of_a_host_is_plain_text(protocol: int) -> None:
    """A program that reads it may not have this package."""
    host = DmsgAddress(KEY).host
    assert host == str(KEY) and host.encode("idna") == host.encode()
    stored = pickle.dumps(host, protocol)
    assert b"dmsg" not in stored
    assert pickle.loads(stored) == copy(host) == deepcopy(host) == json.loads(json.dumps(host)) == host
