"""Plain lines: what tasks make of them is what Spark's own parser does, and what is not plain they leave alone."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from landing_files import START, event, line
from pyspark.sql import SparkSession

from dmsg_logs.ingest import landing, lines, plain
from dmsg_logs.ingest.plain import Told, Unreadable, is_plain, line_blocks, scan, tables, texts
from dmsg_logs.schemas import EVENTS, LINE
from dmsg_logs.synthetic import generate

_DAY = int(START) // 86_400


def file(*texts: str, uri: str = "a.jsonl") -> plain.File:
    """A file as it is stored."""
    return uri, pa.py_buffer("".join(f"{each}\n" for each in texts).encode())


def counted(*files: plain.File) -> list[dict[str, Any]]:
    return [row for batch in scan(files) for row in batch.to_pylist()]


def parts(*files: plain.File, **told: Any) -> Iterator[tuple[str, int | None, dict[str, Any]]]:
    names = {uri: f"name of {uri}" for uri, _ in files}
    for part in tables(
        files, Told(names, told.get("mixed", set(names)), told.get("dropped", {}), told.get("twice", set()))
    ):
        for row in part.rows.to_pylist():
            yield part.state, part.day, row


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (line(), True),
        (" " + line() + "\t\r", True),
        (json.dumps(event()), True),
        (json.dumps(dict(reversed(event().items()))), True),
        (line().replace('"count":1', '"count":1,"seq":9'), True),
        (line(seq=-5), False),
        (line(seq=2**53 - 1), True),
        (line(seq=2**53), False),
        (line(count=1 - 2**53), True),
        (line(count=2**53), False),
        (line("session_up", duration_s=-1e12), True),
        (line("session_up", duration_s=1.1e12), False),
        (line("session_up", duration_s=1.5).replace("1.5", "1e400"), False),
        (line(what="ü\u2028\\}{\x00"), True),
        (line().replace(',"count":1', ""), True),
        (line(ts=START // 1), True),
        ("", False),
        ("[]", False),
        (f"[{line()}]", False),
        (line() + line(), False),
        (line()[:-1], False),
        (line("brand_new"), False),
        (line(v=2), False),
        (line(new=1), False),
        (line(count=None), False),
        (line(node=5), False),
        (line(node=""), False),
        (line(node="é" * 256), True),
        (line(node="n" * 257), False),
        (line(boot=""), False),
        (line(seq=1.0), False),
        (line(seq=2**63), False),
        (line(seq="1"), False),
        (line(ts=0), False),
        (line(ts=4_102_444_800.0), False),
        (line(count=True), False),
        (line().replace('"count":1', '"count":01'), False),
        (line().replace('"count":1', '"count":NaN'), False),
        (line(what="QQ").replace("QQ", "\\ud800"), False),
        (line(new="QQ").replace('"QQ"', "[" * 100_000), False),
        (line(new="QQ").replace('"QQ"', "[" * 100_000 + "]" * 100_000), False),
        (line().replace('"count":1', '"count":' + '{"a":' * 100_000), False),
        ("[" * 100_000, False),
        ('{"a":' * 100_000, False),
    ],
)
def test_which_lines_are_plain(text: str, wanted: bool) -> None:
    assert is_plain(text.encode()) == wanted


def test_text_that_is_not_utf8_is_not_plain() -> None:
    assert not is_plain(line(what="QQ").encode().replace(b"QQ", b"\xff\xfe"))


def _values(rng: random.Random) -> Any:
    return rng.choice(
        [
            0,
            1,
            -1,
            1.5,
            1e300,
            -0.0,
            2**53 + 1,
            2**63 - 1,
            -(2**63),
            2**63,
            True,
            None,
            "",
            "x",
            "é",
            "\x00",
            '"\\/',
            [],
            {},
        ]
    )


def _any_line(rng: random.Random) -> str:
    """A line of any event, as it should be or a little off."""
    name = rng.choice(list(EVENTS))
    made = {
        "str": lambda: rng.choice(["", "relay", 'a"b', "ü"]),
        "int": lambda: rng.randrange(10**6),
        "bool": lambda: True,
    }
    fields = {each.name: made.get(each.type, rng.random)() for each in EVENTS[name].columns}
    value = {**event(name, seq=rng.randrange(1000), v=rng.randint(1, 2)), **fields}
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        value[rng.choice([*value, "new"])] = _values(rng)
    if rng.random() < 0.2:
        value.pop(rng.choice(list(value)))
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, separators=rng.choice([(",", ":"), (", ", " : ")]))
    if rng.random() < 0.1:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(["", "x", '"', ",", " ", "0", "\\"]) + text[at + rng.randint(0, 2) :]
    return text.replace("\n", " ")


def test_what_tasks_make_of_lines_is_what_spark_s_parser_does(spark: SparkSession, tmp_path: Path) -> None:
    """Thousands of lines of every event, whole and spoiled: a plain one has no fault, no more than our columns, and the
    same value in each of them."""
    rng = random.Random(7)
    texts = [_any_line(rng) for _ in range(4000)]
    usual = [each for each in texts if is_plain(each.encode())]
    assert 1000 < len(usual) < 3500
    (tmp_path / "lines.jsonl").write_text("".join(f"{each}\n" for each in usual))
    parsed = lines.parse(lines.read_lines(spark, [str(tmp_path)], tolerant=False)).collect()
    assert {(row.fault, row.raw) for row in parsed} == {(None, None)}
    wanted = Counter(repr([row[name] for name in LINE.names]) for row in parsed)
    for made in (parts(file(*texts)), parts(file(*usual), mixed=())):  # closely, and at a glance
        assert Counter(repr([row[name] for name in LINE.names]) for _, _, row in made) == wanted


def test_generated_lines_are_plain_but_for_those_that_are_not(tmp_path: Path) -> None:
    """What our writers write is plain, all of it, and what was spoiled is not."""
    truth = generate(
        tmp_path, events=3000, seed=5, days=1, relays=2, clients=4, workers=1, corrupt=0.01, newer=0.01, duplicates=0.0
    )
    rows = counted(*((str(path), pa.py_buffer(path.read_bytes())) for path in tmp_path.rglob("*.jsonl.zst")))
    assert sum(row["n"] for row in rows) == truth.lines
    assert sum(row["n"] for row in rows if row["value"] is not None) == truth.corrupt + truth.newer > 0


def test_blocks_are_the_lines_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is compressed, wherever a block ends, with or without an end of the last line."""
    content = b"\n".join([b"a" * 10, b"", b"b\r", b"c" * 7, b""])
    monkeypatch.setattr(plain, "_BLOCK_BYTES", 3)
    halves = [content[:9], content[9:]]
    for name, data in (
        ("x.jsonl", content),
        ("x.jsonl.gz", b"".join(map(gzip.compress, halves))),
        ("x.jsonl.zst", b"".join(map(zstandard.ZstdCompressor().compress, halves))),
        ("x.jsonl", content[:-1]),
    ):
        blocks = line_blocks(pa.py_buffer(data), name)
        assert [each for block in blocks for each in block] == [b"a" * 10, b"", b"b\r", b"c" * 7]
    assert list(line_blocks(pa.py_buffer(b""), "x.jsonl.zst")) == []


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl.zst", zstandard.ZstdCompressor().compress(b"line\n" * 100)[:-3]),
        ("x.jsonl.zst", b"this is no zstd frame"),
        ("x.jsonl.gz", gzip.compress(b"line\n" * 100, mtime=0)[:-9]),
        ("x.jsonl", b"\xef\xbb\xbfline\n"),
    ],
    ids=("cut", "no zstd", "cut gzip", "byte order mark"),
)
def test_a_file_that_cannot_be_vouched_for_is_left_alone(name: str, data: bytes) -> None:
    with pytest.raises(Unreadable):
        list(line_blocks(pa.py_buffer(data), name))
    rows = counted(file(line(), uri="good.jsonl"), (name, pa.py_buffer(data)))
    assert [(row["uri"], row["n"]) for row in rows if row["whole"]][:1] == [("good.jsonl", 1)]
    assert [row["uri"] for row in rows if not row["whole"]] == [name]


