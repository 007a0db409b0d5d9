"""``twistd messaging-server``: one relay of the messaging system."""

from __future__ import annotations

from typing import Any

from dmsg.messaging.core.wire import GO, SEED
from dmsg.taps._options import RoleOptions
from dmsg.taps._relay import RelayRole
from dmsg.taps.settings import FrameLayout, MessagingServerSettings


class Options(RoleOptions):
    """Options of ``twistd messaging-server``."""

    synopsis = "--key FILE [options]"
    longdesc = "A messaging server (relay): accepts links of clients and carries the channels between them."
    tap_name = "messaging-server"
    role = "messaging-server"
    settings_class = MessagingServerSettings


class MessagingRelayService(RelayRole):
    """A relay of the messaging system."""

    tap_name = "messaging-server"
    settings: MessagingServerSettings

    def make_relay(self, **options: Any) -> Any:
        """A :class:`~dmsg.messaging.relay.service.MessagingRelay`."""
        from dmsg.messaging.relay.service import MessagingRelay

        layout = GO if self.settings.layout is FrameLayout.GO else SEED
        return MessagingRelay(layout=layout, go_quirks=self.settings.go_quirks, **options)


def makeService(options: Options) -> MessagingRelayService:
    """The service for parsed options; an error raises ``SystemExit`` with one line."""
    from twisted.internet import reactor

    return options.build(lambda: MessagingRelayService(reactor, options.settings, uid=options.uid))
