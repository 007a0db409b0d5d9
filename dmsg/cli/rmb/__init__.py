"""``dmsg rmb``: the Reliable Message Bus. Its packages may be missing, so its commands are imported when they are used."""

from __future__ import annotations

import importlib
from typing import Any, Final

import click

from dmsg.cli.interrupts import leaving_on_interrupt
from dmsg.rmb.core.errors import LibraryMissing

#: Commands, each in the module of its name (with _ for -).
_COMMANDS: Final = ("call", "relay-key", "serve", "twin")


class _Commands(click.Group):
    """Commands that are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        try:
            name = cmd_name.replace("-", "_")
            with leaving_on_interrupt():
                found: Any = getattr(importlib.import_module(f"{__name__}.{name}"), name)
        except LibraryMissing as error:
            raise click.ClickException(f"{error} to use dmsg rmb") from None
        command: click.Command = found
        return command


@click.group(cls=_Commands, short_help="The Reliable Message Bus: numbered twins call each other.")
def rmb() -> None:
    """The Reliable Message Bus: programs that are numbered twins call each other's commands, through relays."""
