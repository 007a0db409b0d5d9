"""How many handshakes a relay does for strangers, and the cookies that it asks for when there are many.

Pure. A handshake costs a relay some 500 microseconds, mostly for three Diffie-Hellmans, and a stranger can record the
first message of another and send it again. So each handshake takes its tokens (:mod:`dmsg.serving.handshake_rates`) before
the first Diffie-Hellman. The lower half of every bucket is kept for handshakes with a cookie (:ref:`spec-cookie`).
"""

from __future__ import annotations

import hmac
import os
from typing import Final

from dmsg.crypto.keys import Random
from dmsg.crypto.noise import XK_MESSAGE_BYTES
from dmsg.errors import RemoteProtocolError
from dmsg.mux.core.handshake import COOKIE_BYTES
from dmsg.serving.admission import Origin
from dmsg.serving.handshake_rates import HandshakeRates
from dmsg.serving.limits import ServingLimits

#: A secret makes cookies for this time and opens them for twice as long: a handshake may not take longer.
COOKIE_SLOT_S: Final = 16.0
_SECRET_BYTES: Final = 32


class CookieJar:
    """Makes and opens cookies: a MAC over time slot, address group and first message under a secret of the time slot."""

    def __init__(self, *, random: Random = os.urandom) -> None:
        self._random = random
        self._secrets: dict[int, bytes] = {}

    def make(self, address: str, message: bytes, now: float) -> bytes:
        """A cookie for a first message from an address group."""
        slot = int(now // COOKIE_SLOT_S)
        secret = self._secrets.get(slot)
        if secret is None:
            self._secrets = {at: key for at, key in self._secrets.items() if at == slot - 1}
            secret = self._secrets[slot] = self._random(_SECRET_BYTES)
        return _mac(secret, slot, address, message)

    def opens(self, cookie: bytes, address: str, message: bytes, now: float) -> bool:
        """Whether ``cookie`` was made here for the same message and address group, in this time slot or the last one."""
        slot = int(now // COOKIE_SLOT_S)
        return any(
            hmac.compare_digest(cookie, _mac(self._secrets[at], at, address, message))
            for at in (slot, slot - 1)
            if at in self._secrets
        )


def _mac(secret: bytes, slot: int, address: str, message: bytes) -> bytes:
    host = address.encode("utf-8", "surrogateescape")
    text = b"dmsg/0.1 cookie" + slot.to_bytes(8, "big", signed=True) + len(host).to_bytes(2, "big") + host + message
    return hmac.digest(secret, text, "sha256")


class HandshakeBudget(HandshakeRates):
    """The token buckets of all strangers, half of each for those that bring a cookie."""

    def __init__(self, limits: ServingLimits, now: float, *, random: Random = os.urandom, cookies: bool = True) -> None:
        super().__init__(limits, now)
        self._cookies = CookieJar(random=random) if cookies else None

    def gate(self, origin: Origin) -> Gate:
        """The gate for the handshake of one connection from ``origin``."""
        return Gate(self, origin)

    def judge(self, origin: Origin, message: bytes, now: float) -> tuple[bytes, bytes]:
        """The first message to go on with, or the cookie to answer with. Raises ``RemoteProtocolError`` for a refusal.

        A message loses a cookie of ours at its end; others are passed on unchanged.
        """
        proved = False
        jar = self._cookies
        bare = XK_MESSAGE_BYTES[0]
        if jar is not None and len(message) == bare + COOKIE_BYTES:
            proved = jar.opens(message[bare:], origin.address, message[:bare], now)
            message = message[:bare] if proved else message
        refusal = self.take(origin, now, kept=0.0 if proved or jar is None else 0.5)
        if not refusal:
            return message, b""
        if jar is None or proved:
            raise RemoteProtocolError("accept", refusal)
        return b"", jar.make(origin.address, message[:bare], now)


class Gate:
    """A :class:`HandshakeBudget` as seen by one connection."""

    __slots__ = ("_budget", "_origin")

    def __init__(self, budget: HandshakeBudget, origin: Origin) -> None:
        self._budget = budget
        self._origin = origin

    def judge(self, message: bytes, now: float) -> tuple[bytes, bytes]:
        """See :class:`dmsg.mux.core.handshake.FirstMessageGate`."""
        return self._budget.judge(self._origin, message, now)
