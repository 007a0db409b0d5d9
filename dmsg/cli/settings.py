"""The options of every networking command: where the network is, who we are, and how results are written."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from dmsg.cli.completion import file_option, values_of
from dmsg.cli.output import Output, output_options
from dmsg.cli.protocols import DEFAULT, PROTOCOLS, Settings, check_service
from dmsg.cli.runner import run
from dmsg.errors import ConfigError
from dmsg.ops.config import resolve
from dmsg.ops.settings import Setting, describe_default, settings_of
from dmsg.ops.values import KEY, SERVICE, Kind
from dmsg.taps.tables import SETTINGS, known_variables

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


def _unicode(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:  # its bytes were not UTF-8
        raise ValueError("must be Unicode text") from None
    return value


PUBLIC_KEY: Final = ValueType(KEY)
#: A text that is sent to others.
UNICODE: Final = ValueType(Kind("TEXT", _unicode))


@dataclass(frozen=True, slots=True)
class Invocation:
    """One command as it was called: its settings, where it writes, and how it is run."""

    settings: Settings
    out: Output
    verbose: bool = False

    def execute(self, make: Callable[[Any], Coroutine[Any, Any, Any]]) -> None:
        """Run a coroutine function of the reactor, and leave with its exit code."""
        sys.exit(run(make, self.out, verbose=self.verbose))


def setting_options(classes: Mapping[str, type], *, hidden: bool = False) -> Callable[[F], F]:
    """Add an option for each setting of ``classes``, and ``--config``; the function gets ``given``, by name of the option.

    The keys of ``classes`` are their tables in the file; a setting of several classes is one option. The help leaves out the
    limits in groups, and with ``hidden`` everything: the manual lists them.
    """
    tables = " or ".join(f"[{role}]" for role in classes)
    found: dict[str, tuple[Setting, list[str]]] = {}
    for role, cls in classes.items():
        for one in settings_of(cls):
            found.setdefault(one.option, (one, []))[1].append(role)
    options = [
        file_option("--config", f"{_PARAMETER}config", help=f"TOML file with a table {tables}."),
        *(
            _option(one, hidden=hidden, only=roles if len(roles) < len(classes) else ())
            for one, roles in found.values()
        ),
    ]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapped(**parameters: Any) -> Any:
            given = {
                name.removeprefix(_PARAMETER).replace("_", "-"): parameters.pop(name)
                for name in list(parameters)
                if name.startswith(_PARAMETER)
            }
            # an option that was not given is None, False or ()
            return function(
                given={name: value for name, value in given.items() if value not in (None, False, ())}, **parameters
            )

        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped  # type: ignore[return-value]

    return decorate


def _option(one: Setting, *, hidden: bool, only: Collection[str]) -> Callable[[F], F]:
    help = one.marks.help[0].upper() + one.marks.help[1:]
    protocols = [each.name for each in PROTOCOLS.values() if each.role in only]
    if protocols:
        help += f" ({', '.join(protocols)} only)"
    names = (f"--{one.option}", f"{_PARAMETER}{one.name}")
    hidden = hidden or (len(one.path) > 1 and one.marks.derived)
    if one.marks.flag:
        return click.option(*names, is_flag=True, help=help, hidden=hidden)
    return click.option(
        *names,
        metavar=one.kind.metavar,
        shell_complete=values_of(one.kind.metavar),
        multiple=one.kind.many,
        help=f"{help}.",
        show_default=False if one.default in (None, ()) and not one.marks.unset else describe_default(one),
        hidden=hidden,
    )


def client_settings(given: Mapping[str, Any], protocol: str = DEFAULT) -> Settings:
    """The settings of a command that speaks ``protocol``, with the options ``given``.

    Raises ``ConfigError``, also for an option of another protocol only.
    """
    scheme = PROTOCOLS[protocol]
    known = {"config", *(one.option for one in settings_of(scheme.settings))}
    for name in given:
        if name not in known:
            raise ConfigError(name, f"is no setting of the {protocol} protocol", f"option --{name}")
    found: Settings = resolve(
        scheme.settings, scheme.role, given, os.environ, roles=SETTINGS, elsewhere=known_variables
    )
    return found


def common_options(function: F) -> F:
    """Add the options all networking commands take; the function gets an :class:`Invocation` first."""

    @protocol_option
    @setting_options({one.role: one.settings for one in PROTOCOLS.values()})
    @output_options
    @functools.wraps(function)
    def wrapped(protocol: str, given: Mapping[str, Any], out: Output, verbose: bool, **options: Any) -> Any:
        try:
            settings = client_settings(given, protocol)
        except ConfigError as error:
            out.leave(error)
        return function(Invocation(settings, out, verbose), **options)

    return wrapped  # type: ignore[return-value]


#: Adds ``--protocol`` to a command; the function gets ``protocol``.
protocol_option: Final = click.option(
    "--protocol",
    type=click.Choice(list(PROTOCOLS)),
    default=DEFAULT,
    show_default=True,
    help="What is spoken: dmsg, or the older messaging system.",
)


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
        try:
            check_service(call.settings, service)
        except ConfigError as error:
            call.out.leave(error)
        return function(call, service=service, **options)

    return wrapped  # type: ignore[return-value]
