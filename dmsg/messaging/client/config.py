"""The settings of a client of the messaging system."""

from __future__ import annotations

from dataclasses import dataclass, field

from dmsg.clients.config import RelayClientConfig
from dmsg.messaging.core.dialect import DIALECTS, V0, Dialect
from dmsg.messaging.core.limits import HANDSHAKE_TIMEOUT_S, ConnectionConfig
from dmsg.messaging.core.wire import GO, SEED, Layout
from dmsg.ops.settings import setting

LAYOUTS = {layout.name: layout for layout in (GO, SEED)}


def _dialect(name: str) -> None:
    if name not in DIALECTS:
        raise ValueError(f"must be one of {', '.join(DIALECTS)}")


def _layout(name: str) -> None:
    if name not in LAYOUTS:
        raise ValueError(f"must be one of {', '.join(LAYOUTS)}")


@dataclass(frozen=True, slots=True)
class MessagingConfig(RelayClientConfig):
    """All settings of a client, grouped by subject."""

    connection: ConnectionConfig = field(default_factory=ConnectionConfig)
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    dialect_name: str = setting(
        "what is spoken with peers: v0, v2, v3, v4 or v5, or seed; both ends have to say the same",
        default=V0.name,
        name="dialect",
        check=_dialect,
    )
    layout_name: str = setting(
        "the layout of frames: go, as the programs of 2019 have it, or seed, as it is described",
        default=GO.name,
        name="layout",
        check=_layout,
    )

    @property
    def dialect(self) -> Dialect:
        """The dialect for peers."""
        return DIALECTS[self.dialect_name]

    @property
    def layout(self) -> Layout:
        """The layout of frames."""
        return LAYOUTS[self.layout_name]
