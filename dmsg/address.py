"""Address values: who is talked to, and where a server listens. The only parser and printer of them. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from dmsg.crypto.keys import PublicKey
from dmsg.errors import InvalidAddress, InvalidKey

__all__ = ["DmsgAddress", "HostPort", "PinnedServer", "PublicKey", "check_service_name"]

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\.?\Z")
SERVICE_NAME_LIMIT_BYTES = 255


@dataclass(frozen=True, slots=True, order=True)
class HostPort:
    """``host:port`` with an ASCII host name, an IPv4 address or an IPv6 address in brackets; port 1 to 65535."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Read ``host:port`` or raise ``InvalidAddress``."""
        if not isinstance(text, str) or not text.isascii() or len(text) > 300:
            raise InvalidAddress("an address is ASCII host:port")
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit() or len(port) > 5 or not 0 < int(port) < 65536:
            raise InvalidAddress(f"{text!r} has no port between 1 and 65535")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            try:
                ipaddress.IPv6Address(host)
            except ValueError:
                raise InvalidAddress(f"{text!r} has no IPv6 address between its brackets") from None
        elif not _HOST_NAME.match(host):
            raise InvalidAddress(f"{text!r} has no usable host name")
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, order=True)
class PinnedServer:
    """A relay named without discovery: ``pk@host:port``."""

    public_key: PublicKey
    address: HostPort

    @classmethod
    def parse(cls, text: str) -> PinnedServer:
        """Read ``pk@host:port`` or raise ``InvalidAddress``."""
        key, at, address = text.partition("@")
        if not at:
            raise InvalidAddress("a pinned server is written pk@host:port")
        try:
            return cls(PublicKey.parse(key), HostPort.parse(address))
        except InvalidKey as error:
            raise InvalidAddress(str(error)) from None

    def __str__(self) -> str:
        return f"{self.public_key}@{self.address}"


def check_service_name(name: str) -> str:
    """Give ``name`` back if it fits a service TLV (at most 255 bytes of UTF-8), else raise ``InvalidAddress``."""
    if len(name.encode("utf-8", "surrogatepass")) > SERVICE_NAME_LIMIT_BYTES:
        raise InvalidAddress("a service name has at most 255 bytes")
    return name


@dataclass(frozen=True, slots=True)
class DmsgAddress:
    """One end of a transport: the entity, the service there ("" is the default one), and the relay in between.

    ``server_public_key`` is ``None`` for an end that is not bound to one relay (a listening port).
    """

    public_key: PublicKey
    service: str = ""
    server_public_key: PublicKey | None = None

    def __str__(self) -> str:
        service = f"/{self.service}" if self.service else ""
        via = f" via {self.server_public_key}" if self.server_public_key else ""
        return f"dmsg:{self.public_key}{service}{via}"
