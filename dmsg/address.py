"""Address values: the peer to talk to, and where a server listens. The only parser and printer of them. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import SplitResult, quote, unquote, urlsplit

from dmsg.crypto.errors import InvalidKey
from dmsg.crypto.keys import PublicKey
from dmsg.errors import InvalidAddress

_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
#: The zone of an IPv6 address: one of a host's own networks. The library accepts any characters there, even control ones.
_ZONE = re.compile(r"[A-Za-z0-9._-]{1,15}\Z")
_HOST_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\.?\Z")
SERVICE_NAME_LIMIT_BYTES = 255
#: Parsed addresses that are cached, because limits ask for the same ones again and again: 5 µs each. Strangers can fill the
#: caches, which then take 0.7 MiB, including a relay's cache of origins.
_PARSED_ADDRESSES = 1024


@dataclass(frozen=True, slots=True, order=True)
class HostPort:
    """``host:port`` with an ASCII host name, an IPv4 address or an IPv6 address in brackets; port 1 to 65535.

    Entries have the address of a server in this form (:ref:`spec-entries`).
    """

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
            _, percent, zone = host.partition("%")
            try:
                ipaddress.IPv6Address(host)
                if percent and not _ZONE.match(zone):
                    raise ValueError("no zone")
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
        key, at, address = text.partition("@") if isinstance(text, str) else ("", "", "")
        if not at:
            raise InvalidAddress("a pinned server is written pk@host:port")
        try:
            return cls(PublicKey.parse(key), HostPort.parse(address))
        except InvalidKey as error:
            raise InvalidAddress(str(error)) from None

    def __str__(self) -> str:
        return f"{self.public_key}@{self.address}"


#: The longest path of a UNIX socket, in bytes, without the zero at its end.
_SOCKET_PATH_LIMIT_BYTES = 107
_REDIS_FORMS = "a Redis URL is redis://host:port/db, rediss://host:port/db (TLS) or redis+unix:///path?db=0"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A database of a Redis: ``redis://[user:password@]host[:port][/number]``, with ``rediss`` over TLS, or
    ``redis+unix://[user:password@]/path[?db=number]``. Its text has no credentials.

    ``server`` is its address, or the path of its UNIX socket.
    """

    server: HostPort | str
    database: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    secure: bool = False

    @staticmethod
    def is_url(text: str) -> bool:
        """Whether ``text`` has the scheme of a Redis URL."""
        return text.partition(":")[0].lower() in ("redis", "rediss", "redis+unix")

    @classmethod
    def parse(cls, url: str) -> RedisAddress:
        """Read the URL or raise ``InvalidAddress``, whose text has nothing of the URL: it may hold a password."""
        try:
            # the library drops characters that are not allowed in a URL
            if not url.isprintable() or not cls.is_url(url):
                raise ValueError
            parts = urlsplit(url)
            server, number = _redis_server(parts)
        except ValueError:
            raise InvalidAddress(_REDIS_FORMS) from None
        username, password = (None if not word else unquote(word) for word in (parts.username, parts.password))
        return cls(server, number, username, password, parts.scheme == "rediss")

    def __str__(self) -> str:
        if isinstance(self.server, str):
            return f"redis+unix://{quote(self.server)}?db={self.database}"
        return f"redis{'s' if self.secure else ''}://{self.server}/{self.database}"


