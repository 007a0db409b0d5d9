"""Keys, key files and signatures, against vectors made without this package."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rank_vectors import OPERATOR as KEY
from rank_vectors import VECTORS

from dmsg_logs.ranks.signing import (
    SecretKey,
    SigningError,
    canonical_json,
    read_key_file,
    recover,
    sign_document,
    signed_text,
    verify_document_signature,
)


def test_a_key_has_the_public_half_of_the_vectors() -> None:
    assert KEY.public_key == VECTORS["issuer"]


def test_a_document_is_signed_as_in_the_vectors() -> None:
    unsigned = json.loads(VECTORS["unsigned"])
    assert canonical_json(unsigned).decode() == VECTORS["unsigned"]
    assert signed_text(unsigned) == bytes.fromhex(VECTORS["tag"]) + canonical_json(unsigned)
    assert KEY.sign(signed_text(unsigned)) == VECTORS["signature"]
    del unsigned["issuer"]
    assert sign_document(unsigned, KEY) == VECTORS["document"]


def test_the_signature_itself_and_the_order_of_members_are_not_signed() -> None:
    document = json.loads(VECTORS["spaced"])
    assert list(document) != sorted(document)
    assert canonical_json(document).decode() == VECTORS["unsigned"]
    assert verify_document_signature(document) == KEY.public_key


def test_a_signature_is_the_same_each_time() -> None:
    assert KEY.sign(b"text") == KEY.sign(b"text") != KEY.sign(b"texts")
    assert recover(KEY.sign(b"text"), b"text") == KEY.public_key


def test_text_outside_ascii_is_escaped() -> None:
    assert canonical_json({"b": "é", "a": {"z": 1, "y": 2}}) == b'{"a":{"y":2,"z":1},"b":"\\u00e9"}'


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"raw"])
def test_what_json_cannot_say_is_refused(value: object) -> None:
    with pytest.raises(SigningError, match="not JSON"):
        sign_document({"a": value}, KEY)


@pytest.mark.parametrize(
    "signature",
    [
        "",
        "00" * 64,
        "00" * 66,
        "zz" * 65,
        " " * 130,
        "é" * 130,
        VECTORS["signature"].upper(),
        VECTORS["signature"][:-2] + "04",
        VECTORS["signature"][:64] + "ff" * 32 + "00",
        "00" * 65,
    ],
)
def test_malformed_signatures_are_refused(signature: str) -> None:
    with pytest.raises(SigningError):
        recover(signature, VECTORS["unsigned"].encode())


@pytest.mark.parametrize(
    "name",
    [
        "high s",
        "altered score",
        "signed by another key",
        "no signature",
        "signed without a tag",
        "signed as another kind",
    ],
)
def test_spoiled_documents_are_refused(name: str) -> None:
    with pytest.raises(SigningError):
        verify_document_signature(json.loads(VECTORS["refused"][name]))


@pytest.mark.parametrize("raw", [b"", bytes(32), b"\xff" * 32, b"\x01" * 31, b"\x01" * 33])
def test_what_is_no_secret_key_is_refused(raw: bytes) -> None:
    with pytest.raises(SigningError):
        SecretKey(raw)


def test_a_key_is_not_shown() -> None:
    assert repr(KEY) == f"<SecretKey of {KEY.public_key}>"
    assert VECTORS["secret_key"] not in repr(KEY) + str(KEY)


# --- key files -------------------------------------------------------------------------------------------------------


def key_file(directory: Path, content: bytes, mode: int = 0o600) -> Path:
    path = directory / "key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_key_file_is_read(tmp_path: Path, end: bytes) -> None:
    path = key_file(tmp_path, VECTORS["secret_key"].encode() + end)
    assert read_key_file(path).public_key == KEY.public_key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644])
def test_a_key_file_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, VECTORS["secret_key"].encode(), mode)
    with pytest.raises(SigningError, match=f"mode {mode:04o}") as caught:
        read_key_file(path)
    assert VECTORS["secret_key"] not in str(caught.value)


def test_a_key_file_of_another_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fstat = key_file(tmp_path, VECTORS["secret_key"].encode()), os.fstat

    def of_other(descriptor: int) -> os.stat_result:
        status = fstat(descriptor)
        return os.stat_result([*status[:4], 54_321, *status[5:]])

    monkeypatch.setattr(os, "fstat", of_other)
    with pytest.raises(SigningError, match="belongs to uid 54321"):
        read_key_file(path)


def test_a_key_file_where_others_may_put_another_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path, VECTORS["secret_key"].encode())
    tmp_path.chmod(0o777)
    with pytest.raises(SigningError, match="where others may write"):
        read_key_file(path)
    tmp_path.chmod(0o1777)
    assert read_key_file(path).public_key == KEY.public_key


@pytest.mark.parametrize("content", [b"", b"secret", b"00" * 32, b"11" * 31, b"11" * 5000, b"\xff" * 64])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(SigningError, match="does not hold a secret key"):
        read_key_file(key_file(tmp_path, content))


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(SigningError, match="not a plain file"):
        read_key_file(pipe)
    with pytest.raises(SigningError, match="not a plain file"):
        read_key_file(tmp_path)
    with pytest.raises(SigningError, match="No such file"):
        read_key_file(tmp_path / "missing")
