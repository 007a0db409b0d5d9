"""A small fleet for the report: two weeks of figures, the same every time, without Spark."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pandas as pd

from dmsg_logs.report.data import DAY_S, FRAMES, HOUR_S, ReportData, iso_date

#: 6 March 2025, 00:00 UTC.
UNTIL_DAY = 1_741_219_200
SINCE = UNTIL_DAY - 13 * DAY_S
UNTIL = UNTIL_DAY + 21 * HOUR_S
STEP = 3 * HOUR_S
REASONS = (
    *(("handshake", "timeout"), ("transport", "peer_unreachable"), ("transport", "peer_busy")),
    *(("refused", "rate_limit"), ("connection", "reset"), ("handshake", "bad_mac"), ("transport", "timeout")),
    *(("refused", "too_many_transports"), ("connection", "idle")),
)


def key_of(random: Random) -> str:
    """A public key as hex text."""
    return random.choice(("02", "03")) + random.randbytes(32).hex()


def report_data(seed: int = 1, relays: int = 12) -> ReportData:
    """A fleet of ``relays``, one of them slow, with a burst of failures on the tenth day."""
    random = Random(seed)
    names = [key_of(random) for _ in range(relays)]
    buckets = list(range(SINCE, UNTIL, STEP))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in FRAMES}
    for index, relay in enumerate(names):
        _relay(rows, random, relay, index, buckets)
    for at in buckets:
        _moment(rows, random, at, names)
    for metric, middle in (("handshake", 18.0), ("accept", 42.0), ("dial", 95.0)):
        total = {"metric": metric, "count": 240_000, "p50": middle, "p95": middle * 5, "p99": middle * 21}
        rows["latency_total"].append(total)
    _paths(rows)
    _dials(rows, random, names)
    _keys(rows, random)
    _days(rows, random, names)
    _nodes(rows, random, names)
    _bus(rows, Random(seed), buckets)
    totals = {
        **{"files": 1204, "lines_in": 5_048_550, "good": 4_972_100, "dup": 75_945, "corrupt": 505, "missing": 12},
        **{
            "relays": relays,
            "clients": 486,
            "connections": 9_214,
            "transports": 1_204_331,
            "transports_failed": 20_114,
        },
        **{"handshakes_failed": 1202, "refusals": 8_022, "bytes": sum(row["bytes"] for row in rows["relays"])},
        **{"dials": 84_122, "dials_ok": 82_010, "resumptions": 600, "abuse_keys": 9, "abuse_flagged": 2},
        **{"bus_relays": 2, "envelopes": 1_030_000, "twins": 31},
        **{"nodes": 40, "gaps": 3, "gap_lines": 410, "late_lines": 25_242, "events_dropped": 36, "unended": 4},
    }
    frames = {name: pd.DataFrame(rows[name], columns=list(columns)) for name, columns in FRAMES.items()}
    return ReportData(SINCE, UNTIL, STEP, totals, frames)


def ranks_for(data: ReportData, seed: int = 1) -> dict[str, Any]:
    """A document of ranks for the relays of ``data``."""
    random = Random(seed)
    relays = {}
    for index, row in enumerate(data.rows("relays")):
        parts = {
            name: max(0, min(1000, 940 - 55 * index + random.randrange(-40, 40)))
            for name in ("success", "latency", "capacity", "drops")
        }
        relays[row["relay"]] = {"score": sum(parts.values()) // 4, **parts, "dials": 7000, "clients": 40}
    return {
        **{"format": "dmsg-relay-ranks", "version": 1, "issued": UNTIL, "lifetime_s": 172_800, "window_s": 86_400},
        **{
            "issuer": key_of(random),
            "relays": relays,
            "excluded": {"clients": 2, "events": 911},
            "signature": "00" * 65,
        },
    }


def _relay(rows: dict[str, list[dict[str, Any]]], random: Random, relay: str, index: int, buckets: list[int]) -> None:
    weight = 1 / (1 + 0.35 * index)
    total, most = 0.0, 0
    for at in buckets:
        if index == 7 and SINCE + 5 * DAY_S <= at < SINCE + 6 * DAY_S:
            continue  # it was away for a day
        daily = 0.55 + 0.45 * math.sin((at % DAY_S) / DAY_S * 2 * math.pi - 1.9)
        traffic = 9e9 * weight * daily * random.uniform(0.8, 1.25)
        conns = int(60 * weight * daily) + 3
        rows["load"].append({"relay": relay, "at": at, "bytes": traffic, "connections": conns})
        total, most = total + traffic, max(most, conns)
    slow = 9 if index == 4 else 1
    rows["relays"].append(
        {
            **{"relay": relay, "protocol": protocol_of(index)},
            **{"connections": int(2000 * weight), "connections_max": most, "bytes": total},
            **{
                "transports": int(260_000 * weight),
                "refused": 0,
                "failed": int(2600 * weight * slow),
                "refusals": 90 * index,
            },
            **{"queue_max": 262_144, "handshake_p50": 17.1, "handshake_p95": 80.0, "handshake_p99": 312.5 * slow},
            **{"accept_p50": 40.0 * slow, "accept_p95": 210.2, "accept_p99": 810.0 * slow},
        }
    )


def protocol_of(index: int) -> str:
    """What a relay speaks; the third one is of the messaging system."""
    return "messaging" if index == 2 else "dmsg"


def _moment(rows: dict[str, list[dict[str, Any]]], random: Random, at: int, names: list[str]) -> None:
    here = [row for row in rows["load"] if row["at"] == at]
    rows["fleet"].append(
        {
            **{"at": at, "bytes": sum(row["bytes"] for row in here), "relays": len(here)},
            **{"connections": sum(row["connections"] for row in here), "transports": 11_000, "failed": 180},
        }
    )
    burst = 14 if SINCE + 9 * DAY_S + 6 * HOUR_S <= at < SINCE + 9 * DAY_S + 15 * HOUR_S else 1
    for index, (what, reason) in enumerate(REASONS):
        number = int(60 / (1 + index) * random.uniform(0.6, 1.5) * (burst if index == 1 else 1))
        rows["failures"].append({"at": at, "what": what, "reason": reason, "count": number})
    for metric, middle in (("handshake", 18.0), ("accept", 42.0), ("dial", 95.0)):
        p50 = middle * random.uniform(0.8, 1.2)
        p95 = p50 * random.uniform(3, 5)
        one = {"at": at, "metric": metric, "count": 2000, "p50": p50, "p95": p95, "p99": p95 * random.uniform(2, 5)}
        rows["latency"].append(one)
    requests = int(4000 * random.uniform(0.7, 1.3))
    rows["discovery"].append(
        {"at": at, "requests": requests, "errors_4xx": requests // 40, "errors_5xx": requests // 900}
    )


def _paths(rows: dict[str, list[dict[str, Any]]]) -> None:
    for index, (method, path) in enumerate(
        (("GET", "entry"), ("POST", "entry"), ("GET", "available_servers"), ("GET", "health"))
    ):
        requests = 300_000 >> index
        row = {
            "method": method,
            "path": path,
            "requests": requests,
            "errors_4xx": requests // 30,
            "errors_5xx": requests // 900,
        }
        rows["paths"].append({**row, "p50": 2.1, "p95": 7.7, "p99": 31.0 + index, "max": 903.0})


def _dials(rows: dict[str, list[dict[str, Any]]], random: Random, names: list[str]) -> None:
    for stage, reason, scale in (
        *(("request", "peer_unreachable", 40.0), ("connect", "timeout", 22.0), ("accept", "timeout", 9.0)),
        *(("handshake", "bad_mac", 2.0), ("connect", "refused", 6.0)),
    ):
        for index, relay in enumerate(names):
            attempts = int(scale * random.uniform(0.2, 2.5) * (5 if index == 4 else 1))
            row = {"stage": stage, "reason": reason, "relay": relay, "attempts": attempts, "clients": 1 + attempts // 9}
            rows["dial_failures"].append({**row, "protocol": protocol_of(index), "p50": 120.0, "p99": 4990.0})
    row = {"stage": "discovery", "reason": "not_found", "relay": "", "protocol": "dmsg", "attempts": 610, "clients": 44}
    rows["dial_failures"].append({**row, "p50": 12.0, "p99": 90.0})
    rows["dial_failures"].sort(key=lambda each: -each["attempts"])


def _keys(rows: dict[str, list[dict[str, Any]]], random: Random) -> None:
    for index in range(9):
        score = round(0.97 - 0.09 * index, 3)
        counts = {"refusals": 4000 >> index, "handshakes_failed": 300 >> index, "abuse_closes": 80 >> index}
        why = "refused far more often than others, on many relays" if index < 4 else "dials that fail"
        row = {
            "key": key_of(random),
            "days": 9 - index,
            "relays": 12 - index,
            **counts,
            "dials": 900,
            "dial_failures": 850,
        }
        rows["abuse"].append({**row, "score": score, "flagged": index < 2, "why": why})
    for index in range(20):
        sent, received = 2.1e11 / (1 + index * 0.6), 1.4e11 / (1 + index * 0.4)
        row = {"key": key_of(random), "days": 14, "sent": sent, "received": received, "bytes": sent + received}
        rows["talkers"].append({**row, "transports": 9000 // (1 + index), "peers": 40 - index})


def _bus(rows: dict[str, list[dict[str, Any]]], random: Random, buckets: list[int]) -> None:
    for at in buckets:
        for way, most in (("local", 9000), ("federated", 2400), ("stored", 700), ("refused", 80)):
            rows["bus"].append({"at": at, "way": way, "count": int(most * random.uniform(0.5, 1.0))})
    for what, reason, count in (
        *(("envelope", "destination offline", 4100), ("envelope", "unknown twin destination", 220)),
        *(("federation", "timeout", 310), ("session", "evicted", 12)),
    ):
        rows["bus_failures"].append({"what": what, "reason": reason, "count": count})
    for other, attempts, failed in (("r2.example", 240_000, 300), ("r9.example", 900, 410), ("", 12, 3)):
        row = {"relay": "r1.example", "other": other, "attempts": attempts, "failed": failed, "p99": 41.5, "rate": 17.0}
        rows["federation"].append(row)
    for reason, calls, p50 in (("", 96_000, 2.1), ("timeout", 2_500, 5000.0), ("destination offline", 1_500, 1.2)):
        rows["calls"].append({"reason": reason, "calls": calls, "p50": p50, "p99": p50 * 3})


def _days(rows: dict[str, list[dict[str, Any]]], random: Random, names: list[str]) -> None:
    dates = [iso_date(SINCE + day * DAY_S) for day in range(14)]
    ahead = [iso_date(SINCE + (14 + day) * DAY_S) for day in range(7)]
    for date in dates:
        for reason, scale in (("connection_lost", 30), ("relay_draining", 9), ("idle", 3)):
            number = int(scale * random.uniform(0.4, 1.6))
            rows["resumptions"].append({"date": date, "reason": reason, "resumptions": number, "transports": number})
    for reason, p50 in (("connection_lost", 210.0), ("relay_draining", 34.0), ("idle", 90.0)):
        times = {"p50": p50, "p95": p50 * 4, "p99": p50 * 11, "max": p50 * 40}
        rows["resumption_times"].append({"reason": reason, "count": 300, **times})
    weights = {"": sum(1 / (1 + 0.35 * i) for i in range(len(names)))}
    weights |= {relay: 1 / (1 + 0.35 * index) for index, relay in enumerate(names)}
    for relay, weight in weights.items():
        for day, date in enumerate(dates):
            traffic = 40e9 * weight * (1 + 0.03 * day) * random.uniform(0.93, 1.07)
            rows["history"].append({"relay": relay, "date": date, "bytes": traffic, "connections": int(60 * weight)})
        for metric, scale in (("bytes", 57e9), ("connections", 62)):
            for day, date in enumerate(ahead):
                value, spread = scale * weight * (1 + 0.03 * day), 0.06 + 0.03 * day
                row = {"relay": relay, "metric": metric, "day": date, "value": value, "history_days": 14}
                band = {"low": value * (1 - spread), "high": value * (1 + spread)}
                rows["forecast"].append({**row, **band, "method": "weekday_trend"})


def _nodes(rows: dict[str, list[dict[str, Any]]], random: Random, names: list[str]) -> None:
    for index in range(18):
        relay = index < len(names)
        lost = index % 5 == 0
        key = names[index] if relay else key_of(random)
        row = {"role": "server" if relay else "client", "node": key[:16], "key": key}
        counts = {"runs": 1 + index % 3, "files": 40, "lines": 400_000 // (1 + index), "gaps": int(lost)}
        losses = {"gap_lines": 130 * lost, "dup": 300, "corrupt": 9 * (index % 3), "missing": 12 * (index == 5)}
        late = {"late": 210, "lateness_p50": 31.0, "lateness_p99": 340.0, "lateness_max": 93_000.0}
        rest = {
            "dropped": 36 * (index == 10),
            "unended": index % 4 == 0,
            "first_at": SINCE + 7.5,
            "last_at": UNTIL - 3.25,
        }
        rows["quality"].append({**row, **counts, **losses, **late, **rest})
    rows["quality"].sort(key=lambda each: -each["gap_lines"] - each["missing"] - each["corrupt"] - each["dropped"])
