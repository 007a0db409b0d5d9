"""What discovery remembers of one relay while it finds out whether it is where its entry says. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dmsg.address import HostPort
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.entry import DMSG


class RelayState(Enum):
    """What a record waits for."""

    #: Its turn.
    WAITING = "waiting"
    #: The outcome of a proof that is under way.
    PROVING = "proving"
    #: Its time to be proved again.
    RESTING = "resting"
    #: Nothing: it is forgotten.
    GONE = "gone"


TRANSITIONS: Final[Mapping[RelayState, frozenset[RelayState]]] = {
    RelayState.WAITING: frozenset({RelayState.PROVING, RelayState.GONE}),
    RelayState.PROVING: frozenset({RelayState.RESTING, RelayState.WAITING, RelayState.GONE}),
    RelayState.RESTING: frozenset({RelayState.WAITING, RelayState.GONE}),
    RelayState.GONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class RelayRecord:
    """One relay: where it says it is and what it says it speaks, and what is known of that.

    ``source`` is the network (/24, /48) that registered it last, "" if that is not known. ``network`` is the network it
    was proved in, "" while it is not proved; ``failures`` counts failed proofs since the last good one.
    """

    static: PublicKey
    address: HostPort
    source_host: str
    offered_at: float
    protocol: str = DMSG
    source: str = ""
    target: str = ""
    network: str = ""
    failures: int = 0
    #: Attempts in vain since the last good proof, while it is listed.
    misses: int = 0
    #: How often it had its turn in vain since its last proof, because a budget was used up.
    postponements: int = 0
    available: bool = True
    state: RelayState = RelayState.RESTING
    due: float = 0.0
    #: The address or the protocol changed while a proof of the old one was under way.
    moved: bool = False

    @property
    def key(self) -> bytes:
        """The raw public key."""
        return self.static.raw

    @property
    def proved(self) -> bool:
        """Whether the last proof was a good one."""
        return self.network != ""

    def move(self, state: RelayState) -> None:
        """Go to ``state``; ``ValueError`` if there is no way there."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"a relay's record does not go from {self.state.value} to {state.value}")
        self.state = state
