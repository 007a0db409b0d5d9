"""Keys (:ref:`spec-diffie-hellman`), signatures (:ref:`spec-entry-signature`) and key files."""

from __future__ import annotations

import contextlib
import copy
import grp
import hashlib
import os
import pickle
import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmsg.crypto.errors import InvalidKey, InvalidSignature, KeyFileError
from dmsg.crypto.keys import Point, PublicKey, SecretKey, read_key_file, recover, write_key_file

ALICE, BOB = (SecretKey(hashlib.sha256(name).digest()) for name in (b"alice", b"bob"))
ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141


# --- public keys -----------------------------------------------------------------------------------------------------


def test_the_reference_s_public_keys(vectors: Any) -> None:
    """Where the reference panics or takes zeros for a null key, ours says that it is no key."""
    for case in vectors["pubkeys"]:
        good = case["NewPubKey(binary)"] == "ok"
        text = case["hex"]
        if good:
            assert str(PublicKey.parse(text)) == text.lower()
            assert PublicKey(bytes.fromhex(text)).raw == bytes.fromhex(text)
            continue
        with pytest.raises(InvalidKey):
            PublicKey.parse(text)
        if case["name"] not in ("one zero digit", "five zero digits", "not hex"):
            with pytest.raises(InvalidKey):
                PublicKey(bytes.fromhex(text))


@given(st.binary(max_size=40))
def test_any_bytes_are_a_key_or_no_key(raw: bytes) -> None:
    with contextlib.suppress(InvalidKey):
        assert bytes(PublicKey(raw)) == raw


@given(st.text(max_size=70))
def test_any_text_is_a_key_or_no_key(text: str) -> None:
    with contextlib.suppress(InvalidKey):
        assert str(PublicKey.parse(text)) == text.lower()


@pytest.mark.parametrize("text", ["", "02" * 34, "zz" * 33, "é" * 66, " " * 66, "0x" + "02" * 32, None, 5, b"02" * 33])
def test_texts_that_are_no_keys(text: Any) -> None:
    with pytest.raises(InvalidKey):
        PublicKey.parse(text)


@pytest.mark.parametrize("text", ["", "04" + "11" * 32, "00" * 33, "02" + " " * 64, "02" + "11" * 31 + "  ", "zz" * 33])
def test_texts_that_are_no_keys_wherever_points_are(text: str) -> None:
    """Spaces are passed over where hex digits are read, so 66 characters may be fewer than 33 bytes."""
    with pytest.raises(InvalidKey):
        PublicKey.parse_unchecked(text)


def test_public_keys_are_values() -> None:
    key = ALICE.public_key
    same = PublicKey(bytearray(key.raw))  # type: ignore[arg-type]
    assert key == same and hash(key) == hash(same) and len({key, same}) == 1
    assert not any(key == other for other in (BOB.public_key, key.raw, str(key)))
    assert sorted([key, BOB.public_key]) == sorted([BOB.public_key, key])
    assert repr(key) == f"PublicKey({key})"
    assert bytes(key) == key.raw and str(key) == key.raw.hex()
    with pytest.raises(AttributeError):
        key.raw = b""


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_public_keys_can_be_copied_and_stored(protocol: int) -> None:
    key = ALICE.public_key
    assert pickle.loads(pickle.dumps(key, protocol)) == copy.copy(key) == copy.deepcopy([key])[0] == key


def test_a_public_key_comes_neither_before_nor_after_anything_else() -> None:
    for other in (str(ALICE.public_key), ALICE.public_key.raw, None):
        with pytest.raises(TypeError):
            assert ALICE.public_key < other


# --- secret keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw", [b"", bytes(31), bytes(32), bytes(33), ORDER.to_bytes(32, "big"), b"\xff" * 32], ids=len
)
def test_secret_keys_out_of_range(raw: bytes) -> None:
    with pytest.raises(InvalidKey):
        SecretKey(raw)


def test_the_first_and_the_last_secret_key() -> None:
    for number in (1, ORDER - 1):
        raw = number.to_bytes(32, "big")
        assert bytes(SecretKey(raw)) == raw
    one, last = SecretKey((1).to_bytes(32, "big")), SecretKey((ORDER - 1).to_bytes(32, "big"))
    assert one.public_key.raw[1:] == last.public_key.raw[1:]


