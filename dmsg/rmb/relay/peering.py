"""How relays that know each other prove it in each POST, and which posts only they may send. Pure.

:ref:`spec-rmb-peering`. The header :data:`HEADER` holds seven words: version, name of the sender, name of the receiver,
Unix time in milliseconds, a random number, the kind of body, and an ed25519 signature (in hex) over all of them and the
body's digest. A header is valid for one POST, to one receiver, for half a minute.

A relay posts several envelopes at once only to relays that know it: each with its length before it (4 bytes, big-endian).
The answer is 202, or 200 and the status of each envelope in 2 bytes, big-endian.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from dmsg.crypto import ed25519
from dmsg.crypto.errors import InvalidSignature
from dmsg.errors import ConfigError
from dmsg.eventlog.reasons import Reason
from dmsg.rmb.core.errors import InvalidTwin, MalformedEnvelope
from dmsg.rmb.core.twin import check_relay
from dmsg.rmb.relay.errors import NotTrusted

HEADER: Final = "Dmsg-Relay"
VERSION: Final = "1"
#: Most milliseconds between the clocks of two relays, including the latency.
SKEW_MS: Final = 30_000
#: Posts of one relay that are remembered to refuse replays, for twice the time above: 150 bytes each. Above this number,
#: posts are refused; each may have several envelopes.
REMEMBERED_POSTS: Final = 65_536
#: Longest header: two names of at most 259 bytes, and 230 bytes more.
HEADER_LIMIT_BYTES: Final = 1024

#: Most bytes of envelopes in a post of several, independent of the limit of one envelope.
BATCH_BYTES: Final = 512 * 1024

_NONCE_BYTES: Final = 8
_DOMAIN: Final = b"dmsg rmb relay post\n"
_LENGTH: Final = struct.Struct(">I")
_STATUS: Final = struct.Struct(">H")


class Body(Enum):
    """The kind of a POST's body; the value is in the header."""

    #: One envelope, as from any relay.
    ONE = "one"
    #: Several, each with its length before it.
    SEVERAL = "several"
    #: Several, each only for a session that is connected now: the sender keeps those for other sessions.
    CONNECTED = "connected"


@dataclass(frozen=True, slots=True)
class SignedPost:
    """The content of a valid header: the name of the relay that sent it, and the kind of body."""

    relay: str
    body: Body


def parse_trust(text: str) -> tuple[str, bytes]:
    """Name and public key of a relay, from ``NAME[:PORT]=64 hex digits``; raises ``ConfigError``."""
    name, _, digits = text.partition("=")
    try:
        key = bytes.fromhex(digits.strip())
        name = check_relay(name.strip()).lower()
    except (ValueError, InvalidTwin):
        key = b""
    if len(key) != ed25519.PUBLIC_KEY_BYTES:
        raise ConfigError("trust", "a relay is trusted as NAME[:PORT]=KEY, the key being 64 hex digits")
    return name, key


def _signed(words: Sequence[str], body: bytes) -> bytes:
    return _DOMAIN + " ".join(words).encode("ascii", "replace") + b"\n" + hashlib.sha256(body).digest()


class Signer:
    """Makes headers for the posts of the relay called ``name``; ``random(n)`` gives ``n`` bytes."""

    def __init__(self, name: str, key: ed25519.SigningKey, random: Callable[[int], bytes]) -> None:
        self._name = name.lower()
        self._key = key
        self._random = random

    def header(self, relay: str, kind: Body, body: bytes, unix_s: float) -> bytes:
        """The value of the header of a post to ``relay``, which is named as in the twins' registry."""
        words = (
            VERSION,
            self._name,
            relay.lower(),
            str(int(unix_s * 1000)),
            self._random(_NONCE_BYTES).hex(),
            kind.value,
        )
        signature = self._key.sign(_signed(words, body))
        return f"{' '.join(words)} {signature.hex()}".encode("ascii")


class Verifier:
    """Checks headers of posts to this relay, whose names are ``domains``; ``known`` maps the names of relays to keys."""

    def __init__(
        self, domains: Collection[str], known: Mapping[str, bytes], remembered: int = REMEMBERED_POSTS
    ) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._known = {name.lower(): key for name, key in known.items()}
        self._remembered = remembered
        #: For each relay, the posts taken from it and when they may be forgotten.
        self._posts: dict[str, OrderedDict[str, float]] = {name: OrderedDict() for name in self._known}

    def check(self, header: bytes | None, body: bytes, unix_s: float) -> SignedPost:
        """The content of the header; raises :class:`NotTrusted`. A header is valid only once."""
        if header is None:
            raise NotTrusted(Reason.NOT_SIGNED)
        words = header.decode("ascii", "replace").split(" ") if len(header) <= HEADER_LIMIT_BYTES else []
        if len(words) != 7 or words[0] != VERSION:
            raise NotTrusted(Reason.NOT_SIGNED)
        _, name, to, time_ms, nonce, kind, signature = words
        key = self._known.get(name)
        if key is None or to not in self._domains:
            raise NotTrusted(Reason.UNKNOWN_RELAY)
        now_ms = unix_s * 1000
        try:
            if not (len(time_ms) <= 15 and time_ms.isdecimal() and abs(int(time_ms) - now_ms) <= SKEW_MS):
                raise NotTrusted(Reason.TIME_IS_OFF)
            ed25519.verify(key, _signed(words[:-1], body), bytes.fromhex(signature))
            said = SignedPost(name, Body(kind))
        except (InvalidSignature, ValueError):
            raise NotTrusted(Reason.NOT_SIGNED) from None
        posts = self._posts[name]
        while posts and next(iter(posts.values())) < now_ms:
            posts.popitem(last=False)
        if nonce in posts:
            raise NotTrusted(Reason.REPLAYED)
        if len(posts) >= self._remembered:
            if next(iter(posts.values())) <= now_ms + 2 * SKEW_MS:
                raise NotTrusted(Reason.LIMITS_EXCEEDED)
            posts.popitem(last=False)  # our clock was set back: the entry would stay until the clock catches up
        posts[nonce] = now_ms + 2 * SKEW_MS
        return said


def join_envelopes(envelopes: Iterable[bytes]) -> bytes:
    """The body of a post with several envelopes."""
    return b"".join(piece for data in envelopes for piece in (_LENGTH.pack(len(data)), data))


def split_envelopes(body: bytes, most: int) -> list[bytes]:
    """The envelopes in the body of a post, 1 to ``most``; raises :class:`~dmsg.rmb.core.errors.MalformedEnvelope`."""
    envelopes: list[bytes] = []
    position = 0
    while position < len(body):
        start = position + _LENGTH.size
        if len(envelopes) == most or start > len(body):
            raise MalformedEnvelope
        position = start + _LENGTH.unpack_from(body, start - _LENGTH.size)[0]
        if position > len(body):
            raise MalformedEnvelope
        envelopes.append(body[start:position])
    if not envelopes:
        raise MalformedEnvelope
    return envelopes


def join_statuses(statuses: Sequence[int]) -> bytes:
    """The body of the answer to a post with several envelopes."""
    return b"".join(map(_STATUS.pack, statuses))


def split_statuses(body: bytes, count: int) -> list[int] | None:
    """The statuses of ``count`` envelopes, or ``None`` if the body has another length."""
    return [status for (status,) in _STATUS.iter_unpack(body)] if len(body) == count * _STATUS.size else None
