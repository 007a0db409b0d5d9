"""Keys that behave as no honest client does: one row for each day and key that a node complained of.

An offence is a request that a relay refuses, or a connection that it ends, because of the client's behaviour, never because
of a peer, a neighbour at the same address, or an outage: a client that keeps calling an absent peer, or whose relays are
down, has many failures and no offences. Offences are weighed against the client's other traffic, so that a busy client may
meet a limit now and then.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column as TableColumn
from dmsg_logs.tables.tabledef import Inputs, Table
from dmsg_logs.tables.transforms.common import (
    KEY_PATTERN,
    SHORT_PATTERN,
    count_where,
    date_of,
    only,
    stands_for,
    total,
)
from dmsg_logs.tables.transforms.dial_failures import ATTEMPTS

#: A key is flagged at this score.
FLAGGED: Final = 0.5
#: Refused requests that are the client's doing. Limits of an address or of the client that was asked are not among them:
#: others can use them up, and a client that tries again would be flagged for it.
OFFENCES: Final = ("rate_limited", "malformed", "bad_id", "abuse")
#: Offences a day that flag a key, on top of its number of transports: a limit is met by accident, but not 50 times.
OFFENCE_ROOM: Final = 50
#: Connections a day ended for abuse that flag a key: one may be a bug.
ABUSE_ROOM: Final = 2
#: Dials a day to absent or unwilling keys that flag a key, on top of its number of successful dials ...
FRUITLESS_ROOM: Final = 500
#: ... if they went to at least this many keys: calling a friend who is away is not scanning.
SCANNED_TARGETS: Final = 50
#: Reasons in the last step of such a dial.
FRUITLESS: Final = ("unknown_peer", "refused", "access_denied", "no_such_service", "no entry")

_DIGITS: Final = 16
_COUNTS: Final = ("refusals", "offences", "abuse_closes", "transports")
#: Most refusals that one line stands for.
_TIMES_LIMIT: Final = 1_000_000


def abuse_candidates(events: DataFrame) -> DataFrame:
    """The table ``abuse_candidates`` from the lines."""
    return abuse_scores(events).select(*ABUSE_CANDIDATES.names)


def abuse_scores(events: DataFrame) -> DataFrame:
    """The same with one more column: ``confirmed``, whether the key would be flagged without the relay that complains
    most. One relay alone must not be able to silence clients that have seen it fail."""
    complaints = _complaints(events)
    dials = _dials(events)
    handshakes = _handshakes(events)
    both = (
        complaints.join(dials, ["date", "short"], "full")
        .join(handshakes, ["date", "short"], "full")
        .select(
            "date",
            F.coalesce("key", "known_key", "short").alias("key"),
            *[
                F.coalesce(name, F.lit(0)).cast("long").alias(name)
                for name in ("relays", *_COUNTS, "dials", "dial_failures", "fruitless", "targets", "handshakes_failed")
            ],
            *[F.coalesce(name, F.lit(0)).alias(name) for name in ("most_offences", "most_closes")],
        )
    )
    scored = (
        both.where("refusals + abuse_closes + dial_failures + handshakes_failed > 0")
        .withColumn("by_refusals", _share(F.col("offences"), F.col("transports") + OFFENCE_ROOM))
        .withColumn("by_closes", _share(F.col("abuse_closes"), F.lit(ABUSE_ROOM)))
        .withColumn("by_dials", _scanning())
        .withColumn("score", F.greatest("by_refusals", "by_closes", "by_dials"))
    )
    without = F.greatest(
        _share(F.col("offences") - F.col("most_offences"), F.col("transports") + OFFENCE_ROOM),
        _share(F.col("abuse_closes") - F.col("most_closes"), F.lit(ABUSE_ROOM)),
        F.col("by_dials"),
    )
    reasons = {"by_refusals": "refusals", "by_closes": "closed for abuse", "by_dials": "fruitless dials"}
    why = F.concat_ws(", ", *[F.when(F.col(name) >= FLAGGED, text) for name, text in reasons.items()])
    return scored.select(
        "date",
        "key",
        "relays",
        "refusals",
        "handshakes_failed",
        "abuse_closes",
        "dials",
        "dial_failures",
        "score",
        (F.col("score") >= FLAGGED).alias("flagged"),
        why.alias("why"),
        (without >= FLAGGED).alias("confirmed"),
    )


def _share(bad: Column, room: Column) -> Column:
    """0 if nothing is bad, 0.5 if ``bad`` equals ``room``."""
    return bad / (bad + room)


def _scanning() -> Column:
    got_through = F.col("dials") - F.col("dial_failures")
    share = _share(F.col("fruitless"), got_through + FRUITLESS_ROOM)
    return F.when(F.col("targets") >= SCANNED_TARGETS, share).otherwise(F.lit(0.0))


def _complaints(events: DataFrame) -> DataFrame:
    """Relays' complaints of keys, by day and the first digits of the key."""
    event, reason = F.col("event"), F.col("reason")
    lines = only(events, "refused", "connection_closed", "transport_opened", "transport_closed")
    key = F.when(event.isin("refused", "connection_closed"), F.col("remote")).otherwise(F.col("initiator"))
    times = F.least(F.greatest(F.col("count"), F.lit(0)), F.lit(_TIMES_LIMIT))
    refused = event == "refused"
    ended = (event == "connection_closed") | ((event == "transport_closed") & (F.col("by") == "server"))
    by_relay = (
        lines.where(F.col("role") == "server")
        .select(
            date_of(F.col("ts")).alias("date"),
            key.alias("key"),
            F.col("node").alias("relay"),
            F.when(refused, times).alias("refusals"),
            F.when(refused & reason.isin(*OFFENCES), times).alias("offences"),
            F.when(ended & (reason == "abuse"), 1).alias("abuse_closes"),
            F.when(event == "transport_opened", 1).alias("transports"),
        )
        .where("coalesce(refusals, abuse_closes, transports) is not null")
        .where(F.col("key").rlike(KEY_PATTERN))
        .groupBy("date", F.substring("key", 1, _DIGITS).alias("short"), "relay")
        .agg(F.max("key").alias("key"), *[total(name).alias(name) for name in _COUNTS])
    )
    return by_relay.groupBy("date", "short").agg(
        F.max("key").alias("key"),
        count_where(F.col("offences") + F.col("abuse_closes") > 0).alias("relays"),
        *[F.sum(name).alias(name) for name in _COUNTS],
        F.max("offences").alias("most_offences"),
        F.max("abuse_closes").alias("most_closes"),
    )


