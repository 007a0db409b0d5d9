"""The key file of a twin, readable only by its owner: one line, the kind of key and its secret, as in ``ed25519 0x…``."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Final

from dmsg.crypto.errors import KeyFileError
from dmsg.crypto.private_files import create_private, read_private
from dmsg.rmb.core.errors import InvalidSecret
from dmsg.rmb.core.keys import KeyType, TwinKey, read_secret

#: More than the longest phrase of 24 words.
LIMIT_BYTES: Final = 1024
_SECRET_BYTES: Final = 32


def make_twin_key(path: str | os.PathLike[str], kind: KeyType, random: Callable[[int], bytes]) -> TwinKey:
    """Make a new key in the file ``path``, which must not exist; raises ``KeyFileError``."""
    secret = random(_SECRET_BYTES)
    create_private(path, f"{kind.value} 0x{secret.hex()}\n".encode())
    return TwinKey(secret, kind)


def read_twin_key(path: str | os.PathLike[str], *, owners: Collection[int] = ()) -> TwinKey:
    """The key in the file ``path``. Its secret is hex, or a phrase of 12 to 24 words.

    Raises ``KeyFileError`` when the file is missing, malformed, or open to others. ``owners`` are uids that may own it
    besides this process's user and root.
    """
    content = read_private(path, LIMIT_BYTES, owners, made_by="dmsg rmb twin create")
    kind, _, secret = content.decode("utf-8", "replace").strip().partition(" ")
    try:
        return TwinKey(read_secret(secret.strip()), KeyType(kind))
    except (InvalidSecret, ValueError):
        problem = "is not the key of a twin (ed25519 or sr25519, a space, 0x and 64 hex digits)"
        raise KeyFileError(os.fspath(path), problem) from None


def read_secret_file(path: str | os.PathLike[str], *, owners: Collection[int] = ()) -> bytes:
    """The 32 bytes of the secret in a file that holds only a secret, as words or hex; raises as :func:`read_twin_key`."""
    try:
        return read_secret(read_private(path, LIMIT_BYTES, owners).decode("utf-8", "replace"))
    except InvalidSecret as error:
        raise KeyFileError(os.fspath(path), str(error)) from None
