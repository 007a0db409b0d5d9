"""Documents signed by an operator, before their kind is checked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dmsg.crypto.errors import InvalidKey, InvalidSignature
from dmsg.crypto.keys import PublicKey
from dmsg.discovery.errors import DocumentError
from dmsg.discovery.ranks import KIND as RANKS
from dmsg.discovery.signed import DocumentKind, canonical
from dmsg.relays.operator_list import KIND as RELAYS
from fuzz import words
from fuzz.oracles import KEYS, check_memory
from fuzz.signing import ISSUER, NOW_S, signed

DICTIONARY = words.DOCUMENT

_TRUSTED = frozenset({ISSUER.public_key})
_SIGNATURE = re.compile(r"[0-9a-f]{130}")
_LATER = replace(RANKS, version=2)


def one_input(data: bytes) -> None:
    """The input is the document, or text to sign. A signature holds only for its own kind and text.

    A second reader accepts the same documents, and finds the same faults in the others.
    """
    for kind in (RANKS, RELAYS):
        _opened(kind, data)
    text = signed(RANKS, data)
    if text is None:
        return
    given = {"format": RANKS.format, "version": 1, **json.loads(data), "issuer": str(ISSUER.public_key)}
    given.pop("signature", None)
    # Two halves of a character that stand apart in the input, one as an escape, are one character in what is signed.
    assert json.loads(_unsigned(json.loads(text))) == json.loads(json.dumps(given))
    document = _opened(RANKS, text)
    if document is None:
        assert _complaints(RANKS, text)[0] <= {"not_json", "wrong_format", "wrong_version", "bad_field"}
        return
    assert _canonical(document) == text.decode() and canonical(document) == text
    assert RANKS.canonical(document) == _unsigned(document)
    spelled = json.dumps(document, indent=1).encode()
    assert _open(replace(RANKS, limit_bytes=len(spelled)), spelled) == document
    assert _refused(replace(RANKS, limit_bytes=len(spelled) - 1), spelled) == "too_long"
    assert _refused(RELAYS, text.replace(RANKS.format.encode(), RELAYS.format.encode())) == "bad_signature"
    assert _refused(RANKS, text.replace(b'"version":1', b'"version":1,"added":1')) in ("bad_signature", "not_json")
    assert _refused(_LATER, text) == "wrong_version"
    assert _refused(_LATER, _canonical({**document, "version": 2}).encode()) == "bad_signature"
    assert _refused(RANKS, text, KEYS[1].public_key) == "untrusted"
    _check_numbers(document, len(data))
    check_memory(document, len(text), times=128)


def _opened(kind: DocumentKind, data: bytes) -> dict[str, Any] | None:
    """The content that both readers find in a document; ``None`` if both refuse it."""
    complaints, expected = _complaints(kind, data)
    try:
        document = _open(kind, data)
    except DocumentError as error:
        assert type(error) is kind.error
        assert error.reason in complaints, (error, complaints)
        return None
    assert not complaints, complaints
    assert document == expected
    return document


def _open(kind: DocumentKind, data: bytes) -> dict[str, Any]:
    document, issuer = kind.open(data, _TRUSTED)
    assert issuer == ISSUER.public_key
    return document


def _refused(kind: DocumentKind, data: bytes, trusted: PublicKey = ISSUER.public_key) -> str | None:
    try:
        kind.open(data, (trusted,))
    except DocumentError as error:
        assert type(error) is kind.error
        return error.reason
    return None


def _complaints(kind: DocumentKind, data: bytes) -> tuple[set[str], Any]:
    """The possible faults of a document, and its value as Python reads it."""
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_members, parse_constant=_constant)
    except (ValueError, RecursionError):
        return {"not_json"}, None
    if _depth(document) > 16:
        return {"not_json"}, None
    if not isinstance(document, dict):
        return {"wrong_format"}, None
    found: set[str] = set()
    if document.get("format") != kind.format:
        found.add("wrong_format")
    if type(document.get("version")) is not int or document["version"] != kind.version:
        found.add("wrong_version")
    if found:
        return found, None
    signature = document.get("signature")
    try:
        issuer = PublicKey.parse(document.get("issuer", ""))
        if issuer not in _TRUSTED:
            return {"untrusted"}, None
        if not isinstance(signature, str) or not _SIGNATURE.fullmatch(signature):
            return {"bad_signature"}, None
        if any(_is_none_of_ours(number) for number in _numbers(document)):
            return {"bad_field"}, None
        tag = b"%s/%d\0" % (kind.format.encode(), kind.version)
        issuer.verify(bytes.fromhex(signature), tag + _unsigned(document))
    except InvalidKey:
        return {"bad_field"}, None
    except InvalidSignature:
        return {"bad_signature"}, None
    return found, document


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({name for name, _ in pairs}) < len(pairs):
        raise ValueError("twice")
    return dict(pairs)


def _constant(text: str) -> Any:
    raise ValueError(text)


def _depth(value: Any) -> int:
    """Depth of nested arrays and objects."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, (dict, list))]:
        depth += 1
        level = [one for each in level for one in (each.values() if isinstance(each, dict) else each)]
    return depth


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        for one in value.values():
            yield from _numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from _numbers(one)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _is_none_of_ours(number: float) -> bool:
    """Whether a number has more than 20 characters, or is too large for a floating point number."""
    return not math.isfinite(number) if isinstance(number, float) else not -(10**19) < number < 10**20


