"""Which addresses of relays a discovery takes. Pure."""

from __future__ import annotations

from dmsg.address import is_global, parse_ip
from dmsg.discovery.entry import Entry
from dmsg.discovery.errors import AddressNotGlobal


def is_ip(host: str) -> bool:
    """Whether ``host`` is an IP address and no name."""
    return parse_ip(host) is not None


class RelayAddresses:
    """Takes global addresses always, others by ``private``: ``True`` takes them, ``False`` refuses them.

    ``None``, the default, goes by where discovery itself listens (:meth:`listens_on`): on a loopback address it takes
    loopback addresses, on a private address it takes private and loopback ones, and elsewhere, a wildcard included, none
    of them. Otherwise a stranger could have discovery connect to hosts behind its own firewall. Addresses that belong
    to no single host (multicast, unspecified, reserved, link-local) are never taken.
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
        """Whether a relay may be at ``host``. A name may, until its addresses are known."""
        address = parse_ip(host)
        if address is None or is_global(host):
            return True
        if address.is_loopback:
            return self._loopback
        one_host = not (address.is_multicast or address.is_unspecified or address.is_reserved or address.is_link_local)
        return self._private and one_host

    def check(self, entry: Entry) -> None:
        """Raise ``AddressNotGlobal`` for a server's ``entry`` at an address that is not taken."""
        if entry.server is not None:
            host = entry.server.host_port.host
            if not self.takes(host):
                raise AddressNotGlobal(host)
