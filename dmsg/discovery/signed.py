"""JSON documents that an operator signs with a dmsg key: their canonical form, signature and common members. Pure.

A signature covers the document's *domain tag* and then its *canonical form*: everything but ``signature``, members sorted,
no white space, ASCII only. The tag names the kind of document and its version, so a signature of one kind is invalid for
any other kind, and for an entry, whose signed text begins with ``{`` (:ref:`spec-document-signature`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from dmsg.crypto.errors import InvalidKey, InvalidSignature
from dmsg.crypto.keys import PublicKey, SecretKey
from dmsg.discovery.errors import DocumentError
from dmsg.http import json_text
from dmsg.http.errors import MalformedJson

#: How far the issuer's clock may be ahead of ours, in seconds.
AHEAD_S: Final = 300
#: Largest whole number in a document: every JSON reader holds it exactly.
NUMBER_LIMIT: Final = 1 << 53

_SIGNATURE: Final = re.compile(r"[0-9a-f]{130}\Z")


@dataclass(frozen=True, slots=True)
class DocumentKind:
    """One kind of document: the ``format`` and ``version`` it names, its longest text in bytes, and its class of errors."""

    format: str
    version: int
    limit_bytes: int
    error: type[DocumentError]

    @property
    def tag(self) -> bytes:
        """The text that is signed before the canonical form: ``format/version`` and a zero byte."""
        return b"%s/%d\0" % (self.format.encode("ascii"), self.version)

    @property
    def noun(self) -> str:
        """The name of such a document for people."""
        return self.format.removeprefix("dmsg-").replace("-", " ")

    def sign(self, document: Mapping[str, Any], key: SecretKey) -> bytes:
        """``document`` as the issuer publishes it: ``issuer`` and ``signature`` added, in canonical form."""
        issued = {**document, "issuer": str(key.public_key)}
        issued.pop("signature", None)
        signature = key.sign(self.tag + self.canonical(issued)).hex()
        return self.canonical(issued, signature=signature)

    def canonical(self, document: Mapping[str, Any], **added: str) -> bytes:
        """The canonical form of ``document`` without its signature, and with the ``added`` members."""
        unsigned = {name: value for name, value in document.items() if name != "signature"}
        try:
            return canonical({**unsigned, **added})
        except ValueError:
            raise self.error("bad_field", "a number that is none of ours") from None

    def open(self, data: bytes, trusted: Collection[PublicKey]) -> tuple[dict[str, Any], PublicKey]:
        """The document in ``data`` and its signer, one of ``trusted``. Raises ``error`` and nothing else.

        The signature is checked before any other member, which a stranger may have written, is read.
        """
        if len(data) > self.limit_bytes:
            raise self.error("too_long", f"longer than {self.limit_bytes} bytes")
        try:
            document = json_text.decode(data, self.limit_bytes)
        except MalformedJson as error:
            raise self.error("not_json", str(error)) from None
        if type(document) is not dict:
            raise self.error("wrong_format", "not an object")
        if document.get("format") != self.format:
            raise self.error("wrong_format", f"the format is not {self.format}")
        if type(document.get("version")) is not int or document["version"] != self.version:
            raise self.error("wrong_version", f"the version is not {self.version}")
        return document, self._issuer(document, trusted)

    def _issuer(self, document: dict[str, Any], trusted: Collection[PublicKey]) -> PublicKey:
        try:
            issuer = PublicKey.parse(document.get("issuer", ""))
        except InvalidKey as error:
            raise self.error("bad_field", f"issuer: {error}") from None
        if issuer not in trusted:
            raise self.error("untrusted", f"issued by {issuer}")
        text = document.get("signature")
        if not isinstance(text, str) or not _SIGNATURE.match(text):
            raise self.error("bad_signature", "not 130 hex digits")
        try:
            issuer.verify(bytes.fromhex(text), self.tag + self.canonical(document))
        except InvalidSignature as error:
            raise self.error("bad_signature", str(error)) from None
        return issuer

    def number(self, members: Mapping[str, Any], name: str, least: int, most: int) -> int:
        """The whole number ``members[name]``; raises ``error`` unless it is from ``least`` to ``most``."""
        value = members.get(name)
        if type(value) is not int or not least <= value <= most:
            self.bad(name, f"not a whole number from {least} to {most}")
        return value

    def bad(self, name: str, problem: str) -> NoReturn:
        """Raise ``error`` for the member ``name``."""
        raise self.error("bad_field", f"{name}: {problem}")

    def check_issued(self, issued: int, now_s: float) -> None:
        """Raise ``error`` when ``issued`` is more than :data:`AHEAD_S` after ``now_s``; both are Unix seconds."""
        if issued > now_s + AHEAD_S:
            raise self.error("from_the_future", f"issued {issued - now_s:.0f} s from now")

    def check_later(self, issued: int, previous: int) -> None:
        """Raise ``error`` unless ``issued`` is later than ``previous``, when the document in force was issued."""
        if issued < previous:
            raise self.error("rolled_back", f"issued {previous - issued} s before the one in force")
        if issued == previous:
            raise self.error("rolled_back", "issued in the same second as the one in force, and differs from it")


def canonical(document: Mapping[str, Any]) -> bytes:
    """``document`` as JSON text with sorted members, no white space and ASCII only.

    Raises ``ValueError`` for numbers that JSON does not have, and for objects of other kinds.
    """
    try:
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
