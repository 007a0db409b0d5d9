"""Compares ours with installed programs of others, in the same run: relays, tunnels, files.

Every repeat measures each program once for each figure, so that disturbances of the machine hit all alike. Below another
program's figure stands ours as a multiple of it. MB are 10^6 bytes. docs/performance.rst says how to get the others.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.commands import Command
from benchmarks.others import LeftOut, derp, files, rathole, transit
from benchmarks.processes import Cast, process_cpu_s
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes
from dmsg.testing.process import free_port

NAME: Final = "beside"
_WRITE_BYTES: Final = 64 * 1024
_PING_BYTES: Final = 64
_LIMIT_S: Final = 120.0
_MB: Final = 1e6
#: Round trip from client to client at which files are sent, in ms.
_FAR_MS: Final = 100
_FAR_MBIT_PER_S: Final = 1000
_PIECE_BYTES: Final = 64 * 1024
#: The contender that the others are compared with.
_OURS: Final = "dmsg, e2e"


class _Table:
    """Figures by kind and contender."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], dict[str, list[float]]] = {}

    def add(self, what: str, unit: str, whose: str, value: float) -> None:
        self._found.setdefault((what, unit), {}).setdefault(whose, []).append(value)

    def rows(self, ours: str) -> list[Row]:
        rows = []
        for (what, unit), figures in self._found.items():
            for whose, values in figures.items():
                rows.append(row(NAME, f"{what}, {whose}", values, unit))
                if not whose.startswith("dmsg") and ours in figures:
                    times = [mine / theirs for mine, theirs in zip(figures[ours], values, strict=True)]
                    rows.append(row(NAME, f"{what}, {ours}, times {whose}", times, "x"))
        return rows


def run(sizes: Sizes) -> list[Row]:
    """Rows of relays, tunnels and files; only ours if nothing else is installed."""
    left_out: set[str] = set()
    rows = [*_relays(sizes, left_out), *_tunnels(sizes, left_out), *_files(sizes, left_out)]
    for reason in sorted(left_out):
        print(f"left out: {reason}", file=sys.stderr)
    return rows


def _made(make: Callable[[], Any], left_out: set[str]) -> Any:
    """The result of ``make``, or ``None`` with the reason in ``left_out``."""
    try:
        return make()
    except LeftOut as reason:
        left_out.add(str(reason))
        return None


# --- relays -----------------------------------------------------------------------------------------------------------


class _Contender:
    """A relay with two clients: how to send ``total`` bytes over it (MB/s), and its ping-pong in ms (p50, p99)."""

    def __init__(
        self, name: str, push: Callable[[int], float], pings: Callable[[], dict[str, float]], cpu_s: Callable[[], float]
    ) -> None:
        self.name, self.push, self.pings, self.cpu_s = name, push, pings, cpu_s


