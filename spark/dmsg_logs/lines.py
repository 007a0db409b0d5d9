"""One line of text to one row, whatever the line is: pure functions from DataFrames to DataFrames.

Spark's JSON *reader* drops blank lines and ``[]``, makes several rows of an array and ignores what follows the first
object of a line. So files are read as text, which loses nothing. A pattern tells the lines that our writer wrote, which
the reader takes as they are; each other line goes through ``from_json`` here, and comes out as exactly one row: an event,
or a ``fault`` and the line itself.

What is tolerated, because Spark's parser does: numbers and booleans where text is declared (kept as their text), a
field that occurs twice (the last one counts), a field without a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from dmsg_logs.schemas import EVENTS, LINE
from dmsg_logs.schemas import Column as SchemaColumn

#: A longer line is not parsed; our longest event, a dial with many attempts, is a few KiB.
MAX_LINE_BYTES: Final = 1024 * 1024
#: So much of a line that is too long is kept.
KEPT_CHARS: Final = 64 * 1024
#: What is longer than this is not even read: Hadoop passes over it, and it shows as missing.
MAX_READ_BYTES: Final = 256 * 1024 * 1024
#: Times outside of [EARLIEST, LATEST) are mistakes: 2000-01-01 and 2100-01-01, Unix seconds.
EARLIEST_S: Final = 946_684_800.0
LATEST_S: Final = 4_102_444_800.0
_DAY_S: Final = 86_400

_FAULTY: Final = "_faulty"
_PARSED: Final = StructType([*LINE.fields, StructField(_FAULTY, StringType())])
_OPTIONS: Final = {"columnNameOfCorruptRecord": _FAULTY, "mode": "PERMISSIVE", "allowNonNumericNumbers": "false"}
_WHITE: Final = " \t\r"

# Patterns of plain lines. What a loop takes never contains what follows it, so there is nothing to go back to. Java looks
# single characters up in a table, but tries ranges one by one.
_CHARS: Final = "[" + "".join(re.escape(char) for char in map(chr, range(32, 127)) if char not in '"\\') + "]"
#: A value of each type as our writer writes it; an integer that fits into 64 bits.
_VALUES: Final = {
    "str": rf'"{_CHARS}*(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{{4}}){_CHARS}*)*+"',
    "int": r"-?(?:0|[1-9][0-9]{0,17})",
    "float": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?",
    "bool": r"(?:true|false)",
}
#: From September 2001 to the end of 2096, which is inside of [EARLIEST, LATEST).
_TIME: Final = r"[1-3][0-9]{9}(?:\.[0-9]+)?"


def _any_of(alternatives: Iterable[str]) -> str:
    return f"(?:{'|'.join(alternatives)})"


def _plain_line() -> str:
    """The regular expression of plain lines; its group is the key without its first quote."""
    kinds = (f'"{name}","v":{version}' for name, event in EVENTS.items() for version in range(1, event.version + 1))
    fields = _fields([event.columns for event in EVENTS.values()])
    return (
        rf'^\{{"event":{_any_of(kinds)},"ts":{_TIME},"role":{_VALUES["str"]},'
        rf'"(node":"{_CHARS}+","boot":"{_CHARS}+","seq":{_VALUES["int"]}){fields}\}}\z'
    )


def _fields(orders: Iterable[tuple[SchemaColumn, ...]]) -> str:
    """Fields in one of these orders, or the first few of them, as a line of an older version has: a tree, so that what
    several events begin with is looked at once."""
    following: dict[SchemaColumn, list[tuple[SchemaColumn, ...]]] = {}
    for order in orders:
        if order:
            following.setdefault(order[0], []).append(order[1:])
    branches = [f'"{each.name}":{_VALUES[each.type]}{_fields(rest)}' for each, rest in following.items()]
    return f"(?:,{_any_of(branches)})?+" if branches else ""


_PLAIN: Final = _plain_line()


def read_lines(spark: SparkSession, patterns: list[str], *, tolerant: bool) -> DataFrame:
    """The lines of files as ``value``, with the ``uri`` (as Spark writes it) of their file.

    ``tolerant`` reads as much of a damaged file as there is and says nothing; otherwise it fails the job.
    """
    return _reader(spark, tolerant).text(patterns).select("value", _uri())


def read_plain_lines(spark: SparkSession, patterns: list[str]) -> DataFrame:
    """The plain lines of files: the columns of ``schemas.LINE`` and ``uri``, as :func:`parse` gives them, but faster.

    Of what is not plain there may be a row without a key, or one that says what a part of the line says, or none.
    """
    options = {name: value for name, value in _OPTIONS.items() if name != "columnNameOfCorruptRecord"}
    return _reader(spark, tolerant=False).options(**options).schema(LINE).json(patterns).select("*", _uri())


def _reader(spark: SparkSession, tolerant: bool) -> DataFrameReader:
    return (
        spark.read.option("lineSep", "\n")
        .option("ignoreCorruptFiles", str(tolerant).lower())
        .option("ignoreMissingFiles", "false")
        .option("mapreduce.input.linerecordreader.line.maxlength", str(MAX_READ_BYTES))
    )


def _uri() -> Column:
    return F.input_file_name().alias("uri")  # the same as of ``_metadata``, for which every row would be copied


def plain_key(text: Column) -> Column:
    """The key of a plain line, ``node":"…","boot":"…","seq":…``; "" if the line is not plain.

    A plain line is what our writer writes: ASCII, one object and nothing around it, of an event and version we know,
    fields of ours in their order and of their types. It cannot have a fault.
    """
    short = F.octet_length(text) <= MAX_LINE_BYTES
    return F.when(short, F.regexp_extract(text, _PLAIN, 1)).otherwise("")


def is_unreadable(error: Exception) -> bool:
    """Whether a job failed because a file is damaged."""
    return "FAILED_READ_FILE" in str(error)


def parse(lines: DataFrame) -> DataFrame:
    """``value`` and other columns to the columns of ``schemas.LINE``, ``raw``, ``line``, ``fault`` and those others.

    ``fault`` is null for an event. Otherwise it is ``too_long``, ``blank``, ``not_an_object``, ``not_utf8``, ``torn``
    (no whole JSON object, or more than one), ``wrong_type``, ``no_key`` (of node, boot, seq), ``no_event`` or
    ``bad_time``, and ``line`` is the text.
    """
    others = [name for name in lines.columns if name != "value"]
    text = F.col("value")
    bounded = F.when(F.octet_length(text) <= MAX_LINE_BYTES, text)
    parsed = lines.select("value", *others, F.from_json(bounded, _PARSED, _OPTIONS).alias("parsed"))
    # One pass over almost every line that saves several; the others are looked at more closely.
    looked_at = parsed.select("*", (plain_key(text) != "").alias("usual"))
    judged = looked_at.select("*", _fault().alias("fault"))
    faulty = F.col("fault").isNotNull()
    kept = F.make_valid_utf8(F.when(F.col("fault") == "too_long", F.substring(text, 1, KEPT_CHARS)).otherwise(text))
    return judged.select(
        *(F.col("parsed")[name].alias(name) for name in LINE.names),
        F.when(~faulty & ~F.col("usual") & _unfamiliar(), F.make_valid_utf8(text)).alias("raw"),
        F.when(faulty, kept).alias("line"),
        "fault",
        *others,
    )


def key_as_read(text: Column) -> Column:
    """The key that :func:`read_plain_lines` gives to a line, whatever it is: a struct, or null."""
    return F.from_json(text, "node string, boot string, seq long", {"allowNonNumericNumbers": "false"})


def is_several(text: Column) -> Column:
    """Whether :func:`read_plain_lines` may make several rows of a line that is no object: it is an array."""
    return F.btrim(text, F.lit(_WHITE)).startswith("[")


def date_of(ts: Column) -> Column:
    """The UTC date of Unix seconds, whatever the session's time zone is."""
    return F.date_from_unix_date(F.floor(ts / _DAY_S).cast("int"))


