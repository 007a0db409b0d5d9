"""The completeness of each run's log: gaps in its numbers, late lines, and the accounts of its files.

One row for each run; if the lines of a run name several roles, one row for each role. Facts about the run as a whole, its
gaps and its files, then stand in only one of these rows, so that sums are right. A run writes its numbers ``seq`` without
gaps, so a gap means that a line was lost on the way or is in quarantine. Lines after the last one seen cannot be counted.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column as Expression
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from dmsg_logs.tables.tabledef import Column, Inputs, Table, percentile_columns
from dmsg_logs.tables.transforms.common import FIRST_PROTOCOL, RUN, count_where, only, protocol_of, spread, total

#: Seconds after which a line that lands is late. Each fleet chooses how often files are published and shipped, and quiet
#: programs may do it only twice a day, which is no fault; but a line one day behind is too old for the ranks.
LATE_S: Final = 86_400
#: Lateness is told to the second below this, and to the minute above.
_FINELY_S: Final = 600
_LATENESS: Final = f"time from writing to landing, to the second below {_FINELY_S} s, to the minute above"

#: Events that tell the key of their writer; nearly every run has at least one of them.
_TELLING: Final = ("server_started", "transport_opened", "dial_finished")
#: Roles whose programs say that they stop.
_SAYING: Final = ("server", "discovery", "shipper")


def _own_key() -> Expression:
    """The full public key of the writer of a line, if the line tells it.

    A client's key is in its dials, and at one of the two ends of its transports: the end whose key begins with its name, or,
    if it has a given name and the transport is of dmsg, the initiator for even ids (those a client chooses itself).
    """
    event, initiator, responder, node = F.col("event"), F.col("initiator"), F.col("responder"), F.col("node")
    client = (
        F.when(event == "dial_finished", initiator)
        .when(initiator.startswith(node), initiator)
        .when(responder.startswith(node), responder)
        .when(protocol_of() == FIRST_PROTOCOL, F.when(F.col("transport_id") % 2 == 0, initiator).otherwise(responder))
    )
    key = (
        F.when(event == "server_started", F.col("public_key"))
        .when(F.col("role") == "server", F.col("server"))
        .when(F.col("role") == "client", client)
    )
    return F.nullif(key, F.lit(""))


def log_quality(events: DataFrame, keys: DataFrame, accounts: DataFrame) -> DataFrame:
    """The table ``log_quality`` from the good lines, their keys and the accounts of their files."""
    facts = _facts(events)
    gaps = _gaps(keys)
    files = accounts.groupBy(
        F.coalesce("node", F.lit("")).alias("node"), F.coalesce("boot", F.lit("")).alias("boot")
    ).agg(
        F.max("role").alias("role_of_files"),
        F.count_distinct("file").alias("files"),  # a file may have been taken in several times
        total("dup").alias("dup"),
        total("corrupt").alias("corrupt"),
        total("missing").alias("missing"),
    )
    joined = (
        facts.join(gaps, ["node", "boot"], "left")
        .join(_keys(events), list(RUN), "left")
        .join(files, ["node", "boot"], "full_outer")
    )
    same_node, same_run = Window.partitionBy("role", "node"), Window.partitionBy("node", "boot")
    protocol = F.coalesce("protocol", F.max("protocol").over(same_node), F.lit(FIRST_PROTOCOL))
    missing_numbers = F.max("last_seq").over(same_run) + 1 - F.sum("lines").over(same_run)
    return (
        joined.withColumn("role", F.coalesce("role", "role_of_files", F.lit("")))
        # Several relays of one name run side by side: one that still writes is not over, whichever was started last.
        .withColumn("later", F.max("first_at").over(same_node) > F.col("last_at"))
        .withColumn("key", F.coalesce("key", F.max("key").over(same_node), F.nullif(F.col("node"), F.lit(""))))
        .withColumn("protocol", F.when(F.col("role") == "server", protocol))
        .withColumn("stopped", F.coalesce("stopped", F.lit(False)))
        .withColumn("gap_lines", missing_numbers)
        .withColumn("foremost", F.row_number().over(same_run.orderBy(F.desc("lines"), "role")) == 1)
        .select(
            *RUN,
            *_of_run("files"),
            *_zero("lines"),
            "first_seq",
            "last_seq",
            *_of_run("gaps", "gap_lines", "dup", "corrupt", "missing"),
            *_zero("late_lines"),
            "lateness_s_p50",
            "lateness_s_p99",
            "lateness_s_max",
            *_zero("events_dropped"),
            F.when(F.col("role").isin(*_SAYING), F.col("stopped")).alias("ended"),
            "first_at",
            "last_at",
            "key",
            (F.col("stopped") | F.coalesce("later", F.lit(False))).alias("run_over"),
            "protocol",
        )
    )


def _zero(*names: str) -> list[Expression]:
    return [F.coalesce(name, F.lit(0)).cast("long").alias(name) for name in names]


def _of_run(*names: str) -> list[Expression]:
    """Columns about a whole run: their values in its first row, 0 in its other rows."""
    return [
        F.when(F.col("foremost"), F.coalesce(name, F.lit(0))).otherwise(0).cast("long").alias(name) for name in names
    ]


def _facts(events: DataFrame) -> DataFrame:
    """Everything that needs no sorting: added up where the lines are read, so that little is shuffled.

    Lateness is rounded to few different values; the percentiles are those of these values, weighted by their counts.
    Every sum has a fixed width; otherwise Spark would sort all lines first.
    """
    late = F.greatest(F.col("landed_at") - F.col("ts"), F.lit(0.0))
    step = F.when(late < _FINELY_S, 1.0).otherwise(60.0)
    lateness_s = F.floor(late / step + 0.5) * step  # ``round`` goes by way of decimals, for every line
    return (
        events.select(
            *RUN,
            "seq",
            "ts",
            lateness_s.alias("lateness_s"),
            (late > LATE_S).alias("late"),
            F.when(F.col("event") == "events_dropped", F.col("count")).alias("dropped"),
            (F.col("event") == "server_stopped").alias("stopped"),
        )
        .groupBy(*RUN, "lateness_s")
        .agg(
            F.count(F.lit(1)).alias("lines"),
            count_where(F.col("late")).alias("late_lines"),
            F.min("seq").alias("first_seq"),
            F.max("seq").alias("last_seq"),
            F.min("ts").alias("first_at"),
            F.max("ts").alias("last_at"),
            F.sum("dropped").alias("events_dropped"),
            F.bool_or("stopped").alias("stopped"),
        )
        .groupBy(*RUN)
        .agg(
            F.percentile("lateness_s", F.array(F.lit(0.5), F.lit(0.99)), F.col("lines")).alias(
                "lateness_s_percentiles"
            ),
            F.max("lateness_s").alias("lateness_s_max"),
            F.sum("late_lines").alias("late_lines"),
            F.sum("lines").alias("lines"),
            F.min("first_seq").alias("first_seq"),
            F.max("last_seq").alias("last_seq"),
            F.min("first_at").alias("first_at"),
            F.max("last_at").alias("last_at"),
            F.sum("events_dropped").alias("events_dropped"),
            F.bool_or("stopped").alias("stopped"),
        )
        .select("*", *spread("lateness_s", 50, 99))
    )


def _keys(events: DataFrame) -> DataFrame:
    """Each run's own keys, and its protocol if it is a server."""
    told = only(events, *_TELLING).select(*RUN, _own_key().alias("key"), protocol_of()).distinct()
    return told.groupBy(*RUN).agg(F.max("key").alias("key"), F.max("protocol").alias("protocol"))


