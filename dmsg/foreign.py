"""What the other side said, quoted for people. Pure."""

from __future__ import annotations

from typing import Final

#: A text of the other side is shown to people up to this length, in characters.
QUOTED_LIMIT: Final = 100


def quoted(text: str) -> str:
    """``text`` as a message for people may show it: in ASCII, escaped, in quotes, and cut."""
    return ascii(text[:QUOTED_LIMIT]) + ("…" if len(text) > QUOTED_LIMIT else "")
