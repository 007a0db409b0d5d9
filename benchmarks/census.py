"""Counts our objects in a process, and the entries of their tables, by walking all references from one object.

Memory alone does not distinguish a leak of small objects from the caches of an allocator. Their number does, at once.
"""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict, deque
from types import BuiltinFunctionType, CodeType, FrameType, ModuleType
from typing import Any, Final

_OURS: Final = "dmsg."
_TABLES: Final = (dict, OrderedDict, list, set, deque)
#: Types that lead to everything loaded, and hold nothing of ours that is not also held elsewhere.
_OUTSIDE: Final = (ModuleType, type, CodeType, FrameType, BuiltinFunctionType)


def census(root: Any) -> dict[str, dict[str, int]]:
    """``objects``: instances of ours by class; ``tables``: entries in all tables of a name (``Class.attribute``).

    Garbage that waits for the collector is not reached and not counted; ``collector`` counts everything it tracks.
    """
    objects: Counter[str] = Counter()
    tables: Counter[str] = Counter()
    seen = {id(root)}
    level = [root]
    while level:
        for one in level:
            kind = type(one)
            if kind.__module__.startswith(_OURS):
                objects[kind.__qualname__] += 1
                _count_tables(one, kind, tables)
        following: list[Any] = []
        for one in gc.get_referents(*level):
            if id(one) in seen or not gc.is_tracked(one) or isinstance(one, _OUTSIDE):
                continue
            seen.add(id(one))
            if isinstance(one, dict) and "__builtins__" in one:
                continue  # the globals of a module
            following.append(one)
        level = following
    # including garbage that waits for the collector, and objects that are not ours
    return {"objects": dict(objects), "tables": dict(tables), "collector": {"tracked": len(gc.get_objects())}}


def _count_tables(one: Any, kind: type, tables: Counter[str]) -> None:
    names = set(getattr(one, "__dict__", ()))
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names.update((slots,) if isinstance(slots, str) else slots)
    for name in names:
        if name.startswith("__"):
            continue
        value = getattr(one, name, None)
        if isinstance(value, _TABLES):
            tables[f"{kind.__qualname__}.{name}"] += len(value)
