"""Documents of relay ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator

from dmsg.discovery.errors import RanksError
from dmsg.discovery.ranks import KIND, WEIGHT_FLOOR, WEIGHT_LIMIT, Ranks, weight
from fuzz import words
from fuzz.oracles import KEYS, check_memory
from fuzz.signing import ISSUER, NOW_S, signed

DICTIONARY = words.RANKS

_TRUSTED = frozenset({ISSUER.public_key})


def one_input(data: bytes) -> None:
    """The input is a document, or what the trusted key signs."""
    _read(data, None)
    document = signed(KIND, data)
    if document is None:
        return
    ranks = _read(document, None)
    if ranks is None:
        return
    assert ranks.issuer == ISSUER.public_key
    assert _read(document, ranks) is ranks
    again = _read(ranks.document, ranks)
    assert again is ranks
    for server in [*list(ranks.scores)[:4], bytes(33)]:
        for now_s in (0, NOW_S, NOW_S + 10**9):
            assert WEIGHT_FLOOR <= weight(ranks.effective(server, now_s)) <= WEIGHT_LIMIT


def _read(data: bytes, previous: Ranks | None) -> Ranks | None:
    try:
        ranks = Ranks.parse(data, _TRUSTED, NOW_S, previous=previous)
    except RanksError as error:
        assert error.reason.replace("_", "").isalnum()
        return None
    check_memory(ranks, len(data))
    return ranks


def seeds() -> Iterator[bytes]:
    """A whole document, unsigned and signed; its borders."""
    relay = dict.fromkeys(("score", "success", "latency", "capacity", "drops", "dials", "clients"), 500)
    relays = {str(key.public_key): relay for key in KEYS[:2]}
    document = {
        "issued": NOW_S - 60,
        "lifetime_s": 3_600,
        "window_s": 86_400,
        "relays": relays,
        "excluded": {"clients": 1, "events": 2},
    }
    for changed in ({}, {"issued": NOW_S + 301}, {"relays": {}}, {"lifetime_s": 0}, {"excluded": None}, {"x": [1.5]}):
        text = json.dumps({**document, **changed}).encode()
        yield text
        yield signed(KIND, text) or b""
