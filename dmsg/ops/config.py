"""The sources of settings: options, the environment, a TOML file, and defaults.

A value on the command line, or in an endpoint string, wins over one in the environment (``DMSG_*``), that over one in the
TOML file (``--config``, one table for each role), and that over the default. The same text works everywhere: its form depends
only on the kind of the value (:mod:`dmsg.ops.values`).

An unknown name or a malformed value raises :class:`~dmsg.errors.ConfigError`, which names the setting and its place. Secret
keys are given only as files: command lines and environments can be read by others.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

from dmsg.errors import ConfigError
from dmsg.ops.settings import PREFIX, Setting, default_of, settings_of
from dmsg.ops.toml_lines import line_of
from dmsg.ops.values import NONE, has_kind
from dmsg.shipping.plan import redact

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same module before it came into the standard library
    import tomli as tomllib

T = TypeVar("T")

CONFIG_VARIABLE: Final = "DMSG_CONFIG"
#: Shown in place of a secret.
HIDDEN: Final = "(not shown)"
_CONFIG_FILE_LIMIT_BYTES: Final = 1024 * 1024
_LOOKS_LIKE_A_KEY: Final = re.compile(r"\s*(0x)?[0-9a-fA-F]{64}\s*\Z")
_NAMES_OF_INLINE_KEYS: Final = frozenset({"secret_key", "private_key", "key_hex", "sk"})
_SCHEME: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")
_SQLITE: Final = "sqlite:"


# --- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from.

    ``kind`` is ``default``, ``file``, ``environment``, ``option`` or ``argument`` (of an endpoint string); ``name`` is the name
    of the file, variable, option or argument. In a file, the value is in ``table`` of the document ``text``, under ``key``.
    """

    kind: str
    name: str = ""
    table: tuple[str, ...] = ()
    key: str = ""
    text: str = dataclasses.field(default="", repr=False)

    @property
    def place(self) -> str:
        """``name``, and for a file the line, if it is known."""
        line = line_of(self.text, (*self.table, self.key)) if self.table else 0
        return f"{self.name}:{line}" if line else self.name

    def __str__(self) -> str:
        match self.kind:
            case "file":
                return f"[{'.'.join(self.table)}] of {self.place}"
            case "environment":
                return f"variable {self.place}"
            case "argument":
                return f"{self.place} of an endpoint string"
            case _:
                return f"{self.kind} {self.place}".rstrip()


_DEFAULT: Final = Origin("default")


@dataclass(frozen=True, slots=True)
class Value:
    """The value of one setting and where it comes from. The value of a required setting that is not given is ``MISSING``."""

    setting: Setting
    value: Any
    origin: Origin

    @property
    def shown(self) -> Any:
        """The value for people and programs, without the parts of a text that may be secret."""
        one, value = self.setting, self.value
        if value is MISSING:
            return None
        if not isinstance(value, str):
            return value
        if one.marks.hidden:
            return HIDDEN
        text = redact(value)
        unclear = "://" not in text and ("@" in text or "?" in text)
        return HIDDEN if one.marks.secret and unclear else text


@dataclass(frozen=True, slots=True)
class _Given:
    raw: Any
    origin: Origin
    directory: str


def from_directory(place: str, directory: str) -> str:
    """A text that may be a path, made absolute from ``directory`` if it is a path, or ``sqlite:`` and a path. Other texts are
    not changed: URLs and all else that begins with a scheme, ``-`` and ``none``. "~" is the home directory."""
    scheme = _SCHEME.match(place)
    if place in ("-", NONE) or (scheme and scheme[0] != _SQLITE):
        return place
    start = scheme.end() if scheme else 0
    path = place[start:]
    return place[:start] + _absolute(path, directory) if path else place


def _absolute(path: str, directory: str) -> str:
    expanded = os.path.expanduser(path)
    if path.startswith("~") and expanded == path:
        raise ValueError("the home directory is not known")
    try:
        return os.path.abspath(os.path.join(directory, expanded))
    except OSError:
        raise ValueError("is a relative path, and the working directory is gone") from None