def _gaps(keys: DataFrame) -> DataFrame:
    """Number of jumps in the numbers of a run; missing lines before the first one seen are a gap, too.

    The numbers are bits, 64 to a word. A gap ends at a bit that is set while the one below it is not; below the lowest
    bit of a word is the highest of the word before, and below number 0 nothing can be missing.
    """
    words = keys.groupBy("node", "boot", "word").agg(F.bit_or("bits").alias("bits"))
    order = Window.partitionBy("node", "boot").orderBy("word")
    follows = F.lag("word").over(order) == F.col("word") - 1
    highest_before = F.when(follows, F.lag("bits").over(order) < 0).otherwise(F.col("word") == 0)  # bit 63 is the sign
    return (
        words.select("node", "boot", "bits", F.coalesce(highest_before, F.lit(False)).cast("long").alias("below"))
        .groupBy("node", "boot")
        .agg(F.sum(F.expr("bit_count(bits & ~(shiftleft(bits, 1) | below))")).alias("gaps"))
    )


def _build(inputs: Inputs) -> DataFrame:
    return log_quality(inputs.events(), inputs.keys(), inputs.accounts())


LOG_QUALITY: Final = Table(
    "log_quality",
    "One row for each run of a program: how complete its log is, and when it ran. Where lines of one run name several "
    "roles, each has a row, and files, gaps, gap_lines, dup, corrupt and missing of the run are told in the one with "
    "most lines.",
    (
        Column("role", "string", "what wrote the lines: server, client, discovery or another program"),
        Column(
            "node", "string", "short form of the writer's key, or its given name; empty for files without a usable name"
        ),
        Column("boot", "string", "id of the run"),
        Column("files", "long", "landing files of the run"),
        Column("lines", "long", "good lines, each counted once"),
        Column("first_seq", "long", "lowest number seen"),
        Column("last_seq", "long", "highest number seen"),
        Column("gaps", "long", "times the numbers jump between 0 and the highest one seen"),
        Column("gap_lines", "long", "numbers missing between 0 and the highest one seen"),
        Column("dup", "long", "lines of its files that had been seen before"),
        Column("corrupt", "long", "lines of its files that are in quarantine"),
        Column("missing", "long", "lines recorded for its files that the files did not hold"),
        Column("late_lines", "long", f"lines that landed more than {LATE_S // 3600} hours after they were written"),
        *percentile_columns("lateness_s", _LATENESS, "s", 50, 99),
        Column("lateness_s_max", "double", "longest of these times", "s"),
        Column("events_dropped", "long", "events the writer left out because it could not keep up"),
        Column("ended", "boolean", "whether the run said that it stopped; null for clients and others that never do"),
        Column("first_at", "double", "time of its first line", "Unix s"),
        Column("last_at", "double", "time of its last line", "Unix s"),
        Column("key", "string", "full public key of the node; its name where no line of any run tells the key"),
        Column(
            "run_over", "boolean", "whether the run is over: it said so, or a run of the node began after its last line"
        ),
        Column("protocol", "string", "what a server speaks with clients: dmsg, messaging, …; null for others"),
    ),
    _build,
    partition="",
)
