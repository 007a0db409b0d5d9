"""Which lines are duplicates, without shuffling lines: pure functions from DataFrames to DataFrames.

The key of a line is (node, boot, seq). The keys of 64 consecutive ``seq`` fit into the bits of one integer, so all keys
of five million lines are eighty thousand rows (*words*), and a bitwise ``&`` shows the keys that two sets share.

1. Claims: one pass over the lines of a batch gives, for each file, the words of its keys, the number of its lines, and
   the lines that are not plain (:mod:`dmsg_logs.ingest.plain`).
2. Rulings: if several files claim a key, the first by name keeps it, unless an earlier batch has it. That is a window
   over words. The keys that a file must drop are a few words again, against which its lines are checked as they are
   written.
3. Proof: the keys that were *written* decide whether the batch is right (:func:`contradictions`).
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from dmsg_logs.ingest import lines, plain

_KEY: Final = ("node", "boot", "word")
#: Most copies of one line in memory at the same time.
_AT_ONCE: Final = 100_000


def word() -> Column:
    """The word of a line's key."""
    return _word_of("seq").alias("word")


def bits() -> Column:
    """All keys of a word, as an aggregate over lines."""
    return F.bit_or(_bit_of("seq")).alias("bits")


def _word_of(seq: str) -> Column:
    return F.shiftright(seq, plain.WORD_BITS)


def _bit_of(seq: str) -> Column:
    return F.expr(f"shiftleft(1L, cast({seq} & 63 as int))")


def count_lines(read: DataFrame) -> DataFrame:
    """Lines (``uri`` and ``value``) as ``plain.COUNTED``, without telling plain lines from others."""
    value = F.substring("value", 1, lines.MAX_LINE_BYTES + 1).cast("binary").alias("value")
    counted = read.groupBy("uri", value).agg(F.count(F.lit(1)).alias("n"))
    given = {"uri": F.col("uri"), "value": F.col("value"), "n": F.col("n"), "whole": F.lit(True)}
    columns = ((given.get(each.name, F.lit(None)), each) for each in plain.COUNTED)
    return counted.select(*(column.cast(each.dataType).alias(each.name) for column, each in columns))


def odd_lines(counted: DataFrame) -> DataFrame:
    """The counted lines that are not plain, parsed (:func:`lines.parse`), with ``uri`` and ``n``."""
    text = F.col("value").cast("string").alias("value")
    return lines.parse(counted.where(F.isnotnull("value")).select("uri", "n", text))


def claims(counted: DataFrame, odd: DataFrame) -> DataFrame:
    """Counted lines (``plain.COUNTED``) and the parsed odd lines among them to ``uri``, ``node``, ``boot``, ``word``,
    ``bits``, ``n`` (lines) and ``odd`` (odd lines among them). Only events claim a key; that of other lines is null."""
    plainly = counted.where(F.isnull("value")).select("uri", *_KEY, "bits", "n", F.lit(0).alias("odd"))
    claimed = {"node": F.col("node"), "boot": F.col("boot"), "word": _word_of("seq"), "bits": _bit_of("seq")}
    oddly = odd.select(
        "uri",
        *(F.when(F.isnull("fault"), each).alias(name) for name, each in claimed.items()),
        "n",
        F.col("n").alias("odd"),
    )
    words = plainly.unionByName(oddly).groupBy("uri", *_KEY)
    return words.agg(F.bit_or("bits").alias("bits"), F.sum("n").alias("n"), F.sum("odd").alias("odd"))


def by_file(claims: DataFrame) -> DataFrame:
    """One row for each file: ``uri``, its number of ``lines``, how many of them are ``odd``, its least and greatest
    ``boot`` and ``last_boot`` (different only if two logs were put together), its number of ``words`` of keys, and whether
    a key occurs ``twice`` in it, also in a word with an odd line (``oddly``)."""
    twice = F.isnotnull("word") & (F.col("n") > F.bit_count("bits"))
    return claims.groupBy("uri").agg(
        F.sum("n").alias("lines"),
        F.sum("odd").alias("odd"),
        F.min("boot").alias("boot"),
        F.max("boot").alias("last_boot"),
        F.count("word").alias("words"),
        F.bool_or(twice).alias("twice"),
        F.bool_or(twice & (F.col("odd") > 0)).alias("oddly"),
    )


