"""Evidence on each relay by witness: the Spark half of the ranks; :mod:`dmsg_logs.ranks.scoring` does the rest.

A failure counts against a relay only if it happened between a client and the relay itself: the relay could not be
connected to, did not finish the handshake, had no room, lost the session. A peer that refused, was unknown or did not
answer says nothing against the relay, and shows that the relay was there. The reasons are of the list
:data:`dmsg_logs.schemas.REASONS`; a reason not named here counts neither for nor against a relay.

A client's lines affect only its own rows; a relay's lines about itself can only count against it.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from dmsg_logs.ranks.scoring import ITSELF, NEUTRAL, STRANGERS
from dmsg_logs.tables.transforms.common import KEY_PATTERN, SHORT_PATTERN, count_where, only, protocol_of, total
from dmsg_logs.tables.transforms.dial_failures import ATTEMPTS

#: Seconds of a bucket, in which evidence is added up before it is weighted by its age.
BUCKET_S: Final = 300
#: Seconds after which evidence counts half: a relay that was repaired in the morning is nearly as good as new at night.
HALF_LIFE_S: Final = 6 * 3600
#: Lines from clocks that are ahead of ours by more are left out.
AHEAD_S: Final = 300
#: A relay without a log of its own needs this many clients that name it: a single client could invent any number of relays.
WITNESSES: Final = 2
#: Twice as slow as the average of the client's relays gives 0, twice as fast gives 1.
LATENCY_SPAN_LOG2: Final = 2.0
#: Times are clamped to these bounds, in ms.
LATENCY_FLOOR_MS: Final = 1.0
LATENCY_LIMIT_MS: Final = 10_000.0
#: Answers whose times differ by less than about 40 % share a rank.
STEPS_PER_OCTAVE: Final = 2

_DIGITS: Final = 16

#: Reasons in steps of ``dial_finished`` if the relay is absent or broken; ``session_down`` uses the same reasons for a
#: session that never came up.
CONNECT_FAULTS: Final = ("connection refused", "timeout", "unreachable", "host not found")
HANDSHAKE_FAULTS: Final = (
    "timeout",
    "no OK in time",
    "connection lost",
    "message 1 does not open",
    "message 2 does not open",
    "message 3 does not open",
    "message out of turn",
    "message over the limit",
    "frame before OK",
    "not JSON",
    "no line feed",
    "unknown version",
    "malformed initiator",
    "malformed responder",
    "malformed nonce",
    "malformed sig1",
    "malformed sig2",
    "malformed accepted",
    "not an echo",
    "sig1 does not verify",
)
#: The connection was lost while the client waited for a peer's answer.
LOST: Final = "server connection lost"
#: No answer came within the time of the dial, or an answer that may be the relay's or the peer's.
UNANSWERED: Final = ("timeout", "handshake_timeout", "busy")
#: The relay says that it has no room or is stopping.
NO_ROOM: Final = ("too many connections", "server_draining", "server under load")
#: The same in the relay's own lines about refused connections; limits for one address are not among them. A refused request
#: says nothing of the relay: it is over a limit of the client that asks or of the one that is asked. If "busy" counted, a
#: client that takes no requests could let all who dial it speak against the relay.
NO_ROOM_OWN: Final = ("too many connections", "half_open", "handshakes")
#: Sessions a client ends itself.
OWN_ENDS: Final = ("closed", "given up")


def in_window(events: DataFrame, *, now: float, window_s: float) -> DataFrame:
    """The lines of the last ``window_s`` seconds before ``now`` (Unix seconds)."""
    return events.where((F.col("ts") > F.lit(float(now - window_s))) & (F.col("ts") <= F.lit(float(now + AHEAD_S))))


def relay_keys(events: DataFrame) -> DataFrame:
    """``relay``: the full keys of servers that have told their key, if it matches their node name."""
    return (
        only(events, "server_started")
        .where((F.col("role") == "server") & F.col("public_key").rlike(KEY_PATTERN))
        .where(F.substring("public_key", 1, _DIGITS) == F.col("node"))
        .select(F.col("public_key").alias("relay"))
        .distinct()
    )


def relay_evidence(events: DataFrame, *, now: float, window_s: float) -> DataFrame:
    """One row for each relay, client and five minutes, with counts of evidence.

    ``relay`` is a full key from clients' lines, the 16 digits of ``node`` from relays' own. ``client`` is the first 16
    digits of a client's key; empty for strangers (addresses, and nodes not named after a key), ``self`` for the relay.
    ``bucket`` is Unix seconds. ``ok``, ``failed``, ``refused``, ``dropped`` are as in :class:`dmsg_logs.ranks.scoring.Voice`,
    ``dials`` counts attempts of dials and ``pieces`` everything.

    A client's attempts to get a session up count once in a bucket, its dials each time. If all relays of a client failed in a
    bucket, two or more that have worked for it in this window, its own network failed, and these failures are left out. A
    client for which none has worked is not expected to have a network: there any two relays will do.
    """
    lines = only(
        in_window(events, now=now, window_s=window_s),
        "dial_finished",
        "session_up",
        "session_down",
        "refused",
        "events_dropped",
    )
    fact = F.explode(_facts()).alias("fact")
    bucket = (F.floor(F.col("ts") / BUCKET_S) * BUCKET_S).cast("long").alias("bucket")
    sums = (
        lines.select(_client().alias("client"), bucket, fact)
        .select("client", "bucket", "fact.*")
        .where(F.when(F.col("own"), F.col("relay").rlike(SHORT_PATTERN)).otherwise(F.col("relay").rlike(KEY_PATTERN)))
        .groupBy("relay", "client", "bucket")
        .agg(
            *[
                total(F.when(F.col("what") == name, F.col("times"))).alias(name)
                for name in ("ok", "failed", "refused", "dropped", "failed_again", "refused_again")
            ],
            count_where(F.col("dial")).alias("dials"),
            F.count(F.lit(1)).alias("pieces"),
        )
    )
    for name in ("failed", "refused"):
        # retries within five minutes are one piece of evidence, however many a client makes
        sums = sums.withColumn(name, F.col(name) + F.least(F.col(f"{name}_again"), F.lit(1.0)))
    # A peer whose entry names a relay that never answers must not make the one other relay of its callers look innocent.
    worked = F.sum(F.col("ok") + F.col("dropped")).over(Window.partitionBy("client", "relay")) > 0
    sums = sums.withColumn("worked", worked)
    telling = F.col("worked") | ~F.max("worked").over(Window.partitionBy("client"))
    together = Window.partitionBy("client", "bucket")
    named = (F.length("relay") > _DIGITS) & ~F.col("client").isin(STRANGERS, ITSELF)
    troubled = named & (F.col("failed") + F.col("dropped") > 0)
    offline = (
        named
        & (F.count(F.when(troubled & F.col("telling"), 1)).over(together) >= 2)
        & (F.count(F.when(troubled, 1)).over(together) == F.count(F.when(named, 1)).over(together))
    )
    return (
        sums.withColumn("telling", telling)
        .withColumn("offline", offline)
        .select(
            "relay",
            "client",
            "bucket",
            "ok",
            *[F.when(F.col("offline"), 0.0).otherwise(F.col(name)).alias(name) for name in ("failed", "dropped")],
            "refused",
            "dials",
            "pieces",
        )
    )


def faded(evidence: DataFrame, *, now: float, half_life_s: float = HALF_LIFE_S) -> DataFrame:
    """:func:`relay_evidence` added up over time, old evidence counting less: one row for each relay and client."""
    weight = _decay(F.col("bucket") + BUCKET_S, now, half_life_s)
    return evidence.groupBy("relay", "client").agg(
        *[F.sum(F.col(name) * weight).alias(name) for name in ("ok", "failed", "refused", "dropped")],
        F.sum("dials").alias("dials"),
        F.sum("pieces").alias("pieces"),
    )


def relay_latency(events: DataFrame, *, now: float, window_s: float, half_life_s: float = HALF_LIFE_S) -> DataFrame:
    """How each relay compares with a client's other relays: one row for each relay and client, ``session`` and so on as
    in :class:`dmsg_logs.ranks.scoring.Voice`.

    Only times of the same client are compared, so that a distant client makes no relay slow, and only relays of the same
    protocol, because each protocol has its own number of round trips. Sessions are compared by the time to get them up.
    Answers also depend on the target, so they are only ranked, all of a client's together. Each target has one vote, shared
    by the relays it was reached through, of any protocol: however slow a target is, it moves the others by one rank. No
    answer, or a "busy" that may be the peer's or the relay's, counts as the slowest answer.
    """
    lines = only(in_window(events, now=now, window_s=window_s), "session_up", "transport_opened", "dial_finished")
    ms = F.least(F.greatest(F.col("ms"), F.lit(LATENCY_FLOOR_MS)), F.lit(LATENCY_LIMIT_MS))
    same_target = Window.partitionBy("client", "protocol", "is_session", "target")
    every_protocol = Window.partitionBy("client", "is_session", "target")
    times = (
        lines.where((F.col("role") == "client") & F.col("node").rlike(SHORT_PATTERN))
        .select(
            F.col("node").alias("client"),
            protocol_of(),
            _decay(F.col("ts"), now, half_life_s).alias("weight"),
            F.explode(_times()).alias("one"),
        )
        .select("client", "protocol", "weight", "one.*")
        .where(F.col("relay").rlike(KEY_PATTERN) & (F.col("ms") > 0))
        .groupBy("relay", "client", "protocol", "is_session", "target")
        .agg(F.sum("weight").alias("evidence"), (F.sum(F.log2(ms) * F.col("weight")) / F.sum("weight")).alias("time"))
        .select(
            "*",
            F.avg("time").over(same_target).alias("usual"),
            F.count(F.lit(1)).over(same_target).alias("relays"),
            F.count(F.lit(1)).over(every_protocol).alias("sharing"),
            (F.floor(F.col("time") * STEPS_PER_OCTAVE)).alias("step"),
        )
        .withColumn("vote", F.col("evidence") / (F.col("evidence") + F.lit(1.0)) / F.col("sharing"))
    )
    ordered = Window.partitionBy("client", "protocol", "is_session").orderBy("step")
    up_to = F.sum("vote").over(ordered.rangeBetween(Window.unboundedPreceding, Window.currentRow))
    ties = F.sum("vote").over(ordered.rangeBetween(Window.currentRow, Window.currentRow))
    all_votes = F.sum("vote").over(Window.partitionBy("client", "protocol", "is_session"))
    placed = times.withColumn("place", _unit(F.lit(1.0) - (up_to - ties / 2) / all_votes))
    slower = (F.col("time") - F.col("usual")) / F.lit(LATENCY_SPAN_LOG2)
    compared = F.col("is_session") & (F.col("relays") > 1)
    answer = ~F.col("is_session")
    return placed.groupBy("relay", "client").agg(
        F.coalesce(F.max(F.when(compared, _unit(F.lit(NEUTRAL) - slower))), F.lit(NEUTRAL)).alias("session"),
        total(F.when(compared, F.col("evidence"))).alias("session_evidence"),
        total(F.when(answer, F.col("vote") * F.col("place"))).alias("accept_sum"),
        total(F.when(answer, F.col("vote"))).alias("accept_targets"),
    )


def known_relays(rows: DataFrame, keys: DataFrame) -> DataFrame:
    """The rows about relays that have told their key, or that two clients name; relays' own rows all stay."""
    witness = F.when(~F.col("client").isin(STRANGERS, ITSELF), 1)
    return (
        rows.withColumn("witnesses", F.count(witness).over(Window.partitionBy("relay")))
        .join(F.broadcast(keys.withColumn("told", F.lit(True))), "relay", "left")
        .where((F.col("witnesses") >= WITNESSES) | F.col("told") | (F.length("relay") == _DIGITS))
        .select(*rows.columns)
    )


