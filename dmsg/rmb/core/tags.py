"""The tags of an envelope, of which a relay heeds one. Pure."""

from __future__ import annotations

import re
from typing import Final

_FAIL_FAST: Final = "fail-fast"
_BETWEEN: Final = re.compile(r"[,\s]")


def fails_fast(tags: str | None) -> bool:
    """Whether one of ``tags``, which stand between commas and white space, is exactly ``fail-fast``.

    The sender then would rather hear at once that a session is not there than have its message kept.
    """
    return tags is not None and _FAIL_FAST in tags and _FAIL_FAST in _BETWEEN.split(tags)
