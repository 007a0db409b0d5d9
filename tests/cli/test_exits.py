"""Exit codes and error texts: one table in the code, the same in the help and the documentation."""

from __future__ import annotations

import errno
import io
import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from twisted.internet.error import ConnectBindError

from dmsg.cli.commands import group
from dmsg.cli.exits import MEANINGS, CommandError, Exit, as_json, describe, exit_code
from dmsg.cli.files.wire import REFUSALS, TransferFailed
from dmsg.cli.output import Output, human_bytes, printable
from dmsg.crypto.errors import InvalidSignature, KeyFileError
from dmsg.crypto.keys import SecretKey
from dmsg.discovery.errors import (
    DiscoveryUnavailable,
    EntryNotFound,
    EntryRolledBack,
    RateLimitedByDiscovery,
    Unauthorized,
)
from dmsg.errors import Attempt, DialError
from dmsg.messaging.core.errors import IntegrityError as ChannelIntegrityError
from dmsg.mux.core.errors import Busy, IntegrityError
from dmsg.relays.errors import NoCommonRelay, SessionTimeout

DOCUMENT = Path(__file__).parents[2] / "docs" / "howto" / "cli.rst"


def test_every_code_has_a_meaning():
    assert set(MEANINGS) == set(Exit)
    assert [int(code) for code in MEANINGS] == [0, 1, 2, 3, 4, 5, 6, 130]


def test_the_help_shows_the_table():
    text = CliRunner().invoke(group, ["--help"]).stdout
    for code, meaning in MEANINGS.items():
        assert re.search(rf"^ +{int(code)}  {re.escape(meaning)}$", text, re.MULTILINE)


def test_the_documentation_shows_the_table():
    rows = re.findall(r"^   \* - ``(\d+)``\n     - (.+)$", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    assert rows == [(str(int(code)), meaning) for code, meaning in MEANINGS.items()]


def commands(of, *before):
    """Every command by its words, those of groups included."""
    context = click.Context(of)
    for name in of.list_commands(context):
        command = of.get_command(context, name)
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)
        else:
            yield " ".join((*before, name)), command


def test_the_documentation_names_every_command_and_option():
    text = DOCUMENT.read_text("utf-8")
    for name, command in commands(group):
        assert f"dmsg {name}" in text, name
        for parameter in command.params:
            for option in parameter.opts:
                assert not option.startswith("--") or parameter.hidden or option in text, (name, option)


@pytest.mark.parametrize("name", ["", "config show", "relays", "rmb", "rmb twin"])
def test_no_summary_in_a_list_of_commands_is_cut_off(name):
    listed = CliRunner().invoke(group, [*name.split(), "--help"]).stdout
    assert "Commands:" in listed and "..." not in listed.partition("Commands:")[2]


@pytest.mark.parametrize("name", sorted(dict(commands(group))))
def test_every_command_explains_itself(name):
    result = CliRunner().invoke(group, [*name.split(), "--help"])
    assert result.exit_code == 0 and "--json" in result.stdout


def dial_error(*attempts):
    return DialError("02" * 33, [Attempt(stage, server, 5.0, "reason", error) for stage, server, error in attempts])


MISSING = DiscoveryUnavailable("connection refused")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EntryNotFound(), 3),
        (Unauthorized(), 5),
        (EntryRolledBack(), 5),
        (InvalidSignature(), 5),
        (IntegrityError(), 5),
        (ChannelIntegrityError(), 5),
        (MISSING, 6),
        (RateLimitedByDiscovery(), 6),
        (dial_error(), 4),
        (dial_error(("discovery", "", EntryNotFound())), 4),
        (dial_error(("discovery", "", MISSING), ("discovery", "", NoCommonRelay())), 6),
        (dial_error(("discovery", "", MISSING), ("connect", "ab" * 33, Busy())), 4),
        (dial_error(("discovery", "", SessionTimeout("the dial", 10.0))), 6),
        (dial_error(("discovery", "", EntryNotFound()), ("connect", "ab" * 33, SessionTimeout("the dial", 10.0))), 4),
        (KeyFileError("x", "y"), 2),
        (KeyFileError("x", "y", creating=True), 1),
        (CommandError("x", Exit.USAGE), 2),
        (OSError("x"), 1),
        (RuntimeError("x"), 1),
        *((TransferFailed(code), 5 if code == "mismatch" else 1) for code in REFUSALS),
    ],
)
def test_errors_lead_to_codes(error, code):
    assert exit_code(error) == code
    assert as_json(error)["exit_code"] == code and as_json(error)["message"] == describe(error)


