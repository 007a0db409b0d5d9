"""Settings: declared once, as the fields of a frozen dataclass; read from four places.

A value on the command line wins over one in the environment (``DMSG_*``), that over one in the TOML file (``--config``,
one table for each role), and that over the default. All three forms are derived from the field: ``public_address`` is
``--public-address``, ``DMSG_PUBLIC_ADDRESS`` and ``public_address =``. A field that is itself a dataclass of limits is
spread out: ``connections`` in ``limits`` is ``--limit-connections``, ``DMSG_LIMIT_CONNECTIONS`` and
``connections =`` in ``[server.limits]``.

Whatever is unknown or malformed is a :class:`~dmsg.errors.ConfigError` that names the setting and where it stood. Secret
keys are given as files only: command lines and environments can be read by others.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from dmsg.address import HostPort
from dmsg.errors import ConfigError, InvalidAddress

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same module before it came into the standard library
    import tomli as tomllib

T = TypeVar("T")

PREFIX: Final = "DMSG_"
CONFIG_VARIABLE: Final = "DMSG_CONFIG"
_METADATA: Final = "dmsg.setting"
_CONFIG_FILE_LIMIT_BYTES: Final = 1024 * 1024
_LOOKS_LIKE_A_KEY: Final = re.compile(r"\s*(0x)?[0-9a-fA-F]{64}\s*\Z")
_NAMES_OF_INLINE_KEYS: Final = frozenset({"secret_key", "private_key", "key_hex", "sk"})
_SCHEME: Final = re.compile("[A-Za-z][A-Za-z0-9+.-]*:")
_SQLITE: Final = "sqlite:"
_TRUE: Final = frozenset({"yes", "true", "on", "1"})
_FALSE: Final = frozenset({"no", "false", "off", "0"})


@dataclass(frozen=True, slots=True)
class _Meta:
    help: str
    secret: bool = False
    key_file: bool = False
    name: str = ""
    flag: bool = False
    may_be_path: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that can be set: what is derived from one field.

    ``name`` is its name in messages and, with dashes and in capitals, on the command line and in the environment;
    ``path`` where it stands in the dataclass. A ``flag`` has no value on the command line.
    """

    name: str
    path: tuple[str, ...]
    type: Any
    default: Any
    help: str
    secret: bool = False
    key_file: bool = False
    flag: bool = False
    may_be_path: bool = False

    @property
    def place(self) -> tuple[str, ...]:
        """Where it stands in the TOML table."""
        return self.path if len(self.path) > 1 else (self.name,)

    @property
    def option(self) -> str:
        """The name on the command line, without the leading dashes."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return PREFIX + self.name.upper()

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING


def setting(
    help: str,
    *,
    default: Any = MISSING,
    secret: bool = False,
    key_file: bool = False,
    name: str = "",
    flag: bool = False,
    may_be_path: bool = False,
) -> Any:
    """Declare a field: its one-line ``help``, its default (none: required).

    The value of a ``secret`` setting, such as a URL with a password, is never repeated in a message. A ``key_file`` is
    the path of a file, and an attempt to give the key itself is refused. ``name`` is for settings that cannot have their
    own as a field; a ``flag`` is one that is off by default and switched on by its name alone on the command line. A
    value that ``may_be_path`` is a text (:func:`from_directory`).
    """
    meta = _Meta(help, secret, key_file, name, flag, may_be_path)
    return dataclasses.field(default=default, metadata={_METADATA: meta})


def settings_of(cls: type) -> tuple[Setting, ...]:
    """Every setting of a dataclass, those of the dataclasses in it included, in the order they are declared."""
    hints = get_type_hints(cls)
    found: list[Setting] = []
    for each in dataclasses.fields(cls):
        hint = hints[each.name]
        if dataclasses.is_dataclass(hint) and hint is not HostPort:
            found.extend(_group(each.name, hint))  # type: ignore[arg-type]
            continue
        meta: _Meta = each.metadata[_METADATA]
        name = meta.name or each.name
        marks = (meta.secret, meta.key_file, meta.flag, meta.may_be_path)
        found.append(Setting(name, (each.name,), hint, each.default, meta.help, *marks))
    return tuple(found)


def _group(name: str, cls: type) -> list[Setting]:
    """The settings of a dataclass of limits: any frozen dataclass with defaults will do."""
    singular = name.removesuffix("s")
    hints = get_type_hints(cls)
    result = []
    for each in dataclasses.fields(cls):
        words = each.name.replace("_", " ")
        help = each.metadata.get("help", f"{singular}: {words}")
        result.append(Setting(f"{singular}_{each.name}", (name, each.name), hints[each.name], each.default, help))
    return result


# --- values ----------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a text that is not empty")
    return value


def _path(value: Any) -> Path:
    return Path(_text(value))


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("must be yes or no")
    return word in _TRUE


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("must be a whole number")
    try:
        number = int(value)
    except ValueError:
        raise ValueError("must be a whole number") from None
    if number < 0:
        raise ValueError("must not be negative")
    return number


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError("must be a number")
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise ValueError("must be a number") from None
    if not math.isfinite(number):
        raise ValueError("must be a finite number")
    if number < 0:
        raise ValueError("must not be negative")
    return number


def _host_port(value: Any) -> HostPort:
    try:
        return HostPort.parse(value)
    except InvalidAddress as error:
        raise ValueError(f"must be host:port ({error})") from None


_PARSERS: Final[dict[Any, Callable[[Any], Any]]] = {
    str: _text,
    Path: _path,
    bool: _flag,
    int: _integer,
    float: _number,
    HostPort: _host_port,
}


def _parse(hint: Any, value: Any) -> Any:
    """``value``, a text or what TOML made of one, as ``hint``; ``ValueError`` if it is none. "none" is ``None``."""
    if get_origin(hint) in (Union, types.UnionType):
        if isinstance(value, str) and value.lower() == "none":
            return None
        hint = next(one for one in get_args(hint) if one is not type(None))
    return _PARSERS[hint](value)


def from_directory(place: str, directory: str) -> str:
    """A text that may be a path, made absolute from ``directory`` if it is one, or ``sqlite:`` and one. What is not stays
    as it is: URLs and whatever else begins with a scheme, and ``-``."""
    scheme = _SCHEME.match(place)
    if place == "-" or (scheme and scheme[0] != _SQLITE):
        return place
    start = scheme.end() if scheme else 0
    path = place[start:]
    return place[:start] + os.path.abspath(os.path.join(directory, path)) if path else place


def _convert(one: Setting, value: Any, source: str, directory: str) -> Any:
    """The value of one setting, paths made absolute from ``directory``; raises ``ConfigError``."""
    if one.key_file and isinstance(value, str) and _LOOKS_LIKE_A_KEY.match(value):
        raise ConfigError(one.name, "a key is given as the path of a key file, never inline", source)
    try:
        made = _parse(one.type, value)
    except ValueError as error:
        shown = "" if one.secret or one.key_file else f", not {value!r}"
        raise ConfigError(one.name, f"{error}{shown}", source) from None
    if isinstance(made, Path):
        return Path(os.path.abspath(os.path.join(directory, made)))
    return from_directory(made, directory) if one.may_be_path and made is not None else made


# --- sources ---------------------------------------------------------------------------------------------------------


def _unknown(name: str, known: Iterable[str], source: str) -> ConfigError:
    if name.lower().removeprefix(PREFIX.lower()) in _NAMES_OF_INLINE_KEYS:
        return ConfigError(name, "a key is given as the path of a key file (key), never inline", source)
    close = difflib.get_close_matches(name, list(known), n=1)
    return ConfigError(name, "is no setting" + (f"; did you mean {close[0]}?" if close else ""), source)


def _from_environment(
    settings: Iterable[Setting], environ: Mapping[str, str], elsewhere: Iterable[str]
) -> dict[str, tuple[Any, str]]:
    by_variable = {one.variable: one for one in settings}
    others = {CONFIG_VARIABLE, *elsewhere}
    found = {}
    for variable in sorted(environ):
        if variable in by_variable:
            found[by_variable[variable].name] = (environ[variable], f"variable {variable}")
        elif variable.startswith(PREFIX) and variable not in others:
            raise _unknown(variable, [*by_variable, *others], "the environment")
    return found


def _from_file(settings: Iterable[Setting], role: str, path: str, roles: Iterable[str]) -> dict[str, tuple[Any, str]]:
    document = _load(path)
    for name in document:
        if name not in roles:
            raise ConfigError(name, f"is no table; there are {', '.join(f'[{one}]' for one in sorted(roles))}", path)
    table = document.get(role, {})
    if not isinstance(table, dict):
        raise ConfigError(role, "must be a table", path)
    by_path = {one.place: one for one in settings}
    groups = {one.path[0] for one in settings if len(one.path) > 1}
    found = {}
    for key, value in table.items():
        if key in groups and not isinstance(value, dict):
            raise ConfigError(f"{role}.{key}", "must be a table", path)
        inner = {(key, name): one for name, one in value.items()} if key in groups else {(key,): value}
        for place, one in inner.items():
            if place not in by_path:
                known = [each[-1] for each in by_path if each[:-1] == place[:-1]]
                raise _unknown(place[-1], known, f"[{'.'.join((role, *place[:-1]))}] of {path}")
            found[by_path[place].name] = (one, f"[{'.'.join((role, *place[:-1]))}] of {path}")
    return found


def _load(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            content = file.read(_CONFIG_FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigError("config", error.strerror or "cannot be read", path) from None
    if len(content) > _CONFIG_FILE_LIMIT_BYTES:
        raise ConfigError("config", "is too long for a configuration file", path)
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (
        ValueError,
        RecursionError,
    ) as error:  # numbers of thousands of digits, nesting of hundreds of brackets, too
        raise ConfigError("config", f"is not TOML: {error}", path) from None


def resolve(
    cls: type[T],
    role: str,
    options: Mapping[str, str | None],
    environ: Mapping[str, str],
    *,
    roles: Iterable[str] = (),
    elsewhere: Iterable[str] = (),
) -> T:
    """An instance of ``cls`` from ``options`` (by :attr:`Setting.option`), ``environ``, the TOML file and the defaults.

    ``role`` is the table in the file, ``roles`` are the tables that may stand beside it, ``elsewhere`` the ``DMSG_*``
    variables that belong to somebody else. Raises ``ConfigError``.
    """
    settings = settings_of(cls)
    directory = os.getcwd()
    given: dict[str, tuple[Any, str, str]] = {}
    path = options.get("config") or environ.get(CONFIG_VARIABLE)
    if path:
        path = os.path.abspath(path)
        for name, (value, source) in _from_file(settings, role, path, {role, *roles}).items():
            given[name] = (value, source, os.path.dirname(path))
    for name, (value, source) in _from_environment(settings, environ, elsewhere).items():
        given[name] = (value, source, directory)
    for one in settings:
        text = options.get(one.option)
        if text is not None:
            given[one.name] = (text, f"option --{one.option}", directory)
    values: dict[tuple[str, ...], Any] = {}
    for one in settings:
        if one.name in given:
            values[one.path] = _convert(one, *given[one.name])
        elif one.required:
            raise ConfigError(one.name, f"must be given (--{one.option}, {one.variable}, or [{role}] in --config)")
    return _build(cls, values)


def _build(cls: type[T], values: Mapping[tuple[str, ...], Any]) -> T:
    """The dataclass with ``values``; what a group itself does not accept is a ``ConfigError`` too."""
    hints = get_type_hints(cls)
    groups = {path[0] for path in values if len(path) > 1}
    arguments = {path[0]: value for path, value in values.items() if len(path) == 1}
    for each in dataclasses.fields(cls):  # type: ignore[arg-type]
        if each.name in groups:
            inner = {path[1]: value for path, value in values.items() if path[0] == each.name}
            try:
                arguments[each.name] = hints[each.name](**inner)
            except ValueError as error:
                raise ConfigError(each.name, str(error)) from None
    return cls(**arguments)


def variables_of(cls: type) -> frozenset[str]:
    """The names in the environment of every setting of a dataclass."""
    return frozenset(one.variable for one in settings_of(cls))


def describe_default(one: Setting) -> str:
    """The default as help texts and tables show it."""
    if one.required:
        return "required"
    return "none" if one.default is None else str(one.default)
