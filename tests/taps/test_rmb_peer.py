"""``twistd rmb-peer``: what it makes of its options. Processes of it are in ``tests/system``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dmsg.rmb.core.keys import KeyType
from dmsg.rmb.key_file import make_twin_key
from dmsg.rmb.twins.table import TwinTable
from dmsg.taps.rmb_peer import hosts_to_publish

from .conftest import Program


@pytest.mark.parametrize(
    ("urls", "hosts"),
    [
        (("wss://r2.example", "wss://R1.example/path"), ("r1.example", "r2.example")),
        (("wss://relay.grid.tf:443",), ("relay.grid.tf",)),
        (("ws://localhost:80",), ("localhost",)),
        (("wss://r1.example:443", "wss://r1.example"), ("r1.example",)),
        (("wss://r1.example", "wss://r2.example:8443"), ()),
        (("wss://r1.example:80",), ()),
        (("ws://r1.example:443",), ()),
        (("wss://10.0.0.1",), ()),
        (("ws://[::1]:80",), ()),
    ],
)
def test_relays_are_published_by_name_unless_one_is_at_an_unusual_port_or_has_no_name(
    urls: tuple[str, ...], hosts: tuple[str, ...]
) -> None:
    """The public peer's own default has a port, 443: it means the same as none."""
    assert hosts_to_publish(urls) == hosts


@pytest.mark.system
@pytest.mark.time_limit(60)
def test_a_peer_without_a_twin_says_that_and_not_that_it_runs(start: Callable[..., Program], tmp_path: Path) -> None:
    TwinTable(str(tmp_path / "twins")).close()
    make_twin_key(tmp_path / "key", KeyType.ED25519, os.urandom)
    peer = start(
        *("twistd", "-n", "--pidfile=", "rmb-peer", "--key", str(tmp_path / "key")),
        *("--registry", str(tmp_path / "twins"), "--relay", "wss://relay.example"),
    )
    assert peer.wait() == 1
    assert "no twin found in the registry with the given key" in peer.text and "Traceback" not in peer.text
    assert "rmb-peer runs" not in peer.text
