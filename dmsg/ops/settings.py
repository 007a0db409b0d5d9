"""Declarations of settings: the fields of a frozen dataclass, from which all names are derived.

``public_address`` is ``--public-address``, ``DMSG_PUBLIC_ADDRESS``, ``public_address =`` in TOML and ``public-address=`` in
endpoint strings. A field that is itself a dataclass is a group, whose fields are settings too: ``connections`` in ``limits`` is
``--limit-connections``, ``DMSG_LIMIT_CONNECTIONS`` and ``connections =`` in ``[server.limits]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator
from dataclasses import MISSING, dataclass
from functools import cache
from typing import Any, Final, get_type_hints

from dmsg.ops.values import Kind, has_kind, kind_of, optional

PREFIX: Final = "DMSG_"
_METADATA: Final = "dmsg.setting"
_FLAT: Final = "dmsg.flat"


@dataclass(frozen=True, slots=True)
class Marks:
    """What :func:`setting` is told of a field: its one-line ``help``, and more where it needs it.

    ``kind`` is needed where the type and the name do not tell it. The value of a ``secret`` setting, such as a URL with a
    password, is never repeated in a message; one that is ``hidden``, too, is a secret itself, of which nothing is shown
    anywhere. A ``key_file`` is the path of a file, and an attempt to give the key itself is
    refused. ``name`` is for settings that cannot have their own as a field; a ``flag`` is one that is off by default and
    switched on by its name alone on the command line. A value that ``may_be_path`` is a text
    (:func:`~dmsg.ops.config.from_directory`). ``unset`` says what the default means, where it does not speak for itself.
    ``check`` raises ``ValueError`` for a value that will not do. The help of one that is ``derived`` is its name only.
    """

    help: str
    kind: Kind[Any] | None = None
    secret: bool = False
    hidden: bool = False
    key_file: bool = False
    name: str = ""
    flag: bool = False
    may_be_path: bool = False
    unset: str = ""
    derived: bool = False
    check: Callable[[Any], object] | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that can be set: what is derived from one field.

    ``name`` is its name in messages and, with dashes and in capitals, on the command line and in the environment;
    ``path`` where it stands in the dataclass, ``place`` where in the TOML table. ``marks`` are those of :func:`setting`.
    """

    name: str
    path: tuple[str, ...]
    place: tuple[str, ...]
    kind: Kind[Any]
    default: Any
    marks: Marks

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


def setting(help: str, *, default: Any = MISSING, **marks: Any) -> Any:
    """Declare a field with its default (none: required); ``help`` and ``marks`` are the members of :class:`Marks`."""
    return dataclasses.field(default=default, metadata={_METADATA: Marks(help, **marks)})


def flat(cls: type) -> Any:
    """Declare a field that is a dataclass whose fields are named, and stand in TOML, as if they were the outer one's."""
    return dataclasses.field(default_factory=cls, metadata={_FLAT: True})


def settings_of(cls: type) -> tuple[Setting, ...]:
    """Every setting of a dataclass, those of the dataclasses in it included, in the order they are declared."""
    return _found(cls)


@cache
def _found(cls: Hashable) -> tuple[Setting, ...]:
    assert isinstance(cls, type)
    return tuple(_settings(cls, None, (), (), ""))


def _settings(cls: type, made: Any, path: tuple[str, ...], place: tuple[str, ...], prefix: str) -> Iterator[Setting]:
    """``made`` is what there is of ``cls`` by default, inside another dataclass; ``None`` at the top."""
    hints = get_type_hints(cls)
    for each in dataclasses.fields(cls):
        hint = hints[each.name]
        here = (*path, each.name)
        if not has_kind(hint):
            inner = getattr(made, each.name) if made is not None else default_of(each)
            if each.metadata.get(_FLAT):
                yield from _settings(hint, inner, here, place, prefix)
            else:
                yield from _settings(hint, inner, here, (*place, each.name), f"{prefix}{each.name.removesuffix('s')}_")
            continue
        meta: Marks = each.metadata.get(_METADATA) or Marks(f"{prefix}{each.name}".replace("_", " "), derived=True)
        name = meta.name or each.name
        if meta.kind is None:
            kind = kind_of(hint, name)
        else:
            kind = optional(meta.kind) if type(None) in getattr(hint, "__args__", ()) else meta.kind
        default = each.default if made is None else getattr(made, each.name)
        yield Setting(prefix + name, here, (*place, name), kind, default, meta)


def default_of(group: dataclasses.Field[Any]) -> Any:
    """What a group is by default."""
    return group.default_factory() if group.default_factory is not MISSING else group.default


def variables_of(cls: type) -> frozenset[str]:
    """The names in the environment of every setting of a dataclass."""
    return frozenset(one.variable for one in settings_of(cls))


def describe_default(one: Setting) -> str:
    """The default as help texts and tables show it."""
    if one.required:
        return "required"
    if isinstance(one.default, float) and one.default % 1:
        return one.marks.unset or f"{one.default:.6g}"
    return one.marks.unset or one.kind.text(one.default)
