"""Python tasks over Arrow that recognise plain lines (almost all lines are plain) and turn them into columns.

A line is *plain* if it decodes strictly to an event we know: one JSON object in UTF-8, fields of that event only, of
their types and in their range, with a key of no great length, a possible time, and a version we know. A plain line has no
fault and fits completely into our columns. :mod:`dmsg_logs.ingest.lines` parses all other lines in Spark, which is slower.

Tasks are handed whole files, as they are stored. They refuse a file that they cannot vouch for, such as one that is cut
off. Pure functions; a task holds a file as it is stored and some :data:`_HELD_BYTES` of text, however long a line is.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, BooleanType, LongType, StringType, StructField, StructType

from dmsg_logs.ingest import store
from dmsg_logs.ingest.lines import EARLIEST_S, LATEST_S, MAX_FLOAT, MAX_INT, MAX_LINE_BYTES, REST_LEFT
from dmsg_logs.schemas import ENVELOPE, EVENTS, event_struct

#: Largest file that is handed to a task as a whole; our writer begins a new file after 64 MiB.
MAX_FILE_BYTES: Final = 65 * 1024**2
#: Bytes of text that each byte of a packed file may unpack to. Our densest logs, storms of refusals that differ only in
#: number and time, pack to a 100th: none of them is cut, and the cost of a decompression bomb is bounded.
MAX_RATIO: Final = 250
#: Bytes that any packed file may unpack to: the size of a batch.
MAX_TEXT_BYTES: Final = 8 * 1024**3
#: Bytes of text that a task buffers to write lines of one event together.
_HELD_BYTES: Final = 24 * 1024**2
_BLOCK_BYTES: Final = MAX_LINE_BYTES
#: Bytes that Arrow parses at once; a line must fit in.
_PARSED_BYTES: Final = 8 * 1024**2
#: Rows that wait to be handed over.
_MAX_ROWS: Final = 20_000
_MAX_ODD_BYTES: Final = 16 * 1024**2
#: Low bits of ``seq`` that a word covers: 64 keys.
WORD_BITS: Final = 6
_DAY_S: Final = 86_400.0
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_CODECS: Final = {"zst": "zstd", "gz": "gzip"}

#: The rows of :func:`scan`.
COUNTED: Final = StructType(
    [
        StructField("uri", StringType()),
        StructField("node", StringType()),
        StructField("boot", StringType()),
        StructField("word", LongType()),
        StructField("bits", LongType()),
        StructField("value", BinaryType()),
        StructField("n", LongType()),
        StructField("whole", BooleanType()),
    ]
)
_COUNTED: Final = to_arrow_schema(COUNTED)
#: The rows of :func:`texts`.
TEXTS: Final = StructType([StructField("uri", StringType()), StructField("value", BinaryType())])
_TEXTS: Final = to_arrow_schema(TEXTS)
_TEXT_ROWS: Final = 1_000
#: Why :func:`scan` could not read a file, if it could not be unpacked.
DAMAGED: Final = b"damaged"
#: Ends a line whose rest was cut off: no JSON text contains this byte.
_CUT: Final = b"\0"
_INT: Final = Annotated[int, msgspec.Meta(ge=-MAX_INT, le=MAX_INT)]
_FLOAT: Final = Annotated[float, msgspec.Meta(ge=-MAX_FLOAT, le=MAX_FLOAT)]
_TYPES: Final[dict[str, Any]] = {"str": str, "int": _INT, "float": _FLOAT, "bool": bool}
#: Names of programs and runs, bounded because tasks hold them for each key.
_NAME: Final = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
#: The columns of :func:`tables`, without those that say where a row belongs.
_ROW: Final = to_arrow_schema(store.DATA)
#: Errors of a line that is not plain; which one does not matter here.
_ODD: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

#: Keys as bits, by node, boot and word.
Words = Mapping[tuple[str, str, int], int]
#: A file: its URI and its stored bytes.
File = tuple[str, pa.Buffer]


class Unreadable(Exception):
    """A file that has to be read in another way; its message says why."""


class Damaged(Unreadable):
    """A file that cannot be unpacked to its end."""


def _struct(name: str) -> type[msgspec.Struct]:
    """The class of an event. Its own fields are optional, because older versions lack the later ones."""
    event = EVENTS[name]
    strict = {
        "v": Annotated[int, msgspec.Meta(ge=-MAX_INT, le=event.version)],
        "seq": Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)],
        "ts": Annotated[float, msgspec.Meta(ge=EARLIEST_S, lt=LATEST_S)],
        "node": _NAME,
        "boot": _NAME,
    }
    envelope = [(each.name, strict.get(each.name, _TYPES[each.type])) for each in ENVELOPE if each.name != "event"]
    own = [(each.name, _TYPES[each.type], None) for each in event.columns]
    return msgspec.defstruct(
        f"Event_{name}", [*envelope, *own], tag=name, tag_field="event", forbid_unknown_fields=True, gc=False
    )


_STRUCTS: Final = {_struct(name): name for name in EVENTS}
_DECODER: Final[msgspec.json.Decoder[Any]] = msgspec.json.Decoder(functools.reduce(operator.or_, _STRUCTS))
#: How our writer begins a line; the name of the event follows.
_BEGINNING: Final = b'{"event":"'
_HEAD: Final = len(_BEGINNING)
_KINDS: Final = {_BEGINNING + name.encode(): name for name in EVENTS}
_SCHEMAS: Final = {name: to_arrow_schema(event_struct(name)) for name in EVENTS}


def is_plain(line: bytes) -> bool:
    """Whether a line is plain. It must not be longer than ``lines.MAX_LINE_BYTES``."""
    try:
        _DECODER.decode(line)
    except _ODD:
        return False
    return True


def line_blocks(content: pa.Buffer, name: str) -> Iterator[list[bytes]]:
    """The lines of a file, some at a time; the end of ``name`` tells the compression. A line longer than
    ``lines.MAX_LINE_BYTES`` is cut to that length and ends with :data:`_CUT`. A file that unpacks to more than
    :func:`text_limit` allows is read that far; ``lines.REST_LEFT`` stands for the rest, including the incomplete line.

    Raises :class:`Unreadable` for a file that begins with a byte order mark, and :class:`Damaged`: Spark reads these
    files. A file that unpacks too far raises neither, so that nobody reads the rest.
    """
    rest, first = b"", True
    for block in _unpacked(content, name):
        if block is None:
            yield [REST_LEFT.encode()]
            return
        if first and block.startswith(_BYTE_ORDER_MARK) and None not in _unpacked(content, name):
            raise Unreadable("byte order mark")
        first = False
        found = block.split(b"\n")
        found[0] = _bounded(rest + found[0])  # the others are within the block
        rest = found.pop()
        yield found
    if rest:
        yield [rest]


def is_packed(name: str) -> bool:
    """Whether a file is compressed, by the end of its name."""
    return name.rpartition(".")[2] in _CODECS


def text_limit(size: int) -> int:
    """Bytes that a packed file of ``size`` bytes may unpack to."""
    return min(size * MAX_RATIO, MAX_TEXT_BYTES)


def _unpacked(content: pa.Buffer, name: str) -> Iterator[bytes | None]:
    """The text of a file in blocks, none of them empty; ``None`` at the end if the file unpacks to more than it may.

    Raises :class:`Damaged` at a place that cannot be unpacked.
    """
    source = pa.BufferReader(content)
    packed = is_packed(name)
    stream = pa.CompressedInputStream(source, _CODECS[name.rpartition(".")[2]]) if packed else source
    left = text_limit(content.size) if packed else content.size
    while True:
        try:
            block = stream.read(min(_BLOCK_BYTES, left + 1))
        except OSError as error:
            raise Damaged(str(error)) from None
        if not block:
            return
        if len(block) > left:
            if left:
                yield block[:left]
            yield None
            return
        left -= len(block)
        yield block


def _bounded(line: bytes) -> bytes:
    """A line, cut if it is too long. The rest is still too long and never an event; it may be continued."""
    return line if len(line) <= MAX_LINE_BYTES else line[:MAX_LINE_BYTES] + _CUT


def texts(files: Iterable[File]) -> Iterator[pa.RecordBatch]:
    """The unparsed lines of files, as :data:`TEXTS`."""
    for uri, content in files:
        for lines in line_blocks(content, uri):
            for start in range(0, len(lines), _TEXT_ROWS):
                values = pa.array(lines[start : start + _TEXT_ROWS], pa.binary())
                yield pa.record_batch([pa.repeat(pa.scalar(uri), len(values)), values], schema=_TEXTS)


def scan(files: Iterable[File]) -> Iterator[pa.RecordBatch]:
    """The content of files as :data:`COUNTED`. Keys of plain lines are ``node``, ``boot``, ``word``, ``bits`` and ``n``, the
    number of lines; any other line is ``value``. The same word or line may come in several rows. The sum of ``n`` is the
    number of lines, unless a row with ``whole`` false refuses the file; then ``value`` is :data:`DAMAGED` if it could not be
    unpacked."""
    rows = _Rows()
    for uri, content in files:
        words = _Words()
        odd: Counter[bytes] = Counter()
        odd_bytes = 0
        try:
            for lines in line_blocks(content, uri):
                for line in words.take(lines):
                    odd[line] += 1
                    odd_bytes += len(line)
                if len(words.found) + len(odd) > _MAX_ROWS or odd_bytes > _MAX_ODD_BYTES:
                    rows.add(uri, words.found, odd)
                    yield rows.take()
                    words, odd, odd_bytes = _Words(), Counter(), 0
            rows.add(uri, words.found, odd)
        except Unreadable as error:
            rows.refuse(uri, DAMAGED if isinstance(error, Damaged) else None)
        if len(rows) > _MAX_ROWS:
            yield rows.take()
    yield rows.take()


class _Words:
    """Keys of plain lines as bits, and the number of lines, by node, boot and word: ``found``."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, int], list[int]] = {}

    def take(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Count the plain lines and yield the others. Most lines have the same word as the line before."""
        decode = _DECODER.decode
        node = boot = ""
        word = bits = count = 0
        for line in lines:
            try:
                event = decode(line)
            except _ODD:
                yield line
                continue
            seq = event.seq
            if seq >> WORD_BITS == word and event.boot == boot and event.node == node:
                bits |= 1 << (seq & 63)
                count += 1
                continue
            self._add((node, boot, word), bits, count)
            node, boot, word, bits, count = event.node, event.boot, seq >> WORD_BITS, 1 << (seq & 63), 1
        self._add((node, boot, word), bits, count)

    def _add(self, key: tuple[str, str, int], bits: int, count: int) -> None:
        if count:
            found = self.found.setdefault(key, [0, 0])
            found[0] |= bits
            found[1] += count


class _Rows:
    """Rows of :data:`COUNTED` that have not been handed over."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, uri: str, words: Mapping[tuple[str, str, int], list[int]], odd: Mapping[bytes, int]) -> None:
        for (node, boot, word), (bits, count) in words.items():
            signed = bits - (1 << 64) if bits >> 63 else bits
            self._rows.append((uri, node, boot, word, signed, None, count, True))
        for line, count in odd.items():
            self._rows.append((uri, None, None, None, None, line, count, True))

    def refuse(self, uri: str, why: bytes | None) -> None:
        self._rows.append((uri, None, None, None, None, why, 0, False))

    def take(self) -> pa.RecordBatch:
        columns = list(zip(*self._rows, strict=True)) or [()] * len(_COUNTED)
        self._rows = []
        arrays = [pa.array(column, field.type) for column, field in zip(columns, _COUNTED, strict=True)]
        return pa.record_batch(arrays, schema=_COUNTED)


class Part(NamedTuple):
    """Rows for one partition of the output: good or dup, and for good rows the day since 1970-01-01."""

    state: str
    day: int | None
    rows: pa.Table


class Told(NamedTuple):
    """What :func:`tables` needs to know of files, by ``uri``.

    ``names`` are their names, ``mixed`` the files with lines that are not plain, ``dropped`` the keys of each file that are
    duplicates. In a file in ``twice`` a key may occur again: all lines with it but the first are duplicates.
    """

    names: Mapping[str, str]
    mixed: Container[str]
    dropped: Mapping[str, Words]
    twice: Container[str]


class _Waiting:
    """Plain lines of one event, good ones or duplicates."""

    __slots__ = ("lines", "runs", "size")

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.runs: list[tuple[str, int]] = []
        self.size = 0

    def add(self, lines: list[bytes], name: str) -> int:
        size = sum(map(len, lines))
        self.lines += lines
        self.runs.append((name, len(lines)))
        self.size += size
        return size


def tables(files: Iterable[File], told: Told) -> Iterator[Part]:
    """The plain lines of files as columns, those of one event together."""
    waiting: dict[tuple[str, str], _Waiting] = {}
    held = 0
    for uri, content in files:
        closely = uri in told.mixed or uri in told.dropped or uri in told.twice
        taken = dict(told.dropped.get(uri, {}))
        for lines in line_blocks(content, uri):
            sorted_out = _look(lines, taken, uri in told.twice) if closely else _glance(lines)
            for where, found in sorted_out.items():
                held += waiting.setdefault(where, _Waiting()).add(found, told.names[uri])
            while held > _HELD_BYTES:
                where = max(waiting, key=lambda each: waiting[each].size)
                held -= waiting[where].size
                yield from _parts(where, waiting.pop(where))
    for where in sorted(waiting):
        yield from _parts(where, waiting.pop(where))


def _glance(lines: list[bytes]) -> dict[tuple[str, str], list[bytes]]:
    """Lines that are all plain and all good, by their event."""
    alike: defaultdict[bytes, list[bytes]] = defaultdict(list)
    for line in lines:
        alike[line[: line.find(b'"', _HEAD)]].append(line)
    found: dict[tuple[str, str], list[bytes]] = {}
    others: list[bytes] = []
    for beginning, each in alike.items():
        kind = _KINDS.get(beginning)
        if kind is None:
            others += each
        else:
            found["good", kind] = each
    for line in others:
        found.setdefault(("good", _STRUCTS[type(_DECODER.decode(line))]), []).append(line)
    return found


def _look(
    lines: list[bytes], taken: dict[tuple[str, str, int], int], twice: bool
) -> dict[tuple[str, str], list[bytes]]:
    """The plain lines by state and event; ``taken`` are the keys of duplicates, ``twice`` adds the keys of these lines."""
    found: dict[tuple[str, str], list[bytes]] = {}
    for line in lines:
        try:
            event = _DECODER.decode(line)
        except _ODD:
            continue
        key, bit = (event.node, event.boot, event.seq >> WORD_BITS), 1 << (event.seq & 63)
        bits = taken.get(key, 0)
        if twice:
            taken[key] = bits | bit
        found.setdefault(("dup" if bits & bit else "good", _STRUCTS[type(event)]), []).append(line)
    return found


def _parts(where: tuple[str, str], group: _Waiting) -> Iterator[Part]:
    state, name = where
    found = _columns(name, group.lines)
    count = len(group.lines)
    found["file"] = pa.concat_arrays([pa.repeat(pa.scalar(each), times) for each, times in group.runs])
    columns = [found[each.name] if each.name in found else pa.nulls(count, each.type) for each in _ROW]
    rows = pa.table(columns, schema=_ROW)
    if state != "good":
        yield Part(state, None, rows)
        return
    days = pc.cast(pc.floor(pc.divide(rows["ts"], _DAY_S)), pa.int32())
    first, last = pc.min_max(days).as_py().values()
    if first == last:
        yield Part(state, first, rows)
        return
    for day in pc.unique(days).to_pylist():
        yield Part(state, day, rows.filter(pc.equal(days, day)))


def _columns(name: str, lines: list[bytes]) -> dict[str, Any]:
    try:
        table = _read(name, lines)
    except pa.ArrowInvalid:  # a field occurs twice; its last value counts
        table = _read(name, [msgspec.json.encode(_DECODER.decode(line)) for line in lines])
    if table.num_rows != len(lines):
        raise ValueError(f"{len(lines)} lines of {name} became {table.num_rows} rows")
    return {each: table[each] for each in table.column_names}


def _read(name: str, lines: list[bytes]) -> pa.Table:
    return pyarrow.json.read_json(
        pa.BufferReader(b"\n".join(lines)),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=_PARSED_BYTES),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=_SCHEMAS[name], unexpected_field_behavior="error"),
    )
