"""Arguments of endpoint strings, as settings of a client and of the use (a connect or a listener) that a string is for.

Settings of the client that a string does not set come from the environment (``DMSG_*``) and from a TOML file, which
``config=`` or ``DMSG_CONFIG`` names. Settings of its use that it does not set have their defaults.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, TypeVar

from dmsg.errors import ConfigError
from dmsg.ops.config import resolve
from dmsg.ops.settings import Setting, settings_of

C = TypeVar("C")
U = TypeVar("U")

#: The source of arguments, in errors.
SOURCE: Final = "an endpoint string"
_CONFIG: Final = "config"
_NUMBERED: Final = re.compile(r"(.*[^0-9])([0-9]*)", re.DOTALL)


def read_arguments(
    arguments: Mapping[str, str],
    client: type[C],
    use: type[U],
    *,
    role: str,
    environ: Mapping[str, str],
    together: Iterable[Collection[str]] = (),
) -> tuple[C, U]:
    """The settings of the client, and those of its use. Raises ``ConfigError``.

    ``client`` and ``use`` are dataclasses of settings, ``role`` is the table of ``client`` in a file. ``together`` are sets of
    names (:func:`dmsg.ops.config.trace`).
    """
    ours, theirs = settings_of(client), settings_of(use)
    given = _collect(arguments, (*ours, *theirs))
    made = resolve(client, role, given, environ, roles=None, elsewhere=None, view="argument", together=together)
    names = {one.option for one in theirs}
    return made, resolve(use, role, {name: given[name] for name in given if name in names}, {}, view="argument")


def _collect(arguments: Mapping[str, str], settings: Collection[Setting]) -> dict[str, Any]:
    """Values by option. Twisted keeps only the last of two arguments with one name, so arguments of lists may be numbered."""
    lists = {one.option for one in settings if one.kind.many}
    options = {_CONFIG, *(one.option for one in settings)}
    found: dict[str, Any] = {}
    numbered: dict[str, list[tuple[int, str, str]]] = {}
    for written, value in arguments.items():
        name = written.replace("_", "-")
        match = _NUMBERED.fullmatch(name)
        if match and match[1] in lists and len(match[2]) < 10:
            numbered.setdefault(match[1], []).append((int(match[2] or -1), name, value))
        elif name in options:
            found[name] = value
        else:
            raise ConfigError(f"{name}=", f"unknown argument; {_hint(name, options, settings)}", SOURCE)
    return found | {name: [value for *_, value in sorted(several)] for name, several in numbered.items()}


def _hint(name: str, options: Collection[str], settings: Collection[Setting]) -> str:
    close = difflib.get_close_matches(name, options, n=1)
    if close:
        return f"did you mean {close[0]}=?"
    return f"there are {', '.join(f'{one.option}=' for one in settings if len(one.path) == 1)} and others"
