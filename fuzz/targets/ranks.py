"""Documents of relay ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any
from unittest import mock

from dmsg.discovery import ranks as module
from dmsg.discovery.errors import RanksError
from dmsg.discovery.ranks import KIND, WEIGHT_FLOOR, WEIGHT_LIMIT, Ranks, weight
from fuzz import words
from fuzz.oracles import KEYS, check_memory
from fuzz.signing import ISSUER, NOW_S, signed

DICTIONARY = words.RANKS

_TRUSTED = frozenset({ISSUER.public_key})
_NINETY_DAYS_S = 90 * 86_400
_MOST = 1 << 53
_SCORES = ("score", "success", "latency", "capacity", "drops")
_KEY = re.compile(r"0[23][0-9a-f]{64}")


def one_input(data: bytes) -> None:
    """The input is a document, or text that the trusted key signs. A second reader finds the same content or faults."""
    _read(data)
    document = signed(KIND, data)
    ranks = None if document is None else _read(document)
    if document is None or ranks is None:
        return
    plain = json.loads(document)
    assert ranks.issuer == ISSUER.public_key
    for name in ("issued", "lifetime_s", "window_s"):
        assert getattr(ranks, name) == plain[name]
    assert ranks.scores == {bytes.fromhex(key): relay["score"] for key, relay in plain["relays"].items()}
    assert ranks.document == document and ranks.tag.decode() == f'"{plain["signature"][:32]}"'
    _check_again(ranks, json.dumps(plain, indent=1).encode())
    for server in [*list(ranks.scores)[:3], bytes(33)]:
        for quarters in (-1, 0, 2, 3, 4, 5):
            _check_score(ranks, server, ranks.issued + Fraction(ranks.lifetime_s * quarters, 4))


def _read(data: bytes) -> Ranks | None:
    complaints = _complaints(data)
    try:
        ranks = Ranks.parse(data, _TRUSTED, NOW_S)
    except RanksError as error:
        assert complaints is None or error.reason in complaints, (error, complaints)
        return None
    assert complaints == set(), complaints
    check_memory(ranks, len(data))
    return ranks


def _complaints(data: bytes) -> set[str] | None:
    """The possible faults of a document that the trusted key signed; ``None`` for any other document."""
    try:
        document, _ = KIND.open(data, _TRUSTED)
    except RanksError:
        return None
    found: set[str] = set()
    numbers = [(document, name, 1, _NINETY_DAYS_S) for name in ("lifetime_s", "window_s")]
    numbers.append((document, "issued", 0, _MOST))
    relays, excluded = document.get("relays"), document.get("excluded")
    if isinstance(excluded, dict):
        numbers += [(excluded, name, 0, _MOST) for name in ("clients", "events")]
    else:
        found.add("bad_field")
    for key, relay in relays.items() if isinstance(relays, dict) else [("", None)]:
        if _KEY.fullmatch(key) and isinstance(relay, dict):
            numbers += [(relay, name, 0, 1_000) for name in _SCORES]
            numbers += [(relay, name, 0, _MOST) for name in ("dials", "clients")]
        else:
            found.add("bad_field")
    for members, name, least, most in numbers:
        value = members.get(name)
        if type(value) is not int or not least <= value <= most:
            found.add("bad_field")
        elif name == "issued" and value > NOW_S + 300:
            found.add("from_the_future")
    return found


def _check_again(ranks: Ranks, spelled: bytes) -> None:
    """The same content is the document in force, however it is spelled; another document must be newer.

    The limit of relays is made as small as the document, then smaller.
    """
    other = replace(ranks, document=b"{}")
    with mock.patch.object(module, "RELAYS_LIMIT", len(ranks.scores)):
        assert Ranks.parse(spelled, _TRUSTED, NOW_S, previous=ranks) is ranks
        assert _refused(spelled, other) == "rolled_back"
        assert Ranks.parse(spelled, _TRUSTED, NOW_S, previous=replace(other, issued=ranks.issued - 1)) == ranks
    with mock.patch.object(module, "RELAYS_LIMIT", len(ranks.scores) - 1):
        assert _refused(spelled, None) == "too_many_relays"


def _refused(data: bytes, previous: Ranks | None) -> str | None:
    try:
        Ranks.parse(data, _TRUSTED, NOW_S, previous=previous)
    except RanksError as error:
        return error.reason
    return None


def _check_score(ranks: Ranks, server: bytes, now_s: Fraction) -> None:
    """A score counts in full for half the lifetime, then falls linearly to neutral at its end; the weight is the cube."""
    fresh = min(max(2 - 2 * (now_s - ranks.issued) / ranks.lifetime_s, Fraction(0)), Fraction(1))
    score = 500 + (ranks.scores.get(server, 500) - 500) * fresh
    # Two roundings of a time in seconds, relative to a lifetime that may be short.
    near = 1e-6 + float(abs(now_s)) * 1e-15 / ranks.lifetime_s
    assert abs(ranks.freshness(float(now_s)) - fresh) <= near
    effective = ranks.effective(server, float(now_s))
    assert abs(effective - score) <= 1_000 * near
    found = weight(effective)
    assert WEIGHT_FLOOR <= found <= WEIGHT_LIMIT
    assert abs(found - min(max((effective / 500) ** 3, 1 / 8), 8)) < 1e-9


def _relay(changed: dict[str, Any]) -> dict[str, Any]:
    return {**dict.fromkeys((*_SCORES, "dials", "clients"), 500), **changed}


def seeds() -> Iterator[bytes]:
    """A whole document, unsigned and signed; its borders, the limit of each number on both sides."""
    keys = [str(key.public_key) for key in KEYS[:2]]
    document = {
        "issued": NOW_S - 60,
        "lifetime_s": 3_600,
        "window_s": 86_400,
        "relays": dict.fromkeys(keys, _relay({})),
        "excluded": {"clients": 1, "events": 2},
    }
    borders: list[dict[str, Any]] = [{}, {"issued": NOW_S + 301}, {"relays": {}}, {"lifetime_s": 0}, {"excluded": None}]
    for changed in (*borders, {"x": [1.5]}):
        text = json.dumps({**document, **changed}).encode()
        yield text
        yield signed(KIND, text) or b""
    borders = [{"issued": value} for value in (0, -1, NOW_S + 300, True, "0", None)]
    for name in ("lifetime_s", "window_s"):
        borders += [{name: value} for value in (1, 0, _NINETY_DAYS_S, _NINETY_DAYS_S + 1, 1.0)]
    for name in ("clients", "events"):
        for value in (0, -1, _MOST - 1, _MOST + 1, False):
            borders.append({"excluded": {"clients": 1, "events": 2, name: value}})
    for name in (*_SCORES, "dials", "clients"):
        for value in (0, -1, 1_000, 1_001, _MOST - 1, _MOST + 1):
            borders.append({"relays": {keys[0]: _relay({name: value})}})
    relays: tuple[Any, ...] = (
        *({keys[0]: None}, [], {keys[0].upper(): _relay({})}, {keys[0][:-1]: _relay({})}, {keys[0] + "0": _relay({})}),
        *({"04" + keys[0][2:]: _relay({})}, {keys[0] + "\n": _relay({})}, {keys[0]: {"score": 1}}),
        {keys[0]: _relay({"score": 1_000}), keys[1]: _relay({"score": 0})},
        {keys[0]: _relay({"score": 250}), keys[1]: _relay({"score": 251})},
    )
    for changed in (*borders, *({"relays": one} for one in relays), {"excluded": {}}):
        yield json.dumps({**document, **changed}).encode()
