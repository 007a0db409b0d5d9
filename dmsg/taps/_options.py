"""Command lines of twistd plugins, made from a dataclass of settings (:mod:`dmsg.ops.settings`)."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from twisted.python import usage

import dmsg
from dmsg.errors import ConfigError
from dmsg.glue.reactors import install_default
from dmsg.ops.config import resolve
from dmsg.ops.settings import Setting, describe_default, settings_of
from dmsg.rmb.core.errors import LibraryMissing
from dmsg.taps.tables import SETTINGS, known_variables

T = TypeVar("T")

#: Columns of the help at least; the names of options take half of them.
_LEAST_COLUMNS: Final = 60


def _repeatable(one: Setting) -> Callable[[Any, str], None]:
    """A method that takes an option that may be given several times."""

    def take(self: Any, value: str) -> None:
        self[one.option] = [*(self[one.option] or ()), value]

    take.__doc__ = f"{one.marks.help}; may be repeated [{describe_default(one)}]"
    return take


def _columns() -> int:
    """How wide the help is. Twisted fails where ``COLUMNS`` is no number or leaves no room, as some terminals set it."""
    columns = os.environ.get("COLUMNS", "")
    return max(_LEAST_COLUMNS, int(columns)) if columns.isdecimal() else 80


def demand_rmb() -> None:
    """Raise ``ConfigError`` when a library of the extra for the Reliable Message Bus is missing or too old."""
    try:
        for owner in ("wire", "keys"):
            importlib.import_module(f"dmsg.rmb.core.{owner}")
    except LibraryMissing as error:
        raise ConfigError("extra rmb", str(error)) from None


class RoleOptions(usage.Options):
    """Base of the ``Options`` of each role; a subclass names its dataclass.

    After parsing, ``settings`` holds an instance of it. An error in the command line, the environment or the file ends the
    program with status 1 and one line: a page of usage would hide it, and a traceback even more so.
    """

    #: Name of the plugin.
    tap_name = ""
    #: Table in the configuration file.
    role = ""
    settings_class: type[Any]
    #: One-letter names of options.
    letters: Mapping[str, str] = {}
    settings: Any = None
    longdesc = ""
    optParameters: list[list[Any]] = []  # noqa: RUF012 - what usage.Options wants; each subclass gets its own
    optFlags: list[list[Any]] = []  # noqa: RUF012 - the same

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls.optParameters = [["config", None, None, f"TOML file with a table [{cls.role}]"]]
        cls.optFlags = []
        if "limits" in cls.settings_class.__dataclass_fields__:
            cls.longdesc = f"{cls.longdesc} What its limits are for is in docs/reference/limits.rst."
        for one in settings_of(cls.settings_class):
            if one.marks.flag:
                cls.optFlags.append([one.option, None, one.marks.help])
                continue
            letter = cls.letters.get(one.name)
            if one.kind.many:
                setattr(cls, f"opt_{one.name}", _repeatable(one))
                if letter:
                    setattr(cls, f"opt_{letter}", getattr(cls, f"opt_{one.name}"))
            cls.optParameters.append(
                [one.option, None if one.kind.many else letter, None, f"{one.marks.help} [{describe_default(one)}]"]
            )

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ
        super().__init__()  # type: ignore[no-untyped-call]

    def parseOptions(self, options: Sequence[str] | None = None) -> None:
        """Parse and resolve; raises ``SystemExit`` with one line that says what is wrong."""
        try:
            super().parseOptions(options)  # type: ignore[no-untyped-call]
            self.settings = resolve(
                self.settings_class,
                self.role,
                {name: value for name, value in self.items() if value != 0},  # 0: a flag that was not given
                self._environ,
                roles=SETTINGS,
                elsewhere=known_variables,
            )
            if self.parent is not None:  # a command line of twistd or twist, whose --reactor comes before the role
                install_default(self._environ)
        except (usage.UsageError, ConfigError) as error:
            raise SystemExit(f"{self.tap_name}: {error}") from None

    @property
    def uid(self) -> int | None:
        """The user given to ``twistd --uid``, as which the role runs once it has started; ``None`` without one."""
        return None if self.parent is None else self.parent.get("uid")

    def build(self, make: Callable[[], T]) -> T:
        """What ``make`` gives; a ``ConfigError`` becomes ``SystemExit`` with one line."""
        try:
            return make()
        except ConfigError as error:
            raise SystemExit(f"{self.tap_name}: {error}") from None

    def getUsage(self, width: int | None = None) -> str:
        """The page of ``--help``; what has no help but its name, as limits have, is listed below with its default.

        A relay has some 40 of these. Among the others, in the order of the alphabet, they would hide what a first start
        needs.
        """
        derived = [one for one in settings_of(self.settings_class) if one.marks.derived]
        hidden = {f"{one.option}=" for one in derived}
        every: list[str] = self.longOpt
        self.longOpt = [name for name in every if name not in hidden]
        try:
            page: str = super().getUsage(width or _columns())
        finally:
            self.longOpt = every
        if not derived:
            return page
        lines = "".join(f"      --{one.option}={describe_default(one)}\n" for one in derived)
        return f"{page}\nLimits and their defaults:\n{lines}"

    def parseArgs(self, *arguments: str) -> None:
        if arguments:
            raise usage.UsageError(f"takes options only, not {arguments[0]!r}")

    def opt_help(self) -> None:
        """Display this help and exit."""
        try:
            print(self)
            sys.stdout.flush()
        except BrokenPipeError:  # the reader, as in "… --help | head", has read enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:
            raise SystemExit(f"{self.tap_name}: standard output: {error.strerror}") from None
        raise SystemExit(0)

    def opt_version(self) -> None:
        """Print the version and exit."""
        print(f"dmsg {dmsg.__version__}")
        raise SystemExit(0)