@pytest.mark.parametrize(
    ("pack", "mib"), [(zstandard.ZstdCompressor(level=19).compress, 100), (gzip.compress, 10)], ids=("zst", "gz")
)
@pytest.mark.parametrize("text", [b"\n", b"{}\n", b"x", b"\xef\xbb\xbf\n"], ids=("blank", "lines", "one line", "marks"))
def test_a_small_file_that_unpacks_to_much_is_not_read_on(
    text: bytes, pack: Callable[[bytes], bytes], mib: int
) -> None:
    bomb = pack(text * (mib * 1024**2 // len(text)))
    name = f"x.jsonl.{'gz' if pack is gzip.compress else 'zst'}"
    limit = plain.text_limit(len(bomb))
    *blocks, last = line_blocks(pa.py_buffer(bomb), name)
    assert last == [lines.REST_LEFT.encode()] and not is_plain(last[0])
    read = sum(len(each) + 1 for some in blocks for each in some)
    assert read <= limit < mib * 1024**2
    assert read >= limit - lines.MAX_LINE_BYTES - 4 or text == b"x"  # a line without an end is left with the rest
    rows = counted((name, pa.py_buffer(bomb)))
    assert all(row["whole"] for row in rows)
    assert sum(row["n"] for row in rows) == sum(map(len, blocks)) + 1


def test_a_file_may_unpack_to_no_more_than_a_batch_has() -> None:
    assert plain.text_limit(plain.MAX_FILE_BYTES) == plain.MAX_TEXT_BYTES == landing.MAX_BATCH_BYTES
    assert plain.text_limit(3218) == 3218 * plain.MAX_RATIO


def test_a_file_with_a_byte_order_mark_that_unpacks_too_far_is_not_left_to_others() -> None:
    bomb = zstandard.compress(b"\xef\xbb\xbf" + b"\n" * 10**8)
    (first, *_), *_, last = line_blocks(pa.py_buffer(bomb), "x.jsonl.zst")
    assert first == b"\xef\xbb\xbf" and last == [lines.REST_LEFT.encode()]


def test_a_line_that_is_too_long_is_cut_off_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any length and with any beginning: an event of a megabyte with white space behind it is none."""
    longest = lines.MAX_LINE_BYTES
    whole = line().encode().ljust(longest)
    content = b"\n".join(
        [line(seq=2).encode(), whole, whole + b" ", whole + b" " * 3 * longest, b"[]", b"x" * 2 * longest]
    )
    for block in (longest, 70_001):
        monkeypatch.setattr(plain, "_BLOCK_BYTES", block)
        found = [each for some in line_blocks(pa.py_buffer(content), "x.jsonl") for each in some]
        assert [len(each) for each in found] == [len(line(seq=2)), longest, longest + 1, longest + 1, 2, longest + 1]
        assert [is_plain(each) for each in found] == [True, True, False, False, False, False]
        assert found[2][:-1] == found[3][:-1] == whole
        said = [row for batch in texts([("x.jsonl", pa.py_buffer(content))]) for row in batch.to_pylist()]
        assert said == [{"uri": "x.jsonl", "value": each} for each in found]


def test_a_scan_counts_keys_and_keeps_what_is_odd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest bit of a word; the same however little a task holds back."""
    written = [*(line(seq=seq) for seq in (0, 5, 5, 63, 64)), "[]", "[]", "torn"]
    key = ("n" * 16, "b" * 16)
    wanted = {
        (*key, 0): (1 | 1 << 5 | -(2**63), 4),
        (*key, 1): (1, 1),
        b"[]": (0, 2),
        b"torn": (0, 1),
    }
    for rows_held, block in ((20_000, 2**20), (1, 200)):
        monkeypatch.setattr(plain, "_MAX_ROWS", rows_held)
        monkeypatch.setattr(plain, "_BLOCK_BYTES", block)
        found: dict[Any, tuple[int, int]] = {}
        for row in counted(file(*written)):
            what = row["value"] if row["value"] is not None else (row["node"], row["boot"], row["word"])
            bits, n = found.get(what, (0, 0))
            found[what] = (bits | (row["bits"] or 0), n + row["n"])
        assert found == wanted


def test_duplicates_are_told_apart_and_put_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are ruled out, keys that come twice, lines that are not plain; the same however little is held back."""
    one = file(*(line(seq=seq) for seq in (1, 2, 70)), "[]", line("session_up", seq=3, server="s", ts=START + 86_400))
    two = file(*(line(seq=seq, boot="c" * 16) for seq in (1, 1, 2)), uri="b.jsonl")
    dropped = {"a.jsonl": {("n" * 16, "b" * 16, 0): 1 << 2, ("n" * 16, "b" * 16, 1): 1 << 6}}
    for held in (2**20, 1):
        monkeypatch.setattr(plain, "_HELD_BYTES", held)
        found = sorted(
            (state, day, row["file"], row["seq"], row["event"])
            for state, day, row in parts(one, two, dropped=dropped, twice={"b.jsonl"})
            if state == "good"
        )
        assert found == [
            ("good", _DAY, "name of a.jsonl", 1, "refused"),
            ("good", _DAY, "name of b.jsonl", 1, "refused"),
            ("good", _DAY, "name of b.jsonl", 2, "refused"),
            ("good", _DAY + 1, "name of a.jsonl", 3, "session_up"),
        ]
        again = sorted(
            (day is None, row["file"], row["seq"])
            for state, day, row in parts(one, two, dropped=dropped, twice={"b.jsonl"})
            if state == "dup"
        )
        assert again == [(True, "name of a.jsonl", 2), (True, "name of a.jsonl", 70), (True, "name of b.jsonl", 1)]