def _redis_server(parts: SplitResult) -> tuple[HostPort | str, int]:
    """Where the Redis of a URL listens, and the number of the database; raises ``ValueError``."""
    if parts.fragment or parts.port == 0:
        raise ValueError
    if parts.scheme == "redis+unix":
        path, query = unquote(parts.path, errors="strict"), parts.query or "db=0"
        is_path = path.startswith("/") and path.isprintable() and len(path.encode()) <= _SOCKET_PATH_LIMIT_BYTES
        # what looks like a port may be the beginning of a password with a "/"
        if parts.hostname or parts.port is not None or not query.startswith("db=") or not is_path:
            raise ValueError
        return path, _redis_database(query[3:] or "0")
    if parts.query:
        raise ValueError
    host, port = parts.hostname or "", parts.port or 6379
    server = HostPort.parse(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return server, _redis_database(parts.path.removeprefix("/") or "0")


def _redis_database(number: str) -> int:
    if not number.isascii() or not number.isdecimal() or len(number) > 5 or int(number) >= 1 << 16:
        raise ValueError
    return int(number)


#: The parts of IPv6 that lead to other hosts: global unicast addresses, and IPv4 addresses for a translator, which may be in a
#: private network.
_UNICAST = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@lru_cache(maxsize=_PARSED_ADDRESSES)
def parse_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address in ``host``, with an IPv4 address mapped into IPv6 as IPv4; ``None`` for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


@lru_cache(maxsize=_PARSED_ADDRESSES)
def address_group(host: str) -> str:
    """The group that counts as one address for a limit: an IPv4 address, or the /64 in which an IPv6 host chooses its address.

    A name counts as itself, in lower case.
    """
    address = parse_ip(host)
    if address is None:
        return host.lower()
    return str(address) if address.version == 4 else f"{int(address) >> 64:016x}::/64"


@lru_cache(maxsize=_PARSED_ADDRESSES)
def network_group(host: str) -> str:
    """The network that an operator gets in one piece: the /24 of an IPv4 address, the /48 of an IPv6 address.

    All names together are one group: a name costs nothing, and its addresses are not known here.
    """
    address = parse_ip(host)
    if address is None:
        return "name"
    if address.version == 4:
        return f"{ipaddress.IPv4Address(int(address) >> 8 << 8)}/24"
    return f"{ipaddress.IPv6Address(int(address) >> 80 << 80)}/48"


def is_global(host: str) -> bool:
    """Whether ``host`` is an IP address that can be reached from everywhere. ``False`` for a name."""
    address = parse_ip(host)
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        elif address in _UNICAST:
            address = address.sixtofour or address
        else:
            return False
    return address is not None and address.is_global and not address.is_multicast


def check_service_name(name: str) -> str:
    """Return ``name`` if it fits a service TLV (at most 255 bytes of UTF-8), else raise ``InvalidAddress``."""
    try:
        size = len(name.encode())
    except (AttributeError, UnicodeEncodeError):  # bytes, or an argument that was not UTF-8
        raise InvalidAddress("a service name is Unicode text") from None
    if size > SERVICE_NAME_LIMIT_BYTES:
        raise InvalidAddress("a service name has at most 255 bytes")
    return name


def is_host_name(text: str) -> bool:
    """Whether ``text`` is an ASCII host name: labels of letters, digits, ``-`` and ``_``."""
    return _HOST_NAME.match(text) is not None


def check_http_url(text: str) -> str:
    """Return ``text`` without slashes at its end if it is an http or https URL; otherwise raise ``InvalidAddress``.

    The URL must have no user, password, query or fragment.
    """
    try:
        parts = urlsplit(text)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        usable = None
    if (
        not usable
        or not text.isascii()
        or not text.isprintable()
        or any(mark in text for mark in " ?#")  # also of a query or a fragment that is empty
        or parts.username is not None
    ):
        raise InvalidAddress("must be http://host:port")
    return text.rstrip("/")


class _KeyAsHost(str):
    """A key as text, for programs that expect a host name: it may be encoded as one."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """As of any text, but in IDNA it stays as it is, although no label of a name has 66 characters."""
        return super().encode("ascii" if encoding == "idna" else encoding, errors)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """A pickle has the text alone, which programs without this package can read, too."""
        return str, (str(self),)


@dataclass(frozen=True, slots=True)
class DmsgAddress:
    """One end of a transport: the entity, its service ("" is the default service), and the relay in between.

    ``server_public_key`` is ``None`` for an end that is not bound to one relay (a listening port). Endpoint strings of its
    protocol begin with ``scheme``.
    """

    public_key: PublicKey
    service: str = ""
    server_public_key: PublicKey | None = None
    scheme: str = "dmsg"

    @property
    def host(self) -> str:
        """The key as text, for programs written for TCP, which log the host or pass it on."""
        return _KeyAsHost(self.public_key)

    @property
    def port(self) -> int:
        """0, because there are no ports; for programs written for TCP."""
        return 0

    def __str__(self) -> str:
        service = f"/{self.service}" if self.service else ""
        via = f" via {self.server_public_key}" if self.server_public_key else ""
        return f"{self.scheme}:{self.public_key}{service}{via}"
