"""One line of text to one row, whatever the line is: pure functions from DataFrames to DataFrames.

Spark's JSON *reader* drops blank lines and ``[]``, makes several rows of an array and ignores what follows the first
object of a line. So lines that :mod:`dmsg_logs.ingest.plain` cannot vouch for are read as text, which loses nothing, and
parsed here with ``from_json``. Each line gives exactly one row: an event, or a ``fault`` and the line itself.

Tolerated, because Spark's parser tolerates it: numbers and booleans where text is declared (kept as their text), a
field that occurs twice (the last one counts), a field without a value.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DoubleType, LongType, StringType, StructField, StructType

from dmsg_logs.schemas import EVENTS, LINE

#: A longer line is not parsed; our longest event, a dial with many attempts, is a few KiB.
MAX_LINE_BYTES: Final = 1024 * 1024
#: Characters that are kept of a line that is too long.
KEPT_CHARS: Final = 64 * 1024
#: Stands for the unread rest of a file that unpacks to more than it may; it is no JSON, so no program of ours writes it.
REST_LEFT: Final = "\x1admsg_logs: the rest of this file was not unpacked"
#: The fault of that line.
UNPACKS_TOO_FAR: Final = "unpacks_too_far"
#: Hadoop, which reads the files that tasks cannot, skips longer lines: they would not fit into memory.
MAX_READ_BYTES: Final = 32 * 1024 * 1024
#: Larger numbers are mistakes or forged: sums of them would overflow, and times be invalid. ``seq`` is not negative either.
MAX_INT: Final = 2**53 - 1
MAX_FLOAT: Final = 1e12
#: Times outside of [EARLIEST, LATEST) are mistakes: 2000-01-01 and 2100-01-01, Unix seconds.
EARLIEST_S: Final = 946_684_800.0
LATEST_S: Final = 4_102_444_800.0
_DAY_S: Final = 86_400

_FAULTY: Final = "_faulty"
_PARSED: Final = StructType([*LINE.fields, StructField(_FAULTY, StringType())])
_OPTIONS: Final = {"columnNameOfCorruptRecord": _FAULTY, "mode": "PERMISSIVE", "allowNonNumericNumbers": "false"}
_WHITE: Final = " \t\r"


def read_lines(spark: SparkSession, patterns: list[str], *, tolerant: bool) -> DataFrame:
    """The lines of files as ``value``, with the ``uri`` (as Spark writes it) of their file.

    ``tolerant`` silently reads the readable part of a damaged file; otherwise such a file fails the job.
    """
    reader = (
        spark.read.option("lineSep", "\n")
        .option("ignoreCorruptFiles", str(tolerant).lower())
        .option("ignoreMissingFiles", "false")
        .option("mapreduce.input.linerecordreader.line.maxlength", str(MAX_READ_BYTES))
    )
    return reader.text(patterns).select("value", uri())


def uri() -> Column:
    """The file a row was read from, as a URI."""
    return F.input_file_name().alias("uri")  # the same URI as in ``_metadata``, which would copy every row


def is_unreadable(error: Exception) -> bool:
    """Whether a job failed because a file is damaged."""
    return "FAILED_READ_FILE" in str(error)


def parse(lines: DataFrame) -> DataFrame:
    """``value`` and other columns to the columns of ``schemas.LINE``, ``raw``, ``line``, ``fault`` and those others.

    ``fault`` is null for an event. Otherwise it is ``too_long``, ``blank``, ``not_an_object``, ``not_utf8``, ``torn``
    (no whole JSON object, or more than one), ``wrong_type``, ``no_key`` (of node, boot, seq), ``no_event``,
    ``bad_time``, ``out_of_range`` (a number beyond :data:`MAX_INT` or :data:`MAX_FLOAT`) or :data:`UNPACKS_TOO_FAR` (the
    line is :data:`REST_LEFT`), and ``line`` is the text.
    """
    others = [name for name in lines.columns if name != "value"]
    text = F.col("value")
    bounded = F.when(F.octet_length(text) <= MAX_LINE_BYTES, text)
    parsed = lines.select("value", *others, F.from_json(bounded, _PARSED, _OPTIONS).alias("parsed"))
    judged = parsed.select("*", _fault().alias("fault"))
    faulty = F.col("fault").isNotNull()
    kept = F.make_valid_utf8(F.when(F.col("fault") == "too_long", F.substring(text, 1, KEPT_CHARS)).otherwise(text))
    return judged.select(
        *(F.col("parsed")[name].alias(name) for name in LINE.names),
        F.when(~faulty & _unfamiliar(), F.make_valid_utf8(text)).alias("raw"),
        F.when(faulty, kept).alias("line"),
        "fault",
        *others,
    )


def date_of(ts: Column) -> Column:
    """The UTC date of Unix seconds, whatever the session's time zone is."""
    return F.date_from_unix_date(F.floor(ts / _DAY_S).cast("int"))


def _fault() -> Column:
    text = F.col("value")
    stripped = F.btrim(text, F.lit(_WHITE))
    # Wrapped in an array, text that is not exactly one value is found: it gives an array of two, or no array at all.
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
    return (
        F.when(F.octet_length(text) > MAX_LINE_BYTES, "too_long")
        .when(text == REST_LEFT, UNPACKS_TOO_FAR)
        .when(F.isnull("parsed") | found[_FAULTY].isNotNull(), unparsed)
        .when(~whole, "torn")
        .when(~F.is_valid_utf8(text), "not_utf8")
        .when(empty[0] | empty[1] | found["seq"].isNull(), "no_key")
        .when(F.coalesce(found["event"], F.lit("")) == "", "no_event")
        .when(~timely, "bad_time")
        .when(_out_of_range(), "out_of_range")
    )


def _out_of_range() -> Column:
    """Whether any number is out of range. One array, so that the optimizer sees one condition instead of three dozen."""
    limits: dict[DataType, float] = {LongType(): MAX_INT, DoubleType(): MAX_FLOAT}
    numbers = ((F.col("parsed")[each.name], limits.get(each.dataType)) for each in LINE.fields)
    beyond = [F.abs(number.cast("double")) > limit for number, limit in numbers if limit is not None]
    return F.coalesce(F.exists(F.array(*beyond, F.col("parsed.seq") < 0), lambda one: one), F.lit(False))


def _unfamiliar() -> Column:
    """Whether an event holds more than our columns: a later version, or an unknown event or field."""
    event, version = F.col("parsed.event"), F.col("parsed.v")
    newest = F.coalesce(*(F.when(event == name, F.lit(known.version)) for name, known in EVENTS.items()))
    later = newest.isNull() | (F.coalesce(version, F.lit(0)) > newest)
    names = F.array(*(F.lit(name) for name in LINE.names))
    more = F.size(F.array_except(F.json_object_keys("value"), names)) > 0
    return later | F.coalesce(more, F.lit(True))
