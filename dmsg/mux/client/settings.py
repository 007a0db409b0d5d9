"""The settings of a client: options, variables, ``[client]`` in TOML and endpoint strings are views of this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dmsg.clients.settings import RelayClientSettings
from dmsg.mux.client.service import ClientConfig
from dmsg.mux.core.e2e_negotiation import Security
from dmsg.ops.settings import flat, setting

#: The table in the configuration file.
ROLE: Final = "client"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings(RelayClientSettings):
    """A client: who it is, how it finds relays, what it asks of peers, and how it is tuned."""

    security: Security | None = setting(
        "what may be read on the way: e2e, never in the clear; prefer, in the clear only with peers that promise nothing "
        "better; hop, encrypted to the relay and from it",
        default=None,
        unset="prefer; e2e with a list of who may come in",
    )
    config: ClientConfig = flat(ClientConfig)