def _here() -> str:
    """The working directory; "" when it is gone, which matters only for relative paths."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _convert(one: Setting, given: _Given) -> Any:
    """The value of one setting, paths made absolute; raises ``ConfigError``."""
    marks, value, source = one.marks, given.raw, str(given.origin)
    if marks.key_file and isinstance(value, str) and _LOOKS_LIKE_A_KEY.match(value):
        raise ConfigError(one.name, "a key is given as the path of a key file, never inline", source)
    try:
        made = one.kind.parse(value)
        if marks.check is not None and made is not None:
            marks.check(made)
        if isinstance(made, Path):
            return Path(_absolute(str(made), given.directory))
        return from_directory(made, given.directory) if marks.may_be_path and made is not None else made
    except ConfigError as error:
        raise ConfigError(one.name, error.problem, source) from None
    except ValueError as error:
        shown = "" if marks.secret or marks.key_file else f", not {redact(_quoted(value))}"
        raise ConfigError(one.name, f"{error}{shown}", source) from None


def _quoted(value: Any) -> str:
    """The value as it was written. Repeated options and lists of TOML are shown as their items."""
    return ", ".join(map(repr, value)) if isinstance(value, list | tuple) else repr(value)


# --- sources ---------------------------------------------------------------------------------------------------------


def _unknown(name: str, known: Iterable[str], source: str) -> ConfigError:
    if name.lower().removeprefix(PREFIX.lower()) in _NAMES_OF_INLINE_KEYS:
        return ConfigError(name, "a key is given as the path of a key file (key), never inline", source)
    close = difflib.get_close_matches(name, list(known), n=1)
    return ConfigError(name, "is no setting" + (f"; did you mean {close[0]}?" if close else ""), source)


def _from_environment(
    settings: Iterable[Setting], environ: Mapping[str, str], elsewhere: Callable[[], Collection[str]] | None
) -> Iterator[tuple[str, _Given]]:
    by_variable = {one.variable: one for one in settings}
    for variable in sorted(environ):
        if variable in by_variable:
            if environ[variable]:  # an empty variable counts as not set
                yield (
                    by_variable[variable].name,
                    _Given(environ[variable], Origin("environment", variable), _here()),
                )
        elif elsewhere is not None and variable.startswith(PREFIX) and variable != CONFIG_VARIABLE:
            others = elsewhere()
            if variable not in others:
                raise _unknown(variable, [*by_variable, CONFIG_VARIABLE, *others], "the environment")


def _from_file(
    settings: Iterable[Setting], role: str, path: str, roles: Collection[str] | None
) -> Iterator[tuple[str, _Given]]:
    text, document = _load(path)
    for name in document:
        if roles is not None and name not in {role, *roles}:
            known = ", ".join(f"[{one}]" for one in sorted({role, *roles}))
            raise ConfigError(name, f"is no table; there are {known}", path)
        if roles is None and role not in document and difflib.get_close_matches(name, [role]):
            raise ConfigError(name, f"is no table; did you mean [{role}]?", path)
    by_place = {one.place: one for one in settings}
    tables = {place[:length] for place in by_place for length in range(len(place))}

    def look(table: Any, place: tuple[str, ...]) -> Iterator[tuple[str, _Given]]:
        if not isinstance(table, dict):
            raise ConfigError(".".join((role, *place)), "must be a table", path)
        for key, value in table.items():
            inner = (*place, key)
            if inner in tables:
                yield from look(value, inner)
                continue
            origin = Origin("file", path, (role, *place), key, text)
            if inner not in by_place:
                known = [each[-1] for each in (*by_place, *tables) if each and each[:-1] == place]
                raise _unknown(key, known, str(origin))
            yield by_place[inner].name, _Given(value, origin, os.path.dirname(path))

    yield from look(document.get(role, {}), ())


def _load(path: str) -> tuple[str, dict[str, Any]]:
    try:
        with open(path, "rb") as file:
            content = file.read(_CONFIG_FILE_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise ConfigError("config", getattr(error, "strerror", None) or "cannot be read", path) from None
    if len(content) > _CONFIG_FILE_LIMIT_BYTES:
        raise ConfigError("config", "is too long for a configuration file", path)
    try:
        text = content.decode("utf-8")
        return text, tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits, and for deep nesting
        raise ConfigError("config", f"is not TOML: {error}", path) from None


def _gather(
    settings: tuple[Setting, ...],
    role: str,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    roles: Collection[str] | None,
    elsewhere: Callable[[], Collection[str]] | None,
    view: str,
    together: Iterable[Collection[str]],
) -> dict[str, _Given]:
    """Setting -> its value from the source that wins."""
    given: dict[str, _Given] = {}
    path = options.get("config") or environ.get(CONFIG_VARIABLE)
    if path:
        try:
            place = _absolute(path, _here())
        except ValueError as error:
            raise ConfigError("config", str(error), path) from None
        given |= _from_file(settings, role, place, roles)
    given |= _from_environment(settings, environ, elsewhere)
    last = {one.name: one for one in settings if options.get(one.option) is not None}
    for names in together:
        if any(name in last for name in names):
            given = {name: one for name, one in given.items() if name not in names}
    for name, one in last.items():
        place = f"{one.option}=" if view == "argument" else f"--{one.option}"
        given[name] = _Given(options[one.option], Origin(view, place), _here())
    return given


def trace(
    cls: type,
    role: str,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    roles: Collection[str] | None = (),
    elsewhere: Callable[[], Collection[str]] | None = frozenset,
    view: str = "option",
    together: Iterable[Collection[str]] = (),
) -> tuple[Value, ...]:
    """Every setting of ``cls`` with its value and the origin of that. Raises ``ConfigError``.

    The keys of ``options`` are :attr:`Setting.option`; ``view`` names their origin, ``option`` or ``argument``. ``role`` is the
    table in the file, ``roles`` are other tables that it may have; ``elsewhere`` gives the ``DMSG_*`` variables of other roles,
    and is called only when there is one that ``cls`` has not (``None``: any, for both). ``together`` are sets of names: if an
    option gives one name of a set, all of the set is taken from options only.
    """
    settings = settings_of(cls)
    given = _gather(settings, role, options, environ, roles, elsewhere, view, together)
    values = []
    for one in settings:
        if one.name in given:
            values.append(Value(one, _convert(one, given[one.name]), given[one.name].origin))
        else:
            values.append(Value(one, one.default, _DEFAULT))
    return tuple(values)


def assemble(cls: type[T], role: str, values: Iterable[Value]) -> T:
    """The instance of ``cls`` with ``values``. Raises ``ConfigError`` for a required value that is not given, and for values
    that a group does not accept."""
    given = {one.setting.path: one for one in values if one.origin is not _DEFAULT or one.value is MISSING}
    for missing in (one.setting for one in given.values() if one.value is MISSING):
        where = f"--{missing.option}, {missing.variable}, or [{role}] in --config"
        raise ConfigError(missing.name, f"must be given ({where})")
    return _build(cls, role, None, (), given)


def _build(cls: type[T], role: str, made: T | None, path: tuple[str, ...], given: Mapping[tuple[str, ...], Value]) -> T:
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        here = (*path, each.name)
        if here in given:
            arguments[each.name] = given[here].value
        elif not has_kind(hints[each.name]) and any(place[: len(here)] == here for place in given):
            inner = getattr(made, each.name) if made is not None else default_of(each)
            arguments[each.name] = _build(hints[each.name], role, inner, here, given)
    try:
        return cls(**arguments) if made is None else dataclasses.replace(made, **arguments)  # type: ignore[type-var]
    except ConfigError as error:
        named = [str(one.origin) for one in given.values() if one.setting.name == error.option]
        raise ConfigError(error.option, error.problem, ", ".join(named)) from None
    except ValueError as error:
        inside = [one for place, one in given.items() if place[: len(path)] == path]
        # its place in the file, where flat groups have none
        group = next((one.setting.place[: len(path) - len(one.setting.path)] for one in inside), path)
        origins = dict.fromkeys(str(one.origin) for one in inside)
        raise ConfigError(".".join(group) or role, str(error), ", ".join(origins)) from None


def resolve(cls: type[T], role: str, options: Mapping[str, Any], environ: Mapping[str, str], **how: Any) -> T:
    """An instance of ``cls`` from ``options``, ``environ``, the TOML file and the defaults; ``how`` as in :func:`trace`.
    Raises ``ConfigError``."""
    return assemble(cls, role, trace(cls, role, options, environ, **how))


def check_values(settings: Any) -> None:
    """Run the checks of settings that were made without :func:`resolve`; raises ``ConfigError``."""
    for one in settings_of(type(settings)):
        value = settings
        for name in one.path:
            value = getattr(value, name)
        try:
            if one.marks.check is not None and value is not None:
                one.marks.check(value)
        except ValueError as error:
            raise ConfigError(one.name, getattr(error, "problem", str(error))) from None
