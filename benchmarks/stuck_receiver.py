"""A receiver that stops reading: the server's memory for it, and its effect on other clients.

``honest`` is a client of ours that pushes for some seconds until its window stops it. ``hostile`` ignores acknowledgements,
is in league with the receiver, and opens a new transport whenever the server closes one, until everything is written.
The ping-pong of two others is measured before, during and after the pressure, and compared with the mean of before and
after, because the speed of a shared machine varies.
"""

from __future__ import annotations

import threading
from typing import Final, NamedTuple

from benchmarks.processes import Cast, Child
from benchmarks.quiet import least_disturbed
from benchmarks.report import Row, row
from benchmarks.sizes import Sizes

NAME: Final = "stuck_receiver"
_RSS_LIMIT_MIB: Final = 2.0
_P99_TIMES_LIMIT: Final = 1.3
#: How fast the hostile sender pushes: half of what the server could relay, so that the others' tail tells of the
#: queues and not of a machine without a free core.
_HOSTILE_PER_S: Final = 50e6
_SAMPLE_S: Final = 0.02
_WARM_BYTES: Final = 32 * 1024 * 1024


def run(sizes: Sizes) -> list[Row]:
    """Rows of memory and tail latency for both kinds of sender."""
    return [*_honest(sizes), *_hostile(sizes)]


class _Peak:
    """The largest memory of a process during a ``with`` block, in MiB above that at its beginning."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._base = self._peak = 0
        self.rise_mib = 0.0

    def __enter__(self) -> _Peak:
        self._base = self._peak = self._child.rss_kib()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.rise_mib = (max(self._peak, self._child.rss_kib()) - self._base) / 1024

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._peak = max(self._peak, self._child.rss_kib())


def _pings(pinger: Child, echo: Child, seconds: float) -> float:
    pinger.send("pings", target=echo.facts["key"], size=64, rounds=10**9, seconds=seconds)
    p99_ms: float = pinger.answer(seconds + 20)["p99_ms"]
    return p99_ms


def _warm(cast: Cast, server: Child, sizes: Sizes) -> None:
    """Send ordinary traffic through the server, so that the buffers of any traffic do not count as a rise."""
    sink = cast.start("client", server=server.facts, listen="sink")
    source = cast.start("client", server=server.facts)
    total = min(sizes.stuck_bytes, _WARM_BYTES)
    source.ask("push", target=sink.facts["key"], size=16384, total=total, transports=4, limit_s=30)
    source.close()
    sink.close()


class _Stuck(NamedTuple):
    """One repeat: the rise of the server's memory, the others' tail without and with the pressure, the bytes pushed."""

    rise_mib: float
    alone_ms: float
    under_ms: float
    written_mib: float = 0.0
    transports: float = 0.0


def _rows(kind: str, runs: list[_Stuck]) -> list[Row]:
    ratios = [run.under_ms / run.alone_ms for run in runs]
    return [
        row(NAME, f"{kind}: server memory, rise", [run.rise_mib for run in runs], "MiB", at_most=_RSS_LIMIT_MIB),
        row(NAME, f"{kind}: others' ping-pong p99, times alone", ratios, "x", at_most=_P99_TIMES_LIMIT),
        row(NAME, f"{kind}: others' ping-pong p99", [run.under_ms for run in runs], "ms"),
    ]


def _honest(sizes: Sizes) -> list[Row]:
    def once() -> _Stuck:
        with Cast() as cast:
            server = cast.start("server")
            echo = cast.start("client", server=server.facts, listen="echo")
            pinger = cast.start("client", server=server.facts)
            source = cast.start("client", server=server.facts)
            stuck = cast.start("stuck_pair", server=server.facts)
            _warm(cast, server, sizes)
            _pings(pinger, echo, 0.3)
            alone = _pings(pinger, echo, sizes.stuck_s)
            with _Peak(server) as peak:
                stuck.send("accept")
                source.send(
                    "push",
                    target=stuck.facts["key"],
                    size=16384,
                    total=sizes.stuck_bytes,
                    transports=1,
                    limit_s=sizes.stuck_s,
                )
                stuck.answer()
                under = _pings(pinger, echo, sizes.stuck_s)
                source.answer(sizes.stuck_s + 20)
            return _Stuck(peak.rise_mib, (alone + _pings(pinger, echo, sizes.stuck_s)) / 2, under)

    return _rows("honest", least_disturbed(sizes.repeats, once))


def _hostile(sizes: Sizes) -> list[Row]:
    def once() -> _Stuck:
        with Cast() as cast:
            server = cast.start("server")
            echo = cast.start("client", server=server.facts, listen="echo")
            pinger = cast.start("client", server=server.facts)
            pair = cast.start("stuck_pair", server=server.facts)
            _warm(cast, server, sizes)
            _pings(pinger, echo, 0.3)
            alone = _pings(pinger, echo, sizes.stuck_s)
            seconds = sizes.stuck_bytes / _HOSTILE_PER_S
            with _Peak(server) as peak:
                pair.send("flood", total=sizes.stuck_bytes, per_second=_HOSTILE_PER_S, limit_s=3 * seconds + 5)
                under = _pings(pinger, echo, seconds)
                result = pair.answer(3 * seconds + 30)
            alone = (alone + _pings(pinger, echo, sizes.stuck_s)) / 2
            return _Stuck(peak.rise_mib, alone, under, result["written_bytes"] / 2**20, result["transports"])

    runs = least_disturbed(sizes.repeats, once)
    return [
        *_rows("hostile", runs),
        row(NAME, "hostile: written", [run.written_mib for run in runs], "MiB"),
        row(NAME, "hostile: transports opened", [run.transports for run in runs], "transports"),
    ]
