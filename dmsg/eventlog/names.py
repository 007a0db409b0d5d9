"""Names and folders of files of the event log. Pure.

A role writes ``role=<role>/date=<YYYY-MM-DD>/hour=<HH>/<node>-<boot>-<number>-<lines>.jsonl.zst``. While it is being
written, a file is called ``<node>-<boot>-<number>.jsonl.zst.part``, because its number of lines is not known yet. Where files
are collected, sixteen digits of the SHA-256 of the file's bytes follow the number of lines, so that one name means one
content. Date and hour are those of the first line, in UTC; readers take them from the lines, not from the name.
"""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import Final, NamedTuple

FILE_SUFFIX: Final = ".jsonl.zst"
#: Suffix of a file that is being written; only the writer touches such a file.
PART_SUFFIX: Final = ".part"
#: Hex digits of the SHA-256 of a file in its name.
DIGEST_DIGITS: Final = 16
#: Characters to which a node's name is cut, so that the name of a file stays below the usual limit of 255 bytes.
NODE_CHARACTERS: Final = 128

# Read from the right, because a node's name may contain any text. The two forms must not be mixed, or a name of digits only
# could be read in two ways.
_STEM: Final = r"(?P<node>[^/]+)-(?P<boot>[0-9a-f]{8,32})-(?P<number>[0-9]{6,9})"
_FINISHED: Final = re.compile(_STEM + r"-(?P<lines>[0-9]{1,12})(?:-(?P<digest>[0-9a-f]{16}))?\.jsonl\.zst")
_PART: Final = re.compile(_STEM + r"\.jsonl\.zst\.part")
_BOOT: Final = re.compile(r"[0-9a-f]{8,32}")
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]")


class LogFileName(NamedTuple):
    """The parts of a file's name (without folders): ``number`` is that of the file in its run, from 0."""

    node: str
    boot: str
    number: int
    lines: int
    digest: str = ""

    @classmethod
    def parse(cls, name: str) -> LogFileName | None:
        """The parts of the name of a finished file, with or without a digest; ``None`` for any other name."""
        found = _FINISHED.fullmatch(name)
        if found is None or _is_hidden(name):
            return None
        return cls(found["node"], found["boot"], int(found["number"]), int(found["lines"]), found["digest"] or "")

    @classmethod
    def parse_part(cls, name: str) -> LogFileName | None:
        """The parts of the name of a file being written, with no lines; ``None`` for any other name."""
        found = _PART.fullmatch(name)
        if found is None or _is_hidden(name):
            return None
        return cls(found["node"], found["boot"], int(found["number"]), 0)

    def format(self) -> str:
        """The name of the finished file: for parts that :meth:`parse` has read, the shortest form."""
        digest = f"-{self.digest}" if self.digest else ""
        return f"{self._stem}-{self.lines}{digest}{FILE_SUFFIX}"

    def format_part(self) -> str:
        """The name of the same file while it is being written."""
        return f"{self._stem}{FILE_SUFFIX}{PART_SUFFIX}"

    @property
    def _stem(self) -> str:
        return f"{self.node}-{self.boot}-{self.number:06d}"


def _is_hidden(name: str) -> bool:
    """Whether the name begins like a hidden file's. No reader takes such files, so none of ours has such a name."""
    return name.startswith((".", "_"))


def safe_name(text: str) -> str:
    """``text`` as part of a file's name: not hidden, and without characters that have a meaning in a shell or a path."""
    text = _UNSAFE.sub("_", text)[:NODE_CHARACTERS]
    return f"x{text}" if text.startswith((".", "_")) or not text else text


def check_boot(boot: str) -> str:
    """``boot`` if a file's name can hold it (8 to 32 hex digits); ``ValueError`` otherwise."""
    if not _BOOT.fullmatch(boot):
        raise ValueError(f"{boot!r} is no boot id: 8 to 32 lower-case hex digits are")
    return boot


def folder(role: str, ts: float) -> str:
    """The folder of a file whose first line has the time ``ts`` (Unix seconds): ``role=…/date=…/hour=…``, in UTC."""
    return f"role={safe_name(role)}/{datetime.fromtimestamp(ts, timezone.utc):date=%Y-%m-%d/hour=%H}"
