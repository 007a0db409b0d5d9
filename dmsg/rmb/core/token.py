"""The tokens with which a twin's connection logs in to a relay. Pure.

A token looks like a JSON Web Token and says RS512, but the twin's key signs its first two parts. Libraries for JSON Web
Tokens therefore cannot make or check it. See :ref:`spec-rmb-token`.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

from dmsg.http.errors import MalformedJson
from dmsg.http.json_text import decode as decode_json
from dmsg.rmb.core.errors import BadSignature, TokenRefused
from dmsg.rmb.core.keys import TwinKey, verify
from dmsg.rmb.core.limits import (
    MAX_AHEAD_S,
    MAX_CONNECTION_BYTES,
    MAX_TOKEN_BYTES,
    MAX_TOKEN_LIFETIME_S,
    MAX_TWIN,
    TOKEN_LIFETIME_S,
)

_HEADER: Final = '{"alg":"RS512"}'
_ALGORITHM: Final = "RS512"
#: The names of the algorithms of JSON Web Tokens: a header with another text is malformed.
_ALGORITHMS: Final = {f"{kind}{size}" for kind in ("HS", "RS", "ES", "PS") for size in (256, 384, 512)} | {"none"}
_PARTS: Final = ("header", "claims", "signature")
_OTHER: Final = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class Token:
    """The claims of a token. :func:`check_token` has yet to check its signature with the account of ``twin``.

    ``connection`` is the name that tells the twin's connections apart, or ``None``; ``issued`` and ``expires`` are Unix
    times; ``audience`` names the relays it is for, or is ``None`` if missing; ``signature`` is 65 bytes over ``signed``.
    """

    twin: int
    connection: str | None
    issued: int
    expires: int
    audience: tuple[str, ...] | None
    algorithm: str
    signed: bytes
    signature: bytes


def make_token(
    key: TwinKey,
    twin: int,
    connection: str | None,
    now: int,
    lifetime_s: int = TOKEN_LIFETIME_S,
    audience: str | None = None,
) -> str:
    """A token for one connection of ``twin``, valid for ``lifetime_s`` seconds.

    ``audience`` is the domain of the relay it is for: another relay that gets to see the token then cannot use it there.
    """
    claims = {"sub": twin, "sid": connection, "iat": now, "exp": now + lifetime_s}
    if audience is not None:
        claims["aud"] = audience
    text = json.dumps(claims, separators=(",", ":"), ensure_ascii=False)
    signed = f"{_base64(_HEADER.encode())}.{_base64(text.encode())}"
    return f"{signed}.{_base64(key.sign(signed.encode()))}"


def read_token(text: str | None, now: float, max_lifetime_s: int = MAX_TOKEN_LIFETIME_S) -> Token:
    """Parse ``text``, the whole query of the URL as it was written, or ``None`` when the URL has no ``?``.

    Raises :class:`~dmsg.rmb.core.errors.TokenRefused` for a token that is malformed, expired, not valid yet, or whose
    lifetime is longer than ``max_lifetime_s``. Do not trust it before :func:`check_token`.
    """
    if text is None:
        raise TokenRefused(400, "missing jwt", "no token")
    if len(text) > MAX_TOKEN_BYTES:
        raise _no_token("token is too long")
    parts = text.split(".")
    if len(parts) < 3:
        raise _no_token(f"No {_PARTS[len(parts)]} component found in token string")
    if len(parts) > 3:
        raise _no_token("Too many components found in token string")
    header, claims = _json(parts[0]), _json(parts[1])
    signature = _unbase64(parts[2])
    audience = claims.get("aud")
    token = Token(
        twin=_number(claims, "sub", MAX_TWIN),
        connection=_connection(claims.get("sid")),
        issued=_number(claims, "iat"),
        expires=_number(claims, "exp"),
        audience=None if audience is None else _texts(audience),
        algorithm=_algorithm(header),
        signed=text.rpartition(".")[0].encode(),
        signature=signature,
    )
    if int(now) > token.expires:  # in whole seconds, as the public relay counts: valid until the last second ends
        raise TokenRefused(401, "invalid jwt: jwt has expired", "token expired")
    if token.issued > now + MAX_AHEAD_S:
        raise TokenRefused(401, "invalid jwt: jwt is not valid yet", "token from the future")
    if token.expires - token.issued > max_lifetime_s:
        raise TokenRefused(401, "invalid jwt: jwt lifetime is too long", "token lives too long")
    return token


def check_token(token: Token, account: bytes, domains: Collection[str] = (), *, demand_audience: bool = False) -> None:
    """Raise ``TokenRefused`` unless ``account`` signed the token, and one of ``domains`` is in its audience.

    A token without an audience passes unless ``demand_audience`` is set: public clients' tokens have none.
    """
    if token.algorithm != _ALGORITHM:
        found = token.algorithm.capitalize()
        raise TokenRefused(401, f"invalid jwt: jwt: Expected algorithm type {found} but found Rs512", "token malformed")
    try:
        verify(account, token.signed, token.signature)
    except BadSignature:
        raise TokenRefused(401, "invalid jwt: jwt: Invalid signature", "token does not verify") from None
    if demand_audience if token.audience is None else not set(token.audience) & set(domains):
        raise TokenRefused(401, "invalid jwt: jwt is not for this relay", "token for another relay")


def _no_token(problem: str) -> TokenRefused:
    return TokenRefused(401, f"invalid jwt: jwt: {problem}", "token malformed")


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unbase64(text: str) -> bytes:
    """The bytes of a part. Only the canonical base64 text is accepted, so that a token cannot be written in two ways."""
    other = _OTHER.search(text)
    if other:
        raise _no_token(f"Invalid byte {other[0].encode(errors='replace')[0]}, offset {other.start()}.")
    if len(text) % 4 == 1:
        raise _no_token("Encoded text cannot have a 6-bit remainder.")
    data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    if _base64(data) != text:
        raise _no_token(f"Invalid last symbol {ord(text[-1])}, offset {len(text) - 1}.")
    return data


def _json(text: str) -> dict[str, Any]:
    try:
        value = decode_json(_unbase64(text), MAX_TOKEN_BYTES)
    except MalformedJson:
        raise _no_token("malformed JSON") from None
    if not isinstance(value, dict):
        raise _no_token("malformed JSON")
    return value


def _number(claims: dict[str, Any], name: str, limit: int = 2**64 - 1) -> int:
    value = claims.get(name)
    if value is None:
        raise _no_token(f"missing field `{name}`")
    if type(value) is not int or not 0 <= value <= limit:
        raise _no_token(f"invalid field `{name}`")
    return value


def _connection(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise _no_token("invalid field `sid`")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise _no_token("invalid field `sid`") from None
    if size > MAX_CONNECTION_BYTES:
        raise _no_token("sid is too long")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """An audience is one text or a list of them (RFC 7519, section 4.1.3)."""
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in texts):
        raise _no_token("invalid field `aud`")
    return tuple(texts)


def _algorithm(header: dict[str, Any]) -> str:
    for name in ("typ", "cty"):
        if header.get(name) not in (None, "JWT"):
            raise _no_token(f"invalid field `{name}`")
    if not isinstance(header.get("kid"), str | None):
        raise _no_token("invalid field `kid`")
    algorithm = header.get("alg")
    if not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise _no_token("invalid field `alg`")
    return algorithm