def _fault() -> Column:
    text = F.col("value")
    stripped = F.btrim(text, F.lit(_WHITE))
    # Inside of an array anything that is not exactly one value shows: an array of two, or no array at all.
    whole = F.coalesce(F.json_array_length(F.concat(F.lit("["), text, F.lit("]"))), F.lit(0)) == 1
    unparsed = (
        F.when(stripped == "", "blank")
        .when(~stripped.startswith("{"), "not_an_object")
        .when(whole, "wrong_type")
        .otherwise("torn")
    )
    found = {name: F.col("parsed")[name] for name in ("node", "boot", "seq", "event", "ts", _FAULTY)}
    empty = [F.coalesce(found[name], F.lit("")) == "" for name in ("node", "boot")]
    timely = F.coalesce((found["ts"] >= EARLIEST_S) & (found["ts"] < LATEST_S), F.lit(False))
    unusual = ~F.col("usual")
    return (
        F.when(F.octet_length(text) > MAX_LINE_BYTES, "too_long")
        .when(F.isnull("parsed") | found[_FAULTY].isNotNull(), unparsed)
        .when(unusual & ~whole, "torn")
        .when(unusual & ~F.is_valid_utf8(text), "not_utf8")
        .when(empty[0] | empty[1] | found["seq"].isNull(), "no_key")
        .when(F.coalesce(found["event"], F.lit("")) == "", "no_event")
        .when(~timely, "bad_time")
    )


def _unfamiliar() -> Column:
    """Whether an unusual event holds more than our columns do: a later version, an event or a field we do not know."""
    event, version = F.col("parsed.event"), F.col("parsed.v")
    newest = F.coalesce(*(F.when(event == name, F.lit(known.version)) for name, known in EVENTS.items()))
    later = newest.isNull() | (F.coalesce(version, F.lit(0)) > newest)
    names = F.array(*(F.lit(name) for name in LINE.names))
    more = F.size(F.array_except(F.json_object_keys("value"), names)) > 0
    return later | F.coalesce(more, F.lit(True))
