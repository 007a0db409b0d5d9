"""Server endpoints from strings, with a backlog that a burst of connections fits."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Final, cast

from twisted.internet.endpoints import serverFromString
from twisted.internet.interfaces import IStreamServerEndpoint

#: TCP connections that wait to be accepted, unless the endpoint string says how many. Twisted's 50 are full after one turn
#: of a busy relay: the kernel then drops what clients send, who try again after a second. Linux has 4,096 at most.
BACKLOG: Final = 1024
_HAS_BACKLOG: Final = re.compile(r"(haproxy:)?(tcp|tcp6|ssl|unix):")
_SAYS_BACKLOG: Final = re.compile(r"(?<!\\):backlog=")


def server_endpoint(reactor: Any, text: str) -> IStreamServerEndpoint:
    """The endpoint of ``text``, with :data:`BACKLOG` unless it says otherwise; raises what the parser does."""
    if _HAS_BACKLOG.match(text) and not _SAYS_BACKLOG.search(text):
        with contextlib.suppress(TypeError):  # it is given by position, or all else is wrong and told below
            return cast(IStreamServerEndpoint, serverFromString(reactor, f"{text}:backlog={BACKLOG}"))
    return cast(IStreamServerEndpoint, serverFromString(reactor, text))
