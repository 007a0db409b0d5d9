"""Relay ranks: a signed document that says how well each relay has served of late. Pure.

The document is JSON; its signature covers the canonical form of everything but ``signature``: members sorted, no white
space, ASCII only. It is believed when it is signed by a key that is trusted, is no older than the one before, and is
not from the future; what it says counts in full for the first half of its lifetime and then fades to "neutral".

What a rank can do is bounded: it makes a relay come earlier or later in a draw, by the factor between
:data:`WEIGHT_LIMIT` and :data:`WEIGHT_FLOOR`, and never leaves one out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery import json_text
from dmsg.errors import BadInput, DmsgError, InvalidKey, InvalidSignature

__all__ = [
    "DOCUMENT_LIMIT_BYTES",
    "NEUTRAL",
    "RELAYS_LIMIT",
    "Ranks",
    "RanksError",
    "canonical",
    "sign_ranks",
    "weight",
]

FORMAT: Final = "dmsg-relay-ranks"
VERSION: Final = 1
#: Longest document in bytes: :data:`RELAYS_LIMIT` relays at about 175 bytes each, with room for white space.
DOCUMENT_LIMIT_BYTES: Final = 4 * 1024 * 1024
#: Relays in a document. Reading so many takes about half a second, so it is done in a thread where there is one.
RELAYS_LIMIT: Final = 20_000
#: Scores and their parts are whole thousandths.
SCORE_LIMIT: Final = 1000
#: The score of a relay nobody knows anything about.
NEUTRAL: Final = 500
#: How far the issuer's clock may be ahead of ours, in seconds.
AHEAD_S: Final = 300
#: Longest lifetime, and longest window the numbers are from, in seconds: 90 days. What is older says nothing.
SPAN_LIMIT_S: Final = 90 * 24 * 3600
#: Unix seconds, and counts of dials, clients and events, are below this.
NUMBER_LIMIT: Final = 1 << 53
#: How much likelier than a neutral one the best relay is drawn, and the worst one. So a relay, whatever is said of it,
#: is drawn first at least 1/64 as often as if all were equal.
WEIGHT_LIMIT: Final = 8.0
WEIGHT_FLOOR: Final = 0.125

_SCORES: Final = ("score", "success", "latency", "capacity", "drops")
_COUNTS: Final = ("dials", "clients")
_RELAY_KEY: Final = re.compile(r"0[23][0-9a-f]{64}\Z")


class RanksError(DmsgError):
    """A document of relay ranks that is not used, or cannot be had; whatever was known before stays in force.

    ``reason`` is a short fixed text: ``unreadable`` (the file or URL gives nothing), ``too_long``, ``not_json``,
    ``wrong_format``, ``wrong_version``, ``bad_field``, ``too_many_relays``, ``untrusted`` (signed by no key that is
    trusted), ``bad_signature``, ``from_the_future``, ``rolled_back`` (older than one seen before).
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason.replace('_', ' ')}: {detail}" if detail else reason.replace("_", " "))
        self.reason = reason
        self.detail = detail


def weight(score: float) -> float:
    """The weight in a draw of a relay with ``score`` (thousandths): 1 if neutral, growing with its third power.

    Between :data:`WEIGHT_FLOOR` (a score of 250 or less) and :data:`WEIGHT_LIMIT` (1000).
    """
    relative = min(max(score, 0.0), float(SCORE_LIMIT)) / NEUTRAL
    return max(WEIGHT_FLOOR, relative**3)


def canonical(document: Mapping[str, Any]) -> bytes:
    """The text a signature covers, of a document with or without its ``signature``.

    Raises ``RanksError`` when there is none: numbers JSON does not have, or objects of other kinds.
    """
    unsigned = {name: value for name, value in document.items() if name != "signature"}
    return _encode(unsigned)


def sign_ranks(document: Mapping[str, Any], key: SecretKey) -> bytes:
    """``document`` as the issuer hands it out: ``issuer`` and ``signature`` added, in canonical form."""
    issued = {**document, "issuer": str(key.public_key)}
    issued.pop("signature", None)
    return _encode({**issued, "signature": key.sign(canonical(issued)).hex()})


def _encode(document: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError):
        raise RanksError("bad_field", "a number that is none of ours") from None