def _dials(events: DataFrame) -> DataFrame:
    """Clients' own dials. A dial is fruitless if its last step says so."""
    steps = F.from_json("attempts", ATTEMPTS)
    last = F.when(~F.col("ok"), F.coalesce(F.try_element_at(steps, F.lit(-1))["reason"], F.col("reason")))
    fruitless = last.isin(*FRUITLESS)
    return (
        only(events, "dial_finished")
        .where((F.col("role") == "client") & F.col("node").rlike(SHORT_PATTERN))
        .select(
            date_of(F.col("ts")).alias("date"), F.col("node").alias("short"), "ok", "target", fruitless.alias("vain")
        )
        .groupBy("date", "short")
        .agg(
            F.count(F.lit(1)).alias("dials"),
            count_where(~F.col("ok")).alias("dial_failures"),
            count_where(F.col("vain")).alias("fruitless"),
            # the one count of distinct values, of lines that failed only
            F.count_distinct(F.when(F.col("vain"), F.col("target"))).alias("targets"),
        )
    )


def _handshakes(events: DataFrame) -> DataFrame:
    """Failed handshakes from an address that only one key had that day. For people to read only, not part of a score: two
    clients may share an address, and one of them may never get far enough to tell its key."""
    day = date_of(F.col("ts")).alias("date")
    servers = events.where(F.col("role") == "server")
    # A line that stands for several handshakes has no address, which identifies no key.
    told = only(servers, "handshake_failed").where("address != ''")
    failed = told.groupBy(day, "node", "address").agg(F.sum(stands_for()).alias("failures"))
    known = (
        only(servers, "connection_opened")
        .where(F.col("remote").rlike(KEY_PATTERN))
        .groupBy(day, "node", "address")
        .agg(F.min("remote").alias("key"), F.max("remote").alias("other"))
        .where("key = other")
    )
    return (
        failed.join(known, ["date", "node", "address"])
        .groupBy("date", F.substring("key", 1, _DIGITS).alias("short"))
        .agg(F.max("key").alias("known_key"), F.sum("failures").alias("handshakes_failed"))
    )


def _build(inputs: Inputs) -> DataFrame:
    return abuse_candidates(inputs.events())


ABUSE_CANDIDATES: Final = Table(
    "abuse_candidates",
    "One row for each day and key with a complaint or a failed dial; flagged if no honest client behaves so.",
    (
        TableColumn("date", "date", "UTC date"),
        TableColumn("key", "string", "public key of the client; its first 16 digits if no relay has seen it"),
        TableColumn("relays", "long", "relays that complain of offences"),
        TableColumn("refusals", "long", "refusals by relays, for whatever reason"),
        TableColumn(
            "handshakes_failed", "long", "failed handshakes from an address only this key had; part of no score"
        ),
        TableColumn("abuse_closes", "long", "connections and transports that relays ended for abuse"),
        TableColumn("dials", "long", "dials the client has logged"),
        TableColumn("dial_failures", "long", "those that failed, for whatever reason"),
        TableColumn("score", "double", f"0 to 1; the highest of its reasons, each {FLAGGED} at its threshold"),
        TableColumn("flagged", "boolean", f"whether the score is {FLAGGED} or more"),
        TableColumn("why", "string", "the reasons above the threshold; empty if it is not flagged"),
    ),
    _build,
)
