"""Signing of documents with an operator's dmsg key: key files, canonical JSON, recoverable secp256k1 signatures.

The only module here that touches coincurve. A signature is dmsg's (:ref:`spec-document-signature`): r ‖ s ‖ recovery
id, 65 bytes in 130 hex digits, over the SHA-256 of a domain tag, which names the kind of document, and of the
document's canonical JSON without its member ``signature``.
"""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import stat
from collections.abc import Mapping
from typing import Any, Final

import coincurve

PUBLIC_KEY_DIGITS: Final = 66
SIGNATURE_BYTES: Final = 65
_SECRET_KEY_BYTES: Final = 32
_HALF_ORDER: Final = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0
#: Most bytes to read of a key file, which has 64 hex digits and a line end.
_KEY_FILE_LIMIT_BYTES: Final = 4096


class SigningError(ValueError):
    """A key, key file, signature or document that cannot be used; the message says what is wrong with it."""


class SecretKey:
    """An operator's secret key. Never printed: ``repr`` shows the public half only."""

    __slots__ = ("_key", "public_key")

    def __init__(self, raw: bytes) -> None:
        """Take 32 bytes in 1…n-1 or raise ``SigningError``."""
        if len(raw) != _SECRET_KEY_BYTES:
            raise SigningError("a secret key is 32 bytes")
        try:
            self._key = coincurve.PrivateKey(bytes(raw))
        except ValueError:
            raise SigningError("the secret key is out of range") from None
        #: The public half, 66 hex digits.
        self.public_key: str = self._key.public_key.format().hex()

    def __repr__(self) -> str:
        return f"<SecretKey of {self.public_key}>"

    def sign(self, message: bytes) -> str:
        """The signature over SHA-256 of ``message``, 130 hex digits; the same for the same message."""
        signature: bytes = self._key.sign_recoverable(hashlib.sha256(message).digest(), hasher=None)
        return signature.hex()


def read_key_file(path: str | os.PathLike[str]) -> SecretKey:
    """The key in a file of 64 hex digits, as ``dmsg`` writes them.

    Raises ``SigningError`` when the file is missing, no plain file, not a key, of another owner, when group or world may
    read it, or when it is in a directory where others may write.
    """
    name = os.fspath(path)
    try:
        # not blocking, so that opening a named pipe returns and can be refused
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SigningError(f"{name}: {error.strerror or 'cannot be opened'}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SigningError(f"{name}: is not a plain file")
        problem = _why_not_private(name, status)
        if problem:
            raise SigningError(f"{name}: {problem}")
        content = os.read(descriptor, _KEY_FILE_LIMIT_BYTES)
    except OSError as error:
        raise SigningError(f"{name}: {error.strerror or 'cannot be read'}") from None
    finally:
        os.close(descriptor)
    try:
        return SecretKey(bytes.fromhex(content.decode("ascii").strip()))
    except ValueError:
        raise SigningError(f"{name}: does not hold a secret key (64 hex digits)") from None


def _why_not_private(path: str, status: os.stat_result) -> str:
    """Why a file must not be used for a secret; "" if it may. The rules are those of ``dmsg``."""
    trusted = {os.geteuid(), 0}
    if status.st_uid not in trusted:
        return f"belongs to uid {status.st_uid}, not to uid {os.geteuid()}; run as its owner, or chown it"
    if status.st_mode & 0o077:
        return f"can be read by others (mode {stat.S_IMODE(status.st_mode):04o}); chmod 600 it"
    for each in dict.fromkeys((os.path.abspath(path), os.path.realpath(path))):
        directory = os.path.dirname(each)
        there = os.stat(directory)
        mode = stat.S_IMODE(there.st_mode)
        if there.st_uid not in trusted:
            return f"is in {directory}, which belongs to uid {there.st_uid}; move it to a directory of your own"
        # in a sticky directory only the owner of a file may rename or remove it
        group_writes = mode & 0o020 and not _is_own_group(there.st_gid, there.st_uid)
        if (mode & 0o002 or group_writes) and not mode & stat.S_ISVTX:
            return f"is in {directory}, where others may write (mode {mode:04o}); chmod go-w {directory}"
    return ""


def _is_own_group(gid: int, uid: int) -> bool:
    """Whether a group has the name of the user and no other member, as systems with a umask of 002 make them."""
    try:
        group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
    except KeyError:
        return False
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}


def canonical_json(document: Mapping[str, Any]) -> bytes:
    """All members except ``signature`` as JSON, sorted at every level, no white space, ASCII only.

    Raises ``SigningError`` for values that JSON does not have.
    """
    return _encode({name: value for name, value in document.items() if name != "signature"})


def signed_text(document: Mapping[str, Any]) -> bytes:
    """The bytes that the signature of ``document`` covers: its domain tag, which is ``format/version`` and a zero byte, and
    its canonical JSON. So a signature of one kind of document is invalid for another kind, and for an entry of discovery.
    """
    return f"{document.get('format')}/{document.get('version')}\0".encode("utf-8", "surrogatepass") + canonical_json(
        document
    )


def sign_document(document: Mapping[str, Any], key: SecretKey) -> str:
    """``document`` as canonical JSON text, with the ``issuer`` and its ``signature``."""
    issued = {**document, "issuer": key.public_key}
    return _encode({**issued, "signature": key.sign(signed_text(issued))}).decode("ascii")


def verify_document_signature(document: Mapping[str, Any]) -> str:
    """The issuer of a document, if its signature is that issuer's; raises ``SigningError``."""
    issuer, signature = document.get("issuer"), document.get("signature")
    if not isinstance(issuer, str) or not isinstance(signature, str):
        raise SigningError("the document has no issuer or no signature")
    if recover(signature, signed_text(document)) != issuer:
        raise SigningError("the signature is not the issuer's")
    return issuer


def recover(signature: str, message: bytes) -> str:
    """The public key (66 hex digits) that made ``signature`` over SHA-256 of ``message``; raises ``SigningError``."""
    if len(signature) != 2 * SIGNATURE_BYTES or not signature.isascii() or signature != signature.lower():
        raise SigningError("a signature is 130 lower-case hex digits")
    try:
        raw = bytes.fromhex(signature)
    except ValueError:
        raise SigningError("a signature is 130 lower-case hex digits") from None
    if len(raw) != SIGNATURE_BYTES:  # fromhex passes over white space
        raise SigningError("a signature is 130 lower-case hex digits")
    if raw[64] > 3:
        raise SigningError("the recovery id is not 0 to 3")
    if int.from_bytes(raw[32:64], "big") > _HALF_ORDER:
        raise SigningError("the signature is malleable: its s is high")
    try:
        point = coincurve.PublicKey.from_signature_and_message(raw, hashlib.sha256(message).digest(), hasher=None)
    except Exception as error:  # coincurve raises bare Exception when recovery fails
        raise SigningError("no key can be recovered from the signature") from error
    text: str = point.format().hex()
    return text


def _encode(document: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise SigningError(f"the document is not JSON: {error}") from None
