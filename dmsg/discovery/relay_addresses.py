"""Which addresses of relays a discovery accepts. Pure."""

from __future__ import annotations

from dmsg.address import is_global, parse_ip
from dmsg.discovery.entry import Entry
from dmsg.discovery.errors import AddressNotGlobal


def is_ip(host: str) -> bool:
    """Whether ``host`` is an IP address and no name."""
    return parse_ip(host) is not None


class RelayAddresses:
    """Accepts global addresses always, and others by ``private``: ``True`` accepts them, ``False`` refuses them.

    With ``None``, the default, the address on which discovery itself listens decides (:meth:`listens_on`). On a loopback
    address it accepts loopback addresses; on a private address, private and loopback ones; elsewhere, a wildcard included,
    none of them. Otherwise a stranger could make discovery connect to hosts behind its own firewall. Addresses that belong
    to no single host (multicast, unspecified, reserved, link-local) are never accepted.
    """

    def __init__(self, private: bool | None = None) -> None:
        self._loopback = self._private = bool(private)
        self._fixed = private is not None

    def listens_on(self, host: str) -> None:
        """Discovery listens on ``host``: an IP address, or "" when it has none (a socket of another kind)."""
        address = parse_ip(host)
        if self._fixed or address is None or address.is_unspecified or is_global(host):
            return
        self._loopback = True
        self._private = self._private or not address.is_loopback

    def takes(self, host: str) -> bool:
        """Whether a relay may be at ``host``. A name is accepted until its addresses are known."""
        address = parse_ip(host)
        if address is None or is_global(host):
            return True
        if address.is_loopback:
            return self._loopback
        one_host = not (address.is_multicast or address.is_unspecified or address.is_reserved or address.is_link_local)
        return self._private and one_host

    def check(self, entry: Entry) -> None:
        """Raise ``AddressNotGlobal`` for a server's ``entry`` with an address that is not accepted."""
        if entry.server is not None:
            host = entry.server.host_port.host
            if not self.takes(host):
                raise AddressNotGlobal(host)
