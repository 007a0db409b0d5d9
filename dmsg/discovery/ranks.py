"""Relay ranks: a signed document that says how well each relay has served of late. Pure.

The document (:ref:`spec-relay-ranks`) is accepted when it is signed by a trusted key, is no older than the one before, and is
not from the future. Its ranks count in full for the first half of its lifetime and then fade to "neutral".

The effect of a rank is bounded: it makes a relay come earlier or later in a draw, by at most the factor between
:data:`WEIGHT_LIMIT` and :data:`WEIGHT_FLOOR`, and never excludes one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.errors import RanksError
from dmsg.discovery.signed import NUMBER_LIMIT, DocumentKind

#: Longest document in bytes: :data:`RELAYS_LIMIT` relays at about 175 bytes each, with room for white space.
DOCUMENT_LIMIT_BYTES: Final = 4 * 1024 * 1024
#: Most relays in a document. Reading that many takes about half a second, so it is done in a thread where there is one.
RELAYS_LIMIT: Final = 20_000
#: Scores and their parts are whole thousandths.
SCORE_LIMIT: Final = 1000
#: The score of an unknown relay.
NEUTRAL: Final = 500
#: Longest lifetime, and longest window of measurement, in seconds: 90 days. Older numbers say nothing.
SPAN_LIMIT_S: Final = 90 * 24 * 3600
#: Weights of the best and the worst relay, relative to a neutral one. So any relay is drawn first at least 1/64 as often as if
#: all were equal.
WEIGHT_LIMIT: Final = 8.0
WEIGHT_FLOOR: Final = 0.125

_SCORES: Final = ("score", "success", "latency", "capacity", "drops")
_COUNTS: Final = ("dials", "clients")
_RELAY_KEY: Final = re.compile(r"0[23][0-9a-f]{64}\Z")


#: The format of a document of ranks, and the tag of its signature.
KIND: Final = DocumentKind("dmsg-relay-ranks", 1, DOCUMENT_LIMIT_BYTES, RanksError)


def weight(score: float) -> float:
    """The weight in a draw of a relay with ``score`` (thousandths): 1 if neutral, growing with its third power.

    Between :data:`WEIGHT_FLOOR` (a score of 250 or less) and :data:`WEIGHT_LIMIT` (1000).
    """
    relative = min(max(score, 0.0), float(SCORE_LIMIT)) / NEUTRAL
    return max(WEIGHT_FLOOR, relative**3)


def sign_ranks(document: Mapping[str, Any], key: SecretKey) -> bytes:
    """``document`` as the issuer publishes it: ``issuer`` and ``signature`` added, in canonical form."""
    return KIND.sign(document, key)


@dataclass(frozen=True, slots=True)
class Ranks:
    """A verified document.

    ``issued`` is Unix time in seconds, ``lifetime_s`` and ``window_s`` are seconds, ``issuer`` has signed it,
    ``scores`` has thousandths by raw public key. ``document`` is the whole document in canonical form, to be passed on, and
    ``tag`` is its HTTP entity tag.
    """

    issued: int
    lifetime_s: int
    window_s: int
    issuer: PublicKey
    scores: Mapping[bytes, int]
    document: bytes
    tag: bytes

    @classmethod
    def parse(
        cls, data: bytes, trusted: Collection[PublicKey], now_s: float, *, previous: Ranks | None = None
    ) -> Ranks:
        """Read and verify a document; ``now_s`` is Unix time in seconds.

        Returns ``previous``, the document in force, when ``data`` says the same. Raises ``RanksError`` and nothing
        else; the error says what is wrong.
        """
        ranks = cls._check(*KIND.open(data, trusted))
        KIND.check_issued(ranks.issued, now_s)
        if previous is None:
            return ranks
        if ranks.document == previous.document:
            return previous
        KIND.check_later(ranks.issued, previous.issued)
        return ranks

    @classmethod
    def _check(cls, document: dict[str, Any], issuer: PublicKey) -> Ranks:
        scores = _scores(document.get("relays"))
        _check_excluded(document.get("excluded"))
        return cls(
            issued=KIND.number(document, "issued", 0, NUMBER_LIMIT),
            lifetime_s=KIND.number(document, "lifetime_s", 1, SPAN_LIMIT_S),
            window_s=KIND.number(document, "window_s", 1, SPAN_LIMIT_S),
            issuer=issuer,
            scores=scores,
            document=KIND.canonical(document, signature=document["signature"]),
            tag=b'"%s"' % document["signature"][:32].encode("ascii"),
        )

    def freshness(self, now_s: float) -> float:
        """How much the document still counts at Unix time ``now_s``: 1 up to half its lifetime, 0 from its end on."""
        age_s = now_s - self.issued
        return min(1.0, max(0.0, 2.0 * (1.0 - age_s / self.lifetime_s)))

    def effective(self, server: bytes, now_s: float) -> float:
        """The score (thousandths) of the relay with that raw public key at Unix time ``now_s``: 500 if not named."""
        score = self.scores.get(server)
        return float(NEUTRAL) if score is None else NEUTRAL + (score - NEUTRAL) * self.freshness(now_s)


def _scores(relays: Any) -> dict[bytes, int]:
    if type(relays) is not dict:
        KIND.bad("relays", "not an object")
    if len(relays) > RELAYS_LIMIT:
        raise RanksError("too_many_relays", f"more than {RELAYS_LIMIT}")
    scores: dict[bytes, int] = {}
    for key, members in relays.items():
        if not _RELAY_KEY.match(key):
            KIND.bad("relays", "a name is not a public key")
        if type(members) is not dict:
            KIND.bad("relays", "a relay is not an object")
        for name in _SCORES:
            KIND.number(members, name, 0, SCORE_LIMIT)
        for name in _COUNTS:
            KIND.number(members, name, 0, NUMBER_LIMIT)
        scores[bytes.fromhex(key)] = members["score"]
    return scores


def _check_excluded(excluded: Any) -> None:
    if type(excluded) is not dict:
        KIND.bad("excluded", "not an object")
    for name in ("clients", "events"):
        KIND.number(excluded, name, 0, NUMBER_LIMIT)
