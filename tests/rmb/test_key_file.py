"""Key files of twins."""

from __future__ import annotations

import stat

import pytest

from dmsg.crypto.errors import KeyFileError
from dmsg.rmb.core.keys import KeyType
from dmsg.rmb.key_file import make_twin_key, read_twin_key

WORDS = "neck stage box cup core magic produce exercise happy rely vocal then"
SECRET = "0xaa4e323bade8609a595108b585c4135855430c411ccf7923f81438cd8a188fce"


def written(path, content):
    path.write_text(content)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("kind", KeyType)
def test_a_key_is_read_as_it_was_made(tmp_path, kind):
    made = make_twin_key(tmp_path / "key", kind, bytes)
    read = read_twin_key(tmp_path / "key")
    assert (read.kind, read.secret, read.account) == (kind, bytes(32), made.account)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert (tmp_path / "key").read_text() == f"{kind.value} 0x{'00' * 32}\n"


def test_words_stand_for_the_secret_they_make(tmp_path):
    words = read_twin_key(written(tmp_path / "words", f"sr25519 {WORDS}\n"))
    digits = read_twin_key(written(tmp_path / "digits", f"  sr25519   {SECRET}"))
    assert words.account == digits.account
    assert words.account.hex() == "60fe3393cc329aa1044be6adaa37f9d0689327dd25c11475d4a86651d6727a48"


def test_a_key_is_never_overwritten(tmp_path):
    make_twin_key(tmp_path / "key", KeyType.ED25519, bytes)
    with pytest.raises(KeyFileError, match="already exists"):
        make_twin_key(tmp_path / "key", KeyType.ED25519, lambda count: b"\1" * count)
    assert read_twin_key(tmp_path / "key").secret == bytes(32)


@pytest.mark.parametrize(
    "content", ["", "ed25519", f"rsa {SECRET}", SECRET, f"ed25519 {SECRET}00", "ed25519 neck stage", "\ufffd"]
)
def test_what_is_no_key_is_refused_without_being_shown(tmp_path, content):
    with pytest.raises(KeyFileError) as error:
        read_twin_key(written(tmp_path / "key", content))
    assert "is not the key of a twin" in str(error.value) and SECRET not in str(error.value)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    make_twin_key(tmp_path / "key", KeyType.ED25519, bytes)
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(KeyFileError, match="can be read by others"):
        read_twin_key(tmp_path / "key")