def test_generated_from_the_randomness_given_and_drawn_again_when_out_of_range() -> None:
    draws = iter([bytes(32), b"\xff" * 32, bytes(ALICE)])
    assert SecretKey.generate(lambda size: next(draws)).public_key == ALICE.public_key
    assert SecretKey.generate().public_key != SecretKey.generate().public_key


def test_a_secret_key_prints_only_its_public_half() -> None:
    assert repr(ALICE) == f"<SecretKey of {ALICE.public_key}>"
    assert bytes(ALICE).hex() not in repr(ALICE) + str(ALICE)


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
@settings(max_examples=20)
def test_both_sides_share_a_secret(one: bytes, other: bytes) -> None:
    try:
        here, there = SecretKey(one), SecretKey(other)
    except InvalidKey:
        return
    assert here.ecdh(there.public_key.raw) == there.ecdh(here.public_key.raw)


def test_the_reference_s_key_pairs(vectors: Any) -> None:
    """A secret key has the public key the reference gives it."""
    assert len(vectors["keypairs"]) == 7
    for case in vectors["keypairs"]:
        assert str(SecretKey(bytes.fromhex(case["sk"])).public_key) == case["pk"]


def test_the_reference_s_shared_secrets(vectors: Any) -> None:
    """SHA-256 of the compressed shared point, and nothing else."""
    assert len(vectors["ecdh"]) == 5
    for case in vectors["ecdh"]:
        shared = SecretKey(bytes.fromhex(case["sk"])).ecdh(bytes.fromhex(case["pk"]))
        assert shared.hex() == case["ecdh_sha256"]
        assert hashlib.sha256(bytes.fromhex(case["shared_point_compressed"])).digest() == shared


@pytest.mark.parametrize("raw", [b"", bytes(33), b"\x02" + b"\xff" * 32, b"\x04" + bytes(64), b"\x02" * 34])
def test_no_secret_is_shared_with_what_is_no_point(raw: bytes) -> None:
    with pytest.raises(InvalidKey):
        ALICE.ecdh(raw)
    with pytest.raises(InvalidKey):
        ALICE.ecdh(Point(raw))


def test_a_point_gives_each_secret_what_its_bytes_give() -> None:
    point = Point(BOB.public_key.raw)
    for secret in (ALICE, BOB, SecretKey.generate(), ALICE):
        assert secret.ecdh(point) == secret.ecdh(point.raw)


@given(st.binary(min_size=32, max_size=32))
@settings(max_examples=25)
def test_a_key_of_any_bytes_signs_in_the_name_of_its_public_half(raw: bytes) -> None:
    try:
        key = SecretKey(raw)
    except InvalidKey:
        assert not 0 < int.from_bytes(raw, "big") < ORDER
    else:
        assert recover(key.sign(b"text"), b"text") == key.public_key and bytes(key) == raw


# --- signatures ------------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
@settings(max_examples=25)
def test_a_signature_names_its_key(message: bytes) -> None:
    signature = ALICE.sign(message)
    assert len(signature) == 65 and signature[64] <= 3
    assert int.from_bytes(signature[32:64], "big") <= ORDER // 2
    assert recover(signature, message) == ALICE.public_key
    ALICE.public_key.verify(signature, message)
    with pytest.raises(InvalidSignature):
        BOB.public_key.verify(signature, message)
    with pytest.raises(InvalidSignature):
        ALICE.public_key.verify(signature, message + b"x")


@given(st.binary(max_size=200), st.binary(min_size=32, max_size=32))
@settings(max_examples=25)
def test_a_signature_with_entropy_is_another_one_of_the_same_key(message: bytes, entropy: bytes) -> None:
    signature = ALICE.sign(message, entropy)
    assert signature != ALICE.sign(message) == ALICE.sign(message)
    assert int.from_bytes(signature[32:64], "big") <= ORDER // 2 and signature[64] <= 3
    assert recover(signature, message) == ALICE.public_key


@pytest.mark.parametrize("size", [1, 31, 33, 64])
def test_a_signature_takes_no_entropy_of_another_length(size: int) -> None:
    with pytest.raises(ValueError, match=f"32 bytes, not {size}"):
        ALICE.sign(b"message", bytes(size))


