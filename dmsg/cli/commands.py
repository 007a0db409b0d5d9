"""The commands of ``dmsg``, and the report of a wrong command line."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import json
import os
import sys
from typing import Any, Final

import click

import dmsg
from dmsg.cli.exits import Exit, epilogue
from dmsg.cli.interrupts import leaving_on_interrupt

#: The module of each command.
_COMMANDS: Final = {
    "config": "config",
    "connect": "connect",
    "echo": "ping",
    "entry": "lookup",
    "expose": "tunnels",
    "forward": "tunnels",
    "keygen": "keys",
    "ping": "ping",
    "pubkey": "keys",
    "receive": "files.receive",
    "relays": "relays",
    "rmb": "rmb",
    "send": "files.send",
    "servers": "lookup",
    "up": "up",
}


class _Commands(click.Group):
    """Commands that are imported when they are used: to import the modules of all takes a fifth of a start."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        with leaving_on_interrupt():
            found: Any = getattr(importlib.import_module(f"dmsg.cli.{_COMMANDS[cmd_name]}"), cmd_name)
        command: click.Command = found
        return command


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
