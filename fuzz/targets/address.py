"""Address values: host and port, pinned servers, groups of addresses, lists of keys, names of services."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from dmsg.address import (
    HostPort,
    PinnedServer,
    RedisAddress,
    address_group,
    check_service_name,
    is_global,
    network_group,
)
from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.errors import InvalidAddress
from dmsg.foreign import quoted
from dmsg.mux.core.errors import refusal_reason
from dmsg.ops.values import KEYS as PUBLIC_KEYS
from fuzz.oracles import KEYS, as_text, outcome

DICTIONARY = (
    b"[::ffff:",
    b"]:80",
    b"%eth0",
    b"@",
    b"0.0.0.0",
    b"redis://",
    b"rediss://",
    b"redis+unix://",
    b"?db=",
    b"02" * 33,
    b"02" + b"00" * 31 + b"01",
)


def one_input(data: bytes) -> None:
    """The input is the text. A value that is read prints as one line of printable ASCII, which reads as the same value."""
    text = as_text(data)
    for read in (HostPort.parse, PinnedServer.parse):
        kind, value = outcome(partial(read, text), InvalidAddress)
        if kind == "value":
            printed = str(value)
            assert read(printed) == value
            assert printed.isascii() and printed.isprintable() and " " not in printed
    kind, redis = outcome(lambda: RedisAddress.parse(text), InvalidAddress)
    if kind == "value":
        printed = str(redis)
        assert RedisAddress.parse(printed) == RedisAddress(redis.server, redis.database, secure=redis.secure)
        assert printed.isascii() and printed.isprintable() and "@" not in printed
    for group in (address_group, network_group):
        assert len(group(text)) <= max(64, 4 * len(text))
    assert is_global(text) in (True, False)
    kind, keys = outcome(lambda: PUBLIC_KEYS.parse(text), ValueError)
    if kind == "value":
        assert PUBLIC_KEYS.parse(PUBLIC_KEYS.text(keys)) == keys
    kind, key = outcome(lambda: PublicKey.parse(text), InvalidKey)
    if kind == "value":
        assert PublicKey.parse(str(key)) == key and PublicKey(key.raw) == key
    outcome(lambda: check_service_name(text), InvalidAddress)
    shown = quoted(text)
    assert shown.rstrip("…").isascii() and shown.isprintable() and len(shown) <= 1_100
    assert refusal_reason(text).isascii()


def seeds() -> Iterator[bytes]:
    """Each form and its limits."""
    key = KEYS[0].public_key
    for text in (
        "192.0.2.1:80",
        "[2001:db8::1]:65535",
        "[::ffff:192.0.2.1]:1",
        "[fe80::1%eth0]:80",
        "relay.example.:443",
        "a:0",
        f"{key}@relay.example:443",
        f"{key},{KEYS[1].public_key} {key}",
        str(key).upper(),
        "2001:db8::1",
        "fe80::1%eth0",
        "64:ff9b::192.0.2.1",
        "2002:808:808::1",
        "fd00::1",
        "redis://redis.example",
        "redis://user:pass%40word@[2001:db8::1]:6380/15",
        "redis://redis.example:0/65536",
        "redis://redis.example/1?db=2",
        "\x1b[31m",
        "server_draining",
        "ü" * 128,
    ):
        yield text.encode()
