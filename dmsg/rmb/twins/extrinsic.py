"""The only transaction that a twin sends to the chain: its relays and key, signed; :ref:`spec-rmb-update-twin`. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from dmsg.rmb.core.keys import KeyType, TwinKey
from dmsg.rmb.twins.errors import MalformedAnswer
from dmsg.rmb.twins.metadata import Metadata
from dmsg.rmb.twins.scale import compact, optional, with_length

#: Version 4, signed.
_SIGNED: Final = b"\x84"
#: The form of address that is an account's key.
_ACCOUNT: Final = b"\0"
_SIGNATURE_OF: Final = {KeyType.ED25519: b"\0", KeyType.SR25519: b"\1"}
#: A payload longer than this is hashed before it is signed.
_SIGNED_BYTES: Final = 256
#: Valid for ever. No tip. No hash of the metadata.
_IMMORTAL: Final = b"\0"
_NO_TIP: Final = b"\0"
_NO_HASH: Final = b"\0"

_SS58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_SS58_PREFIX: Final = b"\x2a"


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a signature covers: the chain, by the hash of its first block (32 bytes), and the versions of its code."""

    genesis: bytes
    spec_version: int
    transaction_version: int
    metadata: Metadata


def update_call(metadata: Metadata, relays: bytes | None, pk: bytes | None) -> bytes:
    """The call that sets both; ``None`` clears a value."""
    return metadata.update_twin + optional(relays) + optional(pk)


def sign_extrinsic(call: bytes, key: TwinKey, nonce: int, runtime: Runtime) -> bytes:
    """``call``, signed as the ``nonce``-th transaction of the account, with its length in front.

    Raises :class:`~dmsg.rmb.twins.errors.MalformedAnswer` for an unknown extension, because it may add something to the
    signature.
    """
    spec, transaction = (number.to_bytes(4, "little") for number in (runtime.spec_version, runtime.transaction_version))
    parts = {
        "CheckNonZeroSender": (b"", b""),
        "CheckSpecVersion": (b"", spec),
        "CheckTxVersion": (b"", transaction),
        "CheckGenesis": (b"", runtime.genesis),
        "CheckMortality": (_IMMORTAL, runtime.genesis),
        "CheckEra": (_IMMORTAL, runtime.genesis),
        "CheckNonce": (compact(nonce), b""),
        "CheckWeight": (b"", b""),
        "ChargeTransactionPayment": (_NO_TIP, b""),
        "CheckMetadataHash": (_NO_HASH, _NO_HASH),
    }
    extra = additional = b""
    for name in runtime.metadata.extensions:
        if name not in parts:
            raise MalformedAnswer("a signed extension that is not known here")
        extra += parts[name][0]
        additional += parts[name][1]
    payload = call + extra + additional
    if len(payload) > _SIGNED_BYTES:
        payload = hashlib.blake2b(payload, digest_size=32).digest()
    signature = _SIGNATURE_OF[key.kind] + key.sign(payload)[1:]
    return with_length(_SIGNED + _ACCOUNT + key.account + signature + extra + call)


def ss58(account: bytes) -> str:
    """The text of an account, as nodes read it."""
    named = _SS58_PREFIX + account
    named += hashlib.blake2b(b"SS58PRE" + named).digest()[:2]
    number, text = int.from_bytes(named, "big"), ""
    while number:
        number, digit = divmod(number, len(_SS58))
        text = _SS58[digit] + text
    return text