def _decay(ts: Column, now: float, half_life_s: float) -> Column:
    return F.pow(F.lit(2.0), -F.greatest(F.lit(float(now)) - ts, F.lit(0.0)) / F.lit(float(half_life_s)))


def _client() -> Column:
    named = F.col("node").rlike(SHORT_PATTERN)
    return (
        F.when(F.col("role") == "client", F.when(named, F.col("node")).otherwise(STRANGERS))
        .when(F.col("event") == "events_dropped", ITSELF)
        .when(F.col("remote").rlike(KEY_PATTERN), F.substring("remote", 1, _DIGITS))
        .otherwise(STRANGERS)
    )


def _fact(relay: Column, what: Column, *, times: Column | None = None, dial: bool = False, own: bool = False) -> Column:
    return F.struct(
        relay.alias("relay"),
        what.alias("what"),
        (F.lit(1.0) if times is None else times).alias("times"),
        F.lit(dial).alias("dial"),
        F.lit(own).alias("own"),
    )


def _unit(value: Column) -> Column:
    return F.least(F.greatest(value, F.lit(0.0)), F.lit(1.0))


def _steps() -> Column:
    """The failed steps of a dial; most dials have none, and parsing is expensive."""
    return F.coalesce(F.when(F.col("attempts") != "[]", F.from_json("attempts", ATTEMPTS)), F.array())