def _relays(sizes: Sizes, left_out: set[str]) -> list[Row]:
    table = _Table()
    total = max(1, sizes.transfer_bytes // _WRITE_BYTES) * _WRITE_BYTES
    with Cast() as cast:
        contenders = [_ours(cast, security, sizes) for security in ("hop", "e2e")]
        contenders.append(_plain(cast, sizes))
        for make in (_derper, _transit):
            found = _made(lambda make=make: make(cast, sizes), left_out)  # type: ignore[misc]
            contenders += [found] if found else []
        for _ in range(sizes.repeats):
            for one in contenders:
                before = one.cpu_s()
                table.add("64 KiB writes", "MB/s", one.name, one.push(total))
                table.add("64 KiB writes, its CPU", "ms/MB", one.name, (one.cpu_s() - before) / total * _MB * 1000)
            for one in contenders:
                pings = one.pings()
                for percentile in ("p50", "p99"):
                    table.add(f"64 B ping-pong {percentile}", "ms", one.name, pings[f"{percentile}_ms"])
    return table.rows(_OURS)


def _ours(cast: Cast, security: str, sizes: Sizes) -> _Contender:
    server = cast.start("server")
    options = {"server": server.facts, "security": security}
    source, sink, echo = (cast.start("client", listen=listen, **options) for listen in (None, "sink", "echo"))

    def push(total: int) -> float:
        options = {"size": _WRITE_BYTES, "total": total, "transports": 1, "limit_s": _LIMIT_S}
        result = source.ask("push", target=sink.facts["key"], timeout_s=_LIMIT_S, **options)
        if result["acked_bytes"] != total:
            raise RuntimeError(f"{total} sent, {result['acked_bytes']} acknowledged")
        return float(total / result["elapsed_s"] / _MB)

    def pings() -> dict[str, float]:
        return source.ask("pings", target=echo.facts["key"], **_pings(sizes))

    return _Contender(f"dmsg, {security}", push, pings, server.cpu_s)


def _plain(cast: Cast, sizes: Sizes) -> _Contender:
    ports = {kind: cast.start("plain", listen=kind).facts["port"] for kind in ("sink", "echo")}
    relays = {kind: cast.start("plain", listen="relay", to=port) for kind, port in ports.items()}
    source = cast.start("plain")

    def push(total: int) -> float:
        port = relays["sink"].facts["port"]
        result = source.ask("push", port=port, size=_WRITE_BYTES, total=total, timeout_s=_LIMIT_S)
        return float(total / result["elapsed_s"] / _MB)

    def pings() -> dict[str, float]:
        return source.ask("pings", port=relays["echo"].facts["port"], **_pings(sizes))

    return _Contender("plain TCP through a copying relay", push, pings, relays["sink"].cpu_s)


def _derper(cast: Cast, sizes: Sizes) -> _Contender:
    relay = derp.Derper(cast)
    source, sink = relay.client(), relay.client()

    def push(total: int) -> float:
        rate, lost = derp.push(source, sink, total, derp.WINDOW, _LIMIT_S)
        if lost:
            raise LeftOut(f"{relay.name} has lost {lost:.0%} of what it was given")
        return rate

    def pings() -> dict[str, float]:
        return source.ask("pings", target=sink.facts["key"], **_pings(sizes))

    return _Contender(f"{relay.name} over TLS", push, pings, relay.cpu_s)


def _transit(cast: Cast, sizes: Sizes) -> _Contender:
    relay = transit.Transit(cast)
    source, _ = relay.pair()

    def push(total: int) -> float:
        return transit.push(source, _WRITE_BYTES, total, _LIMIT_S)

    def pings() -> dict[str, float]:
        return source.ask("pings", **_pings(sizes))

    return _Contender(relay.name, push, pings, relay.cpu_s)


def _pings(sizes: Sizes) -> dict[str, Any]:
    return {"size": _PING_BYTES, "rounds": sizes.pings, "seconds": _LIMIT_S / 2}


# --- tunnels ----------------------------------------------------------------------------------------------------------


def _tunnels(sizes: Sizes, left_out: set[str]) -> list[Row]:
    table = _Table()
    total = max(1, sizes.transfer_bytes // _WRITE_BYTES) * _WRITE_BYTES
    with Cast() as cast, tempfile.TemporaryDirectory(prefix="bench-tunnel-") as home:
        # Any program may be at the end of a tunnel, so these run on Twisted's own reactor.
        services = {
            kind: cast.start("plain", listen=kind, is_of_others=True).facts["port"] for kind in ("sink", "echo")
        }
        source = cast.start("plain", is_of_others=True)
        tunnels: dict[str, tuple[dict[str, int], Callable[[], float]]] = {
            "dmsg, e2e": _our_tunnel(cast, home, services)
        }
        found = _made(lambda: rathole.Rathole(cast, services), left_out)
        if found:
            tunnels[found.name] = (found.ports, found.cpu_s)
        for _ in range(sizes.repeats):
            for name, (ports, cpu_s) in tunnels.items():
                before = cpu_s()
                result = source.ask("push", port=ports["sink"], size=_WRITE_BYTES, total=total, timeout_s=_LIMIT_S)
                table.add("tunnel", "MB/s", name, total / result["elapsed_s"] / _MB)
                table.add("tunnel, CPU of all its processes", "ms/MB", name, (cpu_s() - before) / total * _MB * 1000)
            for name, (ports, _) in tunnels.items():
                pings = source.ask("pings", port=ports["echo"], **_pings(sizes))
                for percentile in ("p50", "p99"):
                    table.add(f"64 B through a tunnel, {percentile}", "ms", name, pings[f"{percentile}_ms"])
    return table.rows(_OURS)


def _our_tunnel(cast: Cast, home: str, services: dict[str, int]) -> tuple[dict[str, int], Callable[[], float]]:
    """The local ports of the services, and the CPU seconds of the relay and the commands."""
    server = cast.start("server")
    relay = ("--server", f"{server.facts['key']}@127.0.0.1:{server.facts['port']}", "--security", "e2e")
    pids, ports = [server.pid], {}
    for name, target in services.items():
        expose = Command(cast, Path(home), f"expose {name}", "expose", f"tcp:127.0.0.1:{target}", *relay)
        ports[name] = free_port()
        listen = f"tcp:{ports[name]}:interface=127.0.0.1"
        forward = Command(cast, Path(home), f"forward {name}", "forward", expose.result["public_key"], listen, *relay)
        pids += [expose.pid, forward.pid]
    return ports, lambda: sum(process_cpu_s(pid) for pid in pids)


# --- files ------------------------------------------------------------------------------------------------------------


def _files(sizes: Sizes, left_out: set[str]) -> list[Row]:
    far = {"delay_s": _FAR_MS / 4000, "bits_per_s": _FAR_MBIT_PER_S * 1e6}
    distance = f", {_FAR_MS} ms and {_FAR_MBIT_PER_S:,} Mbit/s away"
    rows = _send_files(sizes.file_bytes, sizes.repeats, None, "", left_out)
    return rows + _send_files(max(_PIECE_BYTES, sizes.file_bytes // 4), sizes.repeats, far, distance, left_out)


def _send_files(
    size: int, repeats: int, shape: dict[str, float] | None, distance: str, left_out: set[str]
) -> list[Row]:
    table = _Table()
    with Cast() as cast, tempfile.TemporaryDirectory(prefix="bench-files-") as home:
        path = Path(home) / "random"
        with path.open("wb") as file:
            for _ in range(size // _PIECE_BYTES):
                file.write(os.urandom(_PIECE_BYTES))
        way = files.Way(cast, shape)
        contenders: list[Any] = [files.Dmsg(cast, cast.start("server"), way)]
        for make in (files.Croc, files.Wormhole):
            found = _made(lambda make=make: make(cast, way), left_out)  # type: ignore[misc]
            contenders += [found] if found else []
        for _ in range(repeats):
            for one in list(contenders):
                target = Path(home) / f"to-{time.monotonic_ns()}"
                target.mkdir()
                elapsed_s = _made(lambda one=one, target=target: one.send(path, target), left_out)  # type: ignore[misc]
                if elapsed_s is None:
                    contenders.remove(one)
                    continue
                table.add(f"a file of {size / 2**20:g} MiB{distance}", "s", one.name, elapsed_s)
                if not _same(path, target / path.name):
                    raise RuntimeError(f"{one.name} sent another file")
                shutil.rmtree(target)
    return table.rows(files.Dmsg.name)


def _same(one: Path, other: Path) -> bool:
    with one.open("rb") as a, other.open("rb") as b:
        while piece := a.read(_PIECE_BYTES):
            if piece != b.read(_PIECE_BYTES):
                return False
        return not b.read(1)
