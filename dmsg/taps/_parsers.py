"""Endpoint strings as plugins that load nothing until such a string is used.

Twisted imports every plugin to look for a prefix, also in programs that do not use dmsg. So the work is done in another
module (for ``dmsg:`` in :mod:`dmsg.mux.client.endpoint`), which is imported when such a string is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from twisted.internet.interfaces import IStreamClientEndpointStringParserWithReactor, IStreamServerEndpointStringParser
from twisted.plugin import IPlugin
from zope.interface import implementer


@implementer(IPlugin, IStreamClientEndpointStringParserWithReactor, IStreamServerEndpointStringParser)
class LazyParser:
    """``clientFromString(reactor, "PREFIX:…")`` and ``serverFromString``: ``parse_client`` and ``parse_server`` of
    ``module`` read the rest."""

    def __init__(self, prefix: str, module: str) -> None:
        self.prefix = prefix
        self._module = module

    def parseStreamClient(self, reactor: Any, *args: Any, **kwargs: Any) -> Any:
        return import_module(self._module).parse_client(reactor, *args, **kwargs)

    def parseStreamServer(self, reactor: Any, *args: Any, **kwargs: Any) -> Any:
        return import_module(self._module).parse_server(reactor, *args, **kwargs)
