"""Long distances: transfers and round trips with some milliseconds between relay and clients.

Each client reaches the relay over a :mod:`benchmarks.roles.link` of its own, in a process of its own, with a quarter of
the round trip in each direction. The same links carry plain TCP through a relay that only copies, in the same run, as the
rate of the path. Installed relays of others are measured over links of the same kind (:mod:`benchmarks.others`). MB are
10^6 bytes, rates are of the application's data, up to the last acknowledgement.
"""

from __future__ import annotations

import sys
from typing import Final, NamedTuple

from benchmarks.others import LeftOut, derp, transit
from benchmarks.processes import Cast, Child
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "wan"


class Distance(NamedTuple):
    """A path from client to client: its round trip in ms, its rate in Mbit/s."""

    round_trip_ms: int
    mbit_per_s: int


DISTANCES: Final = tuple(Distance(ms, rate) for ms in (10, 50, 100, 200) for rate in (10, 100, 1000))
#: Buffer of the narrowest hop of each link, besides the data in flight.
BUFFER_BYTES: Final = 256 * 1024
SECURITIES: Final = ("hop", "e2e")
_WRITE_BYTES: Final = 16384
_TRANSPORTS: Final = 8
#: Least share of plain TCP's rate.
_SHARE: Final = 0.8
#: A ping-pong beside a transfer takes at most this many times as long as alone.
_BESIDE: Final = 1.5
_ALONE: Final = 20
_HOP_WINDOW_BYTES: Final = 256 * 1024
_LIMIT_S: Final = 120.0


def run(sizes: Sizes) -> list[Row]:
    """Rows of each distance: rates of plain TCP and of transports, ping-pongs alone and beside a transfer."""
    rows = []
    left_out: set[str] = set()
    for distance in DISTANCES[: sizes.wan_distances]:
        rows += _measure(distance, sizes, left_out)
    for reason in sorted(left_out):
        print(f"left out: {reason}", file=sys.stderr)
    return rows


