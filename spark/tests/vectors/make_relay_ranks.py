"""Writes ``relay_ranks.json``: a signed document of relay ranks, spoiled ones, and what scores are worth as they age.

Made from the description in ``docs/explanation/ranks.rst`` with nothing of ``dmsg_logs``, so that the vectors say what
the page says and not what the code does. The keys are public. Run it with the path to write to; a copy
stands in the tests of discovery.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import coincurve

ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
ISSUED = 1_772_496_000
LIFETIME_S = 172_800
TAG = b"dmsg-relay-ranks/1\0"


def secret(number: int) -> coincurve.PrivateKey:
    return coincurve.PrivateKey(number.to_bytes(32, "big"))


def public(number: int) -> str:
    text: str = secret(number).public_key.format().hex()
    return text


def canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def sign(document: dict[str, Any], number: int, tag: bytes = TAG) -> str:
    digest = hashlib.sha256(tag + canonical(document).encode()).digest()
    signature: bytes = secret(number).sign_recoverable(digest, hasher=None)
    return signature.hex()


def signed(document: dict[str, Any], number: int) -> dict[str, Any]:
    unsigned = {**document, "issuer": public(number)}
    return {**unsigned, "signature": sign(unsigned, number)}


def high_s(document: dict[str, Any]) -> dict[str, Any]:
    """The same signature in its other form, which a strict reader refuses."""
    raw = bytes.fromhex(document["signature"])
    s = ORDER - int.from_bytes(raw[32:64], "big")
    return {**document, "signature": (raw[:32] + s.to_bytes(32, "big") + bytes([raw[64] ^ 1])).hex()}


def relay(score: int, **parts: int) -> dict[str, int]:
    whole = {"success": score, "latency": score, "capacity": score, "drops": score, "dials": 0, "clients": 0}
    return {"score": score, **whole, **parts}


def vectors() -> dict[str, Any]:
    """All of it."""
    document = {
        "format": "dmsg-relay-ranks",
        "version": 1,
        "issued": ISSUED,
        "lifetime_s": LIFETIME_S,
        "window_s": 86_400,
        "relays": {
            public(11): relay(930, success=990, latency=745, capacity=1000, drops=985, dials=412_345, clients=317),
            public(12): relay(500),
            public(13): relay(1000, dials=2**53, clients=2**53),
            public(14): relay(0, dials=3, clients=2),
        },
        "excluded": {"clients": 3, "events": 12_345},
    }
    good = signed(document, 1)
    first = public(11)
    relays = document["relays"]
    assert isinstance(relays, dict)

    def spoiled(**changes: Any) -> str:
        return canonical(signed({**document, **changes}, 1))

    def with_relay(name: str, **members: Any) -> str:
        return spoiled(relays={**relays, name: {**relay(500), **members}})

    refused = {
        "altered score": canonical({**good, "relays": {**relays, first: relay(931)}}),
        "altered time": canonical({**good, "issued": ISSUED + 1}),
        "signed by another key": canonical({**good, "signature": sign({**document, "issuer": public(1)}, 2)}),
        "signed without a tag": canonical({**good, "signature": sign({**document, "issuer": public(1)}, 1, b"")}),
        "signed as another kind": canonical(
            {**good, "signature": sign({**document, "issuer": public(1)}, 1, b"dmsg-relay-list/1\0")}
        ),
        "untrusted issuer": canonical(signed(document, 2)),
        "high s": canonical(high_s(good)),
        "no signature": canonical({name: value for name, value in good.items() if name != "signature"}),
        "signature cut short": canonical({**good, "signature": good["signature"][:-2]}),
        "signature in capitals": canonical({**good, "signature": good["signature"].upper()}),
        "another format": spoiled(format="dmsg-relay-rank"),
        "another version": spoiled(version=2),
        "version is true": spoiled(version=True),
        "issued is a fraction": spoiled(issued=ISSUED + 0.5),
        "no lifetime": spoiled(lifetime_s=0),
        "score over the scale": with_relay(public(15), score=1001),
        "score below the scale": with_relay(public(15), score=-1),
        "score is a text": with_relay(public(15), score="900"),
        "relay in capitals": with_relay(public(15).upper(), score=500),
        "relay of 65 digits": with_relay(public(15)[:-1], score=500),
        "relays are a list": spoiled(relays=[]),
        "nothing excluded": spoiled(excluded=None),
        "from the future": spoiled(issued=ISSUED + 301),
        "not JSON": canonical(good)[:-1],
        "a list": "[" + canonical(good) + "]",
        "a member twice": canonical(good)[:-1] + ',"version":1}',
    }
    worth = {}
    for score in (0, 500, 930, 1000):
        for age_s, share in (
            (-300, 1.0),
            (0, 1.0),
            (86_400, 1.0),
            (108_000, 0.75),
            (151_200, 0.25),
            (172_800, 0.0),
            (10**9, 0.0),
        ):
            worth[f"{score} after {age_s} s"] = {
                "score": score,
                "age_s": age_s,
                "effective": 500 + (score - 500) * share,
            }
    return {
        "about": "A document of relay ranks signed with secret key 1, read at the Unix time now with issuer trusted",
        "secret_key": f"{1:064x}",
        "issuer": public(1),
        "now": ISSUED,
        "unsigned": canonical({**document, "issuer": public(1)}),
        "tag": TAG.hex(),
        "signature": good["signature"],
        "document": canonical(good),
        "spaced": json.dumps(dict(reversed(good.items())), indent=2),
        "refused": refused,
        "effective": list(worth.values()),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(vectors(), indent=1) + "\n", encoding="ascii")
