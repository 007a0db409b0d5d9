"""Errors of HTTP servers and of strangers' JSON, which the packages above translate into their own errors. Pure."""

from __future__ import annotations

from dmsg.errors import DmsgError


class NoAnswer(DmsgError):
    """The server could not be reached, took too long, or sent something that is not an answer."""


class MalformedJson(DmsgError):
    """A text that is not the expected JSON: too long, nested too deep, or not JSON at all."""
