"""``dmsg config show``: every setting of a role, its value, and where that comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING
from enum import Enum
from typing import Any, Final

import click

from dmsg.cli.output import Output, output_options
from dmsg.cli.settings import setting_options
from dmsg.errors import ConfigError
from dmsg.messaging.client.settings import ROLE as MESSAGING_ROLE
from dmsg.mux.client.settings import ROLE
from dmsg.ops.config import Value, assemble, trace
from dmsg.taps.tables import SETTINGS, known_variables

_CLIENTS: Final = {ROLE: "the client", MESSAGING_ROLE: "the client of the messaging system"}


class _Roles(click.Group):
    """Commands by role; the default is the client."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        named = bool(args) and (args[0] in self.commands or args[0] == "--help" or not args[0].startswith("-"))
        return super().parse_args(ctx, args if named else [ROLE, *args])


@click.group()
def config() -> None:
    """Settings: options, DMSG_* variables and a TOML file."""


@config.group(cls=_Roles)
def show() -> None:
    """Show every setting of a role, its value, and where that comes from.

    Without a role, it is the client: this command, and programs with endpoint strings. "messaging" is the same with
    --protocol messaging. Takes the options that the role takes. Secrets are not shown.
    """


def _add(role: str, cls: type) -> None:
    title = _CLIENTS.get(role) or (f"twistd {role}" if "-" in role else f"twistd dmsg-{role}")

    @show.command(
        name=role, help=f"Show the settings of {title}; takes its options.", short_help=f"Settings of {title}."
    )
    @setting_options({role: cls}, hidden=True)
    @output_options
    def command(given: Mapping[str, Any], out: Output, verbose: bool) -> None:
        try:
            values = trace(cls, role, given, os.environ, roles=SETTINGS, elsewhere=known_variables)
            tell(values, role, out)
            assemble(cls, role, values)
        except ConfigError as error:
            out.leave(error)


for _role, _cls in SETTINGS.items():
    _add(_role, _cls)


def tell(values: tuple[Value, ...], role: str, out: Output) -> None:
    """Write ``values``, those of ``role``, as a table or as JSON."""
    out.result({"role": role, "settings": [_as_json(one, role) for one in values]})
    rows = [(one.setting.name, _as_text(one), one.origin.place or one.origin.kind) for one in values]
    out.table(f"Settings of {role}", ("setting", "value", "origin"), rows)


def _as_text(one: Value) -> str:
    if one.value is MISSING:
        return "(required)"
    if one.origin.kind == "default" and one.setting.marks.unset:
        return f"({one.setting.marks.unset})"
    return one.shown if isinstance(one.shown, str) else one.setting.kind.text(one.value)


def _as_json(one: Value, role: str) -> dict[str, Any]:
    setting = one.setting
    return {
        "setting": setting.name,
        "value": _plain(one.shown),
        "origin": "missing" if one.value is MISSING else one.origin.kind,
        "where": one.origin.place,
        "option": f"--{setting.option}",
        "variable": setting.variable,
        "table": ".".join((role, *setting.place[:-1])),
        "key": setting.place[-1],
    }


def _plain(value: Any) -> Any:
    """``value`` as a value of JSON."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Enum):
        return value.value
    return value if value is None or isinstance(value, bool | int | float) else str(value)
