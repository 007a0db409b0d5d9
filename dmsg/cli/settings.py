"""What every networking command takes: where the network is, who we are, and how results are written."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dmsg.cli.output import Output
from dmsg.cli.runner import run
from dmsg.errors import ConfigError
from dmsg.mux.client.settings import ROLE, ClientSettings
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.ops.config import resolve
from dmsg.ops.settings import Setting, describe_default, settings_of
from dmsg.ops.values import KEY, SERVICE, Kind
from dmsg.taps.settings import ROLES, known_variables

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:  # only newer versions of click have it generic
    ParamType = click.ParamType

_PARAMETER: Final = "setting_"


class ValueType(ParamType):
    """A value of ``kind`` on the command line, a number between ``least`` and ``most``."""

    def __init__(self, kind: Kind[Any], least: float | None = None, most: float | None = None) -> None:
        self.name = kind.metavar
        self._kind = kind
        self._least = least
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The value, or a usage error."""
        if not isinstance(value, str):
            return value
        try:
            found = self._kind.parse(value)
        except ValueError as error:
            self.fail(f"{error}, not {value!r}", param, ctx)
        if self._least is not None and found < self._least:
            self.fail(f"must be at least {self._kind.text(self._least)}, not {value!r}", param, ctx)
        if self._most is not None and found > self._most:
            self.fail(f"must be at most {self._kind.text(self._most)}, not {value!r}", param, ctx)
        return found


PUBLIC_KEY: Final = ValueType(KEY)


@dataclass(frozen=True, slots=True)
class Invocation:
    """One command as it was called: its settings, where it writes, and how it is run."""

    settings: ClientSettings
    out: Output
    verbose: bool = False

    def execute(self, make: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine function of the reactor, and leave with its exit code."""
        sys.exit(run(make, self.out, verbose=self.verbose))


def setting_options(cls: type, role: str, *, hidden: bool = False) -> Callable[[F], F]:
    """Add an option for each setting of ``cls``, and ``--config``; the function gets ``given``, by name of the option.

    Settings of groups, and with ``hidden`` all, are not in the help: the manual lists them.
    """
    options = [
        click.option(
            "--config",
            f"{_PARAMETER}config",
            metavar="FILE",
            help=f"TOML file with a table [{role}].",
        ),
        *(_option(one, hidden=hidden) for one in settings_of(cls)),
    ]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapped(**parameters: Any) -> Any:
            given = {
                name.removeprefix(_PARAMETER).replace("_", "-"): parameters.pop(name)
                for name in list(parameters)
                if name.startswith(_PARAMETER)
            }
            # what was not given is None, False or ()
            return function(
                given={name: value for name, value in given.items() if value not in (None, False, ())}, **parameters
            )

        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped  # type: ignore[return-value]

    return decorate


def _option(one: Setting, *, hidden: bool) -> Callable[[F], F]:
    help = one.marks.help[0].upper() + one.marks.help[1:]
    names = (f"--{one.option}", f"{_PARAMETER}{one.name}")
    hidden = hidden or len(one.path) > 1
    if one.marks.flag:
        return click.option(*names, is_flag=True, help=help, hidden=hidden)
    return click.option(
        *names,
        metavar=one.kind.metavar,
        multiple=one.kind.many,
        help=f"{help}.",
        show_default=False if one.default in (None, ()) and not one.marks.unset else describe_default(one),
        hidden=hidden,
    )


def client_settings(given: Mapping[str, Any]) -> ClientSettings:
    """The settings of a command with the options ``given``. Raises ``ConfigError``."""
    return resolve(ClientSettings, ROLE, given, os.environ, roles=ROLES, elsewhere=known_variables())


def common_options(function: F) -> F:
    """Add the options all networking commands take; the function gets an :class:`Invocation` first."""

    @setting_options(ClientSettings, ROLE)
    @output_options
    @functools.wraps(function)
    def wrapped(given: Mapping[str, Any], out: Output, verbose: bool, **options: Any) -> Any:
        try:
            settings = client_settings(given)
        except ConfigError as error:
            out.leave(error)
        return function(Invocation(settings, out, verbose), **options)

    return wrapped  # type: ignore[return-value]


def service_option(function: F) -> F:
    """Add ``--service`` to a networking command (under :func:`common_options`); the function gets ``service``."""

    @click.option(
        "--service",
        metavar="NAME",
        type=ValueType(SERVICE),
        default="",
        help="The service to listen for, or to ask for; default: the one without a name.",
    )
    @functools.wraps(function)
    def wrapped(call: Invocation, *, service: str, **options: Any) -> Any:
        if service and call.settings.security is Security.HOP:
            raise click.UsageError("--service needs end-to-end security: the relay never sees the name")
        return function(call, service=service, **options)

    return wrapped  # type: ignore[return-value]


def output_options(function: F) -> F:
    """Add ``--json`` and ``--verbose``; the function gets ``out`` and ``verbose``."""

    @click.option("--json", "json_lines", is_flag=True, help="Write JSON, one object a line.")
    @click.option("--verbose", is_flag=True, help="Write a log to standard error, with tracebacks.")
    @functools.wraps(function)
    def wrapped(json_lines: bool, verbose: bool, **options: Any) -> Any:
        return function(out=Output(sys.stdout, sys.stderr, json_lines=json_lines), verbose=verbose, **options)

    return wrapped  # type: ignore[return-value]