@given(st.binary(min_size=60, max_size=70))
def test_any_bytes_are_a_signature_or_none(signature: bytes) -> None:
    with pytest.raises(InvalidSignature):
        ALICE.public_key.verify(signature, b"message")


def test_malleable_signatures_are_refused() -> None:
    signature = ALICE.sign(b"message")
    s = ORDER - int.from_bytes(signature[32:64], "big")
    other = signature[:32] + s.to_bytes(32, "big") + bytes((signature[64] ^ 1,))
    with pytest.raises(InvalidSignature, match="high"):
        recover(other, b"message")


def test_the_reference_s_signatures(vectors: Any) -> None:
    for case in vectors["signatures"]:
        message, key = case["payload_utf8"].encode(), PublicKey.parse(case["pk"])
        assert hashlib.sha256(message).hexdigest() == case["sha256"]
        signature = bytes.fromhex(case["sig"])
        if case["go"] == "ok":
            key.verify(signature, message)
        else:
            with pytest.raises(InvalidSignature):
                key.verify(signature, message)


# --- key files -------------------------------------------------------------------------------------------------------


def test_key_files_round_trip_and_are_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    previous = os.umask(0)
    try:
        write_key_file(path, ALICE)
    finally:
        os.umask(previous)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == bytes(ALICE).hex().encode() + b"\n"
    assert bytes(read_key_file(path)) == bytes(ALICE)


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_key_file(path, ALICE)
    with pytest.raises(KeyFileError, match="never overwritten"):
        write_key_file(path, BOB)
    assert bytes(read_key_file(str(path))) == bytes(ALICE)


def test_a_key_file_cannot_be_made_nowhere(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError) as caught:
        write_key_file(tmp_path / "missing" / "key", ALICE)
    assert caught.value.path.endswith("key")
    assert caught.value.problem


def test_nothing_is_left_of_a_key_file_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(KeyFileError, match="No space left"):
        write_key_file(tmp_path / "key", ALICE)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_key_file_whose_writing_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_key_file(tmp_path / "key", ALICE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("where", "problem"),
    [("key\0", "has a null"), ("\0/key", "has a null"), ("\ud800", "has one that the file system cannot write")],
)
def test_a_path_with_a_character_that_no_path_may_have_is_no_key_file(tmp_path: Path, where: str, problem: str) -> None:
    path = f"{tmp_path}/{where}"
    for use in (lambda: write_key_file(path, ALICE), lambda: read_key_file(path)):
        with pytest.raises(KeyFileError, match=problem) as caught:
            use()
        assert caught.value.path == path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_key_file_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "key"
    write_key_file(path, ALICE)
    path.chmod(mode)
    with pytest.raises(KeyFileError, match="chmod 600"):
        read_key_file(path)


