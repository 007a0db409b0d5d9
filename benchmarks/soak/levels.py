"""Samples the levels of every process while it lives, and judges whether they are flat."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import psutil

from benchmarks.processes import Child
from benchmarks.soak.fit import Fit, fit

#: Growth an hour that counts as flat, as a share of the level: at 1 % a process that runs for a month doubles four times
#: over 72 days, and restarts of machines come sooner.
BOUND_SHARE: Final = 0.01
#: Growth over the whole time that counts as flat, however low the level: two arenas of Python's allocator, connections to
#: another relay and to discovery, the threads of a reactor's pool (started on demand), variations of the load, and two
#: tables of the 256 keys a client accepted last, which strangers fill.
FLOORS: Final = {
    "rss": 2048.0,
    "uss": 2048.0,
    "descriptors": 4.0,
    "threads": 10.0,
    "ids": 2.0,
    "objects": 100.0,
    "entries": 600.0,
}
#: Name of a level in the table, and its unit.
NAMES: Final = {
    "rss": ("memory, RSS", "KiB"),
    "uss": ("memory, its own", "KiB"),
    "descriptors": ("descriptors", ""),
    "threads": ("threads", ""),
    "ids": ("transport ids", ""),
    "objects": ("objects of ours", ""),
    "entries": ("table entries", ""),
}
#: Tables that hold one entry for each transport id in use.
_IDS: Final = ("Member.legs", "Connection.streams")
#: Levels of the admin site that only ever rise, or that another level covers.
_COUNTERS: Final = ("proofs_ok", "proofs_failed", "connections_evicted", "connections_refused")
_ANSWER_TIMEOUT_S: Final = 30.0


@dataclass
class Series:
    """One life of one process: level by name as (seconds since the run began, value) pairs."""

    role: str
    pid: int
    began_s: float
    levels: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, name: str, at_s: float, value: float) -> None:
        """Note one sample."""
        self.levels.setdefault(name, []).append((at_s, value))

    def ended_s(self) -> float:
        """When the last sample was taken."""
        return max((points[-1][0] for points in self.levels.values()), default=self.began_s)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a level of a process is flat."""

    role: str
    level: str
    fit: Fit
    bound_per_h: float

    @property
    def flat(self) -> bool:
        """See :meth:`Fit.is_flat`."""
        return self.fit.is_flat(self.bound_per_h)


class Levels:
    """Takes samples of all processes. ``clock()`` gives seconds since the run began."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.series: list[Series] = []
        self._clock = clock
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
        #: Pid -> its series, its child if it can be asked, the port of its admin site if it has one.
        self._watched: dict[int, tuple[Series, Child | None, int | None]] = {}

    def watch(self, role: str, pid: int, child: Child | None = None, admin: int | None = None) -> None:
        """Watch a new process."""
        series = Series(role, pid, self._clock())
        self.series.append(series)
        self._watched[pid] = series, child, admin

    def loaded(self) -> None:
        """The load begins now: the lives of earlier processes count from now on."""
        for one in self.series:
            one.began_s = self._clock()

    def forget(self, pid: int) -> None:
        """Forget a process that is to end."""
        self._watched.pop(pid, None)

    def sample(self) -> None:
        """Sample each process's figures from the operating system."""
        for pid, (series, _, _) in self._watched.items():
            process = psutil.Process(pid)
            with process.oneshot():
                memory = process.memory_full_info()
                now = self._clock()
                series.add("rss", now, memory.rss / 1024)
                series.add("uss", now, memory.uss / 1024)
                series.add("descriptors", now, process.num_fds())
                series.add("threads", now, process.num_threads())

    def count(self) -> None:
        """Sample each process's own figures: its objects and tables, and the gauges of its admin site."""
        for series, child, admin in self._watched.values():
            if child is not None:
                counted = child.ask("census", timeout_s=_ANSWER_TIMEOUT_S)
                now = self._clock()
                series.add("objects", now, sum(counted["objects"].values()))
                series.add("entries", now, sum(counted["tables"].values()))
                series.add("ids", now, sum(counted["tables"].get(name, 0) for name in _IDS))
                for what in counted:
                    for name, number in counted[what].items():
                        series.add(f"{what}: {name}", now, number)
            if admin is not None:
                for name, value in self._gauges(admin).items():
                    series.add(f"gauge: {name}", self._clock(), value)

    def _gauges(self, admin: int) -> dict[str, float]:
        with self._open(f"http://127.0.0.1:{admin}/metrics", timeout=_ANSWER_TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
        gauges = [line.split()[2] for line in lines if line.startswith("# TYPE dmsg_") and line.endswith(" gauge")]
        values = dict(line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
        return {name: float(values[name]) for name in gauges if name in values}

    # --- what came of it -------------------------------------------------------------------------------------------

    def longest(self) -> list[Series]:
        """The longest life of each role, in the order in which the roles began."""
        best: dict[str, Series] = {}
        for one in self.series:
            known = best.get(one.role)
            if known is None or one.ended_s() - one.began_s > known.ended_s() - known.began_s:
                best[one.role] = one
        return list(best.values())

    def verdicts(self, warm_up_s: float) -> list[Verdict]:
        """Each level of each role's longest life, without the first ``warm_up_s`` of that life."""
        found = []
        for series in self.longest():
            for name in NAMES:
                points = [one for one in series.levels.get(name, ()) if one[0] >= series.began_s + warm_up_s]
                line = fit(points)
                if line is not None:
                    bound = max(BOUND_SHARE * line.mean, FLOORS[name] / line.hours)
                    found.append(Verdict(series.role, name, line, bound))
        return found

    def grown(self, role: str, warm_up_s: float) -> list[tuple[str, float, float]]:
        """Details that grew in the longest life of ``role``: name, level after the warm-up, level at the end."""
        (series,) = [one for one in self.longest() if one.role == role]
        grown = []
        for name, points in series.levels.items():
            if ": " not in name:
                continue
            late = [value for at_s, value in points if at_s >= series.began_s + warm_up_s]
            if len(late) >= 8:
                quarter = len(late) // 4
                first, last = sum(late[:quarter]) / quarter, sum(late[-quarter:]) / quarter
                grown.append((name, first, last))
        grown.sort(key=lambda one: one[1] - one[2])
        return grown[:8]

    def as_json(self) -> list[dict[str, Any]]:
        """All samples."""
        return [{"role": one.role, "pid": one.pid, "began_s": one.began_s, "levels": one.levels} for one in self.series]
