"""A small fleet for the tests of ranks: what its clients and relays write in an hour, and what liars and abusers add.

:class:`Fleet` holds all of that in one frame, for the tests that ask it for scores.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from event_rows import Event, line_rows, node_of
from pyspark.sql import DataFrame, SparkSession

from dmsg_logs.ranks.document import excluded_clients, gather_voices
from dmsg_logs.ranks.scoring import Scores, score_relays
from dmsg_logs.schemas import LINE

NOW = 1_772_496_000.0
HOUR_S = 3600.0


def key(kind: str, number: int) -> str:
    """A text that looks like a key."""
    return f"02{kind:0>4.4}{number:010x}{number:050x}"


#: Two relays are as good as each other.
GOOD, TWIN, SLOW, FLAPPING, FAILING = (key("aaaa", number) for number in range(1, 6))
RELAYS = (GOOD, TWIN, SLOW, FLAPPING, FAILING)
CLIENTS = tuple(key("cccc", number) for number in range(49))
ALICE, BOB = CLIENTS[:2]
STRANGER = key("dddd", 7)

LOST = "server connection lost"


def lines_frame(spark: SparkSession, lines: Iterable[Event], path: Path) -> DataFrame:
    """Thousands of lines, by way of a file: much faster than row by row."""
    with path.open("w") as file:
        for row in line_rows(lines):
            file.write(json.dumps({name: row[name] for name in LINE.names if row[name] is not None}) + "\n")
    return spark.read.schema(LINE).json(str(path))


def step(relay: str, stage: str, reason: str) -> dict[str, Any]:
    """One failed step of a dial."""
    return {"stage": stage, "server": relay, "elapsed_ms": 12.0, "reason": reason, "detail": ""}


def dial(client: str, target: str, relay: str, steps: Sequence[dict[str, Any]] = (), ts: float = NOW - 60) -> Event:
    """A dial that got through ``relay``; one that did not if that is empty."""
    fields = {
        "ts": ts,
        "node": node_of(client),
        "target": target,
        "server": relay,
        "ok": bool(relay),
        "reason": "" if relay else steps[-1]["reason"],
        "elapsed_ms": 50.0,
        "attempts": json.dumps(steps),
    }
    return "dial_finished", fields


def accepted(client: str, target: str, relay: str, ms: float, ts: float = NOW - 60) -> Event:
    """The transport such a dial gives, as its initiator logs it."""
    ends = {"initiator": client, "responder": target, "server": relay}
    return "transport_opened", {"ts": ts, "role": "client", "node": node_of(client), **ends, "accept_ms": float(ms)}


def session(client: str, relay: str, s: float, ts: float = NOW - 60) -> Event:
    """A session that is up."""
    return "session_up", {"ts": ts, "node": node_of(client), "server": relay, "duration_s": s, "reason": "first"}


def down(client: str, relay: str, reason: str, up_s: float = 0.0, ts: float = NOW - 60) -> Event:
    """A session that is down, or was never up."""
    return "session_down", {"ts": ts, "node": node_of(client), "server": relay, "duration_s": up_s, "reason": reason}


def refusal(relay: str, client: str, what: str, reason: str, count: int = 1, ts: float = NOW - 60) -> Event:
    """What a relay refused."""
    fields = {"what": what, "reason": reason, "count": count}
    return "refused", {"ts": ts, "role": "server", "node": node_of(relay), "remote": client, **fields}


def abuse_close(relay: str, client: str, ts: float = NOW - 60) -> Event:
    """A connection the relay ended for abuse."""
    return "connection_closed", {
        "ts": ts,
        "role": "server",
        "node": node_of(relay),
        "remote": client,
        "reason": "abuse",
    }


def started(relays: Iterable[str] = RELAYS) -> list[Event]:
    """Relays tell their keys."""
    return [
        ("server_started", {"ts": NOW - 20 * HOUR_S, "role": "server", "node": node_of(one), "public_key": one})
        for one in relays
    ]


def honest(seed: int = 1, clients: Sequence[str] = CLIENTS) -> list[Event]:
    """An hour of honest clients: each has sessions with all relays and dials a few others through them."""
    rng = random.Random(seed)
    events = started()
    for client in clients:
        targets = rng.sample([one for one in clients if one != client], 4)
        for relay in RELAYS:
            slow = 6.0 if relay == SLOW else 1.0
            for at in range(3):
                ts = NOW - 3300 + at * 1000 + rng.uniform(0, 300)
                events.append(session(client, relay, 0.05 * slow * rng.uniform(0.7, 1.4), ts))
                if relay == FLAPPING:
                    events.append(down(client, relay, "Connection was lost.", 300.0, ts + 300 + rng.uniform(0, 300)))
            for target in targets:
                ts = NOW - rng.uniform(0, 3500)
                if relay == FAILING and rng.random() < 0.6:
                    reason = rng.choice(["connection refused", "timeout"])
                    events.append(dial(client, target, GOOD, [step(relay, "connect", reason)], ts))
                elif rng.random() < 0.1:
                    events.append(dial(client, target, "", [step(relay, "accept", "unknown_peer")], ts))
                else:
                    events.append(dial(client, target, relay, [], ts))
                    events.append(accepted(client, target, relay, 30.0 * slow * rng.uniform(0.6, 1.6), ts))
    return events


# --- what one bad client adds, for itself or about itself ------------------------------------------------------------

DENIER, PRAISER, FLOODER, ABUSER, OFFLINE, NAMELESS, INVENTOR = (key("ffff", number) for number in range(1, 8))
MUCH = 40


def denial(client: str = DENIER) -> list[Event]:
    """All relays but one fail all the time, it says."""
    events = [session(client, GOOD, 0.001)]
    for relay in RELAYS[1:]:
        steps = [step(relay, "connect", "timeout")] * MUCH
        for at in range(10):
            ts = NOW - 30 * at
            events += [dial(client, CLIENTS[at], GOOD, steps, ts), down(client, relay, "connection lost", 1.0, ts)]
    return events


def praise(client: str = PRAISER) -> list[Event]:
    """The slow relay is the fastest, and nothing ever fails there, it says; much fails everywhere else."""
    events = []
    for at, target in enumerate(CLIENTS[:14]):
        ts = NOW - 30 * at
        events += [
            session(client, SLOW, 0.001, ts),
            dial(client, target, SLOW, [], ts),
            accepted(client, target, SLOW, 1, ts),
        ]
        for relay in (GOOD, TWIN):
            steps = [step(relay, "accept", LOST), step(relay, "handshake", "timeout")]
            events += [session(client, relay, 9.0, ts), accepted(client, target, relay, 9000, ts)]
            events += [down(client, relay, "Connection was lost.", 3.0, ts), dial(client, target, SLOW, steps, ts)]
    return events


def flood(client: str = FLOODER) -> list[Event]:
    """Dials without end to keys without a client, with the news that the worst relay works."""
    events = [
        dial(client, key("0000", at), "", [step(FAILING, "accept", "unknown_peer")], NOW - at) for at in range(600)
    ]
    return [*events, session(client, FAILING, 0.001)]


def abuse(client: str = ABUSER) -> list[Event]:
    """Requests over every limit on every relay, which the relays refuse and end."""
    events = []
    for relay in RELAYS:
        events += [
            refusal(relay, client, "request", "rate_limited", 5000),
            refusal(relay, client, "request", "busy", 900),
        ]
        events += [refusal(relay, client, "connection", "too many connections", 900)]
        events += [abuse_close(relay, client, NOW - 100 * at) for at in range(1, 4)]
        events += [down(client, relay, "Connection was lost.", 5.0, NOW - 400 * at) for at in range(1, 9)]
    return events


def invention(client: str = INVENTOR) -> list[Event]:
    """Relays that do not exist, and one that borrows the first digits of another's key."""
    invented = [key("eeee", at) for at in range(40)] + [GOOD[:16] + "ab" * 25]
    return [session(client, relay, 0.001, NOW - 60) for relay in invented]


