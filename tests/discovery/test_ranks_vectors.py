"""Relay ranks against vectors made without this package: what the log pipeline signs is what discovery takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.errors import RanksError
from dmsg.discovery.ranks import Ranks, sign_ranks

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "relay_ranks.json").read_text())
ISSUER = PublicKey.parse(VECTORS["issuer"])


@pytest.mark.parametrize("form", ["document", "spaced"])
def test_a_signed_document_is_taken(form: str) -> None:
    ranks = Ranks.parse(VECTORS[form].encode(), [ISSUER], VECTORS["now"])
    relays = json.loads(VECTORS["unsigned"])["relays"]
    assert {key.hex(): score for key, score in ranks.scores.items()} == {
        key: members["score"] for key, members in relays.items()
    }
    assert ranks.document.decode() == VECTORS["document"]


def test_a_document_is_signed_the_same_here() -> None:
    key = SecretKey(bytes.fromhex(VECTORS["secret_key"]))
    assert sign_ranks(json.loads(VECTORS["unsigned"]), key).decode() == VECTORS["document"]


@pytest.mark.parametrize("why", VECTORS["refused"])
def test_a_spoiled_document_is_refused(why: str) -> None:
    with pytest.raises(RanksError):
        Ranks.parse(VECTORS["refused"][why].encode(), [ISSUER], VECTORS["now"])


@pytest.mark.parametrize("case", VECTORS["effective"], ids=lambda case: f"{case['score']} after {case['age_s']} s")
def test_scores_fade(case: dict[str, float]) -> None:
    relay = "02" + "aa" * 32
    score = dict.fromkeys(("score", "success", "latency", "capacity", "drops"), int(case["score"]))
    document = {**json.loads(VECTORS["unsigned"]), "relays": {relay: {**score, "dials": 0, "clients": 0}}}
    signed = sign_ranks(document, SecretKey(bytes.fromhex(VECTORS["secret_key"])))
    ranks = Ranks.parse(signed, [ISSUER], VECTORS["now"])
    assert ranks.effective(bytes.fromhex(relay), VECTORS["now"] + case["age_s"]) == case["effective"]
