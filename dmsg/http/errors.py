"""What HTTP servers and strangers' JSON can get wrong; the slices above translate it into their own errors. Pure."""

from __future__ import annotations

from dmsg.errors import DmsgError


class NoAnswer(DmsgError):
    """The server could not be reached, took too long, or sent something that is not an answer."""


class MalformedJson(DmsgError):
    """A text that is not the JSON that was expected: too long, nested too deep, or not JSON at all."""
