"""How many requests a discovery answers: GETs and signed POSTs over SQLite, with many entries stored.

Starts a discovery in a process of its own on loopback and sends it requests over keep-alive connections, each with
one request in flight. Every POST is an iteration signed beforehand; every answer is checked. Prints a table, and with
``--json`` one JSON object.

    python benchmarks/discovery_load.py --entries 50000 --seconds 5
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dmsg.crypto.keys import SecretKey
from dmsg.discovery.entry import ClientPart, Entry, ServerPart

GOALS = {"get": 1000.0, "post": 250.0}
#: One entry in a hundred is a server's.
SERVER_SHARE = 100


def key_number(number: int) -> SecretKey:
    return SecretKey((number + 1).to_bytes(32, "big"))


def entry_number(number: int, sequence: int, relays: tuple[Any, ...]) -> Entry:
    key = key_number(number)
    server = ServerPart(f"10.0.{number >> 8 & 255}.{number & 255}:8080", 10) if number % SERVER_SHARE == 0 else None
    client = ClientPart(relays) if server is None else None
    return Entry("0.0.1", sequence, time.time_ns(), key.public_key, client, server).sign(key)


# --- the discovery's process -------------------------------------------------------------------------------------------


def serve(path: str, entries: int) -> None:
    """Fill the store, print the port, and serve until told to stop."""
    from twisted.internet import defer, endpoints, reactor, task

    from dmsg.discovery.api import DiscoveryApi, DiscoveryLimits, make_site
    from dmsg.discovery.stores.open import open_store
    from dmsg.discovery.stores.rules import StoreLimits

    store: Any = open_store(f"sqlite:{path}", reactor, limits=StoreLimits(server_ttl_s=None))
    limits = DiscoveryLimits.unlimited_rates()
    api = DiscoveryApi(store, clock_ns=time.time_ns, random=random.Random(), limits=limits)

    async def main() -> None:
        relays = (key_number(0).public_key, key_number(SERVER_SHARE).public_key)
        # Filling takes signed entries but does not check them: the check would only take time.
        for start in range(0, entries, 250):
            batch = [entry_number(n, 0, relays) for n in range(start, min(start + 250, entries))]
            await defer.gatherResults([store.put(entry, time.time_ns()) for entry in batch], consumeErrors=True)
        endpoint = endpoints.TCP4ServerEndpoint(reactor, 0, interface="127.0.0.1")
        port = await endpoint.listen(make_site(api.resource(), reactor=reactor, limits=limits))
        print(port.getHost().port, flush=True)
        stopped: defer.Deferred[None] = defer.Deferred()
        reactor.addSystemEventTrigger("before", "shutdown", stopped.callback, None)
        await stopped
        await store.close()

    task.react(lambda _: defer.Deferred.fromCoroutine(main()))


# --- the load ----------------------------------------------------------------------------------------------------------


class Connection:
    """A non-blocking keep-alive connection with one request in flight; just enough HTTP for our own server."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.started = 0.0

    def send(self, request: bytes) -> None:
        self.started = time.perf_counter()
        self.socket.sendall(request)

    def receive(self) -> tuple[int, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._read()
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(
            next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")).split()[1]
        )
        while len(body) < length:
            body += self._read()
        return int(head.split(b" ", 2)[1]), body

    def _read(self) -> bytes:
        data = self.socket.recv(65536)
        if not data:
            raise SystemExit("the discovery closed a connection")
        return data


def load(port: int, requests: Any, seconds: float, connections: int) -> dict[str, float]:
    """Send from ``requests`` (an iterator of bytes) for ``seconds``; requests a second and latencies in ms."""
    import selectors

    latencies: list[float] = []
    with selectors.DefaultSelector() as selector:
        open_connections = [Connection(port) for _ in range(connections)]
        begin = time.perf_counter()
        for connection in open_connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            connection.send(next(requests))
        busy = connections
        while busy:
            for selected, _ in selector.select():
                connection = selected.data
                status, body = connection.receive()
                now = time.perf_counter()
                if status != 200:
                    raise SystemExit(f"the discovery answered {status}: {body[:200]!r}")
                latencies.append(now - connection.started)
                request = next(requests, None) if now - begin < seconds else None
                if request is None:
                    selector.unregister(connection.socket)
                    connection.socket.close()
                    busy -= 1
                else:
                    connection.send(request)
        elapsed = time.perf_counter() - begin
    latencies.sort()
    return {
        "requests": len(latencies),
        "per_second": len(latencies) / elapsed,
        "p50_ms": latencies[len(latencies) // 2] * 1e3,
        "p99_ms": latencies[len(latencies) * 99 // 100] * 1e3,
    }


def gets(entries: int) -> Any:
    keys = [key_number(random.randrange(entries)).public_key for _ in range(min(entries, 5000))]
    while True:
        yield b"GET /discovery/entries/%s HTTP/1.1\r\nHost: d\r\n\r\n" % str(random.choice(keys)).encode()


def posts(entries: int, count: int) -> Any:
    """POSTs, signed before the clock starts."""
    relays = (key_number(0).public_key,)
    bodies = [entry_number(number % entries, 1 + number // entries, relays).to_json() for number in range(count)]
    head = (
        b"POST /discovery/entries HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    return iter([head % len(body) + body for body in bodies])


def lists() -> Any:
    while True:
        yield b"GET /discovery/available_servers HTTP/1.1\r\nHost: d\r\n\r\n"


def run(entries: int, seconds: float, connections: int) -> dict[str, Any]:
    """Start a discovery, measure, and end it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "entries.sqlite"
        command = [sys.executable, __file__, "--serve", str(path), "--entries", str(entries)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                begin = time.perf_counter()
                line = process.stdout.readline()
                if not line:
                    raise SystemExit("the discovery did not start")
                filled_s = time.perf_counter() - begin
                port = int(line)
                results: dict[str, Any] = {
                    "entries": entries,
                    "connections": connections,
                    "filled_s": filled_s,
                    "get": load(port, gets(entries), seconds, connections),
                    "post": load(port, posts(entries, int(seconds * 2500)), seconds, connections),
                    "available_servers": load(port, lists(), min(seconds, 2.0), connections),
                }
            finally:
                process.send_signal(signal.SIGTERM)
        with sqlite3.connect(path) as database:
            results["stored"] = database.execute("SELECT count(*) FROM entries").fetchone()[0]
        database.close()
    return results


def main() -> int:
    """The command line; the exit code is 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--entries", type=int, default=50_000, help="entries in the store beforehand (50000)")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each kind of request is measured (5)")
    parser.add_argument("--connections", type=int, default=32, help="connections, one request at a time each (32)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", metavar="PATH", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.entries)
        return 0
    results = run(options.entries, min(options.seconds, 60.0), options.connections)
    results["cpus"] = os.cpu_count()
    results["goals_met"] = all(results[kind]["per_second"] >= goal for kind, goal in GOALS.items())
    if options.json:
        print(json.dumps(results))
    else:
        print(f"{results['entries']} entries in SQLite, {options.connections} connections, {results['cpus']} CPUs")
        print(f"{'request':<20}{'per second':>12}{'p50 ms':>10}{'p99 ms':>10}{'goal':>8}")
        for kind in ("get", "post", "available_servers"):
            one = results[kind]
            goal = f"{GOALS[kind]:.0f}" if kind in GOALS else ""
            print(f"{kind:<20}{one['per_second']:>12.0f}{one['p50_ms']:>10.1f}{one['p99_ms']:>10.1f}{goal:>8}")
    return 0 if results["goals_met"] else 1


if __name__ == "__main__":
    sys.exit(main())
