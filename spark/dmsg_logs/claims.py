"""Which lines are duplicates, without shuffling lines: pure functions from DataFrames to DataFrames.

The key of a line is (node, boot, seq). The keys of 64 consecutive ``seq`` fit into the bits of one integer, so all keys
of five million lines are eighty thousand rows (*words*), and whether two sets of keys have one in common is an ``&``.

1. Claims: one look at the text of a batch gives, for each file, the words of the keys that occur in it, and how many
   lines it has. Our writer puts the key at the start of a line, where it is cut out; other lines are parsed.
2. Rulings: of several files that claim a key the first by name keeps it, unless an earlier batch has it. That is a
   window over words. What a file must drop are words again, few of them, which are joined to its lines as they are
   written.
3. Proof: a claim taken from the text may be wrong, because the line turns out to be corrupt. So the keys that were
   *written* decide whether the batch is right (:func:`contradictions`); if they say no, the batch is made again from
   claims of fully parsed lines.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from dmsg_logs import lines

_WORD_BITS: Final = 6
_KEY: Final = ("node", "boot", "word")
_PAIR: Final = "node string, boot string"


def word() -> Column:
    """The word of a line's key."""
    return F.shiftright("seq", _WORD_BITS).alias("word")


def bits() -> Column:
    """All keys of a word, as an aggregate over lines."""
    return F.bit_or(F.expr("shiftleft(1L, cast(seq & 63 as int))")).alias("bits")


def quick_claims(read: DataFrame) -> DataFrame:
    """Lines to ``uri``, ``node``, ``boot``, ``word``, ``bits`` and ``n``, their number.

    What claims no key, because it cannot be an event, has nulls. The sum of ``n`` is the number of lines.
    """
    text = F.col("value")
    first = F.substring_index(text, ',"', 7)
    key = F.substring_index(first, ',"', -3)
    pair, rest = F.substring_index(key, ',"', 2), F.substring_index(key, ',"', -1)
    number = F.substring(rest, 6, 20).try_cast("long")
    ours = (
        text.startswith('{"event":"')
        & text.endswith("}")
        & pair.startswith('node":"')
        & pair.endswith('"')
        & pair.contains('","boot":"')
        & rest.startswith('seq":')
        & number.isNotNull()
    )
    # The pair of another line is written as ours write it; what is not whole cannot claim anything.
    parsed = F.from_json(text, f"{_PAIR}, seq long")
    quoted = F.to_json(F.struct(parsed["node"].alias("node"), parsed["boot"].alias("boot")))
    inner = F.expr("substring(quoted, 3, char_length(quoted) - 3)")
    whole = F.btrim(text, F.lit(" \t\r")).endswith("}") & (F.octet_length(text) <= lines.MAX_LINE_BYTES)
    found = read.select(
        "uri",
        F.when(ours, F.struct(pair.alias("pair"), number.alias("seq")))
        .when(whole, F.struct(quoted.alias("pair"), parsed["seq"].alias("seq")))
        .alias("claim"),
        ours.alias("ours"),
    )
    quoted_pair = F.col("claim.pair").alias("quoted")
    split = found.select("uri", "ours", quoted_pair, F.col("claim.seq").alias("seq"))
    keyed = split.select("uri", F.when(F.col("ours"), F.col("quoted")).otherwise(inner).alias("pair"), "seq")
    counted = keyed.groupBy("uri", "pair", word()).agg(bits(), F.count(F.lit(1)).alias("n"))
    named = counted.withColumn("names", F.from_json(F.concat(F.lit('{"'), "pair", F.lit("}")), _PAIR))
    claimed = F.isnotnull("names.node") & F.isnotnull("names.boot") & F.isnotnull("word")
    return _merged(named.select("uri", *_where(claimed, "names.node", "names.boot"), "n"))


def exact_claims(read: DataFrame) -> DataFrame:
    """The same as :func:`quick_claims` from lines that are parsed as they will be when they are written: slower, right."""
    parsed = lines.parse(read)
    counted = parsed.groupBy("uri", F.isnull("fault").alias("fine"), "node", "boot", word()).agg(
        bits(), F.count(F.lit(1)).alias("n")
    )
    return _merged(counted.select("uri", *_where(F.col("fine"), "node", "boot"), "n"))


def _where(condition: Column, node: str, boot: str) -> list[Column]:
    columns = {"node": node, "boot": boot, "word": "word", "bits": "bits"}
    return [F.when(condition, F.col(column)).alias(name) for name, column in columns.items()]


def _merged(claims: DataFrame) -> DataFrame:
    return claims.groupBy("uri", *_KEY).agg(F.bit_or("bits").alias("bits"), F.sum("n").alias("n"))


def by_file(claims: DataFrame) -> DataFrame:
    """A row a file: ``uri``, the number of its lines, whether a key occurs in it twice, the ``boot`` it has keys of."""
    twice = F.isnotnull("word") & (F.col("n") > F.bit_count("bits"))
    return claims.groupBy("uri").agg(F.sum("n"), F.bool_or(twice), F.collect_set("boot"))


def rulings(claims: DataFrame, earlier: DataFrame) -> DataFrame:
    """``uri``, ``node``, ``boot``, ``word`` and ``dropped``: the keys of a file that another file or batch keeps.

    ``earlier`` has ``node``, ``boot``, ``word``, ``bits`` of what batches before hold.
    """
    ours = claims.where(F.isnotnull("word")).select("uri", *_KEY, "bits")
    everything = ours.unionByName(earlier.select(F.lit("").alias("uri"), *_KEY, "bits"))
    before = Window.partitionBy(*_KEY).orderBy("uri").rowsBetween(Window.unboundedPreceding, Window.currentRow - 1)
    taken = F.coalesce(F.bit_or("bits").over(before), F.lit(0))
    ruled = everything.select("uri", *_KEY, F.col("bits").bitwiseAND(taken).alias("dropped"))
    return ruled.where((F.col("uri") != "") & (F.col("dropped") != 0))


def repeated(parsed: DataFrame) -> DataFrame:
    """Parsed lines with ``again``: whether another line of the same file has the same key, and is kept instead.

    For files in which a key occurs more than once; sorts whole lines. Corrupt lines are never ``again``.
    """
    fine = F.isnull("fault")
    content = F.xxhash64(*(name for name in parsed.columns if name not in ("uri", "landed_at")))
    spread = F.when(~fine, content)  # corrupt lines have no key: not all of them into one partition
    order = Window.partitionBy("uri", fine, "node", "boot", "seq", spread).orderBy(content)
    return parsed.withColumn("again", fine & (F.row_number().over(order) > 1))


def ruled_out(marked: DataFrame, ruled: DataFrame) -> DataFrame:
    """Lines with ``again``, which becomes true as well where the ruling on their file and key is to drop them."""
    joined = marked.withColumn("word", word()).join(ruled, ["uri", *_KEY], "left")
    bit = F.getbit("dropped", F.expr("cast(seq & 63 as int)"))
    return joined.withColumn("again", F.col("again") | F.coalesce(bit == 1, F.lit(False))).drop("word", "dropped")


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
