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
    """The arguments of :func:`setting` for a field: its one-line ``help``, and more where needed.

    ``kind`` is needed where the type and the name do not tell it. The value of a ``secret`` setting, such as a URL with a
    password, is never repeated in a message. A setting that is also ``hidden`` is a secret itself: no part of it is shown
    anywhere. A ``key_file`` is the path of a file; the key itself in its place is refused. ``name`` is for settings whose
    name cannot be that of a field. A ``flag`` is off by default, and its name alone on the command line switches it on. A
    value that ``may_be_path`` is a text (:func:`~dmsg.ops.config.from_directory`). ``unset`` says what the default means, if
    that is not obvious. ``check`` raises ``ValueError`` for a wrong value. The help of a ``derived`` setting is its name only.
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
    """One setting, derived from one field.

    ``name`` is its name in messages, with dashes that on the command line, in capitals that in the environment. ``path`` is
    its place in the dataclass, ``place`` the one in the TOML table. ``marks`` are those of :func:`setting`.
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
    """Declare a field that is a dataclass, whose fields have names, and places in TOML, as if they were the outer one's."""
    return dataclasses.field(default_factory=cls, metadata={_FLAT: True})


def settings_of(cls: type) -> tuple[Setting, ...]:
    """Every setting of a dataclass, including those of the dataclasses in it, in the order of declaration."""
    return _found(cls)


@cache
def _found(cls: Hashable) -> tuple[Setting, ...]:
    assert isinstance(cls, type)
    return tuple(_settings(cls, None, (), (), ""))


def _settings(cls: type, made: Any, path: tuple[str, ...], place: tuple[str, ...], prefix: str) -> Iterator[Setting]:
    """``made`` is the default instance of ``cls`` inside another dataclass; ``None`` at the top."""
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
    """The default of a group."""
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
