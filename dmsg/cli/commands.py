"""The commands of ``dmsg``, and the report of a wrong command line."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

import dmsg
from dmsg.cli.exits import Exit, epilogue
from dmsg.cli.interrupts import leaving_on_interrupt

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

#: The module of each command, and its line in a list of commands.
_COMMANDS: Final = {
    "config": ("config", "Settings: options, DMSG_* variables and a TOML file."),
    "connect": ("connect", "Connect standard input and output with PK."),
    "echo": ("ping", "Accept transports and send back what comes, until interrupted."),
    "entry": ("lookup", "Show the entry of PK; its signature has been verified."),
    "expose": ("tunnels", "Accept transports and connect each to a TCP service."),
    "forward": ("tunnels", "Listen on a port and dial PK for each connection."),
    "keygen": ("keys", "Make a new key file and print its public half."),
    "ping": ("ping", 'Measure round trips to PK, which runs "dmsg echo".'),
    "pubkey": ("keys", "Print the public half of the key in FILE."),
    "receive": ("files.receive", "Receive files into DIR until interrupted."),
    "relays": ("relays", "Lists of relays that an operator signs."),
    "rmb": ("rmb", "The Reliable Message Bus: numbered twins call each other."),
    "send": ("files.send", 'Send each FILE to PK, which runs "dmsg receive".'),
    "servers": ("lookup", "List the relays with room for more clients."),
    "up": ("up", "Run discovery and relays on the loopback interface."),
}


class _Commands(click.Group):
    """Commands that are imported when they are used. A list of them, for help or a shell, imports none."""

    _listing = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, line = _COMMANDS[cmd_name]
        if self._listing:
            return click.Command(cmd_name, short_help=line)
        with leaving_on_interrupt():
            found: Any = getattr(importlib.import_module(f"dmsg.cli.{module}"), cmd_name)
        command: click.Command = found
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with self._listed():
            super().format_commands(ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        with self._listed():
            return super().shell_complete(ctx, incomplete)

    @contextlib.contextmanager
    def _listed(self) -> Iterator[None]:
        self._listing = True
        try:
            yield
        finally:
            self._listing = False


@click.group(cls=_Commands, epilog=epilogue())
@click.version_option(dmsg.__version__, prog_name="dmsg")
def group() -> None:
    """Reach programs by their public keys, through relays that both sides connect to.

    "dmsg up" starts a network on this machine to try things in.

    Settings may also come from the environment (DMSG_DISCOVERY, DMSG_KEY, DMSG_SERVER, …) and from the table [client],
    or with --protocol messaging [messaging], of a TOML file (--config or DMSG_CONFIG); "dmsg config show" tells which.
    """


def run_command_line() -> None:
    """Run the command line; leaves with one of the codes of :class:`dmsg.cli.exits.Exit`."""
    _open_streams()
    try:
        sys.exit(group.main(standalone_mode=False, prog_name="dmsg"))
    except click.ClickException as error:
        code = Exit.USAGE if isinstance(error, click.UsageError) else Exit.FAILED
        with contextlib.suppress(OSError):
            _tell(error, code)
        sys.exit(code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(Exit.INTERRUPTED)
    except OSError as error:  # the help was written to a full disk
        sys.exit(f"dmsg: {error.filename or 'standard output'}: {error.strerror}")


def _tell(error: click.ClickException, code: Exit) -> None:
    if "--json" in sys.argv:  # the parser may have failed before it got to --json
        found = {"error": type(error).__name__, "message": error.format_message(), "exit_code": int(code)}
        print(json.dumps(found, separators=(",", ":")), file=sys.stderr)
    else:
        error.show()


def _open_streams() -> None:
    """Make standard output and error accept every text: results have names of files that others chose."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream: Any = getattr(sys, name)
        if stream is None:  # it was closed: the next file opened must not get its descriptor, and its lines
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        elif mode == "w" and (stream.errors == "strict" or _lacks_letters(stream)):
            stream.reconfigure(errors="backslashreplace")


def _lacks_letters(stream: Any) -> bool:
    """Whether ``stream`` takes the bytes of names that are not UTF-8, as in the C locale, and not the names that are."""
    return stream.errors == "surrogateescape" and codecs.lookup(stream.encoding).name != "utf-8"
