"""Which lines are duplicates, without shuffling lines: pure functions from DataFrames to DataFrames.

The key of a line is (node, boot, seq). The keys of 64 consecutive ``seq`` fit into the bits of one integer, so all keys
of five million lines are eighty thousand rows (*words*), and whether two sets of keys have one in common is an ``&``.

1. Claims: one look at the text of a batch gives, for each file, the words of the keys that occur in it, how many lines
   it has, and how many of them are not as our writer writes them.
2. Rulings: of several files that claim a key the first by name keeps it, unless an earlier batch has it. That is a
   window over words. What a file must drop are words again, few of them, which are joined to its lines as they are
   written.
3. Proof: the keys that were *written* decide whether the batch is right (:func:`contradictions`).
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from dmsg_logs import lines

_WORD_BITS: Final = 6
_KEY: Final = ("node", "boot", "word")


def word() -> Column:
    """The word of a line's key."""
    return _word_of("seq").alias("word")


def bits() -> Column:
    """All keys of a word, as an aggregate over lines."""
    return F.bit_or(_bit_of("seq")).alias("bits")


def _word_of(seq: str) -> Column:
    return F.shiftright(seq, _WORD_BITS)


def _bit_of(seq: str) -> Column:
    return F.expr(f"shiftleft(1L, cast({seq} & 63 as int))")


def count_lines(read: DataFrame, *, closely: bool = False) -> DataFrame:
    """Lines to ``uri``, ``pair``, ``word``, ``bits``, ``value`` and ``n``, their number.

    Plain lines go by their key, of which ``pair`` is ``node":"…","boot":"…"``; any other line keeps its text, ``value``,
    and so do all of them with ``closely``. The sum of ``n`` is the number of lines.
    """
    key = F.lit("") if closely else lines.plain_key(F.col("value"))
    cut = read.select("uri", "value", key.alias("plain_key"))
    is_plain = F.col("plain_key") != ""
    split = cut.select(
        "uri",
        F.when(is_plain, F.substring_index("plain_key", ',"', 2)).alias("pair"),
        F.when(is_plain, F.substring_index("plain_key", ":", -1).cast("long")).alias("seq"),
        F.when(~is_plain, F.substring("value", 1, lines.MAX_LINE_BYTES + 1)).alias("value"),
    )
    return split.groupBy("uri", "pair", "value", word()).agg(bits(), F.count(F.lit(1)).alias("n"))


def claims(counted: DataFrame) -> DataFrame:
    """Counted lines to ``uri``, ``node``, ``boot``, ``word``, ``bits``, ``n`` and, of these, ``odd``, which are not plain.

    Only events claim a key; the others' is null. ``strange`` says that a line is too odd for
    :func:`lines.read_plain_lines` to be told apart from others in what that gives.
    """
    looked_at = lines.parse(counted.withColumn("text", F.col("value")))
    is_plain, fine = F.isnotnull("pair"), F.isnull("fault")
    cut_out = F.from_json(F.concat(F.lit('{"'), "pair", F.lit("}")), "node string, boot string")
    several = (F.col("fault") == "torn") & F.isnotnull(lines.key_as_read(F.col("text"))["seq"])
    named = looked_at.withColumn("cut_out", cut_out).select(
        "uri",
        *(F.when(is_plain, F.col("cut_out")[name]).when(fine, F.col(name)).alias(name) for name in ("node", "boot")),
        F.when(is_plain, F.col("word")).when(fine, _word_of("seq")).alias("word"),
        F.when(is_plain, F.col("bits")).when(fine, _bit_of("seq")).alias("bits"),
        "n",
        F.when(~is_plain, F.col("n")).otherwise(0).alias("odd"),
        (~is_plain & (several | lines.is_several(F.col("text")))).alias("strange"),
    )
    return named.groupBy("uri", *_KEY).agg(
        F.bit_or("bits").alias("bits"),
        F.sum("n").alias("n"),
        F.sum("odd").alias("odd"),
        F.bool_or("strange").alias("strange"),
    )


def by_file(claims: DataFrame) -> DataFrame:
    """A row a file: ``uri``, how many ``lines`` it has and how many of them are ``odd``, whether they have to be looked at
    one by one (``closely``) because a key occurs twice or a line is strange, and the ``boots`` it has keys of."""
    twice = F.isnotnull("word") & (F.col("n") > F.bit_count("bits"))
    return claims.groupBy("uri").agg(
        F.sum("n").alias("lines"),
        F.sum("odd").alias("odd"),
        F.bool_or(twice | F.col("strange")).alias("closely"),
        F.collect_set("boot").alias("boots"),
    )


def odd_lines(counted: DataFrame) -> DataFrame:
    """The lines that are not plain, parsed (:func:`lines.parse`), with their ``uri``; each as often as there are."""
    odd = counted.where(F.isnotnull("value")).select(
        "uri", "value", F.explode(F.expr("array_repeat(1, cast(n as int))"))
    )
    return lines.parse(odd.select("uri", "value"))


def marks(counted: DataFrame, ruled: DataFrame) -> DataFrame:
    """``uri``, ``node``, ``boot``, ``word``, and as bits the keys ``dropped`` by a ruling, and those ``hidden``: what
    :func:`lines.read_plain_lines` makes of them comes from odd lines, which are written as :func:`odd_lines` gives them."""
    read = counted.where(F.isnotnull("value")).select("uri", lines.key_as_read(F.col("value")).alias("key"))
    hidden = read.select("uri", "key.*").where(F.isnotnull("seq")).groupBy("uri", "node", "boot", word()).agg(bits())
    none = F.lit(0).cast("long")
    every = ruled.select("uri", *_KEY, "dropped", none.alias("hidden")).unionByName(
        hidden.select("uri", *_KEY, none.alias("dropped"), F.col("bits").alias("hidden"))
    )
    return every.groupBy("uri", *_KEY).agg(F.bit_or("dropped").alias("dropped"), F.bit_or("hidden").alias("hidden"))


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
    content = F.xxhash64(*(name for name in parsed.columns if name != "uri"))
    spread = F.when(~fine, content)  # corrupt lines have no key: not all of them into one partition
    order = Window.partitionBy("uri", fine, "node", "boot", "seq", spread).orderBy(content)
    return parsed.withColumn("again", fine & (F.row_number().over(order) > 1))


def ruled_out(marked: DataFrame, ruled: DataFrame) -> DataFrame:
    """Lines with ``again``, which becomes true as well where the ruling on their file and key is to drop them."""
    joined = marked.withColumn("word", word()).join(ruled, ["uri", *_KEY], "left")
    return joined.withColumn("again", F.col("again") | _has("dropped")).drop("word", "dropped")


def marked_out(rows: DataFrame, marks: DataFrame) -> DataFrame:
    """Rows of :func:`lines.read_plain_lines` with ``again``, whether to drop them, and without those of odd lines."""
    keyed = rows.where(F.isnotnull("node") & F.isnotnull("boot") & F.isnotnull("seq")).withColumn("word", word())
    joined = keyed.join(marks, ["uri", *_KEY], "left").where(~_has("hidden"))
    return joined.withColumn("again", _has("dropped")).drop("word", "dropped", "hidden")


def _has(name: str) -> Column:
    return F.coalesce(F.getbit(name, F.expr("cast(seq & 63 as int)")) == 1, F.lit(False))


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
