"""Stores of every kind, entries, and a discovery on loopback."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.web.client import Agent, HTTPConnectionPool

from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import ClientPart, Entry, ServerPart
from dmsg.discovery.stores.open import open_store

NOW_NS = 1_600_000_000 * 10**9


def secret_key(name: str) -> SecretKey:
    return SecretKey(hashlib.sha256(name.encode()).digest())


@pytest.fixture
def key_of() -> Any:
    """``key_of(name)``: always the same secret key for the same name."""
    return secret_key


@pytest.fixture
def now_ns() -> int:
    return NOW_NS


@pytest.fixture
def make_entry() -> Any:
    """``make_entry(name, sequence, …)``: a signed entry; a server's if an address is given."""

    def make(
        name: str = "alice",
        sequence: int = 0,
        *,
        timestamp: int | None = None,
        address: str = "",
        available: int = 10,
        servers: tuple[str, ...] = (),
        client: bool | None = None,
        version: str = "0.0.1",
    ) -> Entry:
        key = secret_key(name)
        is_client = not address if client is None else client
        return Entry(
            version,
            sequence,
            NOW_NS + sequence if timestamp is None else timestamp,
            key.public_key,
            ClientPart(tuple(secret_key(one).public_key for one in servers)) if is_client else None,
            ServerPart(address, available) if address else None,
        ).sign(key)

    return make


@pytest.fixture
def later_entry() -> Any:
    """``later_entry(halves, sequence)``: an entry as the implementation of 2023 writes it, byte for byte."""

    def make(halves: str, sequence: int = 0) -> bytes:
        key = secret_key("later")
        head = f'"version":"0.0.1","sequence":{sequence},"timestamp":{NOW_NS + sequence},"static":"{key.public_key}"'
        text = f"{{{head},{halves}}}"
        return f'{text[:-1]},"signature":"{key.sign(text.encode()).hex()}"}}'.encode()

    return make


@pytest.fixture(params=["memory", "sqlite", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store of each kind."""
    if request.param == "memory":
        return "memory:"
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'entries.sqlite'}"
    return request.getfixturevalue("redis_url") + "/3"


@pytest.fixture
def opened(reactor: Any) -> Any:
    """``opened(url, …)``: like ``open_store``, closed when the test ends."""
    stores = []

    def open_one(url: str, **options: Any) -> Any:
        store = open_store(url, reactor, random=random.Random(7), **options)
        stores.append(store)
        return store

    yield open_one
    for store in stores:
        pytest_twisted.blockon(store.close())


@pytest.fixture
def store(store_url: str, opened: Any) -> Any:
    """An empty store of each kind."""
    return opened(store_url)


@pytest.fixture
def agent(reactor: Any) -> Any:
    """An HTTP agent with a pool that is closed when the test ends."""
    pool = HTTPConnectionPool(reactor, persistent=True)
    yield Agent(reactor, connectTimeout=5, pool=pool)
    pytest_twisted.blockon(pool.closeCachedConnections())
