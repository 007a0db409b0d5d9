"""Tokens."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmsg.rmb.core.errors import TokenRefused
from dmsg.rmb.core.keys import KeyType, TwinKey, read_secret, verify
from dmsg.rmb.core.token import check_token, make_token, read_token

from .conftest import DERIVED, LIVE

SHAPES = {name: DERIVED[f"jwt/{name}"] for name in ("rust-shape", "go-shape", "empty-sid")}
KEY = TwinKey(b"\x01" * 32, KeyType.ED25519)
NOW = 1_700_000_000


def part(value):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def unpadded(text):
    return base64.urlsafe_b64decode(text + "==")


def token_of(claims, header=None, signature=b"e" + bytes(64)):
    claims = {"sub": 1, "iat": NOW, "exp": NOW + 60, **claims}
    return f"{part(header or {'alg': 'RS512'})}.{part(claims)}.{part(signature)}"


def refusal(text, now=NOW, **options):
    with pytest.raises(TokenRefused) as caught:
        check_token(read_token(text, now), KEY.account, **options)
    return caught.value.status, caught.value.text


@pytest.mark.parametrize("one", SHAPES.values(), ids=SHAPES)
def test_derived_tokens(one):
    claims = json.loads(one["claims_json"])
    token = read_token(one["token"], claims["exp"])
    assert (token.twin, token.connection) == (claims["sub"], claims.get("sid"))
    assert (token.issued, token.expires, token.audience) == (claims["iat"], claims["exp"], None)
    check_token(token, bytes.fromhex(one["account_public_hex"]))


def test_the_oldest_token():
    """It says that it ended in 1970; its signature stands."""
    one = DERIVED["jwt/rust-literal"]
    assert refusal(one["token"]) == (401, "invalid jwt: jwt has expired")
    signed, _, signature = one["token"].rpartition(".")
    assert [json.loads(unpadded(text)) for text in signed.split(".")] == [one["header"], one["claims"]]
    verify(bytes.fromhex(one["account_public_hex"]), signed.encode(), unpadded(signature))
    assert unpadded(signature).hex() == one["signature_hex"]


@pytest.mark.parametrize("name", ["rust-shape", "empty-sid"])
def test_ours_are_the_same(name):
    one = SHAPES[name]
    claims = json.loads(one["claims_json"])
    key = TwinKey(bytes.fromhex(one["ed25519_seed_hex"]), KeyType.ED25519)
    lifetime_s = claims["exp"] - claims["iat"]
    assert make_token(key, claims["sub"], claims["sid"], claims["iat"], lifetime_s) == one["token"]


def test_a_token_of_sr25519():
    one = DERIVED["jwt/sr25519-verify-only"]
    check_token(read_token(one["token"], NOW), bytes.fromhex(one["account_public_hex"]))
    key = TwinKey(b"\x01" * 32)
    check_token(read_token(make_token(key, 1, None, NOW), NOW), key.account)


@pytest.mark.parametrize("one", LIVE["jwt"], ids=lambda one: one["twin"])
def test_recorded_tokens(one):
    text = one["http_request"].split(" ")[1].partition("?")[2]
    claims = json.loads(unpadded(text.split(".")[1]))
    token = read_token(text, claims["iat"])
    check_token(token, bytes.fromhex(one["account"]))
    assert (token.twin, token.connection) == (one["twin"], None)
    key = TwinKey(read_secret(one["seed"]), KeyType.ED25519)
    assert make_token(key, token.twin, None, token.issued, token.expires - token.issued) == text


@given(st.integers(0, 2**32 - 1), st.none() | st.text(st.characters(codec="utf-8"), max_size=30), st.integers(0, 2**40))
def test_tokens_are_read_as_they_were_made(twin, connection, now):
    token = read_token(make_token(KEY, twin, connection, now), now)
    assert (token.twin, token.connection, token.issued, token.expires) == (twin, connection, now, now + 60)
    check_token(token, KEY.account)


@given(st.text(max_size=60) | st.lists(st.sampled_from([part(b"{}"), part({"alg": "RS512"}), "", "!"])).map(".".join))
def test_any_text_is_a_token_or_refused(text):
    with pytest.raises(TokenRefused):
        read_token(text, NOW)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "No claims component found in token string"),
        ("e30", "No claims component found in token string"),
        ("e30.e30", "No signature component found in token string"),
        ("e30.e30.e30.e30", "Too many components found in token string"),
        ("!!!.e30.e30", "Invalid byte 33, offset 0."),
        ("e30.e30=.e30", "Invalid byte 61, offset 3."),
        ("é.e30.e30", "Invalid byte 195, offset 0."),
        ("e30.e30e3.e30", "Encoded text cannot have a 6-bit remainder."),
        ("e31.e30.e30", "Invalid last symbol 49, offset 2."),
        ("e30.e30.", "missing field `sub`"),
        (f"{part([])}.e30.", "malformed JSON"),
        ("e.".rjust(3000) + "e30.e30", "token is too long"),
    ],
)
def test_what_is_no_token(text, problem):
    assert refusal(text) == (401, f"invalid jwt: jwt: {problem}")


@pytest.mark.parametrize(
    ("claims", "problem"),
    [
        ({"sub": None}, "missing field `sub`"),
        ({"iat": None}, "missing field `iat`"),
        ({"exp": None}, "missing field `exp`"),
        ({"sub": "1"}, "invalid field `sub`"),
        ({"sub": True}, "invalid field `sub`"),
        ({"sub": 2**32}, "invalid field `sub`"),
        ({"sub": -1}, "invalid field `sub`"),
        ({"exp": 1.5}, "invalid field `exp`"),
        ({"exp": 2**64}, "invalid field `exp`"),
        ({"sid": 1}, "invalid field `sid`"),
        ({"sid": "\ud800"}, "invalid field `sid`"),
        ({"sid": "é" * 65}, "sid is too long"),
        ({"aud": 1}, "invalid field `aud`"),
        ({"aud": ["a", 1]}, "invalid field `aud`"),
    ],
)
def test_claims_that_are_refused(claims, problem):
    assert refusal(token_of(claims)) == (401, f"invalid jwt: jwt: {problem}")


@pytest.mark.parametrize("header", [{"alg": 1}, {"alg": "X"}, {"x": 1}, {"alg": "RS512", "typ": "JOSE"}])
@pytest.mark.parametrize("more", [{}, {"kid": "x"}])
def test_headers_that_are_refused(header, more):
    status, text = refusal(token_of({}, {**header, **more}))
    assert status == 401 and text.startswith("invalid jwt: jwt: invalid field `")


def test_members_of_headers():
    assert refusal(token_of({}, {"alg": "RS512", "kid": 1})) == (401, "invalid jwt: jwt: invalid field `kid`")
    read_token(token_of({}, {"alg": "RS512", "kid": "x", "typ": "JWT", "cty": "JWT", "more": []}), NOW)


def test_the_longest_name_of_a_connection():
    assert read_token(token_of({"sid": "é" * 64}), NOW).connection == "é" * 64


def test_no_token_at_all():
    assert refusal(None) == (400, "missing jwt")


def test_tokens_end_and_begin():
    text = make_token(KEY, 1, None, NOW)
    check_token(read_token(text, NOW + 60.9), KEY.account)
    assert refusal(text, NOW + 61) == (401, "invalid jwt: jwt has expired")
    check_token(read_token(text, NOW - 300), KEY.account)
    assert refusal(text, NOW - 301) == (401, "invalid jwt: jwt is not valid yet")
    assert refusal(make_token(KEY, 1, None, NOW, 1801)) == (401, "invalid jwt: jwt lifetime is too long")
    check_token(read_token(make_token(KEY, 1, None, NOW, 1800), NOW), KEY.account)


@pytest.mark.parametrize(("alg", "name"), [("HS256", "Hs256"), ("none", "None"), ("ES512", "Es512")])
def test_other_algorithms(alg, name):
    problem = f"Expected algorithm type {name} but found Rs512"
    assert refusal(token_of({}, {"alg": alg})) == (401, f"invalid jwt: jwt: {problem}")


def test_other_signatures():
    assert refusal(token_of({})) == (401, "invalid jwt: jwt: Invalid signature")
    assert refusal(token_of({}, signature=b"")) == (401, "invalid jwt: jwt: Invalid signature")
    assert refusal(make_token(TwinKey(b"\x02" * 32), 1, None, NOW)) == (401, "invalid jwt: jwt: Invalid signature")


def test_a_token_for_another_relay_is_refused():
    text = make_token(KEY, 1, None, NOW, audience="a.example")
    token = read_token(text, NOW)
    check_token(token, KEY.account, ["b.example", "a.example"], demand_audience=True)
    assert refusal(text, domains=["b.example"]) == (401, "invalid jwt: jwt is not for this relay")
    assert refusal(text) == (401, "invalid jwt: jwt is not for this relay")
    assert read_token(token_of({"aud": ["x", "y"]}), NOW).audience == ("x", "y")


def test_a_relay_can_demand_that_tokens_say_which_relay():
    text = make_token(KEY, 1, None, NOW)
    check_token(read_token(text, NOW), KEY.account, ["a.example"])
    assert refusal(text, demand_audience=True) == (401, "invalid jwt: jwt is not for this relay")
