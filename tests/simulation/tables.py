"""Every container and counter in an object, however deep: at rest it is empty or 0, unless there is a known reason.

The walk also finds tables that are added to the code later: they must be empty or explained.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Final

#: Prefix of the project's modules, whose objects are followed, as are containers of them.
_OURS: Final = "dmsg."
_NOT_OURS: Final = "dmsg.testing."
_TABLES: Final = (dict, set, list, deque, bytearray)

#: Names of numbers that count what is held now, and not what was or may be held.
_COUNT: Final = re.compile(
    "_?(queued|pending|under_way|used|control|offered|asking|open|unread|outstanding|waiting|held|unanswered|incoming|dials|count)"
)


def held(root: object, known: Mapping[str, str]) -> dict[str, int]:
    """The containers and counts below ``root`` that are not empty, as ``Class.attribute``, with the sum of each kind.

    ``known`` gives the reasons why some may be filled, by name. Instead of the class there may be a base class, or the
    attribute that the object was found in.
    """
    found: Counter[str] = Counter()
    todo, seen = [(root, "")], {id(root)}
    while todo:
        one, found_in = todo.pop()
        kinds = [found_in, *(kind.__name__ for kind in type(one).__mro__)]
        for name, value in _attributes(one):
            size = _size(one, name, value)
            if size and not any(f"{kind}.{name}" in known for kind in kinds):
                found[f"{type(one).__name__}.{name}"] += size
            for each in _objects(value):
                if id(each) not in seen:
                    seen.add(id(each))
                    todo.append((each, name))
    return dict(found)


def is_count(name: str) -> bool:
    """Whether a number called ``name`` counts what is held."""
    return _COUNT.match(name) is not None


def _size(one: object, name: str, value: object) -> int:
    if isinstance(value, _TABLES):
        return len(value)
    counts = type(value) is int and is_count(name) and not is_dataclass(one)  # dataclasses are configuration, or ranks
    return abs(value) if counts else 0


def _attributes(one: object) -> Iterator[tuple[str, object]]:
    yield from getattr(one, "__dict__", {}).items()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            full = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(one, full):
                yield name, getattr(one, full)


def _objects(value: object) -> Iterator[object]:
    """The project's objects in ``value``, itself included."""
    if isinstance(value, dict):
        for pair in value.items():
            yield from _objects(pair)
    elif isinstance(value, set | frozenset | list | tuple | deque):
        for each in value:
            yield from _objects(each)
    elif (module := type(value).__module__).startswith(_OURS) and not module.startswith(_NOT_OURS):
        yield value
