"""The posts of relays that know each other: headers that are sent, altered, forged and repeated, and bodies."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from unittest import mock

from dmsg.crypto import ed25519
from dmsg.errors import ConfigError
from dmsg.eventlog.reasons import Reason
from dmsg.rmb.core.errors import MalformedEnvelope
from dmsg.rmb.relay.errors import NotTrusted
from dmsg.rmb.relay.peering import (
    SKEW_MS,
    Body,
    SignedPost,
    Signer,
    Verifier,
    join_envelopes,
    join_statuses,
    parse_trust,
    split_envelopes,
    split_statuses,
)
from fuzz.choices import Choices
from fuzz.oracles import as_text, outcome

DICTIONARY = (
    b"1 ",
    b"a.example",
    b"b.example",
    b"us.example",
    b"one",
    b"several",
    b"connected",
    b"1700000000000",
    b"=",
)

_NAMES = ("a.example", "b.example", "stranger.example")
#: To us by either name, in any case; and to another relay.
_DESTINATIONS = ("us.example", "US.example", "us.example:444", "other.example")
_DOMAINS = ("Us.Example", "us.example:444")
_BODIES = (b"", b"body", b"another")
_REMEMBERED = 5
_START_MS = 1_700_000_000_000


class _Key(ed25519.SigningKey):
    """A key that caches signatures, because inputs sign many equal texts."""

    __slots__ = ()

    def sign(self, message: bytes) -> bytes:
        return _sign(self, message)


@lru_cache(maxsize=16_384)
def _sign(key: _Key, message: bytes) -> bytes:
    return ed25519.SigningKey.sign(key, message)


_KEYS = {name: _Key(bytes((number,)) * 32) for number, name in enumerate(_NAMES)}
_verify = lru_cache(maxsize=16_384)(ed25519.verify)


def one_input(data: bytes) -> None:
    """The first byte says what the rest is."""
    choices = Choices(data)
    match choices.byte() % 4:
        case 0:
            _trust(as_text(choices.rest()))
        case 1:
            _envelopes(choices)
        case 2:
            _statuses(choices)
        case _:
            with mock.patch.object(ed25519, "verify", _verify):
                _posts(choices)


def _trust(text: str) -> None:
    """A name and a key that are read read the same once written again."""
    kind, found = outcome(lambda: parse_trust(text), ConfigError)
    if kind == "value":
        name, key = found
        assert len(key) == 32 and name == name.lower() and name.isascii() and " " not in name
        assert parse_trust(f"{name}={key.hex()}") == parse_trust(f" {name.upper()} = {key.hex().upper()} ") == found


def _envelopes(choices: Choices) -> None:
    """A body means one list of envelopes, and a list one body."""
    most = choices.byte() % 8
    body = choices.rest()
    kind, envelopes = outcome(lambda: split_envelopes(body, most), MalformedEnvelope)
    if kind == "value":
        assert 0 < len(envelopes) <= most and join_envelopes(envelopes) == body
    envelopes = [body[at : at + 40] for at in range(0, len(body), 40)]
    kind, found = outcome(lambda: split_envelopes(join_envelopes(envelopes), most), MalformedEnvelope)
    assert (kind == "value") == (0 < len(envelopes) <= most)
    assert kind == "error" or found == envelopes


def _statuses(choices: Choices) -> None:
    """As many statuses are read as there were envelopes, or none."""
    count = choices.byte() % 8
    body = choices.rest()
    statuses = split_statuses(body, count)
    assert (statuses is None) == (len(body) != 2 * count)
    assert statuses is None or (len(statuses) == count and join_statuses(statuses) == body)


class _Post:
    """A header made by a relay, its content, and whether it was taken."""

    def __init__(self, name: str, header: bytes, body: bytes, time_ms: int) -> None:
        self.name = name
        self.header = header
        self.body = body
        self.time_ms = time_ms
        words = header.decode().split(" ")
        self.to, self.kind = words[2], Body(words[5])
        self.taken = False


class _World:
    """Relays that post, two of them known to ours; an eavesdropper; and our clock."""

    def __init__(self) -> None:
        self.count = 0
        self.now_ms = _START_MS
        self.signers = {name: Signer(name.upper(), _KEYS[name], self._random) for name in _NAMES}
        known = {name.title(): _KEYS[name].public_key for name in _NAMES[:2]}
        self.verifier = Verifier(_DOMAINS, known, _REMEMBERED)
        self.posts: list[_Post] = []
        #: For each relay, until when each post is remembered that was taken.
        self.remembered: dict[str, deque[int]] = {name: deque() for name in _NAMES}

    def make(self, choices: Choices) -> _Post:
        """A relay posts; its clock is off by up to half a minute and a bit."""
        name, to, body = choices.pick(_NAMES), choices.pick(_DESTINATIONS), choices.pick(_BODIES)
        time_ms = self.now_ms + (choices.byte() - 128) * 250
        header = self.signers[name].header(to, choices.pick(tuple(Body)), body, time_ms / 1000)
        post = _Post(name, header, body, time_ms)
        self.posts.append(post)
        return post

    def check(self, post: _Post) -> None:
        """A post is taken once, from a known relay, to us, while it is new, and if there is room to remember it."""
        remembered = self.remembered[post.name]
        is_ours = post.name != _NAMES[2] and post.to in ("us.example", "us.example:444")
        found = self._result(post.header, post.body)
        if not is_ours:
            assert found is Reason.UNKNOWN_RELAY
        elif abs(post.time_ms - self.now_ms) > SKEW_MS:
            assert found is Reason.TIME_IS_OFF
        elif post.taken:
            assert found is Reason.REPLAYED
        else:
            while remembered and remembered[0] < self.now_ms:
                remembered.popleft()
            if len(remembered) >= _REMEMBERED:
                assert found is Reason.LIMITS_EXCEEDED
            else:
                assert found == SignedPost(post.name, post.kind)
                post.taken = True
                remembered.append(self.now_ms + 2 * SKEW_MS)

    def alter(self, choices: Choices, post: _Post) -> None:
        """A post is taken only if a known relay signed every word of the header and the body."""
        words = post.header.decode().split(" ")
        at = choices.below(7)
        match choices.below(4):
            case 0:
                words[at] = as_text(choices.chunk()).replace(" ", "") or "0"
            case 1:
                words[at] = choices.pick(self.posts).header.decode().split(" ")[at]
            case 2:
                place = choices.byte() % len(words[at])
                words[at] = words[at][:place] + chr(choices.byte()) + words[at][place + 1 :]
            case _:
                del words[at]
        body = choices.pick(_BODIES)
        header = " ".join(words).encode("latin-1", "replace")
        found = self._result(header, body)
        if isinstance(found, SignedPost):
            # Only the spelling of the signature may differ: its hex digits may have either case.
            [same] = [one for one in self.posts if one.header.split(b" ")[:6] == header.split(b" ")[:6]]
            assert (same.body, same.name, same.kind) == (body, found.relay, found.body) and not same.taken
            assert bytes.fromhex(words[6]) == bytes.fromhex(same.header.split(b" ")[6].decode())
            same.taken = True
            self.remembered[same.name].append(self.now_ms + 2 * SKEW_MS)

    def any_bytes(self, header: bytes) -> None:
        """Only what was made is taken."""
        assert isinstance(self._result(header, b""), Reason)
        assert self._result(None, b"") is Reason.NOT_SIGNED

    def bound(self) -> None:
        """No more posts are remembered than may be."""
        assert all(len(posts) <= _REMEMBERED for posts in self.verifier._posts.values())

    def _result(self, header: bytes | None, body: bytes) -> SignedPost | Reason:
        try:
            return self.verifier.check(header, body, self.now_ms / 1000)
        except NotTrusted as error:
            assert isinstance(error.why, Reason)
            return error.why

    def _random(self, size: int) -> bytes:
        self.count += 1
        return (self.count * 0xABCDEF).to_bytes(size, "big")


def _posts(choices: Choices) -> None:
    world = _World()
    for _ in range(60):
        if not choices.left:
            break
        match choices.below(7):
            case 0 | 1:
                world.check(world.make(choices))
            case 2 if world.posts:
                world.check(choices.pick(world.posts))
            case 3 if world.posts:
                world.alter(choices, choices.pick(world.posts))
            case 4:
                world.now_ms += choices.byte() * 500
            case 5:
                world.any_bytes(choices.chunk())
            case _:
                world.make(choices)
        world.bound()


def seeds() -> Iterator[bytes]:
    """Lines of trust; bodies; posts that are taken, are too late, are sent again, are too many, are altered."""
    key = _KEYS[_NAMES[0]].public_key.hex().encode()
    for text in (
        b"A.example:444=" + key,
        b" a = " + key.upper() + b"\n",
        b"a=" + key[2:],
        b"_=" + key,
        b"a=zz",
        b"a",
        b"",
    ):
        yield b"\x00" + text
    two = join_envelopes([b"one", b""])
    for body in (two, two[:-1], two[:5], b"", two + b"\xff\xff\xff\xff", bytes(300)):
        yield b"\x01\x02" + body
        yield b"\x01\x01" + body
    for body in (b"", b"\x00\xca\x01\x94", b"\x00\xca\x01"):
        yield b"\x02\x02" + body
    yield b"\x02\x00"
    good = b"\x00\x00\x00\x01\x80\x01"
    yield b"\x03" + good + b"\x02\x00" * 2 + b"\x04\x3c\x02\x00\x04\xff\x02\x00"
    yield b"\x03" + good * 7 + b"\x04\x79" + good + b"\x04\x01" + good
    yield b"\x03" + b"".join(
        bytes((0, name, to, 0, 128, kind)) for name in range(3) for to in range(4) for kind in range(3)
    )
    yield b"\x03" + b"".join(bytes((0, 0, 0, 0, off, 0)) for off in (0, 7, 8, 9, 127, 247, 248, 249, 255))
    yield b"\x03" + b"\x00\x02\x00\x01\x80\x00" + b"\x02\x00" + b"\x05\x07\x31 a b c" + b"\x05\x00"
    for at in range(7):
        send = b"\x06\x00\x00\x01\x80\x01" + b"\x06\x01\x00\x02\x82\x02"
        yield (
            b"\x03"
            + send
            + b"".join(b"\x03\x00" + bytes((at, how)) + b"\x01\x31\x01" for how in range(4))
            + b"\x02\x00"
        )
    # A digit of the signature in capitals, where it is that one; one that is no digit.
    for place, digit in ((place, digit) for place in (1, 126) for digit in b"ABCDEFg\x80"):
        altered = b"\x03\x00\x06\x02" + bytes((place, digit)) + b"\x01"
        yield b"\x03" + b"\x06\x00\x00\x01\x80\x01" * 2 + altered + b"\x02\x00"
    yield b"\x03" + bytes((number * 7919) % 251 for number in range(500))
