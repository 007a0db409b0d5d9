"""Documents that an operator signs, before their kind is looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from dmsg.discovery.errors import DocumentError
from dmsg.discovery.ranks import KIND as RANKS
from dmsg.discovery.signed import canonical
from dmsg.relays.operator_list import KIND as RELAYS
from fuzz import words
from fuzz.oracles import check_memory
from fuzz.signing import ISSUER, signed

DICTIONARY = words.DOCUMENT

_TRUSTED = frozenset({ISSUER.public_key})


def one_input(data: bytes) -> None:
    """The input is the document, or what is signed. A signature holds for its own kind and text, and for nothing else."""
    for kind in (RANKS, RELAYS):
        _opened(kind, data)
    text = signed(RANKS, data)
    if text is None:
        return
    document = _opened(RANKS, text)
    if document is None:
        return
    assert canonical(document) == text
    assert _opened(RANKS, json.dumps(document, indent=1).encode()) == document
    assert _opened(RELAYS, text.replace(RANKS.format.encode(), RELAYS.format.encode())) is None
    assert _opened(RANKS, text.replace(b'"version":1', b'"version":1,"added":1')) is None
    check_memory(document, len(text), times=128)


def _opened(kind: Any, data: bytes) -> dict[str, Any] | None:
    try:
        document, issuer = kind.open(data, _TRUSTED)
    except DocumentError as error:
        assert type(error) is kind.error
        return None
    assert issuer == ISSUER.public_key
    canonical(document)
    return dict(document)


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
