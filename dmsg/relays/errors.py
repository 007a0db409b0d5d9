"""Why a relay, or a peer through one, could not be reached. Pure."""

from __future__ import annotations

from dmsg.discovery.errors import DocumentError
from dmsg.errors import DmsgError


class RelayFault(DmsgError):
    """A request failed because of the relay: another relay may do better. Protocols derive errors from it, too."""


class NoCommonRelay(DmsgError):
    """The peer's entry names no relay that could be tried."""


class SessionTimeout(DmsgError, TimeoutError):
    """A step of connecting or dialling took longer than its limit: ``stage`` names it, ``timeout_s`` is the limit.

    ``detail`` is what went wrong meanwhile, for people, if that is known.
    """

    def __init__(self, stage: str, timeout_s: float, detail: str = "") -> None:
        super().__init__(f"{stage} took longer than {round(timeout_s, 3):g} s" + (f" ({detail})" if detail else ""))
        self.stage = stage
        self.timeout_s = timeout_s
        self.detail = detail


class ServerLost(DmsgError):
    """The connection to the relay ``server`` (hex) ended: ``reason`` is a fixed text, ``detail`` is for people."""

    def __init__(self, server: str, reason: str, detail: str = "") -> None:
        super().__init__(f"the connection to server {server} was lost: {detail or reason}")
        self.server, self.reason, self.detail = server, reason, detail


class RelayListError(DocumentError):
    """A list of relays that is not accepted, or cannot be read; the last accepted one stays in force until it expires."""
