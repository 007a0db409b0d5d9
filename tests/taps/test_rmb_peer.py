"""``twistd rmb-peer``: what it makes of its options. Processes of it are in ``tests/system``."""

from __future__ import annotations

import pytest

from dmsg.taps.rmb_peer import hosts_to_publish


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
