"""Tokens of twins: texts of strangers, and tokens with arbitrary claims."""

from __future__ import annotations

import base64
from collections.abc import Iterator

from dmsg.rmb.core.errors import TokenRefused
from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.core.limits import MAX_AHEAD_S, MAX_TOKEN_LIFETIME_S
from dmsg.rmb.core.token import Token, check_token, make_token, read_token
from fuzz import words
from fuzz.choices import Choices
from fuzz.oracles import as_text, check_memory, outcome

DICTIONARY = (*words.members("alg", "typ", "kid", "sub", "sid", "iat", "exp", "aud"), b'"RS512"', b"1700000000", b".")

_KEY = TwinKey(b"\x01" * 32, KeyType.ED25519)
_OTHER = TwinKey(b"\x02" * 32, KeyType.ED25519)
_NOW = 1_700_000_000
_DOMAINS = ("relay",)


def one_input(data: bytes) -> None:
    """The input is a text; it is also signed as header and claims."""
    text = as_text(data)
    kind, token = outcome(lambda: read_token(text, _NOW), TokenRefused)
    if kind == "value":
        _check_read(token, text)
        # The right signature is no more than 2^-500 likely, unless it is our own seed.
        assert outcome(lambda: check_token(token, _OTHER.account, _DOMAINS), TokenRefused)[0] == "error"
    choices = Choices(data)
    altered = choices.below(0x10000)
    header = choices.chunk()
    signed = f"{_part(header)}.{_part(choices.rest())}"
    whole = f"{signed}.{_part(_KEY.sign(signed.encode()))}"
    kind, token = outcome(lambda: read_token(whole, _NOW), TokenRefused)
    if kind == "error":
        return
    _check_read(token, whole)
    passes = token.algorithm == "RS512" and (token.audience is None or "relay" in token.audience)
    assert (outcome(lambda: check_token(token, _KEY.account, _DOMAINS), TokenRefused)[0] == "value") == passes
    at = altered % len(whole)
    changed = whole[:at] + ("A" if whole[at] != "A" else "B") + whole[at + 1 :]
    assert outcome(lambda: check_token(read_token(changed, _NOW), _KEY.account, _DOMAINS), TokenRefused)[0] == "error"


def _check_read(token: Token, text: str) -> None:
    assert 0 <= token.twin < 2**32
    assert _NOW <= token.expires <= _NOW + MAX_AHEAD_S + MAX_TOKEN_LIFETIME_S
    assert text == f"{token.signed.decode()}.{_part(token.signature)}"
    if token.connection is not None:
        token.connection.encode()
    check_memory(token, len(text))


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def seeds() -> Iterator[bytes]:
    """Tokens of ours; header and claims in plain text; parts that are missing, too many, or no base64."""
    for connection, audience in ((None, None), ("", None), ("here", "relay"), ("\u2028", "other")):
        yield make_token(_KEY, 7, connection, _NOW, audience=audience).encode()
    for header in (b'{"alg":"RS512"}', b'{"alg":"none","typ":"JWT","kid":"k"}'):
        for claims in (
            b'{"sub":7,"sid":null,"iat":1700000000,"exp":1700000060}',
            b'{"exp":1700001000,"iat":1700000000,"sid":"test-client","sub":100,"aud":["relay"]}',
            b'{"sub":4294967296,"sid":"\\ud800","iat":0,"exp":18446744073709551615}',
        ):
            yield b"\x00\x07" + bytes((len(header),)) + header + claims
    yield from (b"", b"e30", b"e30.e30", b"e30.e30.e30.e30", b"!.e30.e30", b"e31.e30.e30", b"e30e3.e30.e30")
