"""A small fleet for the tests of ranks: what its clients and relays write in a few hours, and what liars and abusers add."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from event_rows import Event, node_of

NOW = 1_772_496_000.0
HOUR_S = 3600.0


def key(kind: str, number: int) -> str:
    """A text that looks like a key."""
    return f"02{kind:0>4.4}{number:010x}{number:050x}"


#: Two relays are as good as each other.
GOOD, TWIN, SLOW, FLAPPING, FAILING = (key("aaaa", number) for number in range(1, 6))
RELAYS = (GOOD, TWIN, SLOW, FLAPPING, FAILING)
CLIENTS = tuple(key("cccc", number) for number in range(50))
STRANGER = key("dddd", 7)

LOST = "server connection lost"


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
    return "transport_opened", {"ts": ts, "role": "client", "node": node_of(client), **ends, "accept_ms": ms}


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
    return "connection_closed", {"ts": ts, "role": "server", "node": node_of(relay), "remote": client, "reason": "abuse"}


def started(relays: Iterable[str] = RELAYS) -> list[Event]:
    """Relays tell their keys."""
    return [
        ("server_started", {"ts": NOW - 20 * HOUR_S, "role": "server", "node": node_of(one), "public_key": one})
        for one in relays
    ]


def honest(seed: int = 1, clients: Sequence[str] = CLIENTS) -> list[Event]:
    """A few hours of honest clients: each has sessions with all relays and dials a few others through them."""
    rng = random.Random(seed)
    events = started()
    for client in clients:
        targets = rng.sample([one for one in clients if one != client], 4)
        for relay in RELAYS:
            slow = 6.0 if relay == SLOW else 1.0
            for at in range(3):
                ts = NOW - 4 * HOUR_S + at * HOUR_S + rng.uniform(0, 600)
                events.append(session(client, relay, 0.05 * slow * rng.uniform(0.7, 1.4), ts))
                if relay == FLAPPING and at:
                    events.append(down(client, relay, "Connection was lost.", 900.0, ts + 700 + rng.uniform(0, 900)))
            for target in targets:
                ts = NOW - 4 * HOUR_S + rng.uniform(0, 3.9) * HOUR_S
                if relay == FAILING and rng.random() < 0.4:
                    reason = rng.choice(["connection refused", "timeout"])
                    events.append(dial(client, target, GOOD, [step(relay, "connect", reason)], ts))
                elif rng.random() < 0.1:
                    events.append(dial(client, target, "", [step(relay, "accept", "unknown_peer")], ts))
                else:
                    events.append(dial(client, target, relay, [], ts))
                    events.append(accepted(client, target, relay, 30.0 * slow * rng.uniform(0.6, 1.6), ts))
    return events
