"""The ``dmsg:`` endpoint strings, as plugins that load nothing until such a string is used.

Twisted imports every plugin to look for a prefix, in programs that never heard of dmsg as well; so the work is done
elsewhere (:mod:`dmsg.mux.client.endpoint`) and imported when it is asked for.
"""

from __future__ import annotations

from typing import Any

from twisted.internet.interfaces import IStreamClientEndpointStringParserWithReactor, IStreamServerEndpointStringParser
from twisted.plugin import IPlugin
from zope.interface import implementer


@implementer(IPlugin, IStreamClientEndpointStringParserWithReactor)
class LazyClientParser:
    """``clientFromString(reactor, "dmsg:…")``."""

    prefix = "dmsg"

    def parseStreamClient(self, reactor: Any, *args: Any, **kwargs: Any) -> Any:
        """The client endpoint for the parts of a string."""
        from dmsg.mux.client.endpoint import parse_client

        return parse_client(reactor, *args, **kwargs)


@implementer(IPlugin, IStreamServerEndpointStringParser)
class LazyServerParser:
    """``serverFromString(reactor, "dmsg:…")``."""

    prefix = "dmsg"

    def parseStreamServer(self, reactor: Any, *args: Any, **kwargs: Any) -> Any:
        """The server endpoint for the parts of a string."""
        from dmsg.mux.client.endpoint import parse_server

        return parse_server(reactor, *args, **kwargs)
