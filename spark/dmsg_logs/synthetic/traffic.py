"""The traffic of the synthetic fleet's clients: dials with their failed tries, and the transports they lead to.

Arrays throughout: a fleet's week is millions of rows. A *segment* is one transport on one relay; a transport that is
resumed has several.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Final

import numpy as np

from dmsg_logs.synthetic.fleet import (
    DAY_S,
    DMSG,
    HOUR_S,
    MESSAGING,
    Bools,
    End,
    Fleet,
    Floats,
    Ints,
    RunIndex,
    SessionIndex,
    Sessions,
)

#: Tries of one dial, each through another relay.
TRIES: Final = 3
#: Milliseconds without an answer after which the next relay is tried.
_STAGGER_MS: Final = 250.0
_DIAL_TIMEOUT_MS: Final = 10_000.0
_GHOSTS: Final = 40
#: Share of dials over the messaging system, among those between two clients that both speak it.
_BY_MESSAGING: Final = 0.4


class Outcome(IntEnum):
    """How a try, or a whole dial without one, ended."""

    OK = 0
    CONNECT_REFUSED = 1
    CONNECT_TIMEOUT = 2
    CONNECTION_LOST = 3
    UNKNOWN_PEER = 4
    BUSY = 5
    RATE_LIMITED = 6
    HANDSHAKE_TIMEOUT = 7
    REFUSED = 8
    ACCESS_DENIED = 9
    NO_ENTRY = 10
    UNAVAILABLE = 11
    NO_COMMON_SERVER = 12
    LIE = 13
    NOT_TRIED = 14


#: Tries that the relay itself refuses; it writes ``refused`` for them.
REFUSED_BY_RELAY: Final = (Outcome.UNKNOWN_PEER, Outcome.BUSY, Outcome.RATE_LIMITED)
#: Tries that reach the peer; the relay writes ``transport_closed`` for them, and never wrote that it was opened.
REFUSED_BY_PEER: Final = (Outcome.HANDSHAKE_TIMEOUT, Outcome.REFUSED, Outcome.ACCESS_DENIED)
_WITHOUT_RELAY: Final = (Outcome.NO_ENTRY, Outcome.UNAVAILABLE, Outcome.NO_COMMON_SERVER)

_ORDINARY: Final = {
    Outcome.BUSY: 0.003,
    Outcome.HANDSHAKE_TIMEOUT: 0.004,
    Outcome.REFUSED: 0.004,
    Outcome.ACCESS_DENIED: 0.003,
    Outcome.CONNECT_TIMEOUT: 0.002,
    Outcome.CONNECTION_LOST: 0.002,
}
_FAILING: Final = {**_ORDINARY, Outcome.BUSY: 0.16, Outcome.HANDSHAKE_TIMEOUT: 0.14, Outcome.CONNECTION_LOST: 0.05}
_ABUSED: Final = {Outcome.RATE_LIMITED: 0.72, Outcome.BUSY: 0.08}


@dataclass(slots=True)
class Dials:
    """A row for each dial; ``relay``, ``outcome`` and ``elapsed_ms`` have a column for each try."""

    at: Floats
    initiator: Ints
    responder: Ints
    ghost: Ints  # number of a key that is no node's, -1 for an ordinary target
    e2e: Bools
    messaging: Bools  # of the messaging system; the others are of dmsg
    relay: Ints
    outcome: Ints
    elapsed_ms: Floats
    finish_ms: Floats
    chosen: Ints  # the try that got through, -1
    look_up_ms: Floats

    def take(self, rows: Ints) -> Dials:
        """Some of the dials."""
        return Dials(*(getattr(self, each.name)[rows] for each in fields(self)))


@dataclass(slots=True)
class Segments:
    """A row for each transport on one relay. ``before`` is the segment it goes on from, ``after`` the other way round."""

    dial: Ints
    relay: Ints
    open_at: Floats
    close_at: Floats
    session: Ints  # the initiator's
    other: Ints  # the responder's
    accept_ms: Floats
    cut: Ints  # an ``End`` if its path was lost, -1 if it was closed in good order
    cut_by_initiator: Bools
    before: Ints
    gap_ms: Floats
    after: Ints

    def __len__(self) -> int:
        return len(self.dial)


def rate(at: Floats, start: float) -> Floats:
    """Relative load at a time: quiet nights, a peak in the early evening, less at weekends, some growth every day."""
    day = (at - start) / DAY_S
    hour = (at % DAY_S) / HOUR_S
    curve = 0.3 + 0.5 * np.exp(-(((hour - 11.0) / 3.5) ** 2)) + 0.8 * np.exp(-(((hour - 18.5) / 3.0) ** 2))
    weekday = np.floor(at / DAY_S + 3).astype(np.int64) % 7  # 0 is Monday
    load: Floats = curve * np.where(weekday >= 5, 0.7, 1.0) * (1.0 + 0.025 * day)
    return load


def _times(rng: np.random.Generator, fleet: Fleet, count: int) -> Floats:
    grid = np.arange(fleet.start, fleet.end + 60.0, 60.0)
    total = np.concatenate([[0.0], np.cumsum(rate(grid[:-1] + 30.0, fleet.start))])
    times: Floats = np.interp(rng.random(count) * total[-1], total, grid)
    return times


def _zipf(rng: np.random.Generator, count: int) -> Floats:
    weights = 1.0 / (rng.permutation(count) + 3.0) ** 0.8
    normal: Floats = weights / weights.sum()
    return normal


def make_dials(fleet: Fleet, sessions: SessionIndex, rng: np.random.Generator, count: int) -> Dials:
    """About ``count`` dials, in random order; those of clients that were not running are left out."""
    bad = int(count * 0.035)
    lies = int(count * 0.02)
    clients = fleet.clients
    at = _times(rng, fleet, count)
    initiator = rng.choice(clients, count, p=_zipf(rng, clients)) + fleet.relays
    responder = rng.choice(clients, count, p=_zipf(rng, clients)) + fleet.relays
    is_bad, is_lie = np.zeros(count, np.bool_), np.zeros(count, np.bool_)
    is_bad[:bad], is_lie[bad : bad + lies] = True, True
    if bad:
        initiator[:bad] = rng.choice(fleet.abusers, bad)
        bursts = fleet.start + (fleet.end - fleet.start) * np.array([0.18, 0.52, 0.74]) + HOUR_S
        at[:bad] = bursts[rng.integers(0, len(bursts), bad)] + rng.uniform(0, 5 * HOUR_S, bad)
    if lies:
        initiator[bad : bad + lies] = rng.choice(fleet.liars, lies)
    same = responder == initiator
    responder[same] = (responder[same] - fleet.relays + 1) % clients + fleet.relays
    order = rng.permutation(count)
    keep = order[(RunIndex(fleet).find(initiator, at) >= 0)[order] & (at[order] < fleet.end)]
    at, initiator, responder = at[keep], initiator[keep], responder[keep]
    is_bad, is_lie = is_bad[keep], is_lie[keep]
    n = len(keep)
    both = fleet.bilingual[initiator - fleet.relays] & fleet.bilingual[responder - fleet.relays]
    messaging = both & ~is_lie & (rng.random(n) < _BY_MESSAGING) & (MESSAGING in fleet.homes)
    dials = Dials(
        at,
        initiator,
        responder,
        np.where(rng.random(n) < np.where(is_bad, 0.12, 0.004), rng.integers(0, _GHOSTS, n), -1),
        (rng.random(n) < 0.8) | messaging,
        messaging,
        np.zeros((n, TRIES), np.int64),
        np.full((n, TRIES), Outcome.NOT_TRIED, np.int64),
        np.zeros((n, TRIES)),
        np.zeros(n),
        np.full(n, -1, np.int64),
        rng.lognormal(np.log(4.0), 0.6, n),
    )
    _try(fleet, sessions, rng, dials, is_bad, is_lie)
    return dials


def _try(
    fleet: Fleet, sessions: SessionIndex, rng: np.random.Generator, dials: Dials, is_bad: Bools, is_lie: Bools
) -> None:
    """Let every dial go through the homes of its responder, one after the other, until one works."""
    n = len(dials.at)
    responder = dials.responder - fleet.relays
    homes = fleet.homes[DMSG][responder]
    if MESSAGING in fleet.homes:
        homes = np.where(dials.messaging[:, None], fleet.homes[MESSAGING][responder], homes)
    picks = np.argsort(rng.random(homes.shape) + (homes < 0), axis=1)
    homes = np.take_along_axis(homes, picks, axis=1)
    dials.relay = np.maximum(homes, 0)
    pending = dials.ghost < 0
    dials.outcome[~pending, 0] = Outcome.NO_ENTRY
    odd = rng.random(n)
    _without_relay(dials, pending, odd < 0.0008, Outcome.UNAVAILABLE)
    _without_relay(dials, pending, (odd >= 0.0008) & (odd < 0.0013), Outcome.NO_COMMON_SERVER)
    dials.outcome[is_lie & pending, 0] = Outcome.LIE
    dials.relay[is_lie, 0] = fleet.victim
    dials.elapsed_ms[:, 0] = dials.look_up_ms
    dials.elapsed_ms[is_lie, 0] = rng.uniform(3000, 9000, int(is_lie.sum()))
    pending &= ~is_lie
    began = dials.look_up_ms.copy()
    for step in range(TRIES):
        rows = np.flatnonzero(pending & (homes[:, step] >= 0))
        if not len(rows):
            break
        outcome, own_ms = _one_try(fleet, sessions, rng, dials, rows, step, is_bad[rows])
        dials.outcome[rows, step] = outcome
        dials.elapsed_ms[rows, step] = began[rows] + own_ms
        won = rows[outcome == Outcome.OK]
        dials.chosen[won] = step
        pending[won] = False
        began[rows] += np.minimum(own_ms, _STAGGER_MS)
    tried = dials.outcome != Outcome.NOT_TRIED
    last = np.where(tried, dials.elapsed_ms, 0.0).max(axis=1)
    through = dials.chosen >= 0
    dials.finish_ms = np.where(
        through, dials.elapsed_ms[np.arange(n), dials.chosen], np.minimum(last, _DIAL_TIMEOUT_MS)
    ) + rng.uniform(0.05, 0.4, n)


def _without_relay(dials: Dials, pending: Bools, chosen: Bools, outcome: Outcome) -> None:
    rows = pending & chosen
    dials.outcome[rows, 0] = outcome
    pending &= ~rows


def _one_try(
    fleet: Fleet,
    sessions: SessionIndex,
    rng: np.random.Generator,
    dials: Dials,
    rows: Ints,
    step: int,
    is_bad: Bools,
) -> tuple[Ints, Floats]:
    n = len(rows)
    relay, at = dials.relay[rows, step], dials.at[rows] + dials.look_up_ms[rows] / 1000
    own = sessions.find(dials.initiator[rows], relay, at)
    other = sessions.find(dials.responder[rows], relay, at)
    outcome = _draw(rng.random(n), _ORDINARY)
    failing = relay == fleet.failing
    outcome[failing] = _draw(rng.random(int(failing.sum())), _FAILING)
    outcome[is_bad] = _draw(rng.random(int(is_bad.sum())), _ABUSED)
    outcome[other < 0] = Outcome.UNKNOWN_PEER
    outcome[own < 0] = Outcome.CONNECTION_LOST
    for outage in fleet.outages:
        outcome[(relay == outage.relay) & (at >= outage.down) & (at < outage.up)] = Outcome.CONNECT_REFUSED
    slow = np.where(relay == fleet.slow, 7.0, 1.0) * (0.8 + 0.15 * rate(at, fleet.start))
    round_trip_ms = rng.lognormal(np.log(38.0), 0.55, n) * slow
    own_ms = round_trip_ms.copy()
    own_ms[outcome == Outcome.CONNECT_REFUSED] *= 0.3
    for slow_outcome, least, most in (
        (Outcome.HANDSHAKE_TIMEOUT, 4000, 7000),
        (Outcome.CONNECT_TIMEOUT, 9000, 9400),
    ):
        chosen = outcome == slow_outcome
        own_ms[chosen] = rng.uniform(least, most, int(chosen.sum()))
    return outcome, own_ms


def _draw(uniform: Floats, shares: dict[Outcome, float]) -> Ints:
    codes = np.array([*shares, Outcome.OK], np.int64)
    return codes[np.searchsorted(np.cumsum(list(shares.values())), uniform, side="right")]


def refusals(outcome: Ints, dial: Ints) -> Ints:
    """Number of refusals a line stands for: clients above their rate are refused many times a second."""
    return np.where(outcome == Outcome.RATE_LIMITED, 1 + (dial.astype(np.int64) * 7919) % 23, 1)


def make_segments(
    fleet: Fleet, sessions: Sessions, index: SessionIndex, rng: np.random.Generator, dials: Dials
) -> Segments:
    """The transports of successful dials, including those resumed after a path was lost."""
    rows = np.flatnonzero(dials.chosen >= 0)
    n = len(rows)
    step = dials.chosen[rows]
    at = dials.at[rows] + dials.elapsed_ms[rows, step] / 1000
    duration = rng.lognormal(np.log(18.0), 1.4, n)
    long = rng.random(n) < 0.02
    duration[long] = rng.lognormal(np.log(2500.0), 1.0, int(long.sum()))
    close_at = at + 0.05 + np.minimum(duration, 12 * HOUR_S)
    relay = dials.relay[rows, step]
    _plant_open_ones(fleet, dials, rows, relay, at, close_at)
    accept_ms = (dials.elapsed_ms[rows, step] - dials.look_up_ms[rows]) * rng.uniform(0.45, 0.75, n)
    parts = [_place(fleet, index, dials, rows, relay, at, close_at, accept_ms, np.full(n, -1, np.int64), np.zeros(n))]
    offset = 0
    while True:
        more = _resume(fleet, sessions, index, rng, dials, parts[-1], offset)
        offset += len(parts[-1])
        if more is None:
            break
        parts.append(more)
    whole = Segments(*(np.concatenate([getattr(one, each.name) for one in parts]) for each in fields(Segments)))
    continued = np.flatnonzero(whole.before >= 0)
    whole.after[whole.before[continued]] = continued
    return whole


def _plant_open_ones(
    fleet: Fleet, dials: Dials, rows: Ints, relay: Ints, at: Floats, close_at: Floats, each: int = 12
) -> None:
    """Make sure that transports are open whenever a relay goes away: prolong the last ones before that."""
    for outage in fleet.outages:
        before = np.flatnonzero((relay == outage.relay) & (at < outage.down - 1) & dials.e2e[rows])
        recent = before[np.argsort(at[before], kind="stable")[-each:]]
        close_at[recent] = np.maximum(close_at[recent], outage.down + 120.0 + (at[recent] % 600.0))


def _place(
    fleet: Fleet,
    index: SessionIndex,
    dials: Dials,
    rows: Ints,
    relay: Ints,
    at: Floats,
    close_at: Floats,
    accept_ms: Floats,
    before: Ints,
    gap_ms: Floats,
) -> Segments:
    own = index.find(dials.initiator[rows], relay, at)
    other = index.find(dials.responder[rows], relay, at)
    kept = (own >= 0) & (other >= 0)  # a session may just have ended between question and answer
    rows, relay, own, other = rows[kept], relay[kept], own[kept], other[kept]
    at, close_at, accept_ms = at[kept], close_at[kept], accept_ms[kept]
    n = len(rows)
    none = np.full(n, -1, np.int64)
    return Segments(
        rows,
        relay,
        at,
        close_at,
        own,
        other,
        accept_ms,
        none,
        np.zeros(n, np.bool_),
        before[kept],
        gap_ms[kept],
        none.copy(),
    )


def _resume(
    fleet: Fleet,
    sessions: Sessions,
    index: SessionIndex,
    rng: np.random.Generator,
    dials: Dials,
    segments: Segments,
    offset: int,
) -> Segments | None:
    """Cut segments whose path ends before they do; end-to-end transports of dmsg go on over another relay."""
    own_end, other_end = sessions.end[segments.session], sessions.end[segments.other]
    end = np.minimum(own_end, other_end)
    is_cut = segments.close_at >= end
    by_initiator = own_end <= other_end
    kind = np.where(by_initiator, sessions.kind[segments.session], sessions.kind[segments.other])
    segments.cut[is_cut] = kind[is_cut]
    segments.cut_by_initiator = by_initiator & is_cut
    planned = segments.close_at.copy()
    segments.close_at[is_cut] = end[is_cut]
    resumable = np.isin(kind, (End.KILLED, End.DRAINED, End.BROKEN)) & is_cut & dials.e2e[segments.dial]
    resumable &= ~dials.messaging[segments.dial]
    cut = np.flatnonzero(resumable)
    if not len(cut):
        return None
    gap_s = 0.15 + rng.lognormal(np.log(0.6), 0.8, len(cut))
    at = end[cut] + gap_s
    relay = (segments.relay[cut] + 1 + rng.integers(0, max(1, fleet.dmsg_relays - 1), len(cut))) % fleet.dmsg_relays
    close_at = np.maximum(planned[cut], at + rng.exponential(40.0, len(cut)) + 0.5)
    accept_ms = rng.lognormal(np.log(40.0), 0.5, len(cut))
    more = _place(fleet, index, dials, segments.dial[cut], relay, at, close_at, accept_ms, cut + offset, gap_s * 1000)
    return more if len(more) else None
