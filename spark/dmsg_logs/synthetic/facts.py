"""Figures that lines about sessions and transports share, so that both ends and the relay tell the same story."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from dmsg_logs.synthetic.fleet import Bools, End, Floats, Ints
from dmsg_logs.synthetic.timeline import Kind, Timeline, World

#: Name of a CLOSE code that the fleet sees -> the code.
CODES: Final = {
    "normal": 0,
    "refused": 1,
    "slow_consumer": 5,
    "handshake_timeout": 11,
    "integrity": 12,
    "peer_gone": 13,
    "server_draining": 14,
    "deadline": 15,
    "access_denied": 16,
}
#: Transport ids are even on the initiator's side; ordinary ids wrap around after this many.
_ROUND: Final = 512
_UNIQUE_FROM: Final = 2 * _ROUND
NEVER_OPENED_FROM: Final = 60_000
_MOST_BYTES: Final = 2 << 30


@dataclass(slots=True)
class Facts:
    """Columns by segment, then by session."""

    transport_id: Ints  # on the initiator's connection
    responder_id: Ints
    root: Ints  # the segment a transport began with
    to_initiator: Ints
    to_responder: Ints
    all_to_initiator: Ints  # over every segment of the transport; right in its last one
    all_to_responder: Ints
    queue_peak: Ints
    code: Ints
    by_initiator: Bools
    by_server: Bools
    session_in: Ints
    session_out: Ints
    frames_in: Ints
    frames_out: Ints
    still_open: Ints


def make_facts(world: World, timeline: Timeline, rng: np.random.Generator) -> Facts:
    """The figures for the sessions and transports in ``timeline``."""
    segments, sessions, fleet = world.segments, world.sessions, world.fleet
    n = len(segments)
    root = np.arange(n)
    continued = np.flatnonzero(segments.before >= 0)
    for _ in range(64):  # a chain is never that long
        following = root[segments.before[continued]]
        if (root[continued] == following).all():
            break
        root[continued] = following
    to_responder = np.minimum(rng.lognormal(8.6, 2.3, n), _MOST_BYTES).astype(np.int64)
    to_initiator = np.minimum(to_responder * rng.lognormal(0.3, 1.6, n) + rng.integers(0, 900, n), _MOST_BYTES).astype(
        np.int64
    )
    is_slow = segments.relay == fleet.slow
    largest = np.maximum(to_initiator, to_responder)
    share = np.where(is_slow, rng.uniform(0.1, 0.9, n), np.where(rng.random(n) < 0.2, rng.uniform(0, 0.3, n), 0.0))
    queue_peak = np.minimum(largest * share, 1_300_000).astype(np.int64)
    code, by_initiator, by_server = _ends(world, rng, is_slow)
    told = np.zeros(n, np.bool_)
    told[timeline.ref[timeline.kind == Kind.RELAY_OPENED]] = True
    count = len(sessions.start)

    def by_session(first: Ints, second: Ints) -> Ints:
        own = np.bincount(segments.session[told], first[told], count)
        return (own + np.bincount(segments.other[told], second[told], count)).astype(np.int64)

    frames = (to_initiator + to_responder) // 1200 + 4
    life = (sessions.end - sessions.start).astype(np.int64) * 2
    cut = told & (segments.cut >= 0)
    whose = np.where(segments.cut_by_initiator, segments.session, segments.other)[cut]
    return Facts(
        _ids(segments.session, segments.open_at, segments.close_at, 0),
        _ids(segments.other, segments.open_at, segments.close_at, 1),
        root,
        to_initiator,
        to_responder,
        np.bincount(root, to_initiator, n).astype(np.int64)[root],
        np.bincount(root, to_responder, n).astype(np.int64)[root],
        queue_peak,
        code,
        by_initiator,
        by_server,
        by_session(to_responder + 40 * frames, to_initiator + 40 * frames) + life,
        by_session(to_initiator + 40 * frames, to_responder + 40 * frames) + life,
        by_session(frames, frames) + life // 60,
        by_session(frames, frames) + life // 60,
        np.bincount(whose, minlength=count),
    )


def _ends(world: World, rng: np.random.Generator, is_slow: Bools) -> tuple[Ints, Bools, Bools]:
    """CLOSE code of every segment and who ended it."""
    segments = world.segments
    n = len(segments)
    odd = rng.random(n)
    code = np.zeros(n, np.int64)
    code[odd < 0.004] = CODES["deadline"]
    code[odd < 0.002] = CODES["integrity"]
    by_server = odd > np.where(is_slow, 0.96, 0.998)
    code[by_server] = CODES["slow_consumer"]
    by_initiator = rng.random(n) < 0.6
    cut = segments.cut >= 0
    by_initiator[cut] = segments.cut_by_initiator[cut]
    by_server[cut] = segments.cut[cut] == End.DRAINED
    code[cut] = np.where(segments.cut[cut] == End.CLIENT_STOPPED, CODES["normal"], CODES["peer_gone"])
    code[segments.cut == End.DRAINED] = CODES["server_draining"]
    return code, by_initiator, by_server


def _ids(session: Ints, open_at: Floats, close_at: Floats, parity: int) -> Ints:
    """Ids as a connection assigns them: ascending, wrapping around, never one that is in use.

    Those of channels, which have one byte, are no exception here.
    """
    order = np.lexsort((open_at, session))
    ids = np.zeros(len(session), np.int64)
    owner = session[order]
    place = np.arange(len(order)) - np.searchsorted(owner, owner)
    ids[order] = (place * 2 + owner * 6) % (2 * _ROUND)
    long = (close_at - open_at)[order] > 200.0
    ids[order[long]] = _UNIQUE_FROM + (place[long] * 2) % (NEVER_OPENED_FROM - _UNIQUE_FROM)
    again = np.lexsort((open_at, ids, session))
    same = (session[again][1:] == session[again][:-1]) & (ids[again][1:] == ids[again][:-1])
    clash = again[1:][same & (open_at[again][1:] <= close_at[again][:-1])]
    position = np.zeros(len(session), np.int64)
    position[order] = place
    ids[clash] = _UNIQUE_FROM + (position[clash] * 2) % (NEVER_OPENED_FROM - _UNIQUE_FROM)
    return ids + parity
