"""What the other side said: quoted for people, one of a few known words for logs and metrics. Pure."""

from __future__ import annotations

from typing import Final

__all__ = ["REFUSED_BY_SERVER", "SERVER_REFUSALS", "quoted", "refusal_reason"]

#: A text of the other side is shown to people up to this length, in characters.
QUOTED_LIMIT: Final = 100
#: Why relays refuse a connection, as they say it (TLV ``reason``), and what every other text counts as.
SERVER_REFUSALS: Final = ("server_draining", "too many connections")
REFUSED_BY_SERVER: Final = "refused by server"


def quoted(text: str) -> str:
    """``text`` as a message for people may show it: in ASCII, escaped, in quotes, and cut."""
    return ascii(text[:QUOTED_LIMIT]) + ("…" if len(text) > QUOTED_LIMIT else "")


def refusal_reason(text: str) -> str:
    """What a relay's own words count as: one of :data:`SERVER_REFUSALS`, or :data:`REFUSED_BY_SERVER`."""
    return text if text in SERVER_REFUSALS else REFUSED_BY_SERVER