def _facts() -> Column:
    """The evidence on relays in one line, as an array of structs."""
    event, role = F.col("event"), F.col("role")
    server = F.col("server")
    through = F.when(F.col("ok"), F.array(_fact(server, F.lit("ok"), dial=True)))
    steps = F.transform(
        _steps(),
        lambda step: _fact(step["server"], _blame(step["stage"], step["reason"]), dial=True),
    )
    no_room = (event == "refused") & (F.col("what") == "connection") & F.col("reason").isin(*NO_ROOM_OWN)
    times = F.least(F.greatest(F.col("count"), F.lit(0)), F.lit(1_000_000)).cast("double")
    return (
        F.when((event == "dial_finished") & (role == "client"), F.concat(F.coalesce(through, F.array()), steps))
        .when((event == "session_up") & (role == "client"), F.array(_fact(server, F.lit("ok"))))
        .when((event == "session_down") & (role == "client"), F.array(_fact(server, _end())))
        .when(no_room & (role == "server"), F.array(_fact(F.col("node"), F.lit("refused"), times=times, own=True)))
        .when(
            (event == "events_dropped") & (role == "server"),
            F.array(_fact(F.col("node"), F.lit("dropped"), own=True)),
        )
    )


def _times() -> Column:
    """How long a session took to get up, or an answer to come, as an array of structs; client lines only."""
    event = F.col("event")
    accepted = F.substring("initiator", 1, _DIGITS) == F.col("node")
    steps = F.filter(
        _steps(),
        lambda step: (step["stage"] == "accept") & step["reason"].isin(*UNANSWERED),
    )

    def one(relay: Column, target: Column, ms: Column, *, session: bool = False) -> Column:
        return F.struct(
            relay.alias("relay"), target.alias("target"), ms.alias("ms"), F.lit(session).alias("is_session")
        )

    target, limit = F.substring("target", 1, _DIGITS), F.lit(LATENCY_LIMIT_MS)
    return (
        F.when(
            event == "session_up", F.array(one(F.col("server"), F.lit(""), F.col("duration_s") * 1000, session=True))
        )
        .when(
            (event == "transport_opened") & accepted,
            F.array(one(F.col("server"), F.substring("responder", 1, _DIGITS), F.col("accept_ms"))),
        )
        .when(event == "dial_finished", F.transform(steps, lambda step: one(step["server"], target, limit)))
    )


def _blame(stage: Column, reason: Column) -> Column:
    """The relay's part in a failed step: failed, refused, ok (the other side failed), or nothing."""
    return (
        F.when((stage == "connect") & reason.isin(*CONNECT_FAULTS), "failed")
        .when(
            stage == "handshake",
            F.when(reason.isin(*HANDSHAKE_FAULTS), "failed").when(reason.isin(*NO_ROOM), "refused"),
        )
        .when(stage.isin("request", "accept"), F.when(reason == LOST, "failed").otherwise("ok"))
    )


def _end() -> Column:
    """The same for a session that went down or never came up."""
    reason = F.col("reason")
    faults = reason.isin(*CONNECT_FAULTS, *HANDSHAKE_FAULTS)
    never = F.when(faults, "failed_again").when(reason.isin(*NO_ROOM), "refused_again")
    return F.when(F.col("duration_s") > 0, F.when(~reason.isin(*OWN_ENDS), "dropped")).otherwise(never)
