"""How clients of 2019 differ in what they send to each other (:ref:`spec-messaging-dialects`).

A dialect cannot be detected safely, so it is configured. The layout of frames is independent of it: it is between a client
and its relay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True, slots=True)
class Dialect:
    """How two clients speak with each other."""

    name: str
    #: Each side of a link has ids of its own, and ChannelOpened carries the id of the side that answers. Otherwise a
    #: channel has one id on a link, in both directions.
    own_ids: bool
    #: Payloads are acknowledged inside the ciphertexts (:ref:`spec-messaging-acks`).
    acks: bool
    #: A new key is derived before each message whose number is a multiple of this; 0 if never.
    rekey_every: int
    #: Each ciphertext begins with its number, which is its nonce.
    numbered: bool


#: March 2019, and the one that the description of the protocol matches.
V0: Final = Dialect("v0", own_ids=False, acks=True, rekey_every=10, numbered=False)
#: Exactly as the protocol is described: without acknowledgements.
SEED_DIALECT: Final = replace(V0, name="seed", acks=False)
V2: Final = replace(V0, name="v2", own_ids=True)
V3: Final = replace(V2, name="v3", acks=False)
V4: Final = replace(V3, name="v4", rekey_every=11)
V5: Final = replace(V3, name="v5", rekey_every=0, numbered=True)

#: By name, as a setting has it.
DIALECTS: Final = {dialect.name: dialect for dialect in (V0, SEED_DIALECT, V2, V3, V4, V5)}
