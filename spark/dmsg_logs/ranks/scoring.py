"""Scores from each client's observations of each relay. Pure: plain Python over one row for each relay and client.

Every part of a score is an average over *voices*. A voice is one client (or all strangers together, or the relay itself).
It has a weight from 0 to 1, however much it says, and a value from 0 to 1. Every average has at least :data:`VOICES`
voices: those that are missing say "neutral". So one voice that appears, vanishes or says the opposite moves a part by at
most ``1 / VOICES``, and a score, which is a weighted average of its parts, by no more.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

#: Scores and parts are whole thousandths.
SCALE: Final = 1000
#: The score of a relay without any evidence.
NEUTRAL: Final = 0.5
#: Step of published scores and parts, in thousandths: finer differences are noise.
STEP: Final = 5
#: Least number of voices in an average; missing voices are neutral.
VOICES: Final = 40
#: Pieces of evidence that give a voice half of its weight: one dial is half an anecdote.
EVIDENCE: Final = 1.0
#: The share of failures at which a voice says 0. Where there are other relays, one that fails every fourth time is useless.
USELESS_SHARE: Final = 0.25
#: Least number of targets in a client's comparison of answers; missing targets are neutral. This bounds the influence of
#: one key that answers slowly through one relay and fast through another: its own vote, and one place for all others.
TARGETS: Final = 20
#: Parts of a score and their weights. ``session`` (how long a client needs to get a session up) and ``accept`` (how long
#: an answer takes through the relay) are published together, as ``latency``.
WEIGHTS: Final[Mapping[str, float]] = {"success": 0.35, "session": 0.2, "accept": 0.2, "capacity": 0.1, "drops": 0.15}
#: Most thousandths by which one client can move a published score: 25 by its voice, 20 by how it answers those who dial
#: it, 5 by the step. Relays whose scores differ by no more are treated as equal: see :func:`compare`.
SHARE: Final = round(SCALE / VOICES + SCALE * WEIGHTS["accept"] * 2 / TARGETS) + STEP

#: Names of the two voices that are no client's.
STRANGERS: Final = ""
ITSELF: Final = "self"


@dataclass(slots=True)
class Voice:
    """One client's observations of one relay; old evidence has faded already.

    ``ok``, ``failed``, ``refused`` and ``dropped`` are pieces of evidence: the relay did its work, failed, had no room,
    lost a session. ``session`` compares the time to get a session up with the client's other relays, from 0 (slow) to 1
    (fast), with ``session_evidence`` pieces. ``accept_sum`` and ``accept_targets`` compare answers: the sum of the targets'
    votes, each at most 1, and the number of votes. ``dials`` and ``pieces`` are plain counts.
    """

    relay: str
    client: str
    ok: float = 0.0
    failed: float = 0.0
    refused: float = 0.0
    dropped: float = 0.0
    session: float = NEUTRAL
    session_evidence: float = 0.0
    accept_sum: float = 0.0
    accept_targets: float = 0.0
    dials: int = 0
    pieces: int = 0

    def parts(self) -> dict[str, tuple[float, float]]:
        """Part -> (weight, value), both from 0 to 1 whatever the numbers are."""
        ok, failed = _amount(self.ok), _amount(self.failed)
        refused, dropped = _amount(self.refused), _amount(self.dropped)
        # The weight is that of the voice, not of its comparison: the choice of targets must not decide how loud it is.
        return {
            "success": _verdict(ok, failed),
            "session": (_weight(_amount(self.session_evidence)), _unit(self.session)),
            "accept": (_weight(ok + failed), self._accept()),
            "capacity": _verdict(ok, refused),
            "drops": _verdict(ok, dropped),
        }

    def _accept(self) -> float:
        targets = _amount(self.accept_targets)
        said = min(_amount(self.accept_sum), targets)
        return (said + NEUTRAL * max(0.0, TARGETS - targets)) / max(float(TARGETS), targets)


@dataclass(frozen=True, slots=True)
class RelayScore:
    """One relay's score and its parts in thousandths, and its basis: numbers of dials and of clients' voices."""

    score: int
    success: int
    latency: int
    capacity: int
    drops: int
    dials: int
    clients: int


@dataclass(frozen=True, slots=True)
class Scores:
    """Relay -> score, and the numbers of clients left out and of their pieces of evidence."""

    relays: Mapping[str, RelayScore] = field(default_factory=dict)
    excluded_clients: int = 0
    excluded_events: int = 0


def score_relays(voices: Iterable[Voice], *, relays: Collection[str] = (), excluded: Collection[str] = ()) -> Scores:
    """Scores from ``voices``, each relay and client once; those of ``excluded`` clients are left out and counted.

    ``relays`` are scored even if no client says anything of them.
    """
    heard: dict[str, list[Voice]] = defaultdict(list)
    for relay in relays:
        heard[relay] = []
    silenced: set[str] = set()
    pieces = 0
    for voice in voices:
        if voice.client in excluded:
            silenced.add(voice.client)
            pieces += voice.pieces
        else:
            heard[voice.relay].append(voice)
    return Scores({relay: _score(said) for relay, said in sorted(heard.items())}, len(silenced), pieces)


def compare(one: int, other: int) -> int:
    """1 if the first of two published scores is better, -1 if worse, 0 if they are to be treated as equal.

    No single client can turn 1 into -1.
    """
    if abs(one - other) <= SHARE:
        return 0
    return 1 if one > other else -1


def effective(score: int, issued: float, lifetime_s: float, now: float) -> float:
    """A published score as it counts at ``now`` (Unix seconds): in full up to half its lifetime, then ever less."""
    fresh = min(1.0, max(0.0, 2.0 * (1.0 - (now - issued) / lifetime_s)))
    return SCALE * NEUTRAL + (score - SCALE * NEUTRAL) * fresh


def _score(voices: list[Voice]) -> RelayScore:
    said = [voice.parts() for voice in voices]
    parts = {name: _average([one[name] for one in said]) for name in WEIGHTS}
    latency = WEIGHTS["session"] * parts["session"] + WEIGHTS["accept"] * parts["accept"]
    return RelayScore(
        score=_published(sum(weight * parts[name] for name, weight in WEIGHTS.items())),
        success=_published(parts["success"]),
        latency=_published(latency / (WEIGHTS["session"] + WEIGHTS["accept"])),
        capacity=_published(parts["capacity"]),
        drops=_published(parts["drops"]),
        dials=sum(max(0, voice.dials) for voice in voices),
        clients=sum(voice.client not in (STRANGERS, ITSELF) for voice in voices),
    )


def _average(said: list[tuple[float, float]]) -> float:
    weight = math.fsum(weight for weight, _ in said)
    total = math.fsum(weight * value for weight, value in said)
    return (total + NEUTRAL * max(0.0, VOICES - weight)) / max(float(VOICES), weight)


def _verdict(good: float, bad: float) -> tuple[float, float]:
    evidence = good + bad
    if evidence == 0:
        return 0.0, NEUTRAL
    return _weight(evidence), max(0.0, 1.0 - bad / evidence / USELESS_SHARE)


def _weight(evidence: float) -> float:
    return evidence / (evidence + EVIDENCE)


#: Most pieces of evidence that count; more change nothing, and sums stay finite.
_PLENTY: Final = 1e12


def _amount(number: float) -> float:
    return min(max(number, 0.0), _PLENTY) if not math.isnan(number) else 0.0


def _unit(number: float) -> float:
    return min(max(number, 0.0), 1.0) if not math.isnan(number) else NEUTRAL


def _published(part: float) -> int:
    return STEP * math.floor(part * SCALE / STEP + 0.5)
