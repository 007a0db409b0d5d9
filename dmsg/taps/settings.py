"""The settings of each role that twistd starts: options, environment and TOML tables are made from these declarations.

Importing this installs no reactor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from dmsg.address import HostPort, parse_ip
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG, PROTOCOLS
from dmsg.discovery.limits import DiscoveryLimits
from dmsg.discovery.proofs.limits import ProofLimits
from dmsg.discovery.ranks_source import REFRESH_S as RANKS_REFRESH_S
from dmsg.discovery.stores.rules import StoreLimits
from dmsg.errors import InvalidAddress
from dmsg.eventlog.files import LIMIT_BYTES, ROTATE_BYTES, ROTATE_S
from dmsg.messaging.relay.limits import RelayLimits as MessagingRelayLimits
from dmsg.mux.relay.limits import RelayLimits
from dmsg.ops.settings import setting
from dmsg.ops.values import DURATION, SIZE, TEXT, URL, Kind, more_than_zero
from dmsg.rmb.core.errors import InvalidLimit
from dmsg.rmb.core.limiter import Limit, parse_limit
from dmsg.rmb.core.limits import MAX_ENVELOPE_BYTES
from dmsg.rmb.core.twin import check_relay
from dmsg.rmb.relay.limits import RelayLimits as RmbRelayLimits
from dmsg.serving.limits import ServingLimits
from dmsg.shipping.destinations import parse_options

_LISTEN_HELP = "endpoint to listen on, such as tcp:8080:interface=127.0.0.1 or systemd:domain=INET:index=0"
_EVENTS_HELP = "where the event log goes: a directory, or - for standard output"
_ADMIN_HELP = "endpoint for /metrics, /livez and /readyz, such as tcp:9100:interface=127.0.0.1; never a public one"
_NODE_HELP = "name in logs and metrics"


def _limit(value: object) -> Limit:
    try:
        limit = parse_limit(str(value))
    except InvalidLimit as error:
        raise ValueError(f"must be COUNT,BYTES ({error})") from None
    if not (limit.count and limit.bytes):
        raise ValueError("must be at least 1,1: with 0 no envelope could be sent")
    return limit


LIMIT: Final = Kind("COUNT,BYTES", _limit, lambda limit: f"{limit.count},{limit.bytes}")


def _endpoint(value: object) -> str:
    """The text of an endpoint. IP:PORT, as the public relay takes it, becomes the endpoint with that address."""
    text = TEXT.parse(value)
    try:
        address = HostPort.parse(text)
    except InvalidAddress:
        return text
    ip = address.host
    if parse_ip(ip) is None:
        return text
    kind = "tcp6" if ":" in ip else "tcp"
    return f"{kind}:{address.port}:interface=" + ip.replace(":", "\\:")


ENDPOINT: Final = Kind("ENDPOINT", _endpoint)


class Verify(Enum):
    """How a shipped file is checked."""

    AUTO = "auto"
    READ = "read"


def _without_credentials(location: str) -> None:
    """Raise ``ValueError`` for a URL with a user or password, which would end up in the logs of proxies."""
    try:
        found = "://" in location and "@" in urlsplit(location).netloc
    except ValueError:
        raise ValueError("is not a URL") from None
    if found:
        raise ValueError("a URL with a user or password is not asked; one that is signed may be")


def _listed(protocol: str) -> None:
    """Raise ``ValueError`` for a protocol whose relays no discovery lists."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"is one of {', '.join(PROTOCOLS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonSettings:
    """What every role has."""

    events: str | None = setting(_EVENTS_HELP, default=None, may_be_path=True)
    events_limit: int = setting(
        "bytes that published files of events may take; beyond, the oldest are deleted; 0 for no limit",
        default=LIMIT_BYTES,
        kind=SIZE,
    )
    events_rotate_bytes: int = setting(
        "size, packed, at which a file of events is published", default=ROTATE_BYTES, check=more_than_zero
    )
    events_rotate_s: float = setting(
        "age in seconds at which a file of events is published", default=ROTATE_S, check=more_than_zero
    )
    admin: str | None = setting(_ADMIN_HELP, default=None)
    node: str | None = setting(_NODE_HELP, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings(CommonSettings):
    """What relays of all protocols have."""

    key: Path = setting("file with the server's secret key; dmsg keygen makes one", key_file=True)
    listen: str = setting(_LISTEN_HELP, default="tcp:8080")
    public_address: HostPort | None = setting("host:port under which clients reach the server", default=None)
    discovery: str | None = setting(
        "URL of the discovery to register in, such as http://127.0.0.1:9090", default=None, kind=URL
    )
    discovery_prefix: str = setting("first part of discovery's paths", default="messaging-discovery")
    drain_timeout: float | None = setting(
        "seconds open transports may go on after SIGTERM",
        default=None,
        kind=DURATION,
        unset="limit_drain_timeout_s",
    )
    limits: ServingLimits = field(default_factory=ServingLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(RelaySettings):
    """``twistd dmsg-server``: one relay."""

    aes: bool | None = setting(
        "seal with AES-256-GCM for clients that do, too: yes or no; none: where this processor has instructions for it",
        default=None,
    )
    limits: RelayLimits = field(default_factory=RelayLimits)


class FrameLayout(Enum):
    """How headers of frames are written (:ref:`spec-messaging-frames`)."""

    GO = "go"
    SEED = "seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagingServerSettings(RelaySettings):
    """``twistd messaging-server``: one relay of the messaging system."""

    layout: FrameLayout = setting(
        "layout of frames towards clients that have not sent one: go, as the programs of 2019, or seed",
        default=FrameLayout.GO,
    )
    go_quirks: bool = setting(
        "end channels by CloseChannel towards clients of 2019, which ignore ChannelClosed on open ones",
        default=False,
        flag=True,
    )
    limits: MessagingRelayLimits = field(default_factory=MessagingRelayLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings(CommonSettings):
    """``twistd dmsg-discovery``: entries over HTTP."""

    listen: str = setting(_LISTEN_HELP, default="tcp:9090")
    store: str = setting(
        "where entries are kept: sqlite:PATH, redis://host:port/db (also rediss:, redis+unix:), or memory: (lost at the end)",
        default="memory:",
        secret=True,
        may_be_path=True,
    )
    ranks: str | None = setting(
        "signed relay ranks to order servers by: a file, or an http or https URL",
        default=None,
        secret=True,
        may_be_path=True,
        check=_without_credentials,
    )
    ranks_key: tuple[PublicKey, ...] = setting("public keys whose ranks are believed", default=())
    ranks_refresh_s: float = setting(
        "how often the ranks are read again, in seconds", default=RANKS_REFRESH_S, check=more_than_zero
    )
    list_unproven: bool = setting(
        "list servers without connecting to them first; only where strangers cannot register, as in a closed network",
        default=False,
        flag=True,
    )
    list_protocol: str = setting(
        "whose relays a client is given that does not say what it speaks, as base clients do not: dmsg or messaging",
        default=DMSG,
        check=_listed,
    )
    private_addresses: bool | None = setting(
        "whether servers may be at addresses that are not global; none: if discovery listens on such an address",
        default=None,
    )
    drain_timeout: float = setting("seconds requests under way may take after SIGTERM", default=5.0, kind=DURATION)
    limits: DiscoveryLimits = field(default_factory=DiscoveryLimits)
    store_limits: StoreLimits = field(default_factory=StoreLimits)
    proof_limits: ProofLimits = field(default_factory=ProofLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShipperSettings(CommonSettings):
    """``twistd dmsg-shipper``: finished files of event logs, brought to where they are collected."""

    source: Path = setting("directory whose finished files are shipped: what other roles have as --events", name="from")
    target: str = setting(
        "where to: a directory, s3://bucket/prefix, hdfs://host:port/path, or another URL fsspec knows",
        name="to",
        secret=True,
        may_be_path=True,
    )
    option: str | None = setting(
        "storage option of fsspec, such as endpoint_url=http://127.0.0.1:9000 or region=eu-central-1; may be repeated, "
        "or hold several separated by spaces; never a credential",
        default=None,
        secret=True,
        check=parse_options,
    )
    once: bool = setting(
        "ship what is there and end, with status 1 if anything is left or damaged", default=False, flag=True
    )
    keep: bool = setting("move shipped files into DIR/.shipped instead of removing them", default=False, flag=True)
    verify: Verify = setting(
        "auto: by the store's checksum where it tells one that fits, by reading back otherwise; read: always read back",
        default=Verify.AUTO,
    )
    poll_s: float = setting("seconds between two looks at the directory", default=10.0, check=more_than_zero)
    parallel: int = setting("files that are shipped at a time", default=4)
    attempts: int = setting("failures after which --once leaves a file, or the target, alone", default=3)
    retry_limit_s: float = setting(
        "longest pause in seconds after failures, which doubles from one second; 60 times that for a file whose "
        "failures are its own",
        default=60.0,
        check=more_than_zero,
    )
    drain_timeout: float = setting("seconds uploads under way may take after SIGTERM", default=20.0, kind=DURATION)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinSettings(CommonSettings):
    """What roles of the Reliable Message Bus have: where twins are looked up."""

    registry: str | None = setting(
        "file with the twins, which dmsg rmb twin create makes", default=None, may_be_path=True
    )
    substrate: tuple[str, ...] = setting("WebSocket URLs of nodes of tfchain, in place of a registry file", default=())


def _names(domains: tuple[str, ...]) -> None:
    """Raise ``ValueError`` for a name that no twin can have for a relay: what waits for twins would be sent away."""
    for name in domains:
        check_relay(name)


class Posters(Enum):
    """Which relays may post envelopes to this one."""

    KNOWN = "known"
    OPEN = "open"


class PostScheme(Enum):
    """How other relays are posted to."""

    AUTO = "auto"
    HTTPS = "https"
    HTTP = "http"


@dataclass(frozen=True, slots=True, kw_only=True)
class RmbRelaySettings(TwinSettings):
    """``twistd rmb-relay``: one relay of the Reliable Message Bus."""

    listen: str = setting(f"{_LISTEN_HELP}; or IP:PORT", default="tcp:8080", kind=ENDPOINT)
    domain: tuple[str, ...] = setting("names by which twins name this relay in the registry", default=(), check=_names)
    store: str = setting(
        "where envelopes wait for sessions: memory: (lost at the end), sqlite:PATH, or redis://host:port/db (also rediss:, "
        "redis+unix:)",
        default="memory:",
        secret=True,
        may_be_path=True,
    )
    redis: str | None = setting("another name of --store, for a Redis", default=None, secret=True)
    limit: Limit | None = setting(
        "envelopes and bytes a twin may send in a minute, as COUNT,BYTES", default=None, kind=LIMIT
    )
    ranker_period: float = setting(
        "how long a failure of another relay counts against it, in seconds",
        default=3600.0,
        kind=DURATION,
        check=more_than_zero,
    )
    catchup_threshold: int = setting(
        "with --substrate: blocks missed that are caught up with; after more, all twins are looked up again",
        default=600,
    )
    workers: int | None = setting(
        "the most sessions are this number (500) times --user-per-worker (1000); if neither is given: limit_connections",
        default=None,
        check=more_than_zero,
    )
    user_per_worker: int | None = setting("see --workers", default=None, check=more_than_zero)
    max_message: int = setting("longest envelope in bytes", default=MAX_ENVELOPE_BYTES, kind=SIZE, check=more_than_zero)
    federation: Posters = setting(
        "which relays may post envelopes: known ones (--trust), or open to all, as the public relays are",
        default=Posters.KNOWN,
    )
    federation_scheme: PostScheme = setting(
        "how other relays are posted to: https, http, or auto, which is http only within this machine",
        default=PostScheme.AUTO,
    )
    trust: tuple[str, ...] = setting("a relay that may post, as DOMAIN=HEXKEY", default=())
    relay_key: Path | None = setting(
        "file with this relay's secret key, by which others know it", default=None, key_file=True
    )
    demand_audience: bool = setting(
        "refuse tokens that do not say which relay they are for; public programs' do not", default=False, flag=True
    )
    private_metrics: bool = setting("serve /metrics at the admin endpoint only", default=False, flag=True)
    drain_timeout: float | None = setting(
        "seconds for what is under way after SIGTERM", default=None, kind=DURATION, unset="limit_drain_timeout_s"
    )
    limits: RmbRelayLimits = field(default_factory=RmbRelayLimits)


def _key_type(value: object) -> str:
    word = str(value).lower()
    if word not in ("ed25519", "sr25519"):
        raise ValueError("must be ed25519 or sr25519")
    return word


_SECRET_HELP = (
    "the twin's secret, in place of a key file: 12 to 24 words, or 0x and 64 hex digits, or @FILE with either"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RmbPeerSettings(TwinSettings):
    """``twistd rmb-peer``: what connects the programs at a Redis with the Reliable Message Bus."""

    key: Path | None = setting(
        "file with the twin's secret key; dmsg rmb twin create makes one", default=None, key_file=True
    )
    mnemonic: str | None = setting(
        f"{_SECRET_HELP}; a command line can be read by others", default=None, secret=True, hidden=True
    )
    mnemonics: str | None = setting("another name of --mnemonic", default=None, secret=True, hidden=True)
    seed: str | None = setting("another name of --mnemonic", default=None, secret=True, hidden=True)
    key_type: str = setting(
        "what a secret that is not in a key file signs with", default="sr25519", kind=Kind("sr25519|ed25519", _key_type)
    )
    redis: str = setting(
        "the Redis of the programs, redis://host:port/db (also rediss:, redis+unix:)",
        default="redis://localhost:6379",
        secret=True,
    )
    relay: tuple[str, ...] = setting("WebSocket URL of a relay; up to four, all of which are used", default=())
    genesis: str | None = setting(
        "with --substrate: hash of the chain's first block; the twin's transaction is signed for no other chain",
        default=None,
    )
    no_update: bool = setting("leave the twin's key and relays in the registry as they are", default=False, flag=True)
    allow_plain: bool = setting(
        "take payloads in plain text, and send them so to twins without a key, as public peers do",
        default=False,
        flag=True,
    )