def _measure(distance: Distance, sizes: Sizes, left_out: set[str]) -> list[Row]:
    name = f"{distance.round_trip_ms} ms, {distance.mbit_per_s:,} Mbit/s"
    total = (
        max(1, int(distance.mbit_per_s * 1e6 / 8 * sizes.wan_s) // (_WRITE_BYTES * _TRANSPORTS))
        * _WRITE_BYTES
        * _TRANSPORTS
    )
    plain: list[float] = []
    rates: dict[str, list[float]] = {}
    alone: list[float] = []
    beside: list[float] = []
    with Cast() as cast:
        server = cast.start("server")
        sink_port = cast.start("plain", listen="sink").facts["port"]
        copier = cast.start("plain", listen="relay", to=_link(cast, sink_port, distance))
        plain_port = _link(cast, copier.facts["port"], distance)
        plain_source = cast.start("plain")
        pairs = {security: _pair(cast, server, distance, security) for security in SECURITIES}
        others = _others(cast, distance, left_out)
        for _ in range(sizes.repeats):
            pushed = plain_source.ask("push", port=plain_port, size=_WRITE_BYTES, total=total, timeout_s=_LIMIT_S)
            plain.append(total / pushed["elapsed_s"] / 1e6)
            for security, (source, sink) in pairs.items():
                for transports in (1, _TRANSPORTS):
                    key = f"{security}, {transports} transport{'s' * (transports > 1)}"
                    amount = total if security == "e2e" else _hop_amount(total, distance, transports, sizes)
                    rates.setdefault(key, []).append(_push(source, sink, amount, transports))
            alone.append(_alone(*pairs["e2e"]))
            beside.append(_beside(*pairs["e2e"], total) / alone[-1])
            for other in others:
                other(total)
    rows = [row(NAME, f"{name}, plain TCP through a copying relay", plain, "MB/s")]
    for key, found in rates.items():
        rows += _beside_plain(f"{name}, {key}", found, plain, _SHARE if key.startswith("e2e") else None)
    rows.append(row(NAME, f"{name}, e2e, 64 B and back", alone, "ms"))
    rows.append(row(NAME, f"{name}, e2e, 64 B and back beside a transfer, times alone", beside, "x", at_most=_BESIDE))
    for other in others:
        rows += other.rows(name, plain)
    return rows


class _Derp:
    """A derper and two clients, each at its distance from it."""

    def __init__(self, cast: Cast, distance: Distance) -> None:
        relay = derp.Derper(cast)
        self._ends = [relay.client(_link(cast, relay.port, distance)) for _ in range(2)]
        self._name = relay.name
        self._rates: dict[str, list[float]] = {}
        self._lost: list[float] = []

    def __call__(self, total: int) -> None:
        for window, way in ((derp.WINDOW, f"{derp.WINDOW} packets at a time"), (0, "what arrives of all it takes")):
            rate, lost = derp.push(*self._ends, total, window, _LIMIT_S)
            self._rates.setdefault(way, []).append(rate)
        self._lost.append(lost)

    def rows(self, name: str, plain: list[float]) -> list[Row]:
        rows = []
        for way, found in self._rates.items():
            rows += _beside_plain(f"{name}, {self._name}, {way}", found, plain)
        return [*rows, row(NAME, f"{name}, {self._name}, lost of all it takes", self._lost, "x")]


class _Transit:
    """A transit relay and two ends, each at its distance from it."""

    def __init__(self, cast: Cast, distance: Distance) -> None:
        relay = transit.Transit(cast)
        self._source, _ = relay.pair(*[_link(cast, relay.port, distance) for _ in range(2)])
        self._name = relay.name
        self._rates: list[float] = []

    def __call__(self, total: int) -> None:
        self._rates.append(transit.push(self._source, _WRITE_BYTES, total, _LIMIT_S))

    def rows(self, name: str, plain: list[float]) -> list[Row]:
        return _beside_plain(f"{name}, {self._name}", self._rates, plain)


def _others(cast: Cast, distance: Distance, left_out: set[str]) -> list[_Derp | _Transit]:
    """Installed relays of others; the reasons why some are missing go into ``left_out``."""
    found: list[_Derp | _Transit] = []
    for kind in (_Derp, _Transit):
        try:
            found.append(kind(cast, distance))
        except LeftOut as reason:
            left_out.add(str(reason))
    return found


def _beside_plain(name: str, rates: list[float], plain: list[float], at_least: float | None = None) -> list[Row]:
    shares = [rate / theirs for rate, theirs in zip(rates, plain, strict=True)]
    return [row(NAME, name, rates, "MB/s"), row(NAME, f"{name}, times plain TCP", shares, "x", at_least=at_least)]


def _link(cast: Cast, port: int, distance: Distance) -> int:
    """A quarter of the round trip away from ``port``."""
    shape = {"delay_s": distance.round_trip_ms / 4000, "bits_per_s": distance.mbit_per_s * 1e6}
    found: int = cast.start("link", to=port, buffer_bytes=BUFFER_BYTES, **shape).facts["port"]
    return found


def _hop_amount(total: int, distance: Distance, transports: int, sizes: Sizes) -> int:
    """The part of ``total`` that plain transports carry in the same time: their window is 256 KiB on any path."""
    windows = sizes.wan_s * 1000 / distance.round_trip_ms * transports
    return min(
        total, max(1, int(windows * _HOP_WINDOW_BYTES) // (_WRITE_BYTES * _TRANSPORTS)) * _WRITE_BYTES * _TRANSPORTS
    )


def _pair(cast: Cast, server: Child, distance: Distance, security: str) -> tuple[Child, Child]:
    """A sending client and one that takes the data or sends it back, each at its distance from the relay."""
    clients = []
    kind = "both" if security == "e2e" else "sink"  # base peers know no services
    for listen in (None, kind):
        far = {"key": server.facts["key"], "port": _link(cast, server.facts["port"], distance)}
        clients.append(cast.start("client", server=far, listen=listen, security=security))
    return clients[0], clients[1]


def _push(source: Child, sink: Child, total: int, transports: int) -> float:
    """MB/s."""
    result = source.ask(
        "push",
        target=sink.facts["key"],
        size=_WRITE_BYTES,
        total=total,
        transports=transports,
        limit_s=_LIMIT_S,
        timeout_s=2 * _LIMIT_S,
    )
    if result["acked_bytes"] != total:
        raise RuntimeError(f"{total} sent, {result['acked_bytes']} acknowledged")
    rate: float = total / result["elapsed_s"] / 1e6
    return rate


def _alone(source: Child, sink: Child) -> float:
    """The median round trip of 64 B in ms."""
    result = source.ask(
        "pings",
        target=sink.facts["key"],
        service="echo",
        size=64,
        rounds=_ALONE,
        seconds=_LIMIT_S,
        timeout_s=2 * _LIMIT_S,
    )
    found: float = result["p50_ms"]
    return found


def _beside(source: Child, sink: Child, total: int) -> float:
    """The same beside a transfer that fills the path."""
    result = source.ask(
        "pings_beside",
        target=sink.facts["key"],
        size=_WRITE_BYTES,
        total=total,
        limit_s=_LIMIT_S,
        timeout_s=2 * _LIMIT_S,
    )
    found: float = result["p50_ms"]
    return found
