"""A discovery's source of relay ranks: documents of all kinds, one after the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.web.http_headers import Headers

from dmsg.crypto.keys import PublicKey
from dmsg.discovery.ranks import KIND, Ranks
from dmsg.discovery.ranks_source import RanksSource
from dmsg.discovery.signed import AHEAD_S
from dmsg.http.errors import NoAnswer
from fuzz.choices import Choices
from fuzz.oracles import KEYS

_TRUSTED = KEYS[:2]
_START_S = 1_700_000_000


class _Caller:
    """Gives the target's next answer."""

    def __init__(self) -> None:
        self.answer: tuple[int, bytes] | None = None

    async def call(self, method: str, url: str, *, limit_bytes: int) -> tuple[int, Headers, bytes]:
        if self.answer is None:
            raise NoAnswer("it does not answer")
        return self.answer[0], Headers(), self.answer[1]

    async def close(self) -> None:
        """Nothing is open."""


def one_input(data: bytes) -> None:
    """Operations: load again a document that is good, old, foreign, altered or missing; let time pass.

    The document in force was signed by a trusted key, is not from the future, and is never replaced by an older one.
    """
    choices = Choices(data)
    now = float(_START_S)
    clock, caller = Clock(), _Caller()
    trusted: list[PublicKey] = [key.public_key for key in _TRUSTED]
    source = RanksSource("http://ranks.example/", trusted, clock, now_s=lambda: now, caller=caller)
    for _ in range(64):
        if not choices.left:
            break
        before = source.ranks
        caller.answer = _answer(choices)
        now += choices.byte()
        results: list[Any] = []
        Deferred.fromCoroutine(source.refresh()).addBoth(results.append)
        assert results == [None], results
        ranks = source.ranks
        assert before is None or (ranks is not None and ranks.issued >= before.issued)
        assert ranks is before or (isinstance(ranks, Ranks) and not source.problem)
        if ranks is not None:
            assert ranks.issuer in trusted and ranks.issued <= now + AHEAD_S
        assert source.problem.replace("_", "").isalpha() or not source.problem
    assert not clock.getDelayedCalls()


def _answer(choices: Choices) -> tuple[int, bytes] | None:
    what = choices.below(8)
    if what == 0:
        return None
    if what == 1:
        return choices.below(600), choices.chunk()
    document = {
        "format": KIND.format,
        "version": KIND.version,
        "issued": _START_S + 16 * choices.byte() - 2_000,
        "lifetime_s": 1 + choices.byte(),
        "window_s": 60,
        "relays": {},
        "excluded": {"clients": 0, "events": choices.byte() & 3},
    }
    body = bytearray(KIND.sign(document, KEYS[choices.byte() % 3]))
    if what == 2:
        body[choices.below(0x10000) % len(body)] ^= choices.byte()
    elif what == 3:
        return 200, json.dumps(json.loads(body), indent=1).encode()
    return 200, bytes(body)


def seeds() -> Iterator[bytes]:
    """Newer and older documents, of trusted keys and others, altered, none."""
    good = b"\x07\x7d\x3c\x00\x00\x01"
    newer, older, foreign = (
        good.replace(b"\x7d", b"\x80"),
        good.replace(b"\x7d", b"\x70"),
        b"\x07\x81\x3c\x00\x02\x01",
    )
    yield good + newer + older + foreign + good
    yield good + b"\x00\x01" + b"\x01\x01\x94\x00\x01" + newer
    yield b"\x02\x7d\x3c\x00\x00\x00\x50\x01\x01" + b"\x03\x7d\x3c\x00\x01\x01" + b"\x07\xff\x3c\x00\x00\x01"