def each_line(odd: DataFrame) -> DataFrame:
    """Each odd line ``n`` times, some at a time, because a file may hold the same line any number of times."""
    begun = odd.withColumn("at", F.explode(F.expr(f"sequence(0, n - 1, {_AT_ONCE})")))
    some = F.expr(f"array_repeat(1, cast(least(n - at, {_AT_ONCE}) as int))")
    return begun.withColumn("n", F.explode(some)).drop("at", "n")


def rulings(claims: DataFrame, earlier: DataFrame) -> DataFrame:
    """``uri``, ``node``, ``boot``, ``word`` and ``dropped``: the keys of a file that another file or batch keeps.

    ``earlier`` has ``node``, ``boot``, ``word``, ``bits`` of the keys of earlier batches.
    """
    ours = claims.where(F.isnotnull("word")).select("uri", *_KEY, "bits")
    everything = ours.unionByName(earlier.select(F.lit("").alias("uri"), *_KEY, "bits"))
    before = Window.partitionBy(*_KEY).orderBy("uri").rowsBetween(Window.unboundedPreceding, Window.currentRow - 1)
    taken = F.coalesce(F.bit_or("bits").over(before), F.lit(0))
    ruled = everything.select("uri", *_KEY, F.col("bits").bitwiseAND(taken).alias("dropped"))
    return ruled.where((F.col("uri") != "") & (F.col("dropped") != 0))


def repeated(parsed: DataFrame) -> DataFrame:
    """Parsed lines with ``again``: true if another line of the same file has the same key and is kept instead.

    For files in which a key occurs more than once; sorts whole lines. Corrupt lines are never ``again``.
    """
    fine = F.isnull("fault")
    content = F.xxhash64(*(name for name in parsed.columns if name != "uri"))
    spread = F.when(~fine, content)  # corrupt lines have no key: spread them over partitions
    order = Window.partitionBy("uri", fine, "node", "boot", "seq", spread).orderBy(content)
    return parsed.withColumn("again", fine & (F.row_number().over(order) > 1))


def ruled_out(marked: DataFrame, ruled: DataFrame) -> DataFrame:
    """Lines with ``again`` set also where the ruling on their file and key is to drop them."""
    joined = marked.withColumn("word", word()).join(ruled, ["uri", *_KEY], "left")
    dropped = F.coalesce(F.getbit("dropped", F.expr("cast(seq & 63 as int)")) == 1, F.lit(False))
    return joined.withColumn("again", F.col("again") | dropped).drop("word", "dropped")


def contradictions(written: DataFrame, earlier: DataFrame) -> DataFrame:
    """The words that prove a batch wrong; none proves it right.

    ``written`` has ``state``, ``node``, ``boot``, ``word``, ``bits``, ``n`` of what was written: a good key must be
    there once, and not in an earlier batch, and a dropped key must be good here or there.
    """

    def of(state: str) -> Column:
        return F.coalesce(F.bit_or(F.when(F.col("state") == state, F.col("bits"))), F.lit(0)).alias(state)

    count = F.sum(F.when(F.col("state") == "good", F.col("n")).otherwise(0)).alias("n")
    before = earlier.select(F.lit("earlier").alias("state"), *_KEY, "bits", F.lit(0).alias("n"))
    ours = written.where(F.col("state") != "corrupt").select("state", *_KEY, "bits", "n")
    words = ours.unionByName(before).groupBy(*_KEY).agg(of("good"), of("dup"), of("earlier"), count)
    good, dup, held = F.col("good"), F.col("dup"), F.col("earlier")
    unheld = dup.bitwiseAND(F.bitwise_not(good.bitwiseOR(held)))
    return words.where((F.bit_count(good) != F.col("n")) | (good.bitwiseAND(held) != 0) | (unheld != 0))
