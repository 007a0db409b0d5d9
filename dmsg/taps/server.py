"""``twistd dmsg-server``: one relay."""

from __future__ import annotations

from typing import Any

from dmsg.taps._options import RoleOptions
from dmsg.taps._relay import RelayRole
from dmsg.taps.settings import ServerSettings


class Options(RoleOptions):
    """Options of ``twistd dmsg-server``."""

    synopsis = "--key FILE [options]"
    longdesc = "A server (relay): accepts connections of clients and carries the transports between them."
    tap_name = "dmsg-server"
    role = "server"
    settings_class = ServerSettings


class RelayService(RelayRole):
    """A relay of the dmsg protocol."""

    tap_name = "dmsg-server"
    settings: ServerSettings

    def make_relay(self, **options: Any) -> Any:
        """A :class:`~dmsg.mux.relay.service.DmsgRelay`."""
        from dmsg.mux.relay.service import DmsgRelay

        return DmsgRelay(aes=self.settings.aes, **options)


def makeService(options: Options) -> RelayService:
    """The service for parsed options; an error raises ``SystemExit`` with one line."""
    from twisted.internet import reactor

    return options.build(lambda: RelayService(reactor, options.settings, uid=options.uid))