def _unsigned(document: dict[str, Any]) -> bytes:
    return _canonical({name: value for name, value in document.items() if name != "signature"}).encode()


def _canonical(value: Any) -> str:
    """The canonical form, written by hand except for single strings and numbers."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_canonical(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_canonical, value)) + "]"
    return json.dumps(value)


def _check_numbers(document: dict[str, Any], number: int) -> None:
    """A range includes its ends; only whole numbers are in a range. A clock may be 300 s behind the issuer's."""
    for least, most in ((number, number), (number, number + 2), (number - 2, number)):
        assert RANKS.number({"a": number}, "a", least, most) == number
    for least, most in ((number + 1, number + 2), (number - 2, number - 1), (number + 1, number - 1)):
        assert _complains(lambda least=least, most=most: RANKS.number({"a": number}, "a", least, most)) == "bad_field"
    for other in (float(number), str(number), None, True):
        assert _complains(lambda other=other: RANKS.number({"a": other}, "a", 0, number + 1)) == "bad_field"
    assert _complains(lambda: RANKS.number(document, "missing member", 0, number)) == "bad_field"
    for ahead, reason in ((0, None), (300, None), (301, "from_the_future"), (300.5, "from_the_future")):
        now_s = NOW_S - ahead
        assert _complains(lambda now_s=now_s: RELAYS.check_issued(NOW_S, now_s)) == reason
    assert (RANKS.noun, RELAYS.noun) == ("relay ranks", "relay list")
    for wrong in (math.nan, math.inf, object(), KEYS):
        try:
            canonical({"a": wrong})
        except ValueError:
            continue
        raise AssertionError(wrong)


def _complains(call: Any) -> str | None:
    try:
        call()
    except DocumentError as error:
        return error.reason
    return None


def _signed_by(kind: DocumentKind, text: bytes, **changed: str) -> bytes:
    """A document that is signed, and then changed."""
    document = signed(kind, text)
    assert document is not None
    return json.dumps({**json.loads(document), **changed}).encode()


def seeds() -> Iterator[bytes]:
    """Members of every kind, nested, with names that sort oddly; foreign issuers; signatures of other forms."""
    for text in (
        b"{}",
        b'{"a":[1,-2,true,null,1.5,"\\u00fc"],"B":{"z":1,"a":2},"\\ud800":1}',
        b'{"version":1,"x":1e308}',
        b'{"format":"dmsg-relay-list"}',
        b'{"issuer":"02","signature":"00"}',
        b'{"a":' + b"[" * 14 + b"]" * 14 + b"}",
    ):
        yield text
        yield signed(RANKS, text) or b"{"
        yield signed(RELAYS, text) or b"["
    for text in (
        b'{"a":' + b"[" * 15 + b"]" * 15 + b"}",
        b'{"a":' + b"[" * 16 + b"]" * 16 + b"}",
        b'{"a":99999999999999999999,"b":-9999999999999999999}',
        b'{"a":100000000000000000000}',
        b'{"a":-10000000000000000000}',
        b'{"version":2}',
        b'{"version":true}',
        b'{"version":1.0}',
        b'{"a":"[[[[[[[[[[[[[[[[[[[[[[\\\\\\"{","\\uffff":1,"\\ud83d\\ude00":2}',
    ):
        yield text
        yield signed(RANKS, text) or b""
    good = signed(RANKS, b'{"a":1}') or b""
    signature = json.loads(good)["signature"]
    yield good.replace(b'"a":1', b'"a":1,"a":1')
    yield good.replace(b'"a":1', b'"a":1e999')
    yield good.replace(b'"a":1', b'"a":NaN')
    yield good.replace(b'"a":1', b'"a":2')
    yield b"\xef\xbb\xbf" + good
    yield good + b" \n"
    yield good + b"x"
    yield good.replace(b":", b" : ")
    for changed in (signature[:-1], signature + "0", signature.upper(), signature[:-1] + "\n", "0" * 130, ""):
        yield _signed_by(RANKS, b"{}", signature=changed)
    for issuer in (str(KEYS[1].public_key), str(ISSUER.public_key).upper(), "02" + "0" * 64, ""):
        yield _signed_by(RANKS, b"{}", issuer=issuer)