def nameless() -> list[Event]:
    """A program whose log is not named after its key: one voice together with all others of that kind."""
    events = []
    for at in range(20):
        for _, fields in denial():
            events.append((_, {**fields, "node": f"node {at}"}))
    return events[:: len(events) // 60]


#: By kind of lie: whose it is, and what writes its lines.
LIARS = {
    "all others fail": (DENIER, denial),
    "one relay is praised": (PRAISER, praise),
    "dials without end": (FLOODER, flood),
    "refused and closed for abuse everywhere": (ABUSER, abuse),
    "relays that do not exist": (INVENTOR, invention),
    "no name of its own": ("", nameless),
}


class Fleet:
    """Forty-nine honest clients, and what they and each of the liars say, from one pass over the lines."""

    def __init__(self, spark: SparkSession, directory: Path) -> None:
        lines = honest() + [line for _, tell in LIARS.values() for line in tell()]
        self.events = lines_frame(spark, lines, directory / "lines.jsonl").cache()
        voices, self.told = gather_voices(self.events, now=NOW)
        names = {node_of(client) for client in CLIENTS}
        self.honest = [one for one in voices if one.client in names]
        self.others = [one for one in voices if one.client not in names]
        self.excluded = excluded_clients(self.events, now=NOW)

    def scores(self, liar: str | None = None, *, excluded: bool = True) -> Scores:
        """With the voices of one liar or of none."""
        said = self.honest + [one for one in self.others if liar is not None and one.client == node_of(liar)]
        return score_relays(said, relays=self.told, excluded=self.excluded if excluded else ())
