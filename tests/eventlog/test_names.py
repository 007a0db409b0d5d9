"""Names of files of the event log: they are read back as written, and nothing else is taken for one."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dmsg.eventlog.names import LogFileName, check_boot, folder, safe_name

#: The pattern that readers of the files rely on; written down a second time, so that a change of the first is noticed.
AGREED = re.compile(
    r"^(?P<node>.+)-(?P<boot>[0-9a-f]{8,32})-(?P<n>\d{6,9})-(?P<lines>\d{1,12})(?:-(?P<digest>[0-9a-f]{16}))?\.jsonl\.zst$"
)
BOOTS = st.text("0123456789abcdef", min_size=8, max_size=32)
NAMES = st.builds(
    LogFileName,
    st.text().map(safe_name),
    BOOTS,
    st.integers(0, 10**9 - 1),
    st.integers(0, 10**12 - 1),
    st.just("") | st.text("0123456789abcdef", min_size=16, max_size=16),
)


@given(NAMES)
@example(LogFileName("0", "00000000", 100000000, 100000))
@example(LogFileName("a-00000000", "00000000", 100000000, 100000, "0000000000000000"))
def test_a_name_is_read_back_as_it_was_written(name: LogFileName) -> None:
    text = name.format()
    assert LogFileName.parse(text) == name
    assert LogFileName.parse_part(text) is None
    assert len(text) <= 250
    found = AGREED.match(text)
    assert found is not None
    assert (found["node"], found["boot"]) == (name.node, name.boot)
    assert (int(found["n"]), int(found["lines"]), found["digest"] or "") == (name.number, name.lines, name.digest)


@given(NAMES)
def test_the_name_of_a_file_being_written_is_read_back_too(name: LogFileName) -> None:
    text = name.format_part()
    assert LogFileName.parse_part(text) == (name.node, name.boot, name.number, 0, "")
    assert LogFileName.parse(text) is None and AGREED.match(text) is None


@pytest.mark.parametrize(
    "name",
    [
        "n-00112233-000000-5.jsonl",
        "n-00112233-000000.jsonl.zst",
        "n-00112233-000000.jsonl.part",
        ".n-00112233-000000.jsonl.zst.part",
        ".n-00112233-000000-5.jsonl.zst",
        "_n-00112233-000000-5.jsonl.zst",
        "n-0011223-000000-5.jsonl.zst",
        "n-00112233-00000-5.jsonl.zst",
        "n-00112233-000000-.jsonl.zst",
        "n-00112233-000000-5-0123456789abcde.jsonl.zst",
        "n-00112233-000000-5.jsonl.zst\n",
        "d/n-00112233-000000-5.jsonl.zst",
        "n-00112233-٠٠٠٠٠٠-5.jsonl.zst",
        "-00112233-000000-5.jsonl.zst",
        "",
    ],
)
def test_other_names_are_none_of_ours(name: str) -> None:
    assert LogFileName.parse(name) is None
    assert LogFileName.parse_part(name) is None


@given(st.text())
def test_a_safe_name_means_nothing_to_a_shell_or_a_path(text: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9-][A-Za-z0-9._-]{0,128}", safe_name(text))


def test_folders_are_utc_and_those_of_the_line() -> None:
    assert folder("server", 1_700_000_000.5) == "role=server/date=2023-11-14/hour=22"
    assert folder("a/../b", 0.0) == "role=a_.._b/date=1970-01-01/hour=00"


def test_a_boot_id_is_hex() -> None:
    assert check_boot("0123abcd") == "0123abcd"
    for wrong in ("", "b1", "0123ABCD", "0123abcg", "a" * 33, "0123abcd\n"):
        with pytest.raises(ValueError, match="boot id"):
            check_boot(wrong)
