"""Relay ranks: from the events to a signed document that discovery takes, and back.

The document and its guarantees are described in ``docs/explanation/ranks.rst``.
"""

from __future__ import annotations

import json
import math
import os
import re
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from dmsg_logs.ranks.scoring import SCALE, RelayScore, Voice, score_relays
from dmsg_logs.ranks.signing import SecretKey, SigningError, sign_document, verify_document_signature
from dmsg_logs.runtime import paths
from dmsg_logs.runtime.frames import local_frame
from dmsg_logs.runtime.together import together
from dmsg_logs.tables.transforms.abuse import abuse_scores
from dmsg_logs.tables.transforms.common import KEY_PATTERN
from dmsg_logs.tables.transforms.rank_evidence import (
    AHEAD_S,
    HALF_LIFE_S,
    faded,
    in_window,
    known_relays,
    relay_evidence,
    relay_keys,
    relay_latency,
)

__all__ = [
    "Ranks",
    "RanksError",
    "compute_ranks",
    "parse_document",
    "ranks_document",
    "verify_document",
    "write_ranks",
]

FORMAT: Final = "dmsg-relay-ranks"
VERSION: Final = 1
#: Age of the oldest evidence, in seconds; older evidence would count less than a sixteenth.
WINDOW_S: Final = 86_400
#: Lifetime of a document, in seconds: scores count in full for the first half, then ever less.
LIFETIME_S: Final = 172_800
#: Longest document that readers take; a longer one is not written.
DOCUMENT_LIMIT_BYTES: Final = 4 * 1024 * 1024
RELAYS_LIMIT: Final = 20_000
_DAY_S: Final = 86_400
_SPAN_LIMIT_S: Final = 90 * _DAY_S
_NUMBER_LIMIT: Final = 1 << 53
_NODE_DIGITS: Final = 16
_RELAYS: Final = StructType([StructField("relay", StringType())])
_SCORES: Final = ("score", "success", "latency", "capacity", "drops")
_COUNTS: Final = ("dials", "clients")
_KEY: Final = re.compile(KEY_PATTERN)


class RanksError(ValueError):
    """A document that cannot be believed or written; the message says why."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Scores of relays (thousandths, by full public key), ``issued`` at Unix seconds, over the ``window_s`` before.

    ``excluded_clients`` counts the clients whose evidence was left out, ``excluded_events`` the pieces of that evidence.
    ``issuer`` is empty until the document is signed.
    """

    issued: int
    relays: Mapping[str, RelayScore] = field(default_factory=dict)
    lifetime_s: int = LIFETIME_S
    window_s: int = WINDOW_S
    excluded_clients: int = 0
    excluded_events: int = 0
    issuer: str = ""


def compute_ranks(
    events: DataFrame,
    *,
    now: float,
    window_s: int = WINDOW_S,
    half_life_s: float = HALF_LIFE_S,
    lifetime_s: int = LIFETIME_S,
) -> Ranks:
    """Score every relay in the events, as of ``now`` (Unix seconds)."""
    asked: dict[str, Callable[[], Any]] = {
        "voices": lambda: gather_voices(events, now=now, window_s=window_s, half_life_s=half_life_s),
        "excluded": lambda: excluded_clients(events, now=now, window_s=window_s),
    }
    found = together(asked)
    voices, told = found["voices"]
    scores = score_relays(voices, relays=told, excluded=found["excluded"])
    return Ranks(
        issued=math.floor(now),
        relays=_foremost(scores.relays, told),
        lifetime_s=lifetime_s,
        window_s=window_s,
        excluded_clients=scores.excluded_clients,
        excluded_events=scores.excluded_events,
    )


def gather_voices(
    events: DataFrame, *, now: float, window_s: int = WINDOW_S, half_life_s: float = HALF_LIFE_S
) -> tuple[list[Voice], list[str]]:
    """Every client's observations of every relay, and the relays that have told their key."""
    span = {"now": now, "window_s": float(window_s)}
    told = sorted(row["relay"] for row in _rows(relay_keys(events)))
    keys = local_frame(events.sparkSession, [(relay,) for relay in told], _RELAYS)
    counts = known_relays(faded(relay_evidence(events, **span), now=now, half_life_s=half_life_s), keys)
    latency = known_relays(relay_latency(events, **span, half_life_s=half_life_s), keys)
    rows = together({"counts": lambda: list(_rows(counts)), "latency": lambda: list(_rows(latency))})
    return _voices(rows["counts"], rows["latency"], told), told