@dataclass(frozen=True, slots=True)
class Ranks:
    """A document that was verified.

    ``issued`` is Unix time in seconds, ``lifetime_s`` and ``window_s`` are seconds, ``issuer`` is who signed it,
    ``scores`` has thousandths by raw public key. ``document`` is all of it in canonical form, to be handed on, and ``tag``
    what tells it from others: an HTTP entity tag.
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

        ``previous``, the one in force, is given back when ``data`` says the same. Raises ``RanksError`` and nothing
        else; it tells what is wrong.
        """
        document = _read(data)
        ranks = cls._check(document, trusted)
        if ranks.issued > now_s + AHEAD_S:
            raise RanksError("from_the_future", f"issued {ranks.issued - now_s:.0f} s from now")
        if previous is None:
            return ranks
        if ranks.document == previous.document:
            return previous
        if ranks.issued <= previous.issued:
            raise RanksError("rolled_back", f"issued {previous.issued - ranks.issued} s before the one in force")
        return ranks

    @classmethod
    def _check(cls, document: dict[str, Any], trusted: Collection[PublicKey]) -> Ranks:
        if document.get("format") != FORMAT:
            raise RanksError("wrong_format", f"the format is not {FORMAT}")
        if type(document.get("version")) is not int or document["version"] != VERSION:
            raise RanksError("wrong_version", f"the version is not {VERSION}")
        # Who signed comes first: nothing else that a stranger wrote needs to be looked at.
        issuer = _issuer(document, trusted)
        scores = _scores(document.get("relays"))
        _check_excluded(document.get("excluded"))
        return cls(
            issued=_number(document, "issued", 0, NUMBER_LIMIT),
            lifetime_s=_number(document, "lifetime_s", 1, SPAN_LIMIT_S),
            window_s=_number(document, "window_s", 1, SPAN_LIMIT_S),
            issuer=issuer,
            scores=scores,
            document=_encode(document),
            tag=b'"%s"' % document["signature"][:32].encode("ascii"),
        )

    def freshness(self, now_s: float) -> float:
        """How much the document still says at Unix time ``now_s``: 1 up to half its lifetime, 0 from the end of it on."""
        age_s = now_s - self.issued
        return min(1.0, max(0.0, 2.0 * (1.0 - age_s / self.lifetime_s)))

    def effective(self, server: bytes, now_s: float) -> float:
        """The score (thousandths) of the relay with that raw public key at Unix time ``now_s``: 500 if not named."""
        score = self.scores.get(server)
        return float(NEUTRAL) if score is None else NEUTRAL + (score - NEUTRAL) * self.freshness(now_s)


def _read(data: bytes) -> dict[str, Any]:
    if len(data) > DOCUMENT_LIMIT_BYTES:
        raise RanksError("too_long", f"longer than {DOCUMENT_LIMIT_BYTES} bytes")
    try:
        document = json_text.decode(data, DOCUMENT_LIMIT_BYTES)
    except BadInput as error:
        raise RanksError("not_json", error.detail) from None
    if type(document) is not dict:
        raise RanksError("wrong_format", "not an object")
    return document


def _issuer(document: dict[str, Any], trusted: Collection[PublicKey]) -> PublicKey:
    try:
        issuer = PublicKey.parse(document.get("issuer", ""))
    except InvalidKey as error:
        raise RanksError("bad_field", f"issuer: {error}") from None
    if issuer not in trusted:
        raise RanksError("untrusted", f"issued by {issuer}")
    text = document.get("signature")
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{130}", text):
        raise RanksError("bad_signature", "not 130 hex digits")
    try:
        issuer.verify(bytes.fromhex(text), canonical(document))
    except InvalidSignature as error:
        raise RanksError("bad_signature", str(error)) from None
    return issuer


def _number(members: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = members.get(name)
    if type(value) is not int or not least <= value <= most:
        _bad(name, f"not a whole number from {least} to {most}")
    return value


def _scores(relays: Any) -> dict[bytes, int]:
    if type(relays) is not dict:
        _bad("relays", "not an object")
    if len(relays) > RELAYS_LIMIT:
        raise RanksError("too_many_relays", f"more than {RELAYS_LIMIT}")
    scores: dict[bytes, int] = {}
    for key, members in relays.items():
        if not _RELAY_KEY.match(key):
            _bad("relays", "a name is not a public key")
        if type(members) is not dict:
            _bad("relays", "a relay is not an object")
        for name in _SCORES:
            _number(members, name, 0, SCORE_LIMIT)
        for name in _COUNTS:
            _number(members, name, 0, NUMBER_LIMIT)
        scores[bytes.fromhex(key)] = members["score"]
    return scores


def _check_excluded(excluded: Any) -> None:
    if type(excluded) is not dict:
        _bad("excluded", "not an object")
    for name in ("clients", "events"):
        _number(excluded, name, 0, NUMBER_LIMIT)


def _bad(name: str, problem: str) -> NoReturn:
    raise RanksError("bad_field", f"{name}: {problem}")
