"""Discovery's record of one relay and of its proofs. Pure."""

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

    #: For its turn to be proved.
    WAITING = "waiting"
    #: For the result of a proof that is under way.
    PROVING = "proving"
    #: For the time of its next proof.
    RESTING = "resting"
    #: For nothing: it is forgotten.
    GONE = "gone"


TRANSITIONS: Final[Mapping[RelayState, frozenset[RelayState]]] = {
    RelayState.WAITING: frozenset({RelayState.PROVING, RelayState.GONE}),
    RelayState.PROVING: frozenset({RelayState.RESTING, RelayState.WAITING, RelayState.GONE}),
    RelayState.RESTING: frozenset({RelayState.WAITING, RelayState.GONE}),
    RelayState.GONE: frozenset(),
}


@dataclass(slots=True, eq=False)
class RelayRecord:
    """One relay: the address and protocol that it claims, and the results of its proofs.

    ``source`` is the network (/24, /48) that registered it last, "" if unknown. ``network`` is the network in which it was
    proved, "" while it is not proved; ``failures`` counts failed proofs since the last successful one.
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
    #: The IP address at which it was proved, if the last proof was successful.
    ip: str = ""
    #: Which of several addresses of its name is tried otherwise: the next one after each failed proof.
    turn: int = 0
    #: Failed attempts since the last successful proof, while it is listed.
    misses: int = 0
    #: Turns since its last proof in which it was not tried, because a budget was used up.
    postponements: int = 0
    available: bool = True
    state: RelayState = RelayState.RESTING
    due: float = 0.0
    #: When its next proof is due if it registers again before.
    due_if_offered: float = 0.0
    #: It has registered again, as before, while a proof was under way: if that fails, it was perhaps too early.
    offered_again: bool = False
    #: The address or the protocol changed while a proof of the old one was under way.
    moved: bool = False

    @property
    def key(self) -> bytes:
        """The raw public key."""
        return self.static.raw

    @property
    def proved(self) -> bool:
        """Whether the relay is proved."""
        return self.network != ""

    def move(self, state: RelayState) -> None:
        """Go to ``state``; ``ValueError`` if that transition does not exist."""
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"a relay's record does not go from {self.state.value} to {state.value}")
        self.state = state
