"""The tables of a configuration file, one for each role. What a table declares is imported when it is asked for.

A relay needs nothing of what a client is made of, nor a client of what relays are: importing all takes a tenth of a start.
Importing this installs no reactor.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final

from dmsg.glue.reactors import REACTOR_VARIABLE
from dmsg.ops.config import CONFIG_VARIABLE
from dmsg.ops.settings import variables_of

#: Role -> module and name of its dataclass.
_PLACES: Final = {
    "client": ("dmsg.mux.client.settings", "ClientSettings"),
    "messaging": ("dmsg.messaging.client.settings", "MessagingSettings"),
    "server": ("dmsg.taps.settings", "ServerSettings"),
    "messaging-server": ("dmsg.taps.settings", "MessagingServerSettings"),
    "discovery": ("dmsg.taps.settings", "DiscoverySettings"),
    "shipper": ("dmsg.taps.settings", "ShipperSettings"),
    "rmb-relay": ("dmsg.taps.settings", "RmbRelaySettings"),
    "rmb-peer": ("dmsg.taps.settings", "RmbPeerSettings"),
}
#: Variables of the programs that make tables of event logs.
LOG_VARIABLES: Final = frozenset({"DMSG_LOGS_CACHE", "DMSG_LOGS_DRIVER_MEMORY"})


class _Tables(Mapping[str, type]):
    def __getitem__(self, role: str) -> type:
        module, name = _PLACES[role]
        found: Any = getattr(importlib.import_module(module), name)
        cls: type = found
        return cls

    def __contains__(self, role: object) -> bool:
        return role in _PLACES

    def __iter__(self) -> Iterator[str]:
        return iter(_PLACES)

    def __len__(self) -> int:
        return len(_PLACES)


#: Role, as the table is named -> the dataclass of its settings.
SETTINGS: Final[Mapping[str, type]] = _Tables()


@cache
def known_variables() -> frozenset[str]:
    """Every ``DMSG_*`` variable that means something to some role: one environment may serve several. Imports all tables."""
    return LOG_VARIABLES.union({CONFIG_VARIABLE, REACTOR_VARIABLE}, *map(variables_of, SETTINGS.values()))