def test_a_program_may_run_commands_in_any_thread_and_its_signals_stay_as_they_were():
    arguments = ["keygen", "--help"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a reactor has one of its own
    try:
        with ThreadPoolExecutor() as threads:
            result = threads.submit(CliRunner().invoke, group, arguments).result()
        assert (result.exit_code, result.exception) == (0, None)
        assert CliRunner().invoke(group, arguments).exit_code == 0
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_is_wrong_with_a_long_name_is_told():
    stream = io.StringIO()
    Output(io.StringIO(), stream).failure(KeyFileError("x" * 5_000, "is not a plain file"))
    [line] = stream.getvalue().splitlines()
    assert (
        line.startswith("dmsg: xxx") and line.endswith("…" + line[-1000:]) and line.endswith("x: is not a plain file")
    )
    assert len(line) < 2_100


def test_a_failed_dial_is_told_as_a_tree():
    error = dial_error(("discovery", "", MISSING), ("connect", "ab" * 33, SessionTimeout("connect", 3.0)))
    stream = io.StringIO()
    Output(io.StringIO(), stream).failure(error)
    lines = stream.getvalue().splitlines()
    assert lines[0] == f"dmsg: could not reach {'02' * 33}"
    assert [line.split()[0] for line in lines[1:]] == ["discovery:", "connect"]
    stream = io.StringIO()
    Output(io.StringIO(), stream, json_lines=True).failure(error)
    found = json.loads(stream.getvalue())
    assert [one["stage"] for one in found["attempts"]] == ["discovery", "connect"]
    assert found["target"] == "02" * 33 and found["error"] == "DialError"


@pytest.mark.parametrize(
    "error", [EntryNotFound(), MISSING, OSError(28, "No space left", "/x"), ValueError(""), KeyError("x")]
)
def test_an_error_is_one_line(error):
    assert describe(error).strip() and "\n" not in describe(error)


def test_a_connection_without_a_descriptor_is_told_in_plain_words():
    error = ConnectBindError(errno.EMFILE, "Too many open files")
    assert describe(error) == "Too many open files; allow this process more (ulimit -n)"


def test_what_others_wrote_cannot_move_the_cursor():
    assert printable("a\x1b[2J\u202eb\nc") == "a�[2J�b�c"


def test_without_a_terminal_a_table_is_lines_and_a_bar_is_nothing():
    stdout, stderr = io.StringIO(), io.StringIO()
    out = Output(stdout, stderr)
    out.table("Title", ("a", "b"), [("1", "2"), ("3", "[bold]")])
    bar = out.bar("x", 100)
    bar.advance(50, 1.0)
    bar.close()
    assert (stdout.getvalue(), stderr.getvalue()) == ("1\t2\n3\t[bold]\n", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_on_a_terminal_there_are_tables_and_one_bar_at_a_time(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stdout, stderr = Terminal(), Terminal()
    out = Output(stdout, stderr)
    out.table("Title", ("a", "b"), [("1", "[bold]")])
    first, second = out.bar("one[red]", 100), out.bar("two", 100)
    first.advance(50, 1.0)
    second.advance(50, 1.0)
    out.note("meanwhile")
    first.close()
    second.close()
    assert "Title" in stdout.getvalue() and "[bold]" in stdout.getvalue()
    assert "one[red]" in stderr.getvalue() and "meanwhile" in stderr.getvalue() and "two" not in stderr.getvalue()
    third = out.bar("three", 100)
    third.advance(1, 2.0)
    third.close()
    assert "three" in stderr.getvalue()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (64 * 1024**2, "64.0 MiB"), (2**60, "1048576.0 TiB")],
)
def test_sizes_are_readable(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    "arguments",
    [
        ("ping", "zz"),
        ("ping",),
        ("nonsense",),
        ("send", str(SecretKey.generate().public_key), "/nowhere/to/be/found"),
        ("receive", "/nowhere/to/be/found"),
        ("echo", "--server", "nonsense"),
        ("ping", str(SecretKey.generate().public_key), "--count", "0"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(arguments):
    assert CliRunner().invoke(group, list(arguments)).exit_code == Exit.USAGE
