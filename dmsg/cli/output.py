"""The output of the command: results go to standard output, everything else to standard error. The owner of rich.

Results are lines for people or, with ``--json``, one JSON object a line. Tables and progress bars appear on terminals
only; elsewhere the same facts are plain lines.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, TextIO, TypeVar

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from dmsg.cli.exits import as_json, describe, exit_code

F = TypeVar("F", bound=Callable[..., Any])

#: Seconds between two redraws of a progress bar at least: drawing costs more than moving the data.
REDRAW_S: Final = 0.1
#: Characters of a line for people; ours have some hundred.
LINE_LIMIT: Final = 2_000
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(count: float) -> str:
    """``count`` bytes as ``12.3 MiB``."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def printable(text: str) -> str:
    """``text`` without anything a terminal could take for an instruction."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _told(line: str) -> str:
    """``line`` for people: printable, and not too long to read."""
    if len(line) > LINE_LIMIT:  # keep both ends: the problem with a long name follows the name
        line = f"{line[: LINE_LIMIT // 2]}…{line[-LINE_LIMIT // 2 :]}"
    return printable(line)


class Bar:
    """The progress of one transfer."""

    def __init__(self, out: Output, label: str, total: int, start: int) -> None:
        self._out = out
        self._drawn_at = 0.0
        self._progress: Progress | None = None
        # rich draws one bar at a time
        if out.errors.is_terminal and not out.json and not out.drawing:
            out.drawing = True
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=out.errors, auto_refresh=False, transient=True)
            self._progress.start()
            self._task = self._progress.add_task(escape(label), total=total, completed=start)

    def advance(self, count: int, now: float) -> None:
        """``count`` more bytes, at ``now`` seconds."""
        if self._progress is not None:
            self._progress.advance(self._task, count)
            if now - self._drawn_at >= REDRAW_S:
                self._drawn_at = now
                self._progress.refresh()

    def close(self) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._out.drawing = False


def tell_opened(out: Output, transport: Any) -> None:
    """Tell the peer, its relay and the security of a transport."""
    peer = transport.getPeer()
    key, server = str(peer.public_key), str(peer.server_public_key)
    out.result({"event": "opened", "peer": key, "server": server, "security": transport.security})
    out.note(f"{key[:16]}… through {server[:16]}… ({transport.security})")


def tell_failed(out: Output, error: BaseException, note: str) -> None:
    """Tell that something failed after which the command goes on: ``note`` for people, ``error`` for programs."""
    found = as_json(error)
    del found["exit_code"]
    out.result({"event": "failed", **found})
    out.note(note)


class Output:
    """The output of a command: ``stdout`` for results, ``stderr`` for the rest."""

    def __init__(self, stdout: TextIO, stderr: TextIO, *, json_lines: bool = False) -> None:
        self.json = json_lines
        self.drawing = False
        #: Called with the error when a result cannot be written; without it, the error is raised.
        self.unwritable: Callable[[OSError], object] | None = None
        self.results = Console(file=stdout, highlight=False, soft_wrap=True)
        self.errors = Console(file=stderr, highlight=False, soft_wrap=True)

    def result(self, data: dict[str, Any], *lines: str) -> None:
        """One result: ``data`` for programs, ``lines`` for people."""
        if self.json:
            self._write(self.results, json.dumps(data, separators=(",", ":")))
        else:
            for line in lines:
                self._write(self.results, line)

    def note(self, line: str) -> None:
        """Progress for people, in one line or several; programs do not get it."""
        if not self.json:
            for part in line.split("\n"):
                self._write(self.errors, _told(part))

    def failure(self, error: BaseException) -> None:
        """The error a command ends with."""
        if self.json:
            self._write(self.errors, json.dumps(as_json(error), separators=(",", ":")))
        else:
            first, *rest = describe(error).split("\n")
            self._write(self.errors, _told(f"dmsg: {first}"))
            for line in rest:
                self._write(self.errors, _told(line))

    def leave(self, error: BaseException) -> NoReturn:
        """End the program with ``error``, outside of the reactor."""
        self.failure(error)
        sys.exit(exit_code(error))

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table for people: drawn on a terminal, tab-separated lines elsewhere."""
        if self.json:
            return
        if not self.results.is_terminal:
            for row in rows:
                self._write(self.results, "\t".join(map(printable, row)))
            return
        table = Table(title=title)
        for column in columns:
            table.add_column(column, overflow="fold")
        for row in rows:
            table.add_row(*(escape(printable(cell)) for cell in row))
        self.results.print(table, soft_wrap=False)

    def bar(self, label: str, total: int, start: int = 0) -> Bar:
        """A progress bar over ``total`` bytes, of which ``start`` are there already; draws nothing without a terminal."""
        return Bar(self, label, total, start)

    def raw(self, data: bytes) -> None:
        """A result in bytes, written unchanged."""

        def write() -> None:
            file: Any = self.results.file
            file.buffer.write(data)

        self._guarded(self.results, write)

    def _write(self, console: Console, line: str) -> None:
        def write() -> None:
            if console.is_terminal:
                console.print(line, markup=False, emoji=False)  # writes above a progress bar
            else:
                console.file.write(line + "\n")

        self._guarded(console, write)

    def _guarded(self, console: Console, write: Callable[[], None]) -> None:
        try:
            write()
            console.file.flush()
        except BrokenPipeError:
            # The reader of this output has gone, as in "dmsg receive … | head": the work goes on without output.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, console.file.fileno())
            os.close(nowhere)
        except OSError as error:  # a full disk
            if console is self.errors:
                return  # there is no output left to report it on
            error.filename = error.filename or "standard output"  # what the message names
            if self.unwritable is None:
                raise
            self.unwritable(error)


def output_options(function: F) -> F:
    """Add ``--json`` and ``--verbose`` to a command; the function gets ``out`` and ``verbose``."""

    @click.option("--json", "json_lines", is_flag=True, help="Write JSON, one object a line.")
    @click.option("--verbose", is_flag=True, help="Write a log to standard error, with tracebacks.")
    @functools.wraps(function)
    def wrapped(json_lines: bool, verbose: bool, **options: Any) -> Any:
        out = Output(sys.stdout, sys.stderr, json_lines=json_lines)
        try:
            return function(out=out, verbose=verbose, **options)
        except OSError as error:  # standard output is on a full disk
            out.leave(error)

    return wrapped  # type: ignore[return-value]
