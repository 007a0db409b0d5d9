"""The settings of a client of the messaging system: variables, ``[messaging]`` in TOML, and endpoint strings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dmsg.clients.settings import RelayClientSettings
from dmsg.discovery.entry import MESSAGING
from dmsg.messaging.client.config import MessagingConfig
from dmsg.ops.settings import flat

#: The table in the configuration file.
ROLE: Final = "messaging"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagingSettings(RelayClientSettings):
    """A client: who it is, how it finds relays, what it speaks, and how it is tuned."""

    protocol = MESSAGING
    config: MessagingConfig = flat(MessagingConfig)

    def must_agree(self) -> dict[str, object]:
        """See :class:`~dmsg.clients.settings.RelayClientSettings`: a link has one layout, and its peers one dialect."""
        ours = {"dialect": self.config.dialect_name, "layout": self.config.layout_name}
        return RelayClientSettings.must_agree(self) | ours
