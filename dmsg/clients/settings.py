"""The settings of a client of any protocol, for options, variables, tables in TOML and endpoint strings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Final

from dmsg.address import PinnedServer
from dmsg.clients.config import RelayClientConfig
from dmsg.crypto.keys import PublicKey, SecretKey, read_key_file
from dmsg.discovery.entry import DMSG
from dmsg.errors import ConfigError
from dmsg.ops.settings import flat, setting
from dmsg.ops.values import DIRECTORY, LOCATION, TEXT, URL
from dmsg.relays.choice import RelaysFrom, RelaysMode
from dmsg.relays.state import state_file

#: Limit of ``min_servers``: more than any list of relays holds.
MIN_SERVERS_LIMIT: Final = 999
#: If an endpoint string sets one setting of a group, the others of the group are not taken from elsewhere, because the string
#: has named its network, or its list.
TOGETHER: Final = (("discovery", "server"), ("relays", "relays_key", "relays_mode"))


def _sessions(count: int) -> None:
    if count > MIN_SERVERS_LIMIT:
        raise ValueError(f"must be at most {MIN_SERVERS_LIMIT}")


def _directory(place: Path) -> None:
    if str(place) == "-":
        raise ValueError("must be a directory: standard output has the results of a command")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayClientSettings:
    """A client: who it is, and how it finds relays.

    Raises ``ConfigError`` for settings about a list of relays that contradict each other.
    """

    #: The protocol of its relays.
    protocol: ClassVar[str] = DMSG

    key: Path | None = setting(
        "key file: who you are; without it, a new key that ends with the client",
        default=None,
        key_file=True,
        unset="a new key",
    )
    discovery: str | None = setting(
        "URL of the discovery where entries are looked up and registered, http://host:port", default=None, kind=URL
    )
    servers: tuple[PinnedServer, ...] = setting(
        "relays to use whatever discovery says, pk@host:port; with them, discovery is not needed",
        default=(),
        name="server",
    )
    min_servers: int | None = setting(
        "relays that a client with a key stays connected to",
        default=None,
        unset="two of different network groups, or one if there is one group only",
        check=_sessions,
    )
    ranks_keys: tuple[PublicKey, ...] = setting(
        "whose relay ranks are believed when a relay is chosen", default=(), name="ranks_key", unset="no key's"
    )
    relays: str | None = setting(
        "an operator's signed list of relays: a file or URL", default=None, kind=LOCATION, secret=True, may_be_path=True
    )
    relays_keys: tuple[PublicKey, ...] = setting("who may have signed that list", default=(), name="relays_key")
    relays_mode: RelaysMode | None = setting(
        "whether relays that are not on the list are used when none of the list can be reached: prefer, or only the list's",
        default=None,
        unset="prefer",
    )
    state_dir: str = setting(
        "directory in which a client with a key keeps relays that worked, for its next start; none: nowhere",
        default="",
        kind=replace(TEXT, metavar="DIR|none"),
        may_be_path=True,
        unset="the user's directory for such things",
    )
    events: Path | None = setting(
        "directory of the event log", default=None, kind=DIRECTORY, unset="no log", check=_directory
    )

    config: RelayClientConfig = flat(RelayClientConfig)

    def __post_init__(self) -> None:
        self.relay_list()

    def read_key(self) -> SecretKey | None:
        """The key of the key file, if one is named. Raises ``KeyFileError``."""
        return None if self.key is None else read_key_file(self.key)

    def relay_file(self, key: SecretKey) -> Path | None:
        """The file in which relays that worked are kept; ``None`` for a key that ends with the client."""
        if self.key is None:
            return None
        return state_file(self.state_dir, key.public_key, self.discovery or "", self.protocol)

    def must_agree(self) -> dict[str, object]:
        """The values that must be equal in all endpoint strings that share a client, by the names of settings."""
        return {"relays": self.relay_list()}

    def relay_list(self) -> RelaysFrom | None:
        """The operator's list, if there is one."""
        if self.relays is None:
            for name, value in (("relays_key", self.relays_keys), ("relays_mode", self.relays_mode)):
                if value:
                    raise ConfigError(name, "there is no list of relays it could be about: relays")
            return None
        if not self.relays_keys:
            raise ConfigError("relays_key", "say whose list of relays is believed: a public key")
        return RelaysFrom(self.relays, self.relays_keys, self.relays_mode or RelaysMode.PREFER)
