"""The protocols that commands speak, and how their clients differ for a command."""

from __future__ import annotations

from typing import Any, Final

from dmsg.discovery.entry import DMSG
from dmsg.endpoints.strings import Scheme
from dmsg.errors import ConfigError
from dmsg.messaging.client.endpoint import STRINGS as MESSAGING_STRINGS
from dmsg.messaging.client.service import MessagingClient
from dmsg.messaging.client.settings import MessagingSettings
from dmsg.messaging.client.transport import ChannelTransport
from dmsg.mux.client.endpoint import SCHEME as DMSG_STRINGS
from dmsg.mux.client.service import DmsgClient
from dmsg.mux.client.settings import ClientSettings
from dmsg.mux.client.transport import DmsgTransport
from dmsg.mux.core.e2e_negotiation import Security

Settings = ClientSettings | MessagingSettings
Client = DmsgClient | MessagingClient
Transport = DmsgTransport | ChannelTransport

#: The protocol of a command by default.
DEFAULT: Final = DMSG
#: Name -> the scheme of its endpoint strings: the class of its settings, their table in a file, and the maker of its clients.
PROTOCOLS: Final[dict[str, Scheme[Any, Any]]] = {one.name: one for one in (DMSG_STRINGS, MESSAGING_STRINGS)}


def security_of(settings: Settings) -> dict[str, Any]:
    """The security in ``settings``, as an argument of clients and listeners; no argument if it is not set."""
    security = getattr(settings, "security", None)
    return {} if security is None else {"security": security}


def check_service(settings: Settings, service: str) -> None:
    """Raise ``ConfigError`` for a named service if transports have no services here."""
    if not service:
        return
    if isinstance(settings, MessagingSettings):
        problem = "the messaging system has none: a key listens for one thing"
    elif settings.security is Security.HOP:
        problem = "needs end-to-end security: the relay never sees the name"
    else:
        return
    raise ConfigError("service", problem, "option --service")
