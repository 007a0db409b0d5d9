"""Accounts of what happened to each line: one for each landing file, and their sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from dmsg_logs.ingest.landing import LandingFile, parse_name

#: The file ends early but can be read: whole compressed frames are missing, or it was cut between two lines.
TRUNCATED: Final = "truncated"
#: Reading the file fails; the readable part was taken.
DAMAGED: Final = "damaged"
#: The file unpacks to more than its size allows, or is packed and larger than any file of our writer. One line in
#: quarantine stands for the part that was not read.
UNPACKS_TOO_FAR: Final = "unpacks_too_far"


class AccountsError(Exception):
    """The lines written are not the lines read, so nothing was committed. A file was changed in place, or a disk lies."""


@dataclass(slots=True)
class IngestSummary:
    """What one call of ``ingest`` took in. ``lines_in == good + dup + corrupt``, always.

    ``lines_in`` is counted in the files as text, the three others in the tables as written. ``missing`` counts lines that
    the names of files promise but the files lack; ``missing_files`` names these files and those not readable as a whole.
    """

    files: int = 0
    lines_in: int = 0
    good: int = 0
    dup: int = 0
    corrupt: int = 0
    missing: int = 0
    batches: int = 0
    missing_files: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, accounts: Iterable[Mapping[str, Any]]) -> None:
        """Count one more batch."""
        self.batches += 1
        for each in accounts:
            self.files += 1
            self.lines_in += each["lines"]
            self.good += each["good"]
            self.dup += each["dup"]
            self.corrupt += each["corrupt"]
            self.missing += each["missing"]
            if each["problem"]:
                self.missing_files.append(each["file"])

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``lines_in`` is called ``in``."""
        fields = asdict(self)
        return {"files": fields.pop("files"), "in": fields.pop("lines_in"), **fields}


@dataclass(slots=True)
class Written:
    """Written lines of one file by state, and their node and boot if all good lines (without any, all duplicates) are of
    one run."""

    good: int = 0
    dup: int = 0
    corrupt: int = 0
    node: str | None = None
    boot: str | None = None


def make_accounts(
    files: Iterable[LandingFile],
    lines: Mapping[str, int],
    written: Mapping[str, Written],
    damaged: Iterable[str],
    batch: int,
    left: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """One account for each file, as in the commit. ``lines``, ``written``, ``damaged`` and ``left`` (the files that unpack
    too far) go by the file's name.

    Raises ``AccountsError`` if, for any file, the lines read as text are not the lines written.
    """
    accounts = []
    problems = {**dict.fromkeys(damaged, DAMAGED), **dict.fromkeys(left, UNPACKS_TOO_FAR)}
    names = set()
    for each in files:
        names.add(each.name)
        found, states = lines.get(each.name, 0), written.get(each.name, Written())
        sum_written = states.good + states.dup + states.corrupt
        if found != sum_written:
            raise AccountsError(f"{each.name}: {found} lines were read, but {sum_written} written")
        said = parse_name(each.name)
        missing = max(0, (said.recorded or 0) - found)
        accounts.append(
            {
                "file": each.name,
                "role": said.role,
                "node": states.node or said.node,  # a given name may not go into a file's as it is
                "boot": states.boot or said.boot,
                "number": said.number,
                "recorded": said.recorded,
                "lines": found,
                "good": states.good,
                "dup": states.dup,
                "corrupt": states.corrupt,
                "missing": missing,
                "batch": batch,
                "landed_at": each.changed_at,
                "problem": problems.get(each.name) or (TRUNCATED if missing else None),
                "size": each.size,
                "identity": each.identity,
            }
        )
    strangers = (set(lines) | set(written)) - names
    if strangers:
        raise AccountsError(f"lines of {min(strangers)}, which is not in the batch")
    return accounts