def excluded_clients(events: DataFrame, *, now: float, window_s: int = WINDOW_S) -> frozenset[str]:
    """First 16 digits of the keys whose evidence is left out: flagged for abuse by the word of more than one relay, or by
    their own lines, on a UTC day that the window touches. The first of these days counts as a whole: limits are for a day."""
    before_s = (now - window_s) % _DAY_S
    flagged = abuse_scores(in_window(events, now=now, window_s=window_s + before_s)).where("flagged and confirmed")
    keys = flagged.select(F.substring("key", 1, _NODE_DIGITS).alias("client")).distinct()
    return frozenset(row["client"] for row in _rows(keys))


def ranks_document(ranks: Ranks) -> dict[str, Any]:
    """The document of ``ranks``, without issuer and signature."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "issued": ranks.issued,
        "lifetime_s": ranks.lifetime_s,
        "window_s": ranks.window_s,
        "relays": {
            relay: {name: getattr(score, name) for name in (*_SCORES, *_COUNTS)}
            for relay, score in ranks.relays.items()
        },
        "excluded": {"clients": ranks.excluded_clients, "events": ranks.excluded_events},
    }


def write_ranks(spark: SparkSession | None, ranks: Ranks, target: str, secret_key: SecretKey) -> None:
    """Sign ``ranks`` and replace ``target``, whole and at once.

    ``target`` is any path Spark's Hadoop knows; without a session, a local one. Readers refuse a document that differs from
    the one before and was issued no later. So if lines that came late change the ranks of the same second, the document
    there is followed by one issued a second after it; the same ranks give the same document. Raises ``RanksError`` for a
    document that readers would refuse.
    """
    ranks = replace(ranks, issued=_issued(ranks, _before(spark, target, secret_key)))
    text = sign_document(ranks_document(ranks), secret_key)
    verify_document(text, [secret_key.public_key], ranks.issued)
    if spark is not None:
        paths.write_text(spark, target, text)
    else:
        _write_local(target, text)


def _before(spark: SparkSession | None, target: str, key: SecretKey) -> Ranks | None:
    """The document at ``target``, if there is one that ``key`` has signed."""
    try:
        text = paths.read_text(spark, target) if spark is not None else Path(target).read_text()
        return verify_document(text, [key.public_key], math.inf)
    except (OSError, ValueError, paths.JavaError):
        return None


def _issued(ranks: Ranks, before: Ranks | None) -> int:
    if before is None or not 0 <= before.issued - ranks.issued <= AHEAD_S:
        return ranks.issued
    differs = ranks != replace(before, issued=ranks.issued, issuer=ranks.issuer)
    return before.issued + int(differs)


def verify_document(text: str | bytes, issuers: Collection[str], now: float) -> Ranks:
    """The ranks in a document that is signed by one of ``issuers`` (66 hex digits) and not from the future at ``now``.

    :func:`dmsg_logs.ranks.scoring.effective` decides how much an old document still counts. Raises ``RanksError``.
    """
    document = parse_document(text)
    try:
        issuer = verify_document_signature(document)
    except SigningError as error:
        raise RanksError(str(error)) from None
    if issuer not in issuers:
        raise RanksError(f"{issuer} is not trusted to issue ranks")
    relays, excluded = document.get("relays"), document.get("excluded")
    if type(relays) is not dict or len(relays) > RELAYS_LIMIT:
        raise RanksError(f"relays: not an object of at most {RELAYS_LIMIT}")
    ranks = Ranks(
        issued=_number(document, "issued", 0, _NUMBER_LIMIT),
        relays={relay: _relay_score(relay, members) for relay, members in relays.items()},
        lifetime_s=_number(document, "lifetime_s", 1, _SPAN_LIMIT_S),
        window_s=_number(document, "window_s", 1, _SPAN_LIMIT_S),
        excluded_clients=_number(excluded, "clients", 0, _NUMBER_LIMIT),
        excluded_events=_number(excluded, "events", 0, _NUMBER_LIMIT),
        issuer=issuer,
    )
    if ranks.issued > now + AHEAD_S:
        raise RanksError(f"issued {ranks.issued - now:.0f} s from now")
    return ranks


# --- from rows to voices ---------------------------------------------------------------------------------------------


def _rows(frame: DataFrame) -> Iterator[dict[str, Any]]:
    for batch in frame.toArrow().to_batches():
        yield from batch.to_pylist()


_VOICE_FIELDS: Final = frozenset(each.name for each in fields(Voice))


def _voices(counts: Iterable[dict[str, Any]], latency: Iterable[dict[str, Any]], told: Collection[str]) -> list[Voice]:
    """One voice for each relay and client. A relay names itself by the short form of its key: its lines about itself count
    for the full key, and are dropped if that is not known."""
    voices: dict[tuple[str, str], Voice] = {}
    full: dict[str, set[str]] = {}
    for relay in told:
        full.setdefault(relay[:_NODE_DIGITS], set()).add(relay)
    own = []
    for row in (*counts, *latency):
        relay, client = row["relay"], row["client"]
        if len(relay) == _NODE_DIGITS:
            own.append(row)
            continue
        full.setdefault(relay[:_NODE_DIGITS], set()).add(relay)
        _add(voices.setdefault((relay, client), Voice(relay, client)), row)
    for row in own:
        for relay in full.get(row["relay"], ()):
            client = row["client"]
            _add(voices.setdefault((relay, client), Voice(relay, client)), row)
    return list(voices.values())


def _add(voice: Voice, row: Mapping[str, Any]) -> None:
    for name in _VOICE_FIELDS & row.keys() - {"relay", "client", "session"}:
        setattr(voice, name, getattr(voice, name) + (row[name] or 0))
    if row.get("session") is not None:
        voice.session = row["session"]


def _foremost(scores: Mapping[str, RelayScore], told: Collection[str]) -> Mapping[str, RelayScore]:
    """As many relays as a document holds: two clients can invent any number, and the document must still be written."""
    if len(scores) <= RELAYS_LIMIT:
        return scores
    known = frozenset(told)
    order = sorted(scores, key=lambda relay: (relay not in known, -scores[relay].clients, relay))
    return {relay: scores[relay] for relay in sorted(order[:RELAYS_LIMIT])}


# --- the document ----------------------------------------------------------------------------------------------------


def parse_document(text: str | bytes) -> dict[str, Any]:
    """The members of a document of ranks. Neither signature nor members are checked. Raises ``RanksError`` for other texts."""
    document = _parse(text)
    if document.get("format") != FORMAT or type(document.get("version")) is not int or document["version"] != VERSION:
        raise RanksError(f"this is not version {VERSION} of {FORMAT}")
    return document


def _parse(text: str | bytes) -> dict[str, Any]:
    raw = text.encode() if isinstance(text, str) else text
    if len(raw) > DOCUMENT_LIMIT_BYTES:
        raise RanksError(f"longer than {DOCUMENT_LIMIT_BYTES} bytes")
    try:
        document = json.loads(raw.decode(), object_pairs_hook=_members)
    except (ValueError, RecursionError) as error:
        raise RanksError(f"not JSON: {error}") from None
    if type(document) is not dict:
        raise RanksError("not an object")
    return document


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has two members of one name")
    return members


def _relay_score(relay: str, members: Any) -> RelayScore:
    if not _KEY.match(relay):
        raise RanksError("relays: a name is not a public key")
    return RelayScore(
        **{name: _number(members, name, 0, SCALE) for name in _SCORES},
        **{name: _number(members, name, 0, _NUMBER_LIMIT) for name in _COUNTS},
    )


def _number(members: Any, name: str, least: int, most: int) -> int:
    value = members.get(name) if type(members) is dict else None
    if type(value) is not int or not least <= value <= most:
        raise RanksError(f"{name}: not a whole number from {least} to {most}")
    return value


def _write_local(target: str, text: str) -> None:
    temporary = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.{uuid.uuid4().hex}")
    try:
        with open(temporary, "x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