@pytest.mark.parametrize(
    "content", [b"", b"zz", bytes(ALICE), b"00" * 32, b"ff" * 32, b"\xff\xfe" * 32, b"ab" * 3000, b"\x1c" + b"01" * 32]
)
def test_files_without_a_key(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(KeyFileError, match="does not hold a secret key") as caught:
        read_key_file(path)
    assert content.hex() not in str(caught.value) or not content


def test_no_file_stays_open_that_was_read_or_refused(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    write_key_file(tmp_path / "key", ALICE)
    assert bytes(read_key_file(tmp_path / "key")) == bytes(ALICE)
    (tmp_path / "key").chmod(0o644)
    for path in (tmp_path / "key", tmp_path):
        with pytest.raises(KeyFileError):
            read_key_file(path)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_key_file_may_end_without_a_newline_or_in_capitals(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(bytes(ALICE).hex().upper())
    path.chmod(0o600)
    assert bytes(read_key_file(path)) == bytes(ALICE)


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (tmp_path, fifo):
        with pytest.raises(KeyFileError, match="not a plain file"):
            read_key_file(path)
    with pytest.raises(KeyFileError, match="No such file"):
        read_key_file(tmp_path / "missing")


def test_a_file_that_cannot_be_read_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int, size: int) -> bytes:
        raise OSError(5, "Input/output error")

    write_key_file(tmp_path / "key", ALICE)
    monkeypatch.setattr(os, "read", broken)
    with pytest.raises(KeyFileError, match="Input/output error"):
        read_key_file(tmp_path / "key")


# --- key files and other users ---------------------------------------------------------------------------------------

#: A user that owns nothing here and runs no test.
OTHER_UID = 54_321


def owned(status: os.stat_result, uid: int) -> os.stat_result:
    """The status with another owner; only root could change that of a file."""
    return os.stat_result([*status[:4], uid, *status[5:]])


@pytest.fixture
def of_other(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes a file or directory look as if it belonged to another user."""
    others: set[tuple[int, int]] = set()

    def told(status: os.stat_result) -> os.stat_result:
        return owned(status, OTHER_UID) if (status.st_dev, status.st_ino) in others else status

    fstat, stat = os.fstat, os.stat
    monkeypatch.setattr(os, "fstat", lambda descriptor: told(fstat(descriptor)))
    monkeypatch.setattr(os, "stat", lambda path, **options: told(stat(path, **options)))

    def change(path: Path) -> None:
        status = stat(path)
        others.add((status.st_dev, status.st_ino))

    return change


def test_a_key_file_of_another_owner_is_refused(tmp_path: Path, of_other: Callable[[Path], None]) -> None:
    path = tmp_path / "key"
    write_key_file(path, ALICE)
    of_other(path)
    with pytest.raises(KeyFileError, match=f"belongs to uid {OTHER_UID}, .* run as its owner, or chown it") as caught:
        read_key_file(path)
    assert (caught.value.path, caught.value.problem[:7]) == (str(path), "belongs")
    assert bytes(read_key_file(path, owners=(OTHER_UID,))) == bytes(ALICE)


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o702])
def test_a_key_file_where_others_may_put_another_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open" / "key"
    path.parent.mkdir()
    write_key_file(path, ALICE)
    path.parent.chmod(mode)
    with pytest.raises(KeyFileError, match=f"where others may write .* chmod go-w {path.parent}"):
        read_key_file(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(KeyFileError, match="others may write"):
        read_key_file(tmp_path / "link")
    with pytest.raises(KeyFileError, match="others may write"):
        write_key_file(path.parent / "new", ALICE)
    assert not (path.parent / "new").exists()
    path.parent.chmod(0o700)
    assert bytes(read_key_file(tmp_path / "link")) == bytes(ALICE)


def test_a_link_where_others_may_put_another_is_refused(tmp_path: Path) -> None:
    write_key_file(tmp_path / "key", ALICE)
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "key")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(KeyFileError, match="others may write"):
        read_key_file(tmp_path / "open" / "link")


def test_a_key_file_in_a_directory_of_another_owner_is_refused(
    tmp_path: Path, of_other: Callable[[Path], None]
) -> None:
    path = tmp_path / "theirs" / "key"
    path.parent.mkdir()
    write_key_file(path, ALICE)
    of_other(path.parent)
    with pytest.raises(KeyFileError, match="a directory of your own"):
        read_key_file(path)
    assert bytes(read_key_file(path, owners=(OTHER_UID,))) == bytes(ALICE)


def test_a_key_file_of_ours_in_a_sticky_directory_is_taken_and_no_other(
    tmp_path: Path, of_other: Callable[[Path], None]
) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    for name in ("ours", "theirs"):
        write_key_file(tmp_path / "tmp" / name, ALICE)
    of_other(tmp_path / "tmp" / "theirs")
    assert bytes(read_key_file(tmp_path / "tmp" / "ours")) == bytes(ALICE)
    with pytest.raises(KeyFileError, match="belongs to"):
        read_key_file(tmp_path / "tmp" / "theirs")


def test_a_group_of_more_than_its_user_may_not_write_beside_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    directory = tmp_path / "group"
    directory.mkdir()
    write_key_file(directory / "key", ALICE)
    directory.chmod(0o770)

    def group(name: str, members: list[str]) -> None:
        monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, members)))

    for members in ([], [user]):
        group(user, members)
        assert bytes(read_key_file(directory / "key")) == bytes(ALICE)
    for name, members in ((user, [user, "mallory"]), ("staff", []), ("staff", [user])):
        group(name, members)
        with pytest.raises(KeyFileError, match="others may write"):
            read_key_file(directory / "key")
    monkeypatch.setattr(grp, "getgrgid", {}.__getitem__)  # the system knows of no such group
    with pytest.raises(KeyFileError, match="others may write"):
        read_key_file(directory / "key")
