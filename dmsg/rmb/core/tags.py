"""The tags of an envelope; a relay heeds only ``fail-fast``. Pure."""

from __future__ import annotations

import re
from typing import Final

_FAIL_FAST: Final = "fail-fast"
_BETWEEN: Final = re.compile(r"[,\s]")


def fails_fast(tags: str | None) -> bool:
    """Whether one of ``tags``, which are separated by commas or white space, is exactly ``fail-fast``.

    The sender then wants an error at once when the session is not connected, instead of a stored message.
    """
    return tags is not None and _FAIL_FAST in tags and _FAIL_FAST in _BETWEEN.split(tags)
