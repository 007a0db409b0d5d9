"""All parts of discovery at once: registrar, HTTP client, API and a durable store; and the benchmark still runs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import pytest_twisted
from twisted.internet import defer

from dmsg.address import HostPort
from dmsg.discovery.api import DiscoveryApi, make_site
from dmsg.discovery.client import HttpDiscovery
from dmsg.discovery.errors import EntryNotFound
from dmsg.discovery.keeper import Pace
from dmsg.discovery.registrar import EntryRegistrar

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("prefix", ["discovery", "messaging-discovery"])
@pytest_twisted.ensureDeferred
async def test_a_server_and_a_client_under_one_key(
    store: Any, served: Any, agent: Any, reactor: Any, key_of: Any, prefix: str
) -> None:
    offset_ns = [0]
    api = DiscoveryApi(store, clock_ns=lambda: time.time_ns() + offset_ns[0], random=random.Random(1))
    port = served(make_site(api.resource(), reactor=reactor))
    key = key_of("both")

    def registrar() -> EntryRegistrar:
        # Each has a client of its own, as processes of their own would.
        discovery = HttpDiscovery(f"http://127.0.0.1:{port}", agent, reactor, prefix=prefix)
        return EntryRegistrar(
            discovery,
            key,
            clock=reactor,
            now_ns=lambda: time.time_ns() + offset_ns[0],
            random=random.Random(2),
            pace=Pace(debounce_s=0.001, retry_first_s=0.001),
        )

    as_client, as_server = registrar(), registrar()
    relays = sorted(key_of(f"relay {n}").public_key for n in range(3))
    as_client.set_client(relays[:2])
    as_server.set_server(HostPort("127.0.0.1", 8080), 5)
    await as_client.published()
    await as_server.published()
    as_client.set_client(relays)
    await as_client.published()
    watcher = HttpDiscovery(f"http://127.0.0.1:{port}", agent, reactor, prefix=prefix)
    entry = await watcher.get_entry(key.public_key)
    assert entry.client is not None
    assert entry.client.delegated_servers == tuple(relays)
    assert entry.server is not None
    assert [one.static for one in await watcher.available_servers()] == [key.public_key]
    await defer.gatherResults([defer.Deferred.fromCoroutine(one.close()) for one in (as_client, as_server)])

    offset_ns[0] = 10**12
    with pytest.raises(EntryNotFound):
        await watcher.get_entry(key.public_key)
    again = registrar()
    again.set_server(HostPort("127.0.0.1", 8080), 4)
    await again.published()
    assert (await watcher.get_entry(key.public_key)).sequence == entry.sequence + 1
    await again.close(withdraw=True)
    assert await watcher.available_servers() == []


@pytest.mark.system
def test_the_benchmark_runs() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "discovery_load.py")]
    done = subprocess.run(
        [*command, "--entries", "300", "--seconds", "0.3", "--connections", "4", "--json"],
        capture_output=True,
        text=True,
        timeout=25,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )
    assert done.stderr == ""
    results = json.loads(done.stdout)
    assert results["stored"] == 300
    assert min(results[kind]["requests"] for kind in ("get", "post", "available_servers")) > 0
