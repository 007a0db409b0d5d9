"""Inputs that are documents: as they are, and signed by a trusted key."""

from __future__ import annotations

import json
from typing import Any

from dmsg.discovery.errors import DocumentError
from dmsg.discovery.signed import DocumentKind
from fuzz.oracles import KEYS

ISSUER = KEYS[0]
#: When the documents are read, in Unix seconds.
NOW_S = 1_700_000_000


def signed(kind: DocumentKind, data: bytes) -> bytes | None:
    """The JSON object in ``data`` as a document of ``kind``, signed by the trusted key; ``None`` if there is none."""
    try:
        document: Any = json.loads(data)
        if not isinstance(document, dict):
            return None
        return kind.sign({"format": kind.format, "version": kind.version, **document}, ISSUER)
    except (ValueError, RecursionError, DocumentError):
        return None
